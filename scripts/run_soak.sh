#!/usr/bin/env bash
# Runs the slow tests, and then the engine tests again with lakehouses on each server: make soak.
# Arguments are passed to pytest; with arguments, only the slow tests run. All parts run even if one fails, and the
# failed parts are listed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
read -ra long_on_moto <<<"$LONG_ON_MOTO"
read -ra with_shuffled_lists <<<"$WITH_SHUFFLED_LISTS"
read -ra on_other_servers <<<"$ON_OTHER_SERVERS"
read -ra other_servers <<<"$OTHER_SERVERS"
mkdir -p soak
log=soak/$(date -u +%Y-%m-%dT%H%M%SZ).log
failed=()

# Runs pytest for one part and records a failure.
run_part() {
    local name=$1
    shift
    echo "==> $name"
    $python -m pytest -v "$@" || failed+=("$name")
}

run_all() {
    trap 'exit 130' INT # pytest handles the signal itself, so without the trap the next part would start
    run_part "long tests" --durations=0 -m "soak${selection:+ and $selection}" "$@"
    if [ $# = 0 ]; then
        run_part "lakehouses on moto" --workers 2 --lakes=moto "${long_on_moto[@]}"
        run_part "shuffled lists" --workers 2 --lists=shuffled --hypothesis-profile=soak "${with_shuffled_lists[@]}"
        local kind
        for kind in "${other_servers[@]}"; do
            run_part "lakehouses on $kind" --workers 2 --lakes="$kind" "${on_other_servers[@]}"
        done
    fi
    [ ${#failed[@]} = 0 ] || echo "make soak: failed, see $log: $(printf '%s; ' "${failed[@]}")"
    return $((${#failed[@]} > 0))
}

selection=$(scripts/debian_packages.sh deploy/debian-packages-soak.txt)
run_all "$@" 2>&1 | tee "$log"
