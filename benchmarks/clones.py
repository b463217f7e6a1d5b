"""Measure requests, round trips, bytes and times of the operations on a clone of a large lakehouse.

Run from the project's root: ``.venv/bin/python -m benchmarks.clones``. It writes ``benchmarks/results/clones.md``.
Requests, round trips and bytes do not depend on the machine.
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


def generate(storage: Storage, n_tables: int, n_versions: int) -> Lakehouse:
    """Create a lakehouse with a commit of all tables, a table with data files, and commits of one to five tables."""
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
class StepRequests:
    """The requests of a step to both storages."""

    requests: int
    rounds: int
    bytes_read: int
    bytes_written: int
    seconds: float
    #: The number of requests for files of tables.
    table_files: int
    #: The number of requests for data files.
    data_files: int

    def cells(self, name: str) -> tuple[object, ...]:
        """Return the table row of a step."""
        kilobytes = (f"{number / 1e3:.1f}" for number in (self.bytes_read, self.bytes_written))
        values = (name, self.requests, self.rounds, *kilobytes, f"{self.seconds * 1e3:.0f}")
        return (*values, self.table_files, self.data_files)


class MeteredPair:
    """Both storages, with counters of their requests."""

    def __init__(self, parent: str, clone: str):
        self.logged = {root: FaultyStorage(LocalStorage(root, fsync=False), concurrency=32) for root in (parent, clone)}
        self.storages = {root: MeteredStorage(logged) for root, logged in self.logged.items()}

    def lake(self, root: str) -> Lakehouse:
        """Return a lakehouse with empty caches."""
        background.drain()
        clear_process_caches()
        return Lakehouse(self.storages[root], cache="off")

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Open clones on these storages while the block runs."""

        def open_metered(root: str, options: object = None) -> Storage:
            return self.storages[root] if root in self.storages else open_storage(root)

        with ExitStack() as stack:
            for module in (clone_module, clone_records):
                stack.enter_context(mock.patch.object(module, "open_storage", open_metered))
            yield

    def measure(self, step: Callable[[], object]) -> StepRequests:
        """Run a step and return its requests."""
        n_before = {root: len(storage.log) for root, storage in self.logged.items()}
        before = {root: storage.snapshot() for root, storage in self.storages.items()}
        elapsed_s = seconds(step)
        log = [request for root, storage in self.logged.items() for request in storage.log[n_before[root] :]]
        counts = [storage.snapshot() - before[root] for root, storage in self.storages.items()]
        return StepRequests(
            sum(count.total for count in counts),
            sum(count.rounds for count in counts),
            sum(count.bytes_read for count in counts),
            sum(count.bytes_written for count in counts),
            elapsed_s,
            sum(request.path.startswith("tables/") for request in log if request.kind != "list"),
            sum(request.path.endswith(".parquet") for request in log),
        )


def steps(folder: Path, n_tables: int, n_versions: int) -> dict[str, StepRequests]:
    """Clone, change both sides, compare, refresh, promote and drop. Return the requests of each step."""
    parent, clone = f"file://{folder}/parent/", f"file://{folder}/clone/"
    generate(LocalStorage(parent, fsync=False), n_tables, n_versions)
    pair = MeteredPair(parent, clone)
    requests_by_step: dict[str, StepRequests] = {}

    def step(name: str, work: Callable[[Lakehouse], object]) -> None:
        lake = pair.lake(parent)
        requests_by_step[name] = pair.measure(lambda: work(lake))

    with pair.opening():
        step("clone", lambda lake: operations.plan_clone(lake, clone, "feature").execute())
        step("compare, unchanged", lambda lake: operations.compare(lake, "feature"))
        change_tables(pair.lake(parent), [1, n_tables // 2])
        change_tables(pair.lake(clone), [3, n_tables - 1])
        with catalog_at(pair.lake(clone)) as catalog:
            catalog.load_table("data.filled").append(pa.table({"id": pa.array(range(N_ROWS), pa.int64())}))
        step(
            "compare, 2 tables changed in the parent and 3 in the clone",
            lambda lake: operations.compare(lake, "feature"),
        )
        step("refresh, 2 tables", lambda lake: operations.plan_refresh(lake, "feature").execute())
        step("promote, 3 tables", lambda lake: operations.plan_promotion(lake, "feature").execute())
        step("drop with files", lambda lake: operations.drop_clone(lake, "feature", delete_files=True))
    return requests_by_step


def lines_of(requests_by_step: dict[str, StepRequests]) -> list[str]:
    """Return the table of the steps."""
    header = ["step", "requests", "round trips", "kB read", "kB written", "ms", "table files", "data files"]
    return table(header, [requests.cells(name) for name, requests in requests_by_step.items()])


def main() -> None:
    """Measure and write the results."""
    lines = [
        "# Clones",
        "",
        "Generated by `benchmarks/clones.py`, on local disk. Each step starts with empty caches. Requests, round trips",
        "and bytes include both sides. The last two columns count the requests for files of tables, and those of them",
        "for data files. Times come from a busy machine with two cores and are not comparable.",
    ]
    requests: dict[str, dict[int, float]] = {}
    for n_tables, n_versions in SIZES:
        with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
            requests_by_step = steps(Path(folder), n_tables, n_versions)
        lines += ["", f"## {n_tables:,} tables, {n_versions:,} versions", "", *lines_of(requests_by_step)]
        for step, step_requests in requests_by_step.items():
            requests.setdefault(step, {})[n_tables] = step_requests.requests
    lines += ["", plot("clones", lambda axes: by_tables(axes[0], "requests", requests), width=7.5)]
    write_result("clones", lines)


if __name__ == "__main__":
    main()
