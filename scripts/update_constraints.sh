#!/usr/bin/env bash
# Resolves pyproject.toml anew, without constraints, and writes the versions found to constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

report=$(mktemp)
trap 'rm -f "$report"' EXIT
echo "==> resolving pyproject.toml"
.venv/bin/python -m pip --disable-pip-version-check --no-input -qq install --dry-run --ignore-installed \
    --no-build-isolation --report "$report" --editable '.[all,deploy]' \
    --group=bench --group=docs --group=lint --group=release --group=test pip setuptools wheel </dev/null
.venv/bin/python - "$report" >constraints.txt.new <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as report:
    found = [item["metadata"] for item in json.load(report)["install"]]
pins = {f"{m['name']}=={m['version']}" for m in found if m["name"] != "trinitylake-ops"}
print("\n".join(sorted(pins, key=str.lower)))
PYTHON
mv constraints.txt.new constraints.txt
echo "==> constraints.txt written; make setup installs it"
