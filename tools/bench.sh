#!/bin/sh
# Usage: tools/bench.sh PYTHON [BENCHMARK...]
#
# Runs the named benchmarks, or all of them, one after another (never side by side: they would measure one another). Each
# prints JSON with the machine it ran on.
set -eu
python=$1
shift
benchmarks=$(dirname "$0")/../benchmarks
if [ "$#" -eq 0 ]; then
    set -- "$benchmarks"/[!_]*.py
fi
for benchmark in "$@"; do
    case $benchmark in
        */*) ;;
        *) benchmark=$benchmarks/${benchmark%.py}.py ;;
    esac
    if [ ! -f "$benchmark" ]; then
        echo "no such benchmark: $benchmark" >&2
        exit 1
    fi
    "$python" "$benchmark"
done
