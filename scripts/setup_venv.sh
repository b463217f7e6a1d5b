#!/usr/bin/env bash
# Creates .venv with everything that the make targets need, pinned by constraints.txt.
# An argument is the name of an additional dependency group, for make bench and make dist.
# Does nothing if .venv is current, that is, if the folder, pyproject.toml, constraints.txt and this script are unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
venv=.venv
extras=all,deploy
groups=(docs lint test ${1:+"$1"})
stamp=$venv/.installed${1:+-$1}

fail() {
    echo "make setup: $*" >&2
    exit 1
}

fingerprint() {
    { pwd && cat pyproject.toml constraints.txt scripts/setup_venv.sh; } | sha256sum | cut -d ' ' -f 1
}

is_current() {
    [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]
}

# Debian ships venv without ensurepip unless pythonX.Y-venv is installed.
ensure_venv_module() {
    "$python" -c 'import venv, ensurepip; ensurepip.version()' 2>/dev/null && return
    local package output
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "==> installing the Debian package $package"
        export DEBIAN_FRONTEND=noninteractive
        exec 8>"${TMPDIR:-/tmp}/trinitylake-apt.lock"
        flock 8 # debian_packages.sh may run in parallel
        output=$({ apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package"; } </dev/null 2>&1) ||
            fail "installing $package failed: $output"
    else
        fail "$python cannot create virtual environments; install them as root: apt-get install $package"
    fi
}

create_venv() {
    # A venv is bound to its folder. It is recreated if it was moved, is incomplete, or if its Python was removed.
    if [ "$(cat "$venv/.folder" 2>/dev/null)" = "$PWD" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    ensure_venv_module
    echo "==> creating $venv"
    "$python" -m venv --clear "$venv"
    pwd >"$venv/.folder"
}

install() {
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq)
    # Install the build backend first, so that packages are built with the pinned version.
    "${pip[@]}" install --constraint constraints.txt pip setuptools uv wheel </dev/null
    echo "==> installing pinned packages (about $([ -n "$1" ] && echo 500 MB || echo 1 GB), a few minutes)"
    # Do not compile modules now: most are never imported, and Python compiles the others on first import.
    local arguments=(--constraint constraints.txt --no-build-isolation --editable ".[$extras]" "${groups[@]/#/--group=}")
    # uv downloads in parallel and links cached packages, but ignores the configuration of pip, which is the fallback.
    "$venv/bin/uv" pip install --quiet --system-certs --python "$venv/bin/python" "${arguments[@]}" </dev/null 2>/dev/null ||
        "${pip[@]}" install --no-compile "${arguments[@]}" </dev/null
}

# Prefer the Python of the system, because distributions build it with profile-guided optimization.
if [ -z "$python" ]; then
    python=python3
    /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11) or not ensurepip.version())' \
        2>/dev/null && python=/usr/bin/python3
fi
command -v "$python" >/dev/null || fail "$python not found; install it as root: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; set PYTHON to a Python 3.11 or newer"

# Allow only one setup at a time. Other make targets wait for it.
if command -v flock >/dev/null; then
    exec 9<.
    flock 9
fi

wanted=$(fingerprint)
is_current && exit 0
create_venv
rm -f "$stamp"
install "${1:-}"
echo "$wanted" >"$stamp"
echo "==> $venv is ready"
