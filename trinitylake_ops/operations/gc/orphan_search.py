"""Search for orphans: unreached files of failed commits, aborted writes and interrupted operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from trinitylake_ops.format.checksums import CompactUuidSet
from trinitylake_ops.format.file_names import (
    OWNER_NAME,
    TABLES_PREFIX,
    is_operation_path,
    is_space_path,
    is_verified_path,
    lease_path,
    parse_lease_path,
)
from trinitylake_ops.operations.gc.mark import Mark, is_deletable, owned_tables
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.transaction.lakehouse import Lakehouse


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Orphans by path, or by URI under the table root, with their sizes in bytes."""

    sizes_bytes: Mapping[str, int]
    #: Owner files of tables, which are deleted last.
    owners: Mapping[str, int]
    #: The number of files under ``tables/`` without a known owner.
    unowned_files: int
    #: The total size of these files.
    unowned_bytes: int

    @classmethod
    def of_all(cls, *orphans: Self) -> Self:
        """Combine several results."""
        return cls(
            sizes_bytes=dict(sorted(item for result in orphans for item in result.sizes_bytes.items())),
            owners=dict(sorted(item for result in orphans for item in result.owners.items())),
            unowned_files=sum(result.unowned_files for result in orphans),
            unowned_bytes=sum(result.unowned_bytes for result in orphans),
        )


def find_orphans(lake: Lakehouse, mark: Mark, listed: Iterable[FileInfo], modified_before_ms: int) -> Orphans:
    """Find the orphans among listed files under the root.

    Args:
        lake: The lakehouse.
        mark: The mark, which is extended to table files if needed.
        listed: The listed files.
        modified_before_ms: Only files last modified before this time are orphans, in milliseconds since the epoch.

    Raises:
        StorageError: A kept file cannot be read, or a storage request failed.
    """
    listing = _Listing.of(listed, modified_before_ms)
    old = {path: info for path, info in listing.old.items() if path not in mark}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned: set[str] = set()
    if table_ids:
        mark.add_tables()
        owned = owned_tables(lake.storage, table_ids, mark.base.definition.id, mark.tables.managed_ids)
    orphans = {
        path: info.size_bytes
        for path, info in sorted(old.items())
        if path not in mark and _is_lakehouse_file(path, owned)
    }
    owners = _unused_owner_files(orphans, listing, mark.tables.managed_ids)
    unowned = [info for path, info in old.items() if (table_id := table_id_in(path)) and table_id not in owned]
    deletable = {path: size for path, size in orphans.items() if path in owners or not _is_owner_path(path)}
    return Orphans(
        sizes_bytes={path: size for path, size in deletable.items() if path not in owners},
        owners={path: size for path, size in deletable.items() if path in owners},
        unowned_files=len(unowned),
        unowned_bytes=sum(info.size_bytes for info in unowned),
    )


def find_table_root_orphans(mark: Mark, now_ms: int, age_ms: int, listed: Iterable[FileInfo] | None = None) -> Orphans:
    """Find the orphans under the table root, in folders whose owner files name this lakehouse.

    The result is empty if nothing may be deleted under the table root.

    Args:
        mark: The mark, which is extended to table files if needed.
        now_ms: The storage's time, in milliseconds since the epoch. If the clock of the table root's storage is behind,
            the time of that clock is used.
        age_ms: The minimum age of orphans, in milliseconds.
        listed: The files to check; by default all tables under the table root are listed.

    Raises:
        StorageError: A kept file cannot be read, or a storage request failed.
    """
    table_root = mark.table_root
    if table_root is None or table_root.refusal:
        return Orphans(sizes_bytes={}, owners={}, unowned_files=0, unowned_bytes=0)
    before_ms = min(now_ms, table_root.storage.now_ms()) - age_ms
    listing = _Listing.of(table_root.storage.list(TABLES_PREFIX) if listed is None else listed, before_ms)
    old = {path: info for path, info in listing.old.items() if table_id_in(path) is not None}
    if old:
        mark.add_tables()
    reached = mark.tables.in_table_root
    old = {path: info for path, info in old.items() if path not in reached}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(table_root.storage, table_ids, table_root.lakehouse_id)
    orphans = {path: info.size_bytes for path, info in sorted(old.items()) if table_id_in(path) in owned}
    owners = _unused_owner_files(orphans, listing, reached.managed_ids)
    root = table_root.root
    return Orphans(
        sizes_bytes={f"{root}{path}": size for path, size in orphans.items() if not _is_owner_path(path)},
        owners={f"{root}{path}": orphans[path] for path in sorted(owners)},
        unowned_files=0,
        unowned_bytes=0,
    )


@dataclass(frozen=True)
class _Listing:
    """The old files of a listing, and the number of files in the folder of each table."""

    old: dict[str, FileInfo]
    n_table_files: Counter[str]

    @classmethod
    def of(cls, listed: Iterable[FileInfo], modified_before_ms: int) -> Self:
        old: dict[str, FileInfo] = {}
        newest_lease = 0
        newest_record = (0, "")
        n_table_files: Counter[str] = Counter()
        for info in listed:
            table_id = table_id_in(info.path)
            if table_id is not None:
                n_table_files[table_id] += 1
            newest_lease = max(newest_lease, parse_lease_path(info.path) or 0)
            if is_verified_path(info.path):
                newest_record = max(newest_record, (info.last_modified_ms, info.path))
            # The space summary deletes its superseded files itself.
            if info.last_modified_ms < modified_before_ms and not is_space_path(info.path):
                old[info.path] = info
        old.pop(lease_path(newest_lease), None)  # its lease number must not be reused
        old.pop(newest_record[1], None)  # all other records are superseded
        return cls(old, n_table_files)


def _is_lakehouse_file(path: str, tables: set[str]) -> bool:
    is_operational = is_operation_path(path) or parse_lease_path(path) is not None
    return is_operational or is_deletable(path, tables)


def _is_owner_path(path: str) -> bool:
    table_id = table_id_in(path)
    return table_id is not None and path == f"{TABLES_PREFIX}{table_id}/{OWNER_NAME}"


def _unused_owner_files(orphans: Iterable[str], listing: _Listing, managed_ids: CompactUuidSet) -> set[str]:
    """Return the owner files of tables that no kept version defines, if all other files in the folder are orphans."""
    deletable = Counter(table_id for path in orphans if (table_id := table_id_in(path)) is not None)
    return {
        path
        for path in orphans
        if _is_owner_path(path)
        and not managed_ids.has_like(table_id := table_id_in(path) or "")
        and deletable[table_id] == listing.n_table_files[table_id]
    }
