#!/usr/bin/env bash
# Runs all tests; in parallel, lint and the tests whose lakehouses are once more on an S3 server: make test.
# Arguments go to pytest; with any, only pytest runs. What ran in parallel is shown after the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
# Tests that run once more on radosgw: files that use the fixture `lakes`. The longer ones run in `make soak`.
read -ra on_radosgw <<<"$TESTS_ON_RADOSGW"
read -ra long_on_radosgw <<<"$LONG_ON_RADOSGW"
outputs=$(mktemp -d)
jobs=()
trap 'kill "${jobs[@]}" 2>/dev/null || true; rm -rf "$outputs"' EXIT

# Waits for a background job, shows what it printed, and returns its status.
finish() {
    local name=$1 job=$2 status=0
    wait "$job" || status=$?
    if [ -s "$outputs/$name" ]; then
        echo "==> $name"
        cat "$outputs/$name"
    fi
    [ "$status" = 0 ] || echo "make test: $name failed, see above" >&2
    return "$status"
}

# Downloading Debian packages and installing Python packages take about as long as each other.
scripts/debian_packages.sh >"$outputs/selection" &
packages=$!
jobs+=("$packages")
make setup
if [ $# = 0 ]; then
    make lint >"$outputs/lint" 2>&1 &
    lint=$!
    jobs+=("$lint")
fi
wait "$packages"
selection=$(<"$outputs/selection")
# The archive is written while pytest collects the tests; a JVM that starts earlier does without it.
SPARK_SUBMIT_OPTS=$(scripts/share_classes.sh)
export SPARK_SUBMIT_OPTS

again=
if [ $# = 0 ] && [ -z "$selection" ]; then
    PYTEST_ADDOPTS='' $python -m pytest -p no:cacheprovider --lakes=radosgw "${on_radosgw[@]}" \
        "${long_on_radosgw[@]/#/--ignore=}" >"$outputs/pytest, lakehouses on radosgw" 2>&1 &
    again=$!
    jobs+=("$again")
fi

echo "==> pytest"
status=0
$python -m pytest --workers 5 --durations=25 -m "not soak${selection:+ and $selection}" "$@" || status=$?
[ -z "$again" ] || finish "pytest, lakehouses on radosgw" "$again" || status=$((status ? status : 1))
[ $# -gt 0 ] || finish lint "$lint" || status=$((status ? status : 1))
exit "$status"
