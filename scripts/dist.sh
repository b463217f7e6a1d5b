#!/usr/bin/env bash
# Builds the sdist, the wheel and the SBOM in dist/, and tests the wheel with each extra on each Python version. Run by
# make dist; see docs/release.md. PYTHONS lists versions or interpreters. A missing version is installed by uv or, as
# root, in a Debian root file system. The script fails if a version is unavailable.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
uv=$PWD/.venv/bin/uv
missing=()
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Prints the interpreter for a version, path or name, from the PATH, pyenv, uv, or a Debian root file system.
python_of() {
    local program
    for program in "$1" "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        program=$(command -v "$program") && "$program" -c 'pass' 2>/dev/null && echo "$program" && return
    done
    "$uv" python find "$1" 2>/dev/null ||
        { "$uv" python install --quiet "$1" && "$uv" python find "$1"; } 2>/dev/null ||
        scripts/debian_python.sh "$1" "$work"
}

echo "==> sdist and wheel"
$python scripts/build_dist.py dist
wheel=$(echo dist/trinitylake_ops-*.whl)

echo "==> SBOM (CycloneDX) of all extras, with the versions of constraints.txt"
sbom=dist/$(basename "$wheel" -py3-none-any.whl).cdx.json
"$uv" venv --quiet --python "$python" "$work/all"
"$uv" pip install --quiet --system-certs --python "$work/all" --constraint constraints.txt "$wheel[all]"
find "$work/all" -name direct_url.json -delete # so that the SBOM does not contain the local path of the wheel
.venv/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file "$sbom" \
    "$work/all/bin/python" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
$python -c 'import json, sys; print("%s: %d components" % (sys.argv[1], len(json.load(open(sys.argv[1]))["components"])))' "$sbom"

for version in ${PYTHONS:-3.11 3.12 3.13 3.14}; do
    echo "==> testing the wheel on Python $version"
    if interpreter=$(python_of "$version"); then
        "$interpreter" scripts/smoke_wheel.py "$wheel" --uv "$uv" --constraints constraints.txt
    else
        echo "Python $version is not installed, and neither uv nor Debian provides it"
        missing+=("$version")
    fi
done
(cd dist && sha256sum trinitylake_ops-* >SHA256SUMS)
[ ${#missing[@]} = 0 ] || { echo "make dist: not tested on Python ${missing[*]}; set PYTHONS to its interpreter" >&2; exit 1; }
