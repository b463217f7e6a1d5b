#!/usr/bin/env bash
# Installs the Debian packages that some tests need, if run as root. Prints a pytest marker expression for the tests that
# can run: an empty one for all tests, or "not debian_packages" if packages are missing.
# In CI (CI=true), a missing package is an error. Arguments are additional package lists.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lists=(deploy/debian-packages.txt "$@")

# A package also counts as installed if another one provides it: Node.js packages from other sources include npm.
missing_packages() {
    local package provided
    provided=$(dpkg-query --show --showformat '${db:Status-Abbrev} ,${Provides},\n' | sed -n 's/^ii *//p' | tr -d ' ')
    sed -e '/^#/d' -e '/^$/d' "${lists[@]}" | while read -r package; do
        dpkg-query --show --showformat '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' ||
            grep -qE ",$package(\(=[^)]*\))?," <<<"$provided" || echo "$package"
    done
}

missing=$(missing_packages | tr '\n' ' ')
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "==> installing Debian packages: $missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    exec 8>"${TMPDIR:-/tmp}/trinitylake-apt.lock"
    flock 8 # setup_venv.sh, which runs in parallel, may also install a package
    # shellcheck disable=SC2086  # a list of names
    output=$({ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } </dev/null 2>&1) ||
        echo "make test: installing Debian packages failed: $output" >&2
    missing=$(missing_packages | tr '\n' ' ')
fi

if [ -z "$missing" ]; then
    echo ""
elif [ "${CI:-}" = true ]; then
    echo "make test: Debian packages are missing: $missing; CI requires all of them" >&2
    exit 1
else
    echo "==> skipping tests that need Debian packages; install them as root: apt-get install $missing" >&2
    echo "not debian_packages"
fi
