#!/usr/bin/env bash
# Builds sdist, wheel and SBOM in dist/, and tries the wheel with each extra on each Python: make dist, docs/release.md.
# PYTHONS are versions or programs. A version that is not here comes by uv, or in a Debian made for it, as root.
# Fails if one is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
uv=$PWD/.venv/bin/uv
missing=()
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# Prints the program of a Python: a path or name that runs, pyenv's, what uv knows or brings, or that of a Debian.
python_of() {
    local found
    for found in "$1" "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        found=$(command -v "$found") && "$found" -c 'pass' 2>/dev/null && echo "$found" && return
    done
    "$uv" python find "$1" 2>/dev/null ||
        { "$uv" python install --quiet "$1" && "$uv" python find "$1"; } 2>/dev/null ||
        scripts/debian_python.sh "$1" "$made"
}

echo "==> sdist and wheel"
$python scripts/build_dist.py dist
wheel=$(echo dist/trinitylake_ops-*.whl)

echo "==> SBOM (CycloneDX) of all extras for users, at the versions of constraints.txt"
sbom=dist/$(basename "$wheel" -py3-none-any.whl).cdx.json
"$uv" venv --quiet --python "$python" "$made/all"
"$uv" pip install --quiet --system-certs --python "$made/all" --constraint constraints.txt "$wheel[all]"
find "$made/all" -name direct_url.json -delete # where the wheel lay is nobody's business
.venv/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file "$sbom" \
    "$made/all/bin/python" 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
$python -c 'import json, sys; print("%s: %d components" % (sys.argv[1], len(json.load(open(sys.argv[1]))["components"])))' "$sbom"

for wanted in ${PYTHONS:-3.11 3.12 3.13 3.14}; do
    echo "==> the wheel on Python $wanted"
    if found=$(python_of "$wanted"); then
        "$found" scripts/smoke_wheel.py "$wheel" --uv "$uv" --constraints constraints.txt
    else
        echo "not here, and neither uv nor Debian brings it"
        missing+=("$wanted")
    fi
done
(cd dist && sha256sum trinitylake_ops-* >SHA256SUMS)
[ ${#missing[@]} = 0 ] || { echo "make dist: not tried on Python ${missing[*]}; name its program in PYTHONS" >&2; exit 1; }
