# Read by the other scripts with ".": makes Python environments and installs into them, with uv or without.
#
# 1. uv is used when it is on PATH and runs; else the standard library's venv and pip do the same work.
# 2. When uv is there but cannot install (an index that only pip is configured for, say), pip gets its turn before the
#    build fails.
# 3. PERDURE_NO_UV=1 leaves uv alone.

have_uv() {
    [ -z "${PERDURE_NO_UV:-}" ] && uv --version >/dev/null 2>&1 </dev/null
}

# make_env PYTHON DIRECTORY
make_env() {
    rm -rf "$2"
    if have_uv && uv venv --quiet --no-project --python "$1" "$2"; then return; fi
    rm -rf "$2"
    "$1" -m venv "$2"
}

# install_into DIRECTORY PIP-ARGUMENT...
install_into() {
    install_python=$1/bin/python
    shift
    if have_uv; then
        if uv pip install --quiet --python "$install_python" "$@"; then return; fi
        echo "uv could not install; trying pip." >&2
    fi
    # An environment made by uv has no pip in it.
    "$install_python" -m pip --version >/dev/null 2>&1 || "$install_python" -m ensurepip >/dev/null
    "$install_python" -m pip install --quiet --disable-pip-version-check "$@"
}

# python_version DIRECTORY: "3.11", or nothing when the environment is missing, broken or too old.
python_version() {
    "$1/bin/python" -I -c 'import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' \
        2>/dev/null </dev/null || :
}
