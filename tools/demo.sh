#!/bin/sh
# Usage: tools/demo.sh PYTHON [DATA-DIRECTORY]
#
# The demonstration of `make demo`: an order is charged, killed with `kill -9` during the charge, killed again after it,
# and finished by the third run. The same lines are the smoke test of the built wheel in .ci/run.
set -eu
python=$1
data=${2:-demo-data}
order=$(cd "$(dirname "$0")/../examples" && pwd)/order.py

# killed COMMAND...: run it, and insist that it ended by SIGKILL (128 + 9).
killed() {
    status=0
    "$@" || status=$?
    if [ "$status" -ne 137 ]; then
        echo "expected to be killed with SIGKILL, but the exit status was $status: $*" >&2
        exit 1
    fi
}

rm -rf "$data"
killed "$python" "$order" --data "$data" --crash during
killed "$python" "$order" --data "$data" --crash after
"$python" "$order" --data "$data"
