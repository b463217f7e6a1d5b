#!/usr/bin/env bash
# Makes a Debian with a Python that is not here: debian_python.sh VERSION FOLDER, as root. Prints a program that is this Python.
# It sees this project and uv's cache at their places, and trusts whom this system trusts. Its mounts end with it.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A suites=([3.11]=bookworm [3.13]=trixie [3.14]=forky)

# Binds a file or folder of this system into the Debian, where it is here.
see() {
    [ -e "$2" ] || return 0
    if [ -d "$2" ]; then mkdir -p "$1$2"; else mkdir -p "$1${2%/*}" && touch "$1$2"; fi
    mount --bind "$2" "$1$2"
}

if [ "$1" = --inside ]; then # in a mount namespace of its own
    root=$2
    for place in /proc /sys /dev /etc/hosts /etc/resolv.conf "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" \
        "$project" "$("$project/.venv/bin/uv" cache dir)"; do
        see "$root" "$place"
    done
    exec chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$PWD" "${@:3}"
fi

suite=${suites[$1]:-}
if [ -z "$suite" ] || [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "debian_python.sh: for Python ${!suites[*]} alone, as root, with the Debian package debootstrap" >&2
    exit 1
fi
root=$2/debian-$1
site=$(apt-get indextargets --format '$(SITE)' "Codename: $(. /etc/os-release && echo "$VERSION_CODENAME")" 'Created-By: Packages')
# The script of sid is that of all suites. A namespace of its own, too: whatever ends it, no mount is left.
unshare --mount --propagation private debootstrap --variant=minbase --include="ca-certificates,python$1" "$suite" "$root" \
    "${site%%$'\n'*}" /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 || { tail -n 3 "$root.log" >&2; exit 1; }
printf '#!/bin/sh\nexec unshare --mount --propagation private "%s" --inside "%s" "python%s" "$@"\n' \
    "$project/scripts/debian_python.sh" "$root" "$1" >"$root.sh"
chmod +x "$root.sh"
echo "$root.sh"
