"""Requests, sequential rounds and bytes of the engine's work at several sizes, which depend on no machine.

Run from the project's root: ``.venv/bin/python -m benchmarks.request_counts``; it writes
``benchmarks/results/request_counts.md``. *Cold* is a process that has read nothing yet, *warm* one that has just done
the same. A round is a request, or several in parallel, that others wait for.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lakes import MadeUpDefinitions, loaded, name
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_path
from trinitylake_ops.storage import (
    MemoryStorage,
    MeteredStorage,
    RequestCounts,
    Storage,
    StorageWrapper,
    drop_memory_root,
)

TABLE_COUNTS = (100, 7_000, 16_000, 50_000, 100_000, 1_000_000)
N_COMMITS = 2_000
N_SETTLING = 500  # commits before those that are measured: until buffers are full
LATEST = 2_000_000
RESULTS = Path(__file__).parent / "results" / "request_counts.md"


class NodeReads(StorageWrapper):
    """Counts reads of nodes."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.n_reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.n_reads += "-node-" in path
        return self.inner.read(path, offset=offset, length=length)


class ManyVersions(StorageWrapper):
    """Shows the one root there is under all versions up to ``LATEST``."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        version = parse_root_path(path)
        if version is not None and version > LATEST:
            raise FileMissingError("there is no such version", path=path)
        return self.inner.read(path if version is None else root_path(0), offset=offset, length=length)


@dataclass(frozen=True)
class CommitFigures:
    """What single-table commits write, after their begin."""

    nodes: Sequence[int]
    written_bytes: Sequence[int]
    rounds: Sequence[int]
    rounds_warm: int


def measured(storage: Storage, work: Callable[[Lakehouse], object], *, is_warm: bool) -> RequestCounts:
    """Count what a piece of work asks of the storage."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter, cache="private")
    if is_warm:
        work(lake)
    with meter.measure() as measurement:
        work(lake)
    return measurement.counts


def commits(storage: Storage, n_tables: int) -> CommitFigures:
    """Change random tables one by one."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter, cache="private")
    generator = random.Random(n_tables)

    def change(table: str) -> RequestCounts:
        with lake.transaction() as txn, meter.measure() as measurement:
            txn.alter_table("ns", table, TableDef(properties={"stamp": str(generator.random())}))
            txn.commit()
        return measurement.counts

    for _ in range(N_SETTLING):
        change(name(generator.randrange(n_tables)))
    counts = [change(name(generator.randrange(n_tables))) for _ in range(N_COMMITS)]
    change(name(0))
    return CommitFigures(
        nodes=[count.requests["create"] - 2 for count in counts],  # besides the definition and the root
        written_bytes=[count.bytes_written for count in counts],
        rounds=[count.rounds for count in counts],
        rounds_warm=change(name(0)).rounds,
    )


def diff_node_reads(storage: Storage) -> int:
    """Return how many nodes a cold diff of the last two versions reads."""
    nodes = NodeReads(storage)
    lake = Lakehouse(nodes, cache="off")
    latest = lake.latest_version()
    lake.diff(latest - 1, latest)
    return nodes.n_reads


def find_latest_rounds() -> dict[str, int]:
    """Return the rounds it takes to find version ``LATEST`` by different hints."""
    found = {}
    storage = MemoryStorage("memory://find-latest/")
    Lakehouse.create(storage.root, storage=storage)
    many = ManyVersions(storage)
    for case, hint in (("right", LATEST), ("deleted", None), ("1,000,000 versions behind", LATEST - 1_000_000)):
        storage.delete(HINT_PATH)
        if hint is not None:
            storage.write(HINT_PATH, str(hint).encode())
        found[case] = measured(many, lambda lake: lake.latest_version(), is_warm=False).rounds
    drop_memory_root(storage.root)
    return found


def p99(values: Sequence[float]) -> float:
    """Return the value that 99 of 100 do not exceed."""
    return statistics.quantiles(values, n=100)[98]


def asked(counts: RequestCounts) -> str:
    """Return a cell: requests, and rounds in parentheses."""
    return f"{counts.total} ({counts.rounds})"


def main() -> None:
    """Measure, print and write the results."""
    works: dict[str, tuple[Callable[[Lakehouse], object], bool]] = {
        "begin, cold": (lambda lake: lake.snapshot().definition, False),
        "begin, warm": (lambda lake: lake.snapshot().definition, True),
        "look a table up, cold": (lambda lake: lake.snapshot().table("ns", name(42)), False),
        "list the tables, cold": (lambda lake: lake.snapshot().tables("ns"), False),
        "list the tables, warm": (lambda lake: lake.snapshot().tables("ns"), True),
        "open version 1, cold": (lambda lake: lake.snapshot(1).definition, False),
    }
    reading = {work: [work] for work in works}
    diffs, writing = ["nodes that a diff of neighbours reads"], []
    heights = ["height"]
    for n_tables in TABLE_COUNTS:
        storage = MadeUpDefinitions(MemoryStorage(f"memory://requests-{n_tables}/"))
        loaded(storage, n_tables)
        figures = commits(storage, n_tables)
        heights.append(str(Lakehouse(storage, cache="off").snapshot().tree_shape().height))
        for work, (call, is_warm) in works.items():
            reading[work].append(asked(measured(storage, call, is_warm=is_warm)))
        diffs.append(str(diff_node_reads(storage)))
        kilobytes = [size_bytes / 1000 for size_bytes in figures.written_bytes]
        cells = (
            f"{n_tables:,}",
            f"{statistics.mean(figures.nodes):.2f}",
            max(figures.nodes),
            *(f"{value:.1f}" for value in (statistics.mean(kilobytes), statistics.median(kilobytes), p99(kilobytes))),
            f"{statistics.median(figures.rounds):.0f}",
            figures.rounds_warm,
        )
        writing.append(f"| {' | '.join(map(str, cells))} |")
        drop_memory_root(storage.root)
        print(f"{n_tables:,} tables done", flush=True)
    latest = find_latest_rounds()
    text = "\n".join(
        [
            "# Requests, rounds and bytes",
            "",
            "Made by `benchmarks/request_counts.py`: default settings, storage in memory, trees of a bulk load after"
            f" {N_SETTLING + N_COMMITS:,} commits of one random table each. Cells are requests, rounds in parentheses.",
            "",
            f"| tables | {' | '.join(f'{n_tables:,}' for n_tables in TABLE_COUNTS)} |",
            f"|---|{'---:|' * len(TABLE_COUNTS)}",
            *(f"| {' | '.join(cells)} |" for cells in (heights, *reading.values(), diffs)),
            "",
            f"{N_COMMITS:,} commits that change one random table each, without their begin. A warm one changes a table"
            " that the process changed before.",
            "",
            "| tables | nodes, mean | most in one | kB written, mean | median | p99 | rounds, median | rounds, warm |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|",
            *writing,
            "",
            f"Find the latest of {LATEST:,} versions, in sequential requests:"
            f" {', '.join(f'hint {case} {rounds}' for case, rounds in latest.items())}.",
            "",
        ]
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
