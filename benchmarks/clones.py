"""What a clone of a large lakehouse asks of the storage, and what is done with it: requests, rounds, bytes, time.

Run from the project's root: ``.venv/bin/python -m benchmarks.clones``; it writes ``benchmarks/results/clones.md``.
Requests, rounds and bytes depend on no machine.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa

from benchmarks.lakes import change_tables, filled
from benchmarks.report import by_tables, plot, seconds, table, write_result
from benchmarks.scale import N_TABLES, N_VERSIONS
from tests.faults import FaultyStorage
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.clones import clone as clone_module
from trinitylake_ops.operations.clones import clone_records
from trinitylake_ops.storage import LocalStorage, MeteredStorage, Storage, background, open_storage
from trinitylake_ops.storage.cache.storage import clear_process_caches

N_ROWS = 10_000
N_DATA_FILES = 20
SIZES = ((100, 10), (1_000, 100), (10_000, 1_000), (N_TABLES, N_VERSIONS))


def generated(storage: Storage, n_tables: int, n_versions: int) -> Lakehouse:
    """Make a lakehouse: one commit of all tables, one table with data files, then commits of one to five tables."""
    lake = filled(storage, n_tables)
    with catalog_at(lake) as catalog:
        catalog.create_namespace("data")
        rows = pa.table({"id": pa.array(range(N_ROWS), pa.int64())})
        filled_table = catalog.create_table("data.filled", rows.schema)
        for _ in range(N_DATA_FILES):
            filled_table.append(rows)
    generator = random.Random(0)
    while lake.latest_version() < n_versions - 1:
        change_tables(lake, {generator.randrange(n_tables) for _ in range(generator.randint(1, 5))})
    return lake


@dataclass(frozen=True)
class Asked:
    """What a step asked of both storages."""

    requests: int
    rounds: int
    bytes_read: int
    bytes_written: int
    seconds: float
    of_tables: int
    of_data_files: int

    def cells(self, name: str) -> tuple[object, ...]:
        """Return the row of a step."""
        kilobytes = (f"{number / 1e3:.1f}" for number in (self.bytes_read, self.bytes_written))
        asked = (name, self.requests, self.rounds, *kilobytes, f"{self.seconds * 1e3:.0f}")
        return (*asked, self.of_tables, self.of_data_files)


class Watched:
    """Both storages, and what was asked of them."""

    def __init__(self, parent: str, clone: str):
        self.logged = {root: FaultyStorage(LocalStorage(root, fsync=False), concurrency=32) for root in (parent, clone)}
        self.storages = {root: MeteredStorage(logged) for root, logged in self.logged.items()}

    def lake(self, root: str) -> Lakehouse:
        """Return a lakehouse without anything in memory."""
        background.drain()
        clear_process_caches()
        return Lakehouse(self.storages[root], cache="off")

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Let clones be opened on these storages."""

        def opened(root: str, options: object = None) -> Storage:
            return self.storages[root] if root in self.storages else open_storage(root)

        with ExitStack() as stack:
            for module in (clone_module, clone_records):
                stack.enter_context(mock.patch.object(module, "open_storage", opened))
            yield

    def asked(self, step: Callable[[], object]) -> Asked:
        """Return what a step asks."""
        logged = {root: len(storage.log) for root, storage in self.logged.items()}
        before = {root: storage.snapshot() for root, storage in self.storages.items()}
        took = seconds(step)
        log = [one for root, storage in self.logged.items() for one in storage.log[logged[root] :]]
        counts = [storage.snapshot() - before[root] for root, storage in self.storages.items()]
        return Asked(
            sum(each.total for each in counts),
            sum(each.rounds for each in counts),
            sum(each.bytes_read for each in counts),
            sum(each.bytes_written for each in counts),
            took,
            sum(one.path.startswith("tables/") for one in log if one.kind != "list"),
            sum(one.path.endswith(".parquet") for one in log),
        )


def steps(folder: Path, n_tables: int, n_versions: int) -> dict[str, Asked]:
    """Clone, work on both sides, compare, refresh, promote, drop; return what each asked."""
    parent, clone = f"file://{folder}/parent/", f"file://{folder}/clone/"
    generated(LocalStorage(parent, fsync=False), n_tables, n_versions)
    watched = Watched(parent, clone)
    found: dict[str, Asked] = {}

    def step(name: str, do: Callable[[Lakehouse], object]) -> None:
        lake = watched.lake(parent)
        found[name] = watched.asked(lambda: do(lake))

    with watched.opening():
        step("clone", lambda lake: operations.plan_clone(lake, clone, "feature").execute())
        step("compare at once", lambda lake: operations.compare(lake, "feature"))
        change_tables(watched.lake(parent), [1, n_tables // 2])
        change_tables(watched.lake(clone), [3, n_tables - 1])
        with catalog_at(watched.lake(clone)) as catalog:
            catalog.load_table("data.filled").append(pa.table({"id": pa.array(range(N_ROWS), pa.int64())}))
        step("compare, 2 tables changed there and 3 here", lambda lake: operations.compare(lake, "feature"))
        step("refresh, 2 tables", lambda lake: operations.plan_refresh(lake, "feature").execute())
        step("promote, 3 tables", lambda lake: operations.plan_promotion(lake, "feature").execute())
        step("drop with its files", lambda lake: operations.drop_clone(lake, "feature", delete_files=True))
    return found


def lines_of(found: dict[str, Asked]) -> list[str]:
    """Return the table of the steps."""
    header = ["step", "requests", "rounds", "kB read", "kB written", "ms", "files of tables", "data files"]
    return table(header, [asked.cells(name) for name, asked in found.items()])


def main() -> None:
    """Measure and write the results."""
    lines = [
        "# Clones",
        "",
        "Made by `benchmarks/clones.py`, on local disk. Each step is planned and done by a lakehouse with nothing in",
        "memory. Requests, rounds and bytes are those of both sides. The last columns count requests for files of",
        "tables, and for data files among them. Times are those of a busy machine of two cores: compare none of them.",
    ]
    requests: dict[str, dict[int, float]] = {}
    for n_tables, n_versions in SIZES:
        with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
            found = steps(Path(folder), n_tables, n_versions)
        lines += ["", f"## {n_tables:,} tables, {n_versions:,} versions", "", *lines_of(found)]
        for step, asked in found.items():
            requests.setdefault(step, {})[n_tables] = asked.requests
    lines += ["", plot("clones", lambda axes: by_tables(axes[0], "requests", requests), width=7.5)]
    write_result("clones", lines)


if __name__ == "__main__":
    main()
