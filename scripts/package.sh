#!/usr/bin/env bash
# Makes in dist/ (or the folder given) what spark-submit needs on machines that have Spark and the same version of
# Python, and neither this package nor what it depends on:
#   trinitylake_ops.zip    the package, for --py-files
#   trinitylake_job.py     the program, with the arguments of the command trinitylake
#   environment/           what the package depends on, and bin/python, which starts the machine's Python with it
#   environment.tar.gz     the same, for --archives environment.tar.gz#environment
# That is the core and the clients of all storages, or of those whose extras EXTRAS names. Spark and Java are the
# cluster's. Dagster starts jobs and is not part of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
dist=${1:-dist}
extras=${EXTRAS:-azure dynamodb gcs hdfs obstore redis s3 spark}
left_out="pyspark trinitylake-ops"

mkdir -p "$dist"
made=$(mktemp -d "$dist/.package-XXXXXX")
trap 'rm -rf "$made"' EXIT

echo "==> the package"
"$python" - "$made/trinitylake_ops.zip" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

files = sorted(path for path in Path("trinitylake_ops").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
    for path in files:
        archive.write(path)
PYTHON
cp deploy/spark/trinitylake_job.py "$made/"

echo "==> what it depends on"
"$python" - "$extras" "$left_out" >"$made/requirements.txt" <<'PYTHON'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras, left_out = (argument.split() for argument in sys.argv[1:])
wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
print("\n".join(one for one in wanted if re.split(r"[^A-Za-z0-9_.-]", one)[0].lower() not in left_out))
PYTHON
"$python" -m pip --disable-pip-version-check --no-input -qq install --constraint constraints.txt --only-binary :all: \
    --no-compile --target "$made/environment/site-packages" --requirement "$made/requirements.txt" </dev/null
mkdir "$made/environment/bin"
"$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' >"$made/environment/python"
cat >"$made/environment/bin/python" <<'SCRIPT'
#!/bin/sh
# The machine's Python, of the version that the packages beside were made for, with these packages.
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=$(cat "$here/python")
command -v "$python" >/dev/null || { echo "$0: there is no $python on this machine's PATH" >&2; exit 127; }
PYTHONPATH="$here/site-packages${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$@"
SCRIPT
chmod +x "$made/environment/bin/python"
tar -C "$made/environment" -cf - . | gzip -1 >"$made/environment.tar.gz"

rm -rf "$dist/environment"
mv "$made"/environment "$made"/environment.tar.gz "$made"/trinitylake_* "$dist/"
echo "==> $dist: $(du -h "$dist/environment.tar.gz" | cut -f 1) for --archives, $(du -h "$dist/trinitylake_ops.zip" | cut -f 1) for --py-files"
