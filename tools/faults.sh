#!/bin/sh
# Usage: tools/faults.sh PYTHON [PYTEST-ARGUMENT...]
#        tools/faults.sh --check
#
# Runs tests/faults: real processes that die, or get an error from the system, at every write and sync that they make, and disks
# that are really full or read-only. Needs strace (with the right to trace) and mount namespaces (unshare) for users, on Linux.
#
# --check says on standard output what is missing, and fails, if something is; `.ci/run` leaves the tests out then, and says so.
#
# PERDURE_TEST_WORKERS: number of processes that share the tests; default as many as processors, at most 4.
set -eu
cd "$(dirname "$0")/.."

missing() {
    if ! strace -f -qq --trace=write --inject=write:error=EIO:when=99 -o /dev/null true >/dev/null 2>&1 </dev/null; then
        echo "strace, version 5.3 or newer, and the right to trace processes"
    elif ! unshare -rm sh -c 'mount -t tmpfs none /tmp' >/dev/null 2>&1 </dev/null; then
        echo "unshare -rm, and the right to mount a tmpfs in a namespace of one's own"
    fi
}

lacks=$(missing)
if [ "$1" = --check ]; then
    echo "$lacks"
    [ -z "$lacks" ]
    exit
fi
if [ -n "$lacks" ]; then
    echo "tests/faults needs $lacks, which this machine does not have. The rest of the tests does without: make test" >&2
    exit 1
fi
python=$1
shift
if [ -n "${PERDURE_TEST_WORKERS:-}" ]; then
    workers="-n $PERDURE_TEST_WORKERS"
else
    workers="-n auto --maxprocesses 4"
fi
# shellcheck disable=SC2086
exec "$python" -m pytest --forbid-skips $workers tests/faults "$@"
