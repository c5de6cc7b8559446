#!/bin/sh
# Usage: tools/test.sh [PYTEST-ARGUMENT...]
#
# Runs the suite under the oldest and under the newest supported Python of this machine, each in its own environment, and
# says which versions ran. A skip or an expected failure is red (see tests/support/scenario_table.py).
#
# What takes long (the marker `exhaustive`) runs under the oldest Python only: what explores or enumerates deaths, damage and
# schedules, which looks at the order of our writes and not at the interpreter; and of tests in both modes on both drivers, two
# of the four. The newest runs everything else.
#
# The whole suite has to kill at least 10,000 simulated processes after they had made new history: under the oldest Python that is
# asserted, and the figures are left in build/incarnations.json (see tests/support/incarnations.py). Neither is so when arguments
# choose tests.
#
# PERDURE_TEST_WORKERS: number of processes that share the tests; default as many as processors, at most 4.
# PYTHON: run under this interpreter alone.
set -eu
cd "$(dirname "$0")/.."
. tools/env.sh

if [ -n "${PYTHON:-}" ]; then
    tools/setup.sh .venv test "$PYTHON"
    environments=.venv
else
    tools/setup.sh .venv test
    if have_uv; then need_pip=0; else need_pip=1; fi
    pythons=$(PERDURE_NEED_PIP=$need_pip tools/find-python.sh list)
    environments=""
    for end in oldest newest; do
        if [ "$end" = oldest ]; then line=$(printf '%s\n' "$pythons" | head -n 1); else line=$(printf '%s\n' "$pythons" | tail -n 1); fi
        version=${line%% *}
        minor=${version%.*}
        # .venv is the oldest, unless its owner made it otherwise; whichever end it is not gets its own.
        if [ -z "$minor" ] || [ "$minor" = "$(python_version .venv)" ]; then
            environment=.venv
        else
            environment=.venv-$end
            tools/setup.sh "$environment" test "${line#* }"
        fi
        case " $environments " in
            *" $environment "*) ;;
            *) environments="$environments $environment" ;;
        esac
    done
    # "oldest" and "newest" may both be another version than .venv and the same one.
    case " $environments " in
        *" .venv-oldest "*" .venv-newest "*)
            if [ "$(python_version .venv-oldest)" = "$(python_version .venv-newest)" ]; then environments=.venv-oldest; fi
            ;;
    esac
fi

if [ -n "${PERDURE_TEST_WORKERS:-}" ]; then
    workers="-n $PERDURE_TEST_WORKERS"
else
    workers="-n auto --maxprocesses 4"
fi

# The tests start hundreds of processes. Each would compile everything anew where the environment says not to keep what was
# compiled; so it is kept, out of the way.
unset PYTHONDONTWRITEBYTECODE
PYTHONPYCACHEPREFIX=$PWD/build/pycache
export PYTHONPYCACHEPREFIX

if [ $# -eq 0 ]; then
    budget="--incarnations=10000 --incarnations-file=build/incarnations.json --figures-file=build/figures.json"
else
    budget=""
fi
share=""

status=0
ran=""
for environment in $environments; do
    version=$("$environment/bin/python" -c 'import platform; print(platform.python_version())')
    echo
    echo "Tests under Python $version ($environment)"
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pytest --forbid-skips $workers $budget ${share:+-m "$share"} "$@" || status=$?
    ran="$ran $version"
    budget=""
    if [ $# -eq 0 ]; then share="not exhaustive"; fi
    if [ "$status" -ne 0 ]; then break; fi
done
echo
echo "Tested under Python:$ran"
case $ran in
    " "*" "*) ;;
    *) if [ "$status" -eq 0 ]; then echo "(only one supported version was used; install another, newer one to test under both)"; fi ;;
esac
exit "$status"
