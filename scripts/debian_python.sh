#!/usr/bin/env bash
# Creates a Debian root file system with a Python version that is not installed: debian_python.sh VERSION FOLDER, as
# root. Prints the path of a program that runs this Python. The program can access this project, the cache of uv and the
# CA certificates of this system at their usual paths. Its mounts are removed when it ends.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A suites=([3.11]=bookworm [3.13]=trixie [3.14]=forky)

# Bind-mounts a file or folder of this system into the Debian root, if it exists.
bind() {
    [ -e "$2" ] || return 0
    if [ -d "$2" ]; then mkdir -p "$1$2"; else mkdir -p "$1${2%/*}" && touch "$1$2"; fi
    mount --bind "$2" "$1$2"
}

if [ "$1" = --inside ]; then # runs in a separate mount namespace
    root=$2
    for path in /proc /sys /dev /etc/hosts /etc/resolv.conf "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" \
        "$project" "$("$project/.venv/bin/uv" cache dir)"; do
        bind "$root" "$path"
    done
    exec chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$PWD" "${@:3}"
fi

suite=${suites[$1]:-}
if [ -z "$suite" ] || [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "debian_python.sh: supports Python ${!suites[*]}, and requires root and the Debian package debootstrap" >&2
    exit 1
fi
root=$2/debian-$1
site=$(apt-get indextargets --format '$(SITE)' "Codename: $(. /etc/os-release && echo "$VERSION_CODENAME")" 'Created-By: Packages')
# The debootstrap script of sid works for all suites. The separate namespace ensures that no mount remains.
unshare --mount --propagation private debootstrap --variant=minbase --include="ca-certificates,python$1" "$suite" "$root" \
    "${site%%$'\n'*}" /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 || { tail -n 3 "$root.log" >&2; exit 1; }
printf '#!/bin/sh\nexec unshare --mount --propagation private "%s" --inside "%s" "python%s" "$@"\n' \
    "$project/scripts/debian_python.sh" "$root" "$1" >"$root.sh"
chmod +x "$root.sh"
echo "$root.sh"
