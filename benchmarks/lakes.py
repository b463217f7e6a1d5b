"""Create lakehouses for benchmarks, with a transaction, or with a bulk load and generated table definitions."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.file_names import new_table_path
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper, background
from trinitylake_ops.transaction.draft import Draft, RootStamp
from trinitylake_ops.tree.bulk import bulk_load
from trinitylake_ops.tree.edit import EditedTree
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot

#: Latency of each request to a simulated remote storage.
REQUEST_SECONDS = 0.020

_DEFINITION = TableDef(id="00000000-0000-4000-8000-000000000000").to_bytes()


def filled(storage: Storage, n_tables: int) -> Lakehouse:
    """Create a lakehouse with default settings and ``n_tables`` tables in one namespace."""
    lake = Lakehouse.create(storage.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(n_tables):
            txn.create_table("ns", name(number), TableDef())
    return lake


def name(number: int) -> str:
    """Return the name of a table."""
    return f"t{number:09}"


def new_definition() -> TableDef:
    """Return a new, unique table definition."""
    return TableDef(properties={"stamp": str(random.random())})


def change_tables(lake: Lakehouse, tables: Iterable[int]) -> None:
    """Change tables in one commit."""
    with lake.transaction() as txn:
        for number in tables:
            txn.alter_table("ns", name(number), new_definition())


class _DeferredRunner(background.ThreadRunner):
    """Keeps submitted work until it is drained."""

    def __init__(self) -> None:
        super().__init__()
        self._work: dict[background.Work, None] = {}

    def submit(self, work: background.Work) -> None:
        self._work[work] = None

    def drain(self, timeout_s: float) -> bool:
        del timeout_s
        while self._work:
            work = next(iter(self._work))
            del self._work[work]
            background.run_logged(work)
        return True


@contextmanager
def deferred_background_work() -> Iterator[None]:
    """Run background work when the block ends, so that its requests are not counted in the block."""
    runner = _DeferredRunner()
    with background.using(runner):
        try:
            yield
        finally:
            background.drain()


class GeneratedDefinitions(StorageWrapper):
    """Returns the same content for all table definitions that were not written, which saves writing a million files."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        try:
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        except FileMissingError:
            if "-table-" in path:
                return _DEFINITION
            raise


class LaterStorage(StorageWrapper):
    """A storage whose clock is some years ahead, so that no version is protected by its age."""

    def __init__(self, inner: Storage, years: int = 1):
        super().__init__(inner)
        self._years = years

    def now_ms(self) -> int:
        return self.inner.now_ms() + self._years * 365 * 24 * 3_600_000


class SlowStorage(StorageWrapper):
    """Delays every request, by default by 20 ms, and sends up to 32 requests concurrently, as to a server."""

    def __init__(self, inner: Storage, seconds: float = REQUEST_SECONDS):
        super().__init__(inner)
        self._seconds = seconds
        self.concurrency = 32
        self.serial_read_limit = self.serial_create_limit = 1

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        time.sleep(self._seconds)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        time.sleep(self._seconds)
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        time.sleep(self._seconds)
        self.inner.write(path, data)

    def stat(self, path: str) -> FileInfo:
        time.sleep(self._seconds)
        return self.inner.stat(path)

    def delete(self, path: str) -> None:
        time.sleep(self._seconds)
        self.inner.delete(path)


def create_loaded_lake(storage: Storage, n_tables: int, **settings: str) -> Lakehouse:
    """Create a lakehouse with tables in one namespace by a bulk load.

    Args:
        storage: The storage, which must generate the table definitions.
        n_tables: The number of tables.
        settings: Settings of the lakehouse that differ from the defaults.
    """
    lake = Lakehouse.create(storage.root, storage=storage, **settings)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    lake.commit(_Load(n_tables), lake.snapshot())
    return lake


@dataclass(frozen=True)
class _Load:
    """A bulk load of all tables as one commit."""

    n_tables: int

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        files: dict[str, bytes] = {}
        entries = _entries(base, self.n_tables)
        tree = bulk_load(entries, base.limits, created_at_ms=stamp.created_at_ms, write=files.update)
        info = CommitInfo("load")
        system = stamp.system(base, info, lakehouse_def=base.definition_location)
        return Draft(system, info, EditedTree(tree, files), {}, base.definition)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        raise AssertionError("there are no other writers")


def _entries(base: Snapshot, n_tables: int) -> Iterator[tuple[str, str]]:
    yield from scan(base.files.nodes, base.root)
    for number in range(n_tables):
        yield (
            base.keys.table_key("ns", name(number)),
            new_table_path("ns", name(number), base.definition.file_path_max_size_bytes),
        )
