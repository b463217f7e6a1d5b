#!/usr/bin/env bash
# Runs all tests and, in parallel, lint, whose output is shown after the output of the tests: make test.
# Arguments are passed to pytest; with arguments, only pytest runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
outputs=$(mktemp -d)
jobs=()
trap 'kill "${jobs[@]}" 2>/dev/null || true; rm -rf "$outputs"' EXIT

# Waits for a background job, prints its output, and returns its status.
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

# Install Debian packages and Python packages in parallel, because both take about the same time.
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
# Spark's JVMs live for minutes: the optimizing compiler and parallel garbage collection would cost more than they save.
export SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

echo "==> pytest"
status=0
$python -m pytest --workers 5 --durations=25 -m "not soak${selection:+ and $selection}" "$@" || status=$?
[ $# -gt 0 ] || finish lint "$lint" || status=$((status ? status : 1))
exit "$status"
