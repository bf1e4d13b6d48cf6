# shellcheck shell=bash
# Sourced by the scripts beside it: `make_environment EXTRAS` puts the package and its pinned dependencies into .venv
# (or $PRORES_VENV) and sets $python. Runs in the repository's root.

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: Python 3.12 or newer is needed, with its venv module, and none is on PATH or under pyenv:" \
        "install one ('pyenv install 3.12', or your system's python3.12 and python3.12-venv), or set PYTHON=/path/to/python3.12" >&2
    return 2
}

# True where every one of the extras (a,b) was installed after the files that say what to install last changed.
is_installed() {
    local extra file
    for extra in ${2//,/ }; do
        for file in pyproject.toml setup.py constraints.txt csrc/*; do
            [ "$1/.installed-$extra" -nt "$file" ] || return 1
        done
    done
}

make_environment() {
    local extras=$1 venv=${PRORES_VENV:-.venv} found extra install
    python=$venv/bin/python
    is_installed "$venv" "$extras" && return
    found=$(find_python) || return
    echo "installing into $venv with $found (PyTorch and its CUDA libraries: about 6 GB, a few minutes)"
    [ -x "$python" ] || "$found" -m venv "$venv" || return
    install=("$python" -m pip install --disable-pip-version-check -c constraints.txt)
    [ -t 1 ] || install+=(-q)
    # The extension is compiled against the headers of the torch that is there.
    "${install[@]}" torch && "${install[@]}" -e ".[$extras]" || return
    for extra in ${extras//,/ }; do
        touch "$venv/.installed-$extra"
    done
}
