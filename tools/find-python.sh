#!/bin/sh
# Usage: tools/find-python.sh oldest | newest | list
#
# Prints the CPythons of this machine that can run Perdure, one per minor version, oldest first, as "3.11.7 /path".
#
# 1. A candidate is only believed once it has run: pyenv and asdf put names on PATH (python3.13) that exit 127 unless that
#    version is selected, and a Debian python3 may lack the module that makes environments. Looking names up was not enough.
# 2. Every directory of PATH is searched, not just the first hit, since a dead shim may hide a working interpreter.
# 3. Pre-releases and free-threaded builds are left out: "newest" means newest that our dependencies support.
#
# PERDURE_NEED_PIP=1 asks for an interpreter that can make an environment with pip in it, without uv.
set -eu

probe='
import sys
if sys.version_info < (3, 11) or sys.implementation.name != "cpython" or sys.version_info.releaselevel != "final":
    sys.exit(1)
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    sys.exit(1)
import sqlite3, ssl, venv
if sys.argv[1] == "1":
    import ensurepip
base = getattr(sys, "_base_executable", None) or sys.executable
print("%d.%d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.version_info[2], base))
'

candidates() {
    # IFS is split on ":" only here, so that directories with spaces in their names survive.
    old_ifs=$IFS
    IFS=:
    for directory in $PATH; do
        IFS=$old_ifs
        [ -n "$directory" ] || directory=.
        for path in "$directory"/python3.1[1-9] "$directory"/python3.[2-9][0-9] "$directory"/python3 "$directory"/python; do
            if [ -x "$path" ]; then printf '%s\n' "$path"; fi
        done
        # The versions behind shims: found from the shims themselves, which works with an empty HOME too.
        case $directory in
            */shims) candidates_in "${directory%/shims}/versions" ;;
        esac
    done
    IFS=$old_ifs
    if [ -n "${PYENV_ROOT:-}" ]; then candidates_in "$PYENV_ROOT/versions"; fi
    if pyenv_root=$(pyenv root 2>/dev/null </dev/null); then candidates_in "$pyenv_root/versions"; fi
    if uv_pythons=$(uv python dir 2>/dev/null </dev/null); then candidates_in "$uv_pythons"; fi
}

candidates_in() {
    for path in "$1"/*/bin/python3; do
        if [ -x "$path" ]; then printf '%s\n' "$path"; fi
    done
}

list() {
    candidates | awk '!seen[$0]++' | while IFS= read -r path; do
        "$path" -I -c "$probe" "${PERDURE_NEED_PIP:-0}" 2>/dev/null </dev/null || :
    done | awk '{ split($1, part, "."); if (!seen[part[1] "." part[2]]++) print }' | sort -t. -k1,1n -k2,2n
}

case ${1:-} in
    oldest) list | head -n 1 ;;
    newest) list | tail -n 1 ;;
    list) list ;;
    *)
        echo "usage: tools/find-python.sh oldest | newest | list" >&2
        exit 2
        ;;
esac
