#!/usr/bin/env bash
# Resolves pyproject.toml without constraints and writes the resolved versions to constraints.txt.
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
    packages = [item["metadata"] for item in json.load(report)["install"]]
pins = {f"{package['name']}=={package['version']}" for package in packages if package["name"] != "trinitylake-ops"}
print("\n".join(sorted(pins, key=str.lower)))
PYTHON
mv constraints.txt.new constraints.txt
echo "==> wrote constraints.txt; run make setup to install it"
