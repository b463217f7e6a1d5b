"""Count the requests, sequential round trips and bytes of the engine's operations at several sizes.

Run from the project's root: ``.venv/bin/python -m benchmarks.request_counts``. It writes
``benchmarks/results/request_counts.md`` and its plots, which do not depend on the machine. *Cold* means that the
process has read nothing yet, and *warm* that it has just done the same work. A round trip is one request, or several
parallel requests, for which later requests wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from benchmarks.lakes import (
    GeneratedDefinitions,
    change_tables,
    create_loaded_lake,
    deferred_background_work,
    name,
    new_definition,
)
from benchmarks.report import Spread, by_tables, plot, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_path
from trinitylake_ops.storage import (
    FileInfo,
    MemoryStorage,
    MeteredStorage,
    RequestCounts,
    Storage,
    StorageWrapper,
    background,
    drop_memory_root,
)
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.bulk import FILL
from trinitylake_ops.tree.forecast import TreeForecast, forecast_tree
from trinitylake_ops.tree.shape import TreeShape
from trinitylake_ops.versions.history import diff_snapshots

TABLE_COUNTS = (100, 7_000, 16_000, 50_000, 100_000, 1_000_000)
N_COMMITS = 2_000
#: Commits before the measured ones, until buffers reach their steady state: this many commits of several tables,
#: followed by this many commits of one table.
N_SETTLING = 1_000
N_SETTLING_TABLES = 20
N_DIFFS = 300
N_WARM = 300
N_WARM_TABLES = 20
LATEST = 2_000_000
#: Upper bounds of what commits write: nodes on average, nodes in one commit, and kB on average.
MAX_MEAN_NODES, MAX_NODES, MAX_MEAN_KILOBYTES = 0.5, 16, 110


class NodeRequests(StorageWrapper):
    """Records which nodes below roots are read and created."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.read_paths: list[str] = []
        self.created_paths: list[str] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if "-node-" in path:
            self.read_paths.append(path)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        if "-node-" in path:
            self.created_paths.append(path)
        self.inner.create(path, data)


class ManyVersions(StorageWrapper):
    """Presents the only root as every version up to ``LATEST``."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self.inner.read(self._root_path(path), offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        return self.inner.stat(self._root_path(path))

    def _root_path(self, path: str) -> str:
        version = parse_root_path(path)
        if version is not None and version > LATEST:
            raise FileMissingError("the version does not exist", path=path)
        return path if version is None else root_path(0)


@dataclass(frozen=True)
class AtSize:
    """All measurements at one number of tables. Sequences have one entry per commit or diff."""

    shape: TreeShape
    forecast: TreeForecast
    #: By operation. The field's name is a key of the results that ``same_as_before`` compares with earlier revisions.
    works: Mapping[str, RequestCounts]
    changes: Commits
    creations_and_drops: Commits
    warm: Commits
    opened_after_new_settings: RequestCounts
    diff_node_reads: Sequence[int]
    diff_rounds: Sequence[int]


@dataclass(frozen=True)
class Commits:
    """Requests of single-table commits after their begin."""

    counts: Sequence[RequestCounts]
    nodes: Sequence[int]

    @property
    def kilobytes(self) -> list[float]:
        """The kB written by each commit."""
        return [counts.bytes_written / 1000 for counts in self.counts]

    @property
    def rounds(self) -> list[int]:
        """The sequential round trips of each commit."""
        return [counts.rounds for counts in self.counts]


COMMIT_COLUMNS = (
    *("tables", "nodes: median", "mean", "p99", "max", "kB: median", "mean", "p99"),
    *("round trips: median", "mean", "p99", "max"),
)

#: The operations measured at each size, and whether the process has done them before (warm).
OPERATIONS: Mapping[str, tuple[Callable[[Lakehouse], object], bool]] = {
    "open by Lakehouse.open and begin, cold": (
        lambda lake: Lakehouse.open(lake.root, storage=lake.storage).snapshot().definition,
        False,
    ),
    "begin, cold": (lambda lake: lake.snapshot().definition, False),
    "begin, warm": (lambda lake: lake.snapshot().definition, True),
    "look a table up, cold": (lambda lake: lake.snapshot().table("ns", name(42)), False),
    "list the tables, cold": (lambda lake: lake.snapshot().tables("ns"), False),
    "open version 1, cold": (lambda lake: lake.snapshot(1), False),
    "open version 1 and its settings, cold": (lambda lake: lake.snapshot(1).definition, False),
    "open version 1 and its settings, warm": (lambda lake: lake.snapshot(1).definition, True),
    "open version 1,000, cold": (lambda lake: lake.snapshot(1_000), False),
}


def count_requests(storage: Storage, operation: Callable[[Lakehouse], object], *, is_warm: bool) -> RequestCounts:
    """Count the storage requests of an operation.

    Args:
        storage: The storage of the lakehouse.
        operation: The operation.
        is_warm: Whether to run the operation once before it is measured.
    """
    background.drain()  # write the hint of the last commit
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter, cache="private")
    if is_warm:
        operation(lake)
    with meter.measure() as measurement:
        operation(lake)
    return measurement.counts


def at_size(n_tables: int) -> AtSize:
    """Measure at one number of tables, after a bulk load and commits until buffers are full."""
    storage = GeneratedDefinitions(MemoryStorage(f"memory://requests-{n_tables}/"))
    create_loaded_lake(storage, n_tables)
    node_requests = NodeRequests(storage)
    meter = MeteredStorage(node_requests)
    lake = Lakehouse(meter, cache="private")
    generator = random.Random(n_tables)
    for _ in range(N_SETTLING):
        change_tables(lake, {generator.randrange(n_tables) for _ in range(N_SETTLING_TABLES)})
    for _ in range(N_SETTLING):
        change_tables(lake, [generator.randrange(n_tables)])
    changes = commits(lake, meter, node_requests, [change(generator.randrange(n_tables)) for _ in range(N_COMMITS)])
    snapshot = lake.snapshot()
    shape = snapshot.tree_shape()
    diffs = [diff_reads(storage, lake.latest_version() - number) for number in range(N_DIFFS)]
    operations = {
        operation: count_requests(storage, call, is_warm=is_warm) for operation, (call, is_warm) in OPERATIONS.items()
    }
    few = [generator.randrange(n_tables) for _ in range(N_WARM_TABLES)]
    commits(lake, meter, node_requests, [change(table) for table in few])
    warm = commits(lake, meter, node_requests, [change(generator.choice(few)) for _ in range(N_WARM)])
    creations_or_drops = [create_or_drop(number, generator.randrange(n_tables)) for number in range(N_COMMITS)]
    creations_and_drops = commits(lake, meter, node_requests, creations_or_drops)
    lake.alter_definition(properties={"stamp": "new"})
    result = AtSize(
        shape=shape,
        forecast=forecast_tree(snapshot.definition, n_tables, fill=FILL),
        works=operations,
        changes=changes,
        creations_and_drops=creations_and_drops,
        warm=warm,
        opened_after_new_settings=count_requests(storage, lambda lake: lake.snapshot(1), is_warm=False),
        diff_node_reads=[n_reads for n_reads, _ in diffs],
        diff_rounds=[n_rounds for _, n_rounds in diffs],
    )
    drop_memory_root(storage.root)
    return result


def change(table: int) -> Callable[[Transaction], object]:
    """Return a function that changes a table in a transaction."""
    return lambda txn: txn.alter_table("ns", name(table), new_definition())


def create_or_drop(number: int, table: int) -> Callable[[Transaction], object]:
    """Return a function that creates a table or, for even numbers, drops an existing table in a transaction."""

    def change_table(txn: Transaction) -> None:
        if number % 2 or not txn.has_table("ns", name(table)):
            txn.create_table("ns", f"{name(table)}-{number}", new_definition())
        else:
            txn.drop_table("ns", name(table))

    return change_table


def commits(
    lake: Lakehouse,
    meter: MeteredStorage,
    node_requests: NodeRequests,
    changes: Iterable[Callable[[Transaction], object]],
) -> Commits:
    """Commit each change separately, and count the requests of each commit after the begin of its transaction.

    Args:
        lake: The lakehouse.
        meter: Counts the requests.
        node_requests: Records the created nodes.
        changes: The changes, one per commit.
    """
    counts, nodes = [], []
    for change_in in changes:
        with deferred_background_work(), lake.transaction() as txn, meter.measure() as measurement:
            change_in(txn)
            n_before = len(node_requests.created_paths)
            txn.commit()
        counts.append(measurement.counts)
        nodes.append(len(node_requests.created_paths) - n_before)
    return Commits(counts, nodes)


def diff_reads(storage: Storage, version: int) -> tuple[int, int]:
    """Return the nodes and round trips of a diff between a version and its predecessor, without reading the roots."""
    nodes = NodeRequests(storage)
    meter = MeteredStorage(nodes)
    lake = Lakehouse(meter, cache="off")
    before, after = lake.snapshot(version - 1), lake.snapshot(version)
    assert before.definition == after.definition  # reads both definitions before the measurement
    with meter.measure() as measurement:
        assert diff_snapshots(before, after)
    return len(nodes.read_paths), measurement.counts.rounds


def find_latest_rounds() -> dict[str, int]:
    """Return the round trips of finding version ``LATEST`` with different hints."""
    rounds_by_hint = {}
    storage = MemoryStorage("memory://find-latest/")
    Lakehouse.create(storage.root, storage=storage)
    background.drain()  # so that its hint does not overwrite the hints below
    many = ManyVersions(storage)
    for case, hint in (("right", LATEST), ("deleted", None), ("1,000,000 versions behind", LATEST - 1_000_000)):
        storage.delete(HINT_PATH)
        if hint is not None:
            storage.write(HINT_PATH, str(hint).encode())
        assert Lakehouse(many).latest_version() == LATEST
        rounds_by_hint[case] = count_requests(many, lambda lake: lake.latest_version(), is_warm=False).rounds
    drop_memory_root(storage.root)
    return rounds_by_hint


def requests_cell(counts: RequestCounts) -> str:
    """Return a cell: requests, with round trips in parentheses."""
    return f"{counts.total} ({counts.rounds})"


def commit_rows(sizes: Mapping[int, AtSize], commits_of: Callable[[AtSize], Commits]) -> list[list[object]]:
    """Return the table rows of single-table commits."""
    return [
        [
            f"{n_tables:,}",
            *Spread.of(commits_of(result).nodes).cells(),
            max(commits_of(result).nodes),
            *Spread.of(commits_of(result).kilobytes).cells(digits=1),
            *Spread.of(commits_of(result).rounds).cells(digits=1),
            max(commits_of(result).rounds),
        ]
        for n_tables, result in sizes.items()
    ]


def diff_rows(sizes: Mapping[int, AtSize]) -> list[list[object]]:
    """Return the table rows of diffs between adjacent versions."""
    return [
        [
            f"{n_tables:,}",
            result.shape.height + 1,
            *Spread.of(result.diff_node_reads).cells(digits=1),
            max(result.diff_node_reads),
            max(result.diff_rounds),
        ]
        for n_tables, result in sizes.items()
    ]


def forecast_rows(sizes: Mapping[int, AtSize]) -> list[list[object]]:
    """Return the table rows of predicted and measured values."""
    rows: list[list[object]] = []
    for n_tables, result in sizes.items():
        forecast, shape = result.forecast, result.shape
        mean_kilobytes = Spread.of(result.changes.kilobytes).mean
        rows.append(
            [
                f"{n_tables:,}",
                f"{forecast.height} / {shape.height}",
                f"{forecast.nodes:,} / {shape.nodes:,}",
                f"{forecast.nodes_per_commit:.2f} / {Spread.of(result.changes.nodes).mean:.2f}",
                f"{forecast.bytes_per_commit / 1000:.1f} / {mean_kilobytes:.1f}",
                f"{forecast.write_amplification:.0f} / {1000 * mean_kilobytes / forecast.message_bytes:.0f}",
            ]
        )
    return rows


def draw_commits(axes: Sequence[Axes], sizes: Mapping[int, AtSize]) -> None:
    """Draw the kB and nodes that commits write by number of tables, and the distribution of the kB."""
    bytes_axes, nodes_axes, spread_axes = axes
    spreads = {n_tables: Spread.of(result.changes.kilobytes) for n_tables, result in sizes.items()}
    lines = {
        "mean": {n_tables: spread.mean for n_tables, spread in spreads.items()},
        "p99": {n_tables: spread.p99 for n_tables, spread in spreads.items()},
        "predicted mean": {n_tables: result.forecast.bytes_per_commit / 1000 for n_tables, result in sizes.items()},
    }
    by_tables(bytes_axes, "kB written per commit of one table", lines, MAX_MEAN_KILOBYTES)
    lines = {
        "mean": {n_tables: Spread.of(result.changes.nodes).mean for n_tables, result in sizes.items()},
        "predicted mean": {n_tables: result.forecast.nodes_per_commit for n_tables, result in sizes.items()},
    }
    by_tables(nodes_axes, "nodes written per commit of one table", lines, MAX_MEAN_NODES)
    for n_tables, result in sizes.items():
        spread_axes.plot(
            sorted(result.changes.kilobytes), [100 * k / N_COMMITS for k in range(N_COMMITS)], label=f"{n_tables:,}"
        )
    spread_axes.set_xlabel("kB")
    spread_axes.set_title("% of commits that write at most this much")
    spread_axes.legend(title="tables")


def draw_rounds(axes: Axes, sizes: Mapping[int, AtSize]) -> None:
    """Draw sequential round trips by number of tables."""
    lines = {
        operation: {n_tables: float(result.works[operation].rounds) for n_tables, result in sizes.items()}
        for operation in OPERATIONS
    }
    lines["commit, warm"] = {n_tables: Spread.of(result.warm.rounds).median for n_tables, result in sizes.items()}
    by_tables(axes, "sequential round trips", lines)


def main() -> None:
    """Measure, print and write the results."""
    sizes = {}
    for n_tables in TABLE_COUNTS:
        sizes[n_tables] = at_size(n_tables)
        print(f"{n_tables:,} tables done", flush=True)
    latest = find_latest_rounds()
    rows = [
        [operation, *(requests_cell(result.works[operation]) for result in sizes.values())] for operation in OPERATIONS
    ]
    after_new_settings = [requests_cell(result.opened_after_new_settings) for result in sizes.values()]
    rows.append(["open version 1, cold, after the settings were changed", *after_new_settings])
    write_result(
        "request_counts",
        [
            "# Requests, round trips and bytes",
            "",
            "Generated by `benchmarks/request_counts.py`: default settings, storage in memory, trees of a bulk load"
            f" after {N_SETTLING:,} commits of {N_SETTLING_TABLES} random tables and {N_SETTLING + N_COMMITS:,} of one."
            " Cells contain requests, with round trips in parentheses.",
            "",
            *table(["tables", *(f"{n_tables:,}" for n_tables in sizes)], rows),
            "",
            plot("rounds", lambda axes: draw_rounds(axes[0], sizes), width=8),
            "",
            f"{N_COMMITS:,} commits that change one random table each, without their begin and without the hint, which"
            f" is written in the background; bounds: {MAX_MEAN_NODES} nodes and {MAX_MEAN_KILOBYTES} kB on average,"
            f" {MAX_NODES} nodes"
            " in one commit.",
            "",
            *table(COMMIT_COLUMNS, commit_rows(sizes, lambda result: result.changes)),
            "",
            f"{N_WARM} commits that change one of {N_WARM_TABLES} tables that the process changed before; bound: 2"
            " round trips. If a flush reads a node that is not cached, that is one more round trip.",
            "",
            *table(COMMIT_COLUMNS, commit_rows(sizes, lambda result: result.warm)),
            "",
            f"{N_COMMITS:,} commits that alternately create a table and drop a random one:",
            "",
            *table(COMMIT_COLUMNS, commit_rows(sizes, lambda result: result.creations_and_drops)),
            "",
            plot("commits", lambda axes: draw_commits(axes, sizes), 3),
            "",
            "Nodes below the roots that a cold diff of two adjacent versions reads, among the last"
            f" {N_DIFFS} versions; bound: twice the number of levels including the root. A flush changes two paths,"
            " and the old value of the changed key may be on a third.",
            "",
            *table(["tables", "levels", "nodes, median", "mean", "p99", "max", "max round trips"], diff_rows(sizes)),
            "",
            "Predicted by `tree/forecast.py`, as `trinitylake init` prints it / measured:",
            "",
            *table(
                [
                    "tables",
                    "levels below the root",
                    "nodes",
                    "nodes per commit",
                    "kB per commit",
                    "write amplification",
                ],
                forecast_rows(sizes),
            ),
            "",
            f"Find the latest of {LATEST:,} versions, in sequential requests (bounds 2, 45, 45):"
            f" {', '.join(f'hint {case} {rounds}' for case, rounds in latest.items())}.",
        ],
    )


if __name__ == "__main__":
    main()
