#!/usr/bin/env bash
# Runs all tests, and beside them lint and the tests whose lakehouses live on an S3 server once more: make test.
# Arguments go to pytest; with any, neither of the two runs beside. What ran beside is shown after the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
# Tests that run once more on radosgw: files that use the fixture `lakes`. Those of the longer kind run in `make soak`.
read -ra on_radosgw <<<"$TESTS_ON_RADOSGW"
read -ra long_on_radosgw <<<"$LONG_ON_RADOSGW"
kept=$(mktemp -d)
jobs=()
trap 'kill "${jobs[@]}" 2>/dev/null || true; rm -rf "$kept"' EXIT

# Ends with the status of a job that was started beside, after showing what it printed.
shown_status() {
    local name=$1 job=$2 status=0
    wait "$job" || status=$?
    if [ -s "$kept/$name" ]; then
        echo "==> $name"
        cat "$kept/$name"
    fi
    [ "$status" = 0 ] || echo "make test: $name failed, see above" >&2
    return "$status"
}

if [ $# = 0 ]; then
    make lint >"$kept/lint" 2>&1 &
    lint=$!
    jobs+=("$lint")
fi
SPARK_SUBMIT_OPTS=$(scripts/share_classes.sh)
export SPARK_SUBMIT_OPTS
selection=$(scripts/debian_packages.sh)

again=
if [ $# = 0 ] && [ -z "$selection" ]; then
    PYTEST_ADDOPTS='' $python -m pytest -p no:cacheprovider --lakes=radosgw "${on_radosgw[@]}" \
        "${long_on_radosgw[@]/#/--ignore=}" >"$kept/pytest, lakehouses on radosgw" 2>&1 &
    again=$!
    jobs+=("$again")
fi

echo "==> pytest"
status=0
$python -m pytest --workers 4 --durations=25 -m "not soak${selection:+ and $selection}" "$@" || status=$?
[ -z "$again" ] || shown_status "pytest, lakehouses on radosgw" "$again" || status=$((status ? status : 1))
[ $# -gt 0 ] || shown_status lint "$lint" || status=$((status ? status : 1))
exit "$status"
