#!/usr/bin/env bash
# Makes sure of the Debian packages that some tests need, and prints the pytest marker expression that
# selects the tests which can run: everything, or, without them, all but those marked debian_packages.
# As root they are installed; in CI (CI=true) a missing one is an error. Arguments are further lists of packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lists=(deploy/debian-packages.txt "$@")

# A package counts as installed, too, where another provides it: the Node.js of others brings its own npm.
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
    # shellcheck disable=SC2086  # a list of names
    output=$({ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } </dev/null 2>&1) ||
        echo "make test: could not install them: $output" >&2
    missing=$(missing_packages | tr '\n' ' ')
fi

if [ -z "$missing" ]; then
    echo ""
elif [ "${CI:-}" = true ]; then
    echo "make test: in CI every test runs, but Debian packages are missing: $missing" >&2
    exit 1
else
    echo "==> left out: tests that need Debian packages; install as root: apt-get install $missing" >&2
    echo "not debian_packages"
fi
