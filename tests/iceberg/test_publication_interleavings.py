"""Runs that stage tables, read them and publish are serializable in random interleavings with interruptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from tests.lakes import Lakes, check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.partition_key import PartitionKey, encode_partitions
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.rebase import rebase
from trinitylake_ops.iceberg.write.replacement import StagedRead, TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode, load_staged

MODES: tuple[Mode, ...] = ("append", "replace_partitions", "replace_table")


@dataclass
class World:
    """A lakehouse of orders and totals, and the changes of each version for a serial replay."""

    lake: Lakehouse
    rng: random.Random
    committed: dict[int, list[tuple[str, Run, int, int | None]]] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)

    def stage(self, table: str, mode: Mode, customer: str, value: int) -> StagedTable:
        partitions = [{"customer": customer}] if mode == "replace_partitions" else None
        rows = pa.table({"customer": [customer], "n": [value]})
        return stage_arrow(self.lake, rows, "shop", table, mode=mode, partition_by=["customer"], partitions=partitions)

    def rows(self, table: str) -> list[tuple[str, int]]:
        rows = catalog_at(self.lake).load_table(("shop", table)).scan().to_arrow().to_pylist()
        return sorted((row["customer"], row["n"]) for row in rows)

    def check(self) -> None:
        """Replay the commits sequentially and compare the results."""
        orders: list[tuple[str, int]] = []
        totals: dict[str, int] = {}
        for version in sorted(self.committed):
            for table, run, value, repeated in self.committed[version]:
                if table == "totals":
                    amounts = [n for customer, n in orders if customer == run.customer or not run.reads_partition]
                    totals[run.customer] = sum(amounts)
                    continue
                if run.mode == "replace_table":
                    orders = []
                elif run.mode == "replace_partitions":
                    orders = [row for row in orders if row[0] != run.customer]
                elif repeated is not None:
                    orders.remove((run.customer, repeated))
                orders.append((run.customer, value))
        if self.committed:
            assert self.rows("orders") == sorted(orders)
            assert self.rows("totals") == sorted(totals.items())


@dataclass(eq=False)
class Run:
    """A run that writes two tables, in one publication or in one per table."""

    world: World
    customer: str
    mode: Mode
    is_split: bool
    reads_partition: bool
    stages_orders: bool = True

    def steps(self) -> Iterator[None]:
        """Run step by step. Publications may be interrupted before or after a commit, and retried."""
        repeated: tuple[int, StagedTable] | None = None
        for _ in range(3):
            value = self.world.rng.randrange(1, 1000)
            attempt = Attempt(self, value, repeated)
            yield from attempt.stage()
            yield from attempt.publish()
            if not attempt.is_repeated:
                return
            # The whole run is repeated. It replaces its earlier append, whose outcome is unknown.
            assert attempt.orders is not None
            repeated = (value, attempt.orders) if self.mode == "append" else None


class Attempt:
    """One execution of a run: the tables that it stages, reads and publishes."""

    def __init__(self, run: Run, value: int, repeated: tuple[int, StagedTable] | None):
        self.run, self.world, self.value = run, run.world, value
        self.old_value, self.superseded = (None, None) if repeated is None else repeated
        self.orders: StagedTable | None = None
        self.totals: StagedTable | None = None
        self.reads: list[TableRead] = []
        self.staged_reads: list[StagedRead] = []
        self.is_repeated = False

    def stage(self) -> Iterator[None]:
        """Stage orders, read them, and stage their total."""
        run, lake = self.run, self.world.lake
        if run.stages_orders:
            self.orders = self.world.stage("orders", run.mode, run.customer, self.value)
            if self.superseded is not None:
                self.orders = rebase(lake, self.orders, superseded=self.superseded)
            yield
            table = load_staged(lake, self.orders)
            reads_replaced_partition = run.reads_partition and run.mode == "replace_partitions"
            includes_base = run.mode != "replace_table" and not reads_replaced_partition
            self.staged_reads = [StagedRead(root=lake.root, staged=self.orders, includes_base=includes_base)]
        else:
            snapshot = lake.snapshot()
            table = catalog_at(lake, snapshot.version).load_table(("shop", "orders"))
            self.reads = [TableRead.of(snapshot, "shop", "orders")]
        rows = table.scan(row_filter=f"customer = '{run.customer}'" if run.reads_partition else "true").to_arrow()
        yield
        self.totals = self.world.stage("totals", "replace_partitions", run.customer, sum(rows["n"].to_pylist()))
        yield

    def publish(self) -> Iterator[None]:
        """Publish both tables together, or separately in any order. Rejected publications are retried."""
        tables = [table for table in (self.orders, self.totals) if table is not None]
        parts = [[table] for table in tables] if self.run.is_split else [tables]
        self.world.rng.shuffle(parts)
        published: list[str] = []
        for part in [*parts, *parts]:
            names = [table.table for table in part]
            if set(names) & set(published):
                continue
            outcome = self._commit(part, may_be_interrupted=True)
            yield
            if outcome == "unknown" and len(tables) == len(part) == 2 and self.world.rng.random() < 0.5:
                self.is_repeated = True
                return
            if outcome in ("unknown", "interrupted"):
                is_resumed = self._commit(part, may_be_interrupted=False) == "already published"
                assert is_resumed or outcome == "interrupted", "a committed publication is found"
                outcome = "committed" if is_resumed else self.world.outcomes[-1]
            if outcome == "committed":
                published += names
                assert "totals" not in names or len(tables) == 1 or "orders" in published

    def _commit(self, tables: list[StagedTable], *, may_be_interrupted: bool) -> str:
        random_value = self.world.rng.random() if may_be_interrupted else 1.0
        if random_value < 0.15:
            return "interrupted"
        names = [table.table for table in tables]
        superseded = [self.superseded] if self.superseded is not None and "orders" in names else []
        try:
            publication = publish_once(
                self.world.lake,
                tables,
                publication_id(*(table.metadata_location for table in tables)),
                isolation="serializable",
                staged_reads=self.staged_reads if "totals" in names else [],
                reads=self.reads,
                superseded=superseded,
            )
        except CommitConflictError:
            self.world.outcomes.append("rejected")
            return "rejected"
        if publication.was_published:
            return "already published"
        self.world.committed[publication.version] = [(name, self.run, self.value, self.old_value) for name in names]
        self.world.outcomes.append("committed")
        return "unknown" if random_value < 0.45 else "committed"


def interleave(lake: Lakehouse, seed: int) -> list[str]:
    rng = random.Random(seed)
    world = World(lake, rng)
    first = Run(world, "first", "append", is_split=False, reads_partition=False)
    for _ in first.steps():
        pass
    runs = [
        Run(
            world,
            customer,
            rng.choice(MODES),
            is_split=rng.random() < 0.4,
            reads_partition=rng.random() < 0.4,
            stages_orders=rng.random() < 0.8 or not world.committed,
        )
        for customer in "abc"[: rng.randint(2, 3)]
    ]
    remaining = [run.steps() for run in runs]
    while remaining:
        steps = rng.choice(remaining)
        try:
            next(steps)
        except StopIteration:
            remaining.remove(steps)
        except CommitConflictError:  # another run rewrote rows that a repeated run had appended
            world.outcomes.append("rejected")
            remaining.remove(steps)
    world.check()
    return world.outcomes


@pytest.mark.parametrize("seed", range(8))
def test_interleaved_publications_are_serializable(lakes: Lakes, seed: int) -> None:
    lake = lakes.local()
    interleave(lake, seed)
    check_lake(lake)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("changed_partition", ["a", "b"])
def test_publication_conflicts_if_partition_of_staged_read_changed(
    lakes: Lakes, changed_partition: str, is_before: bool
) -> None:
    """Another writer appends to the same or another partition, before or after ``source`` is published."""
    lake = lakes.local()
    world = World(lake, random.Random(0))

    def publish(staged: StagedTable, *reads: StagedRead) -> None:
        publication = publication_id(staged.metadata_location)
        publish_once(lake, [staged], publication, isolation="serializable", staged_reads=reads)

    publish(world.stage("orders", "append", "a", 1))
    source = world.stage("orders", "append", "a", 2)
    if is_before:
        publish(world.stage("orders", "append", changed_partition, 3))
    publish(source)
    if not is_before:
        publish(world.stage("orders", "append", changed_partition, 3))
    table = load_staged(lake, source)
    partitions = encode_partitions(
        [PartitionKey.of(table.metadata, {"customer": "a"}).record], table.spec(), table.schema()
    )
    read = StagedRead(root=lake.root, staged=source, includes_base=True, by_another=True, partitions=partitions)
    assert StagedRead.from_json(read.to_json()) == read
    totals = world.stage("totals", "replace_partitions", "a", 3)
    if changed_partition == "a":
        with pytest.raises(CommitConflictError):
            publish(totals, read)
    else:
        publish(totals, read)
        assert world.rows("totals") == [("a", 3)]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_interleavings_are_serializable(lakes: Lakes) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    outcomes = [outcome for number in range(300) for outcome in interleave(lakes.local(str(number)), seed + number)]
    assert {"committed", "rejected"} <= set(outcomes)
