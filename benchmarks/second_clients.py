"""Compare the two clients of S3 in whole operations of a user, which decide whether the second client stays.

Run from the project's root: ``.venv/bin/python -m benchmarks.second_clients``; it starts radosgw (a package of
``deploy/debian-packages.txt``) behind a proxy that delays each response by 5 ms, and writes
``benchmarks/results/second_clients.md``. Times are only worth as ratios within the run. ``--quick`` shows within a
minute or two that all works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.delay import delayed
from benchmarks.lakes import Later, change_tables, filled
from benchmarks.report import RESULTS, table, write_result
from benchmarks.servers import running
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.storage import open_storage

FIRST_CLIENT, SECOND_CLIENT = "s3fs", "obstore"
N_TABLES, QUICK_TABLES = 10_000, 300
DELAY_SECONDS = 0.005
#: The second client stays if it is this many times as fast in one of the operations (decision 45).
MIN_SPEEDUP = 1.5
_TABLES_A_COMMIT = 1_000
#: Of each table: pointers that a node's buffer replaces keep the last definition below it alive.
_CHANGES = 2
_POLICY = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)


def times_of(root: str, target: str, options: Mapping[str, str], n_tables: int) -> dict[str, float]:
    """Return the seconds of each operation, on a fresh lakehouse with three definitions of each table."""
    storage = open_storage(root, options)
    filled(storage, n_tables)
    lake = Lakehouse(storage, options)
    for _ in range(_CHANGES):
        for first in range(0, n_tables, _TABLES_A_COMMIT):
            change_tables(lake, range(first, min(first + _TABLES_A_COMMIT, n_tables)))
    found: dict[str, float] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        found[what] = time.perf_counter() - begun

    timed("verify", lambda: operations.verify(lake))
    export = operations.plan_export(lake, "away", "full", target=target, target_options=options)
    timed("full export", export.execute)
    operations.drop_export(lake, "away")
    later = Lakehouse(Later(storage), options)
    operations.plan_expiration(later, _POLICY).execute()
    purge = operations.plan_purge(Lakehouse(Later(storage, years=2), options))
    assert purge.files >= n_tables, purge.files
    timed("purge", purge.execute)
    return found


def measure(n_tables: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each operation, by client."""
    results: dict[str, dict[str, float]] = {}
    with running("radosgw") as server, delayed(server.endpoint, DELAY_SECONDS) as endpoint:
        for client in (SECOND_CLIENT, FIRST_CLIENT):
            options = {**replace(server, endpoint=endpoint).storage_options, "client": client}
            root, target = server.fresh_root(), server.fresh_root("export")
            results[client] = times_of(root, target, options, n_tables)
            for operation, seconds in results[client].items():
                print(f"{client}: {operation} {seconds:.1f} s", flush=True)
            for used in (root, target):
                server.delete_all(used)
    return results


def report(results: Mapping[str, Mapping[str, float]], n_tables: int) -> list[str]:
    """Return the lines of Markdown.

    Args:
        results: the seconds of each operation, by client.
        n_tables: the number of tables of the lakehouse.
    """
    rows = []
    for operation, first in results[FIRST_CLIENT].items():
        second = results[SECOND_CLIENT][operation]
        rows.append([operation, f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}"])
    return [
        "# The two clients of S3",
        "",
        f"Made by `benchmarks/second_clients.py`: whole operations on a lakehouse of {n_tables:,} tables with three"
        f" definitions each, on radosgw. Every response arrives {DELAY_SECONDS * 1000:.0f} ms after the server, on the"
        " same machine, sent it. The purge deletes at least one file per table. The second client stays if it is at"
        f" least {MIN_SPEEDUP} times as fast in one operation ([decision"
        " 45](../../docs/decisions/0045-one-client-per-storage.md)).",
        "",
        *table(
            ["operation", f"{FIRST_CLIENT}: s", f"{SECOND_CLIENT}: s", f"{FIRST_CLIENT} / {SECOND_CLIENT}"],
            rows,
        ),
    ]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_clients", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tables: a trial")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the result")
    given = parser.parse_args()
    n_tables = QUICK_TABLES if given.quick else N_TABLES
    write_result("second_clients", report(measure(n_tables), n_tables), given.to)


if __name__ == "__main__":
    main()
