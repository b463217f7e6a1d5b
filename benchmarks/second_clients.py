"""Whether the second client of a storage pays for its place: whole operations of a user, with either client.

Run from the project's root: ``.venv/bin/python -m benchmarks.second_clients``; it starts its servers (the packages of
``deploy/debian-packages.txt``) behind a proxy that delays each response by 5 ms, and writes
``benchmarks/results/second_clients.md``. Times are only worth as ratios within the run. ``--quick`` shows within a
minute or two that all works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.delay import delayed
from benchmarks.lakes import Later, change_tables, filled
from benchmarks.report import RESULTS, table, write_result
from benchmarks.servers import running
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.storage import open_storage

QUICK_TABLES = 300
DELAY_SECONDS = 0.005
#: A second client stays if it is so many times as fast in one of the operations.
LEAST_GAIN = 1.5
_TABLES_A_COMMIT = 1_000
#: Of each table: pointers that a node's buffer replaces keep the last definition below it alive.
_CHANGES = 2
_POLICY = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)


@dataclass(frozen=True)
class Rivals:
    """A storage, and the option ``client`` of its first and of its second client."""

    name: str
    server: str
    first: str
    second: str
    #: Fewer for a server that takes seconds for a hundred requests.
    n_tables: int


ALL_RIVALS = (
    Rivals("S3 (radosgw)", "radosgw", "s3fs", "obstore", n_tables=10_000),
    Rivals("Azure (azurite)", "azurite", "azure-storage-blob", "obstore", n_tables=1_000),
)


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


def measure(rivals: Rivals) -> dict[str, dict[str, float]]:
    """Return the seconds of each operation, by client."""
    results: dict[str, dict[str, float]] = {}
    with running(rivals.server) as server, delayed(server.endpoint, DELAY_SECONDS) as endpoint:
        for client in (rivals.second, rivals.first):
            options = {**replace(server, endpoint=endpoint).storage_options, "client": client}
            root, target = server.fresh_root(), server.fresh_root("export")
            results[client] = times_of(root, target, options, rivals.n_tables)
            for what, seconds in results[client].items():
                print(f"{rivals.name}, {client}: {what} {seconds:.1f} s", flush=True)
            for used in (root, target):
                server.delete_all(used)
    return results


def report(results: Mapping[Rivals, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return the lines of Markdown."""
    rows = []
    for rivals, by_client in results.items():
        for what, first in by_client[rivals.first].items():
            second = by_client[rivals.second][what]
            names = (rivals.name, f"{rivals.n_tables:,}", what, f"{rivals.first}, {rivals.second}")
            rows.append([*names, f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}"])
    return [
        "# Second clients of a storage",
        "",
        "Made by `benchmarks/second_clients.py`: whole operations on a lakehouse whose tables have three definitions"
        f" each. Every response arrives {DELAY_SECONDS * 1000:.0f} ms after the server, on the same machine, sent it."
        f" The purge deletes at least one file per table. A second client stays if it is at least {LEAST_GAIN} times as"
        " fast in one operation.",
        "",
        *table(["storage", "tables", "operation", "clients", "first, s", "second, s", "first / second"], rows),
    ]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_clients", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tables: a trial")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the result")
    given = parser.parse_args()
    chosen = [replace(rivals, n_tables=QUICK_TABLES) if given.quick else rivals for rivals in ALL_RIVALS]
    write_result("second_clients", report({rivals: measure(rivals) for rivals in chosen}), given.to)


if __name__ == "__main__":
    main()
