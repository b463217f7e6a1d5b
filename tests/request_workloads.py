"""The workloads of ``tests/request_budgets.py``, one for each operation of that table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyiceberg.table import Table

from benchmarks.lakes import GeneratedDefinitions, create_loaded_lake, deferred_background_work
from benchmarks.lakes import name as table_name
from benchmarks.request_counts import OPERATIONS, count_requests
from tests.clock import AgingStorage
from tests.iceberg.threaded import ThreadedStorage
from tests.lakes import table
from tests.operations.aging import LONG_MS, keeping
from tests.request_budgets import BUDGETS, StorageKind
from tests.transaction.groups import commit_queued
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.file_names import HINT_PATH, root_naming
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.storage import (
    LocalStorage,
    MemoryStorage,
    MeteredStorage,
    RequestCounts,
    Storage,
    StorageWrapper,
    drop_memory_root,
)
from trinitylake_ops.transaction.transaction import Transaction

#: Number of tables in the namespace ``ns``. The tree is a single node, as with the 100 tables of the benchmark.
N_TABLES = 50
#: Number of tables for which the tree has one level below its root.
N_MANY_TABLES = 7_000
#: The latest version of a new subject.
LATEST = 7
SCHEMA = pa.schema([("id", pa.int64())])


class Subject:
    """A lakehouse on one kind of storage, whose requests are counted.

    Versions 2 to 7 each change one table of the namespace ``ns``.
    """

    def __init__(self, kind: StorageKind, folder: Path):
        self.kind = kind
        self.root = f"file://{folder}/lake/" if kind is StorageKind.FOLDER else f"memory://{folder.name}-{kind}/"
        storage = LocalStorage(self.root, fsync=False) if kind is StorageKind.FOLDER else MemoryStorage(self.root)
        self.storage: Storage = ThreadedStorage(storage) if kind is StorageKind.SERVER else storage
        self.meter = MeteredStorage(self.storage)
        lake = Lakehouse.create(self.root, storage=self.storage)
        with lake.transaction() as txn:
            txn.create_namespace("ns")
            for number in range(N_TABLES):
                txn.create_table("ns", table_name(number), table())
        for number in range(LATEST - 1):
            with lake.transaction() as txn:
                txn.alter_table("ns", table_name(number), table(changed="once"))

    def warm_lake(self) -> Lakehouse:
        """Return the lakehouse as opened by a process that has read the latest version."""
        lake = Lakehouse(self.meter)
        lake.snapshot().definition  # noqa: B018 - loads the definition into the cache
        return lake

    def commit_in_another_process(self, namespace: str) -> None:
        """Create a namespace, without counting the requests."""
        with Lakehouse(self.storage).transaction() as txn:
            txn.create_namespace(namespace)

    def count(self, work: Callable[[], object]) -> RequestCounts:
        """Return the requests of a workload, without background requests."""
        with deferred_background_work(), self.meter.measure() as measurement:
            work()
        return measurement.counts


Workload = Callable[[Subject], RequestCounts]


def _benchmark_workload(name: str) -> Workload:
    call, is_warm = OPERATIONS[name]
    return lambda subject: count_requests(subject.storage, call, is_warm=is_warm)


def _cold(call: Callable[[Lakehouse], object]) -> Workload:
    return lambda subject: count_requests(subject.storage, call, is_warm=False)


def _warm(call: Callable[[Lakehouse], object]) -> Workload:
    return lambda subject: count_requests(subject.storage, call, is_warm=True)


def _with_many_tables(name: str) -> Workload:
    """Return a workload of the benchmark on a tree with one level below its root."""

    def count(subject: Subject) -> RequestCounts:
        storage = GeneratedDefinitions(MemoryStorage(f"{subject.root}many/"))
        create_loaded_lake(storage, N_MANY_TABLES)
        call, is_warm = OPERATIONS[name]
        try:
            return count_requests(storage, call, is_warm=is_warm)
        finally:
            drop_memory_root(subject.root)

    return count


def _open(subject: Subject) -> RequestCounts:
    return subject.count(lambda: Lakehouse.open(subject.root, storage=subject.meter))


def _begin_right_after_open(subject: Subject) -> RequestCounts:
    lake = Lakehouse.open(subject.root, storage=subject.meter)
    return subject.count(lake.transaction)


def _begin_without_cache(subject: Subject) -> RequestCounts:
    lake = Lakehouse(subject.meter, cache="off")
    lake.snapshot()
    return subject.count(lake.snapshot)


def _missing_version(lake: Lakehouse) -> None:
    try:
        lake.snapshot(LATEST + 5)
    except VersionNotFoundError:
        return
    raise AssertionError("there is no such version")


def _after_new_settings(call: Callable[[Lakehouse], object]) -> Workload:
    def count(subject: Subject) -> RequestCounts:
        Lakehouse(subject.storage).alter_definition(properties={"stamp": "new"})
        return count_requests(subject.storage, call, is_warm=False)

    return count


def _with_hint(hint: bytes | None) -> Workload:
    """Return a workload that finds the latest version by a hint."""

    def count(subject: Subject) -> RequestCounts:
        if hint is None:
            subject.storage.delete(HINT_PATH)
        else:
            subject.storage.write(HINT_PATH, hint)
        return count_requests(subject.storage, lambda lake: lake.latest_version(), is_warm=False)

    return count


def _commit(
    change: Callable[[Transaction], object], *, fill_cache: Callable[[Lakehouse], object] | None = None
) -> Workload:
    """Return a workload that commits a change after ``fill_cache``, without counting the begin of its transaction."""

    def count(subject: Subject) -> RequestCounts:
        lake = subject.warm_lake()
        if fill_cache is not None:
            fill_cache(lake)
        txn = lake.transaction()
        change(txn)
        return subject.count(txn.commit)

    return count


def _read_namespace(lake: Lakehouse) -> object:
    return lake.snapshot().namespace("ns")


def _create_namespace(txn: Transaction) -> None:
    txn.create_namespace("new")


def _create_table(txn: Transaction) -> None:
    txn.create_table("ns", "new", table())


def _alter_table(txn: Transaction) -> None:
    txn.alter_table("ns", table_name(0), table(changed="twice"))


def _create_table_with_file(txn: Transaction) -> None:
    _create_table(txn)
    txn.add_file("tables/new/metadata/0.json", b"{}")


def _create_and_drop(txn: Transaction) -> None:
    txn.create_namespace("new")
    txn.create_table("new", "t", table())
    txn.drop_namespace("new", cascade=True)


def _conflict_once(lake: Lakehouse, subject: Subject) -> None:
    """Lose one race against another process, so that this process probes for other writers from then on."""
    txn = lake.transaction()
    txn.create_namespace("conflicting")
    subject.commit_in_another_process("first")
    txn.commit()


def _commit_after_conflict(subject: Subject) -> RequestCounts:
    txn = subject.warm_lake().transaction()
    _create_namespace(txn)
    subject.commit_in_another_process("first")
    return subject.count(txn.commit)


def _commit_while_probing(subject: Subject) -> RequestCounts:
    lake = subject.warm_lake()
    _conflict_once(lake, subject)
    txn = lake.transaction()
    _create_namespace(txn)
    return subject.count(txn.commit)


def _commit_after_repeated_conflict(subject: Subject) -> RequestCounts:
    lake = subject.warm_lake()
    _conflict_once(lake, subject)
    txn = lake.transaction()
    _create_namespace(txn)
    subject.commit_in_another_process("second")
    return subject.count(txn.commit)


class _RaceStorage(StorageWrapper):
    """Commits in another process just before each of the next ``remaining`` roots is created."""

    def __init__(self, subject: Subject):
        super().__init__(subject.meter)
        self.concurrency = 1  # so that the speculative reads are sent after the root instead of in parallel
        self.remaining = 0
        self._subject = subject

    def create(self, path: str, data: bytes) -> None:
        if self.remaining and root_naming(path) is not None:
            self.remaining -= 1
            self._subject.commit_in_another_process(f"won-{self.remaining}")
        self.inner.create(path, data)


def _commit_after_three_conflicts(subject: Subject) -> RequestCounts:
    racing = _RaceStorage(subject)
    lake = Lakehouse(racing)
    _conflict_once(lake, subject)
    txn = lake.transaction()
    _create_namespace(txn)
    racing.remaining = 3
    return subject.count(txn.commit)


def _group_commit(n_members: int, *, with_files: bool) -> Workload:
    def count(subject: Subject) -> RequestCounts:
        lake = subject.warm_lake()
        lake.snapshot().namespace("ns")
        transactions = [lake.transaction() for _ in range(n_members)]
        for number, txn in enumerate(transactions):
            txn.create_table("ns", f"new-{number}", table())
            if with_files:
                txn.add_file(f"tables/new-{number}/metadata/0.json", b"{}")
        return subject.count(lambda: commit_queued(lake, transactions))

    return count


def _hint_update(subject: Subject) -> RequestCounts:
    txn = subject.warm_lake().transaction()
    _create_namespace(txn)
    with deferred_background_work():
        txn.commit()
        before = subject.meter.snapshot()
    return subject.meter.snapshot() - before


# Iceberg tables


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def _catalog(subject: Subject) -> TrinityLakeCatalog:
    """Return a catalog with cold caches on a lakehouse with the table ``ice.t``."""
    with catalog_at(Lakehouse(subject.storage)) as catalog:
        catalog.create_namespace("ice")
        catalog.create_table("ice.t", SCHEMA).append(rows(1))
    return catalog_at(Lakehouse(subject.meter))


def _table_change(change: Callable[[Table], object]) -> Workload:
    """Return a workload that changes a table to which the same catalog has already appended."""

    def count(subject: Subject) -> RequestCounts:
        with _catalog(subject) as catalog:
            loaded = catalog.load_table("ice.t")
            loaded.append(rows(2))
            return subject.count(lambda: change(loaded))

    return count


def _set_property(loaded: Table) -> None:
    loaded.transaction().set_properties(a="1").commit_transaction()


def _create_and_append(loaded: Table) -> None:
    with loaded.catalog.create_table_transaction("ice.new", SCHEMA) as change:
        change.append(rows(1))


def _scan(n_before: int) -> Workload:
    """Return a workload that reads all rows of a table after it was loaded and read ``n_before`` times."""

    def count(subject: Subject) -> RequestCounts:
        with _catalog(subject) as catalog:
            loaded = catalog.load_table("ice.t")
            for _ in range(n_before):
                loaded.scan().to_arrow()
            return subject.count(lambda: loaded.scan().to_arrow())

    return count


def _scan_after_append(subject: Subject) -> RequestCounts:
    with _catalog(subject) as catalog:
        created = catalog.create_table("ice.new", SCHEMA)
        created.append(rows(1))
        return subject.count(lambda: created.scan().to_arrow())


def _write_file(subject: Subject) -> RequestCounts:
    io = StorageFileIO.on(subject.meter)

    def write() -> None:
        with io.new_output(f"{subject.root}tables/x/data").create() as stream:
            stream.write(b"content")

    return subject.count(write)


def _read_file(subject: Subject) -> RequestCounts:
    _write_file(subject)
    file = StorageFileIO.on(subject.meter).new_input(f"{subject.root}tables/x/data")
    return subject.count(lambda: (file.open().read(), len(file)))


def _list_files_of_table(subject: Subject) -> RequestCounts:
    with _catalog(subject) as catalog:
        created = catalog.create_table("ice.new", SCHEMA)
        for number in range(5):
            created.append(rows(number))
    definition = Lakehouse(subject.storage).snapshot().table("ice", "new")
    return subject.count(lambda: list(files_of(definition, StorageFileIO.on(subject.meter))))


# Operations


@contextmanager
def _aged(subject: Subject) -> Iterator[tuple[Lakehouse, AgingStorage]]:
    """Yield the lakehouse and its storage's clock, two days after its last commit."""
    clock = AgingStorage(subject.meter, subject.storage.now_ms())
    clock.time_ms += LONG_MS
    lake = Lakehouse(clock)
    lake.snapshot().definition  # noqa: B018 - loads the definition into the cache
    yield lake, clock


def _operation(call: Callable[[Lakehouse], object]) -> Workload:
    def count(subject: Subject) -> RequestCounts:
        with _aged(subject) as (lake, _):
            return subject.count(lambda: call(lake))

    return count


def _space(*, is_first: bool, is_changed: bool) -> Workload:
    """Return a workload that measures space, after an earlier run, and after an append to a table of five snapshots."""

    def count(subject: Subject) -> RequestCounts:
        with catalog_at(Lakehouse(subject.storage)) as catalog:
            catalog.create_namespace("ice")
            created = catalog.create_table("ice.t", SCHEMA)
            for number in range(5):
                created.append(rows(number))
            if not is_first:
                operations.measure_space(Lakehouse(subject.storage))
            if is_changed:
                created.append(rows(5))
        return count_requests(subject.storage, operations.measure_space, is_warm=False)

    return count


def _expire(subject: Subject) -> RequestCounts:
    with _aged(subject) as (lake, _):
        plan = operations.plan_expiration(lake, keeping(2))
        return subject.count(plan.execute)


def _purge(*, executes: bool) -> Workload:
    def count(subject: Subject) -> RequestCounts:
        with _aged(subject) as (lake, clock):
            operations.plan_expiration(lake, keeping(2)).execute()
            clock.time_ms += LONG_MS
            if not executes:
                return subject.count(lambda: operations.plan_purge(lake))
            plan = operations.plan_purge(lake)
            return subject.count(plan.execute)

    return count


def _maintain_again(subject: Subject) -> RequestCounts:
    with _aged(subject) as (lake, _):
        operations.maintain(lake)
        return subject.count(lambda: operations.maintain(lake))


#: The workload of each row of the table.
WORKLOADS: Mapping[str, Workload] = {
    "open": _open,
    "begin right after open": _begin_right_after_open,
    "begin, without cache": _begin_without_cache,
    **{name: _benchmark_workload(name) for name in OPERATIONS if name in BUDGETS},
    **{
        f"{name} (7,000 tables)": _with_many_tables(name) for name in ("look a table up, cold", "list the tables, cold")
    },
    "open version 1, cold, after the settings were changed": _after_new_settings(lambda lake: lake.snapshot(1)),
    "open version 1 and its settings, cold, after they were changed": _after_new_settings(
        lambda lake: lake.snapshot(1).definition
    ),
    "open the latest version by number, cold": _cold(lambda lake: lake.snapshot(LATEST)),
    "open a missing version, cold": _cold(_missing_version),
    "find the latest version, cold": _with_hint(b"%d" % LATEST),
    "find the latest version, hint one behind": _with_hint(b"%d" % (LATEST - 1)),
    "find the latest version, hint 7 behind": _with_hint(b"0"),
    "find the latest version, hint ahead": _with_hint(b"1000000"),
    "find the latest version, no hint": _with_hint(None),
    "look a table up, warm": _warm(lambda lake: lake.snapshot().table("ns", table_name(3))),
    "commit a namespace": _commit(_create_namespace),
    "commit a changed table": _commit(_alter_table, fill_cache=lambda lake: lake.snapshot().table("ns", table_name(0))),
    "commit a new table": _commit(_create_table, fill_cache=_read_namespace),
    "commit a new table, namespace not cached": _commit(_create_table),
    "commit a new table with a file": _commit(_create_table_with_file, fill_cache=_read_namespace),
    "commit without changes": _commit(_create_and_drop),
    "commit after a conflict": _commit_after_conflict,
    "commit while probing": _commit_while_probing,
    "commit after a repeated conflict": _commit_after_repeated_conflict,
    "commit after three conflicts in a row": _commit_after_three_conflicts,
    "group commit of 16": _group_commit(16, with_files=False),
    "group commit of 3 with a file each": _group_commit(3, with_files=True),
    "update the hint": _hint_update,
    "set a table property": _table_change(_set_property),
    "append": _table_change(lambda table: table.append(rows(3))),
    "overwrite": _table_change(lambda table: table.overwrite(rows(3))),
    "load a table and append": _table_change(lambda table: table.catalog.load_table("ice.t").append(rows(3))),
    "create a table": _table_change(lambda table: table.catalog.create_table("ice.new", SCHEMA)),
    "create a table and append": _table_change(_create_and_append),
    "scan, first time": _scan(0),
    "scan again": _scan(1),
    "scan after an append": _scan_after_append,
    "write a table file": _write_file,
    "read a table file": _read_file,
    "list the files of a table after 5 appends": _list_files_of_table,
    "roll back one version": _operation(lambda lake: operations.rollback(lake, LATEST - 1)),
    "verify": _operation(operations.verify),
    "compact, nothing to do": _operation(operations.compact),
    "plan the expiration of 6 versions": _operation(lambda lake: operations.plan_expiration(lake, keeping(2))),
    "expire 6 versions": _expire,
    "plan the purge of 6 versions": _purge(executes=False),
    "purge 6 versions": _purge(executes=True),
    "maintain, nothing to do": _maintain_again,
    "space, the first run": _space(is_first=True, is_changed=False),
    "space, nothing committed since": _space(is_first=False, is_changed=False),
    "space after an append": _space(is_first=False, is_changed=True),
    "export by reference": _operation(lambda lake: operations.plan_export(lake, "kept").execute()),
}
