#!/bin/sh
# Usage: tools/reference.sh PYTHON [PYTEST-ARGUMENT...]
#
# Runs tests/reference: this engine and the reference engine (an npm package) by turns on the same bytes. Needs node 18 or
# newer and npm, which takes the package from wherever it is configured to.
#
# 1. build/reference holds the package, at the versions and with the checksums of tests/reference/package-lock.json. npm runs
#    when that is another than the one installed; a stamp is written last, so that an installation that broke off is begun
#    again.
# 2. The lock file names no registry (see tests/reference/.npmrc), and leaves out the native half of cbor-x, which is optional
#    and not to be had everywhere: after "npm install --package-lock-only", take out cbor-x's optionalDependencies again.
set -eu
cd "$(dirname "$0")/.."

python=$1
shift
for program in node npm; do
    if ! "$program" --version >/dev/null 2>&1 </dev/null; then
        echo "tests/reference needs node and npm, and $program does not run. Install Node.js 18 or newer." >&2
        exit 1
    fi
done

directory=build/reference
mkdir -p "$directory"
state=$(cat tests/reference/package.json tests/reference/package-lock.json | cksum)
if [ "$(cat "$directory/stamp" 2>/dev/null || :)" != "$state" ]; then
    echo "Installing the reference engine into $directory"
    rm -f "$directory/stamp"
    cp tests/reference/package.json tests/reference/package-lock.json tests/reference/.npmrc "$directory"
    (cd "$directory" && npm ci --loglevel=error </dev/null)
    printf '%s\n' "$state" >"$directory/stamp"
fi
exec "$python" -m pytest --forbid-skips tests/reference "$@"
