#!/bin/sh
# Usage: tools/types.sh
#
# mypy and pyright, both strict, over what pyproject.toml names; then that each package's public API is fully typed, as a
# user's type checker will see it.
set -eu
cd "$(dirname "$0")/.."

# pyright asks the `python` on PATH for the installed packages; with --verifytypes it ignores its other settings.
PATH=$PWD/.venv/bin:$PATH
export PATH

echo "mypy"
mypy
echo "pyright"
pyright
for init in */perdure/*/__init__.py; do
    package=perdure.$(basename "$(dirname "$init")")
    echo "pyright --verifytypes $package"
    if report=$(pyright --ignoreexternal --verifytypes "$package"); then
        printf '%s\n' "$report" | grep '^Type completeness score'
    else
        printf '%s\n' "$report"
        exit 1
    fi
done
