#!/usr/bin/env bash
# Runs all tests, and in parallel lint and the tests that are repeated with lakehouses on an S3 server: make test.
# Arguments are passed to pytest; with arguments only the tests run. Output of the parallel jobs follows the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
# Tests that are repeated on radosgw: files that use the fixture `lakes`. The longer ones run in `make soak`.
read -ra on_radosgw <<<"$TESTS_ON_RADOSGW"
read -ra long_on_radosgw <<<"$LONG_ON_RADOSGW"
outputs=$(mktemp -d)
jobs=()
trap 'kill "${jobs[@]}" 2>/dev/null || true; rm -rf "$outputs"' EXIT

# Waits for a background job, prints its output, and returns its status.
finish_job() {
    local name=$1 job=$2 status=0
    wait "$job" || status=$?
    if [ -s "$outputs/$name" ]; then
        echo "==> $name"
        cat "$outputs/$name"
    fi
    [ "$status" = 0 ] || echo "make test: $name failed; its output is above" >&2
    return "$status"
}

if [ $# = 0 ]; then
    make lint >"$outputs/lint" 2>&1 &
    lint=$!
    jobs+=("$lint")
fi
SPARK_SUBMIT_OPTS=$(scripts/share_classes.sh)
export SPARK_SUBMIT_OPTS
selection=$(scripts/debian_packages.sh)

again=
if [ $# = 0 ] && [ -z "$selection" ]; then
    PYTEST_ADDOPTS='' $python -m pytest -p no:cacheprovider --lakes=radosgw "${on_radosgw[@]}" \
        "${long_on_radosgw[@]/#/--ignore=}" >"$outputs/pytest, lakehouses on radosgw" 2>&1 &
    again=$!
    jobs+=("$again")
fi

echo "==> pytest"
status=0
$python -m pytest --workers 4 --durations=25 -m "not soak${selection:+ and $selection}" "$@" || status=$?
[ -z "$again" ] || finish_job "pytest, lakehouses on radosgw" "$again" || status=$((status ? status : 1))
[ $# -gt 0 ] || finish_job lint "$lint" || status=$((status ? status : 1))
exit "$status"
