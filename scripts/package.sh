#!/usr/bin/env bash
# Builds the files for spark-submit in dist/ or another folder. They are for machines that have Spark and the same Python
# version, but neither this package nor its dependencies:
#   trinitylake_ops.zip    the package, for --py-files
#   trinitylake_job.py     the program, with the arguments of the trinitylake command
#   environment/           the dependencies, and bin/python, which starts the machine's Python with them
#   environment.tar.gz     the same, for --archives environment.tar.gz#environment
# The dependencies are those of the core and of the storages, or of the extras in EXTRAS. The cluster provides Spark and
# Java. Jobs do not need Dagster, which only starts them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
dist=${1:-dist}
extras=${EXTRAS:-azure dynamodb gcs hdfs obstore redis s3 spark}
excluded="pyspark trinitylake-ops"

mkdir -p "$dist"
work=$(mktemp -d "$dist/.package-XXXXXX")
trap 'rm -rf "$work"' EXIT

echo "==> packaging trinitylake_ops"
"$python" - "$work/trinitylake_ops.zip" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

files = sorted(path for path in Path("trinitylake_ops").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
    for path in files:
        archive.write(path)
PYTHON
cp deploy/spark/trinitylake_job.py "$work/"

echo "==> installing dependencies"
"$python" - "$extras" "$excluded" >"$work/requirements.txt" <<'PYTHON'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras, excluded = (argument.split() for argument in sys.argv[1:])
optional = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
requirements = [*project["dependencies"], *optional]
print("\n".join(line for line in requirements if re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() not in excluded))
PYTHON
"$python" -m pip --disable-pip-version-check --no-input -qq install --constraint constraints.txt --only-binary :all: \
    --no-compile --target "$work/environment/site-packages" --requirement "$work/requirements.txt" </dev/null
mkdir "$work/environment/bin"
"$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' >"$work/environment/python"
cat >"$work/environment/bin/python" <<'SCRIPT'
#!/bin/sh
# Starts the Python of this machine with the packages in this environment, which require its exact version.
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=$(cat "$here/python")
command -v "$python" >/dev/null || { echo "$0: $python is not on the PATH of this machine" >&2; exit 127; }
PYTHONPATH="$here/site-packages${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$@"
SCRIPT
chmod +x "$work/environment/bin/python"
tar -C "$work/environment" -cf - . | gzip -1 >"$work/environment.tar.gz"

rm -rf "$dist/environment"
mv "$work"/environment "$work"/environment.tar.gz "$work"/trinitylake_* "$dist/"
echo "==> $dist: $(du -h "$dist/environment.tar.gz" | cut -f 1) for --archives, $(du -h "$dist/trinitylake_ops.zip" | cut -f 1) for --py-files"
