"""Lakehouses with a simulated age, and the files that a version needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from tests.clock import AgingStorage
from tests.lakes import table
from tests.operations.changes import small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationState, TableDef
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.operations import Budget, ExpirationReport, OrphanReport, PurgeReport, RetentionPolicy
from trinitylake_ops.operations.budget import BudgetSpentBeforeError
from trinitylake_ops.storage import Storage
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.versions.snapshot import Snapshot

T = TypeVar("T")

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
#: Longer than a transaction's time to live plus the clock margin.
LONG_MS = 2 * DAY_MS


def with_least_requests(execute: Callable[[Budget], T]) -> tuple[int, T]:
    """Execute with roughly the smallest request budget that suffices for planning. Return the budget and the report."""
    for max_requests in count(5, 4):
        try:
            return max_requests, execute(Budget(max_requests=max_requests))
        except BudgetSpentBeforeError:
            continue
    raise AssertionError


def keeping(versions: int) -> RetentionPolicy:
    """Return a policy that keeps only the newest versions."""
    return RetentionPolicy(maximum_age_ms=0, minimum_versions=versions, protected_ms=0)


@dataclass(frozen=True)
class Aging:
    """A lakehouse and the clock of its storage."""

    lake: Lakehouse
    clock: AgingStorage

    @classmethod
    def on(cls, storage: Storage, **fields: Any) -> Aging:
        """Create a lakehouse of order 4 whose trees are deep."""
        clock = AgingStorage(storage, storage.now_ms())
        lake = Lakehouse.create(storage.root, storage=clock, order=4, **{**small_sizes(4), **fields})
        return cls(lake, clock)

    def later(self, duration_ms: int = LONG_MS) -> None:
        self.clock.time_ms += duration_ms

    def expire(self, policy: RetentionPolicy | None = None) -> ExpirationReport:
        return operations.plan_expiration(self.lake, policy or keeping(1)).execute()

    def purge(self) -> PurgeReport:
        return operations.plan_purge(self.lake).execute()

    def remove_orphans(self) -> OrphanReport:
        return operations.plan_orphan_removal(self.lake).execute()

    def clean_up(self) -> None:
        """Expire, purge and remove orphans, with enough time in between."""
        self.later()
        self.expire()
        self.later()
        self.purge()
        self.later()
        self.remove_orphans()


def grow(aging: Aging, versions: int, namespace: str = "n") -> None:
    """Commit versions, an hour apart, that add, change and drop tables, so that nodes and definitions are replaced."""
    for number in range(versions):
        with aging.lake.transaction(message="m" * 3_400) as txn:  # leaves little space for messages in the root
            for earlier in range(number):
                txn.alter_table(f"{namespace}{earlier}", "a", table(of=str(number)))
            txn.create_namespace(f"{namespace}{number}")
            for name in ("a", "b", "c"):
                txn.create_table(f"{namespace}{number}", name, table())
            if number:
                txn.drop_table(f"{namespace}{number - 1}", "c")
        aging.later(HOUR_MS)


def needed_files(lake: Lakehouse, version: int | str | None = None) -> dict[str, bytes]:
    """Return path -> bytes of all files that a version or a named export needs, including its root."""
    return files_of_snapshot(lake, lake.snapshot(version))


def expired_files(lake: Lakehouse) -> dict[str, bytes]:
    """Return path -> bytes of all files that restorable expired versions need."""
    batches = [batch for batch in lake.snapshot().definition.expirations if batch.state == ExpirationState.EXPIRED]
    files: dict[str, bytes] = {}
    for version in {version for batch in batches for version in batch.ranges()}:
        files |= files_of_snapshot(lake, Snapshot.of(lake.files, version))
    return files


def files_of_snapshot(lake: Lakehouse, snapshot: Snapshot) -> dict[str, bytes]:
    storage = lake.storage
    io = StorageFileIO.on(storage, lake.storage_options, read_only=True)
    paths = {snapshot.definition_location}
    for visited in walk(snapshot.files.nodes, snapshot.root, snapshot.location):
        node = visited.node
        paths.add(visited.location)
        for key, location in [*zip(node.keys, node.values, strict=True), *node.buffer.items()]:
            if location is not None:
                paths.add(location)
                if key.startswith(TABLE_KEY_PREFIX):
                    definition = TableDef.from_bytes(storage.read(location), location)
                    if definition.format_properties.get(METADATA_LOCATION):
                        paths |= {file.location for file in files_of(definition, io) if file.live}
    return {path: storage.read(path) for path in sorted(paths) if not is_uri(path)}


def live_versions(lake: Lakehouse) -> list[int]:
    return sorted(info.version for info in lake.history() if info.state == "live")


def states(lake: Lakehouse) -> list[tuple[str, str]]:
    """Return the recorded states of expired versions."""
    return [(batch.state.name, batch.versions) for batch in lake.snapshot().definition.expirations]
