#!/bin/sh
# Usage: tools/demo.sh PYTHON [DATA-DIRECTORY]
#
# The demonstration of `make demo`: an order is charged, killed with `kill -9` during the charge, killed again after it,
# and finished by the third run. The same lines are the smoke test of the built wheel in .ci/run.
set -eu
python=$1
data=${2:-demo-data}
order=$(cd "$(dirname "$0")/../examples" && pwd)/order.py

# act TEXT...: say what comes.
act() {
    printf '\n%s\n' "$*"
}

# killed COMMAND...: run it, and insist that it ended by SIGKILL (128 + 9).
killed() {
    status=0
    "$@" || status=$?
    if [ "$status" -ne 137 ]; then
        echo "expected to be killed with SIGKILL, but the exit status was $status: $*" >&2
        exit 1
    fi
    echo "  (exit status 137: ended by SIGKILL)"
}

rm -rf "$data"
act "1. A new order. The process is killed inside the charge: the money is taken, and the process forgets it."
killed "$python" "$order" --data "$data" --crash during
act "2. The same program again. The charge was not recorded, so it runs again; then the process is killed while it waits."
killed "$python" "$order" --data "$data" --crash after
act "3. Once more. The charge is recorded, so it is replayed; the shipment comes, and the order is finished."
"$python" "$order" --data "$data"
act "Run it again, and nothing runs:   $python ${order#"$PWD/"} --data $data"
