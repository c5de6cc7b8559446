#!/bin/sh
# Usage: tools/setup.sh DIRECTORY run | test | dev [PYTHON]
#
# Makes the environment DIRECTORY hold what "make" is about to use: the project itself, editable, with its runtime
# dependencies (run), and the dependency group test, or dev, on top.
#
# 1. Nothing happens when it already does: a stamp in the environment holds the tree's path, the checksum of
#    pyproject.toml and the level. Comparing times instead broke when a clone was moved or a branch switched.
# 2. A level includes those before it, so `make demo` on a fresh clone waits for four packages and not for forty.
# 3. A working environment is kept whatever its version, unless PYTHON asks for another one.
set -eu
cd "$(dirname "$0")/.."
. tools/env.sh

directory=$1
level=$2
python=${3:-}
case $level in
    run) rank=1 ;;
    test) rank=2 ;;
    dev) rank=3 ;;
    *)
        echo "usage: tools/setup.sh DIRECTORY run | test | dev [PYTHON]" >&2
        exit 2
        ;;
esac

version=$(python_version "$directory")
if [ -n "$python" ]; then
    if ! wanted=$("$python" -I -c 'import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "$python does not run, or is older than Python 3.11, which Perdure needs." >&2
        exit 1
    fi
    if [ "$version" != "$wanted" ]; then version=""; fi
fi

stamp=$directory/.perdure-stamp
state="$PWD $(cksum <pyproject.toml)"
if [ -n "$version" ] && [ -f "$stamp" ]; then
    { IFS= read -r stamp_state && IFS= read -r stamp_rank; } <"$stamp" || stamp_state=""
    if [ "$stamp_state" = "$state" ]; then
        if [ "$stamp_rank" -ge "$rank" ]; then exit 0; fi
    elif [ "${stamp_rank:-0}" -gt "$rank" ]; then
        # The environment was richer before pyproject.toml changed: bring all of it up to date, not a part.
        rank=$stamp_rank
    fi
fi
case $rank in
    1) level=run ;;
    2) level=test ;;
    3) level=dev ;;
esac

if [ -z "$version" ]; then
    if [ -z "$python" ]; then
        if have_uv; then need_pip=0; else need_pip=1; fi
        found=$(PERDURE_NEED_PIP=$need_pip tools/find-python.sh oldest)
        python=${found#* }
    fi
    if [ -z "$python" ]; then
        cat >&2 <<'TEXT'
Perdure needs CPython 3.11 or newer with sqlite3, ssl and venv, and none was found on PATH, in pyenv or in uv.
Install one and run make again, for example:
    Debian, Ubuntu   apt install python3 python3-venv      (the venv package is needed when python3 is there already)
    macOS            brew install python
    anywhere         uv python install 3.13   or   pyenv install 3.13
or name one: make PYTHON=/path/to/python3
TEXT
        exit 1
    fi
    echo "Making $directory with $("$python" -V 2>&1)"
    make_env "$python" "$directory"
fi

echo "Installing into $directory what '$level' needs"
rm -f "$stamp"
if [ "$level" = run ]; then
    install_into "$directory" -e .
else
    "$directory/bin/python" -I tools/group.py "$level" >"$directory/.perdure-requirements.txt"
    install_into "$directory" -e . -r "$directory/.perdure-requirements.txt"
fi
printf '%s\n%s\n' "$state" "$rank" >"$stamp"
