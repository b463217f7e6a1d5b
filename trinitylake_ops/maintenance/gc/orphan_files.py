"""Finds orphans: files with names that the lakehouse gives, that no kept root reaches, and that are old enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from trinitylake_ops.format.file_identity import FoldedSet
from trinitylake_ops.format.file_names import (
    OWNER_NAME,
    TABLES_PREFIX,
    is_operation_path,
    is_verified_path,
    lease_path,
    parse_lease_path,
)
from trinitylake_ops.maintenance.reach.mark import Mark, is_deletable, owned_tables
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.transaction.lakehouse import Lakehouse


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Orphans with their sizes in bytes, apart from owner files, which are deleted last.

    Also files without a known owner. Files are given by paths, those under the table root by URIs.
    """

    sizes_bytes: Mapping[str, int]
    owners: Mapping[str, int]
    unowned_files: int
    unowned_bytes: int

    @classmethod
    def of_all(cls, *found: Self) -> Self:
        """Return all of several."""
        return cls(
            sizes_bytes=dict(sorted(item for one in found for item in one.sizes_bytes.items())),
            owners=dict(sorted(item for one in found for item in one.owners.items())),
            unowned_files=sum(one.unowned_files for one in found),
            unowned_bytes=sum(one.unowned_bytes for one in found),
        )


def find_orphans(lake: Lakehouse, mark: Mark, listed: Iterable[FileInfo], modified_before_ms: int) -> Orphans:
    """Find the orphans among listed files by a mark, which is extended to files of tables where needed.

    Raises what marking raises.
    """
    found = _Listing.of(listed, modified_before_ms)
    old = {path: info for path, info in found.old.items() if path not in mark}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned: set[str] = set()
    if table_ids:
        mark.add_tables()
        owned = owned_tables(lake.storage, table_ids, mark.base.definition.id, mark.tables.managed_ids)
    orphans = {
        path: info.size_bytes for path, info in sorted(old.items()) if path not in mark and _is_ours(path, owned)
    }
    owners = _owners_that_go(orphans, found, mark.tables.managed_ids)
    unowned = [info for path, info in old.items() if (table_id := table_id_in(path)) and table_id not in owned]
    going = {path: size for path, size in orphans.items() if path in owners or not _is_owner_path(path)}
    return Orphans(
        sizes_bytes={path: size for path, size in going.items() if path not in owners},
        owners={path: size for path, size in going.items() if path in owners},
        unowned_files=len(unowned),
        unowned_bytes=sum(info.size_bytes for info in unowned),
    )


def find_orphans_there(mark: Mark, now_ms: int, age_ms: int, listed: Iterable[FileInfo] | None = None) -> Orphans:
    """Find the orphans under the table root, in folders whose owner files name the lakehouse, of an age at ``now_ms``.

    Files of others, and of a table root that is not freed from here, are left alone and not counted. Age is told by the
    clock of its storage where that is behind. Lists all tables there, unless ``listed`` are the files to look at.
    Raises what marking raises.
    """
    table_root = mark.table_root
    if table_root is None or table_root.refusal:
        return Orphans(sizes_bytes={}, owners={}, unowned_files=0, unowned_bytes=0)
    before_ms = min(now_ms, table_root.storage.now_ms()) - age_ms
    found = _Listing.of(table_root.storage.list(TABLES_PREFIX) if listed is None else listed, before_ms)
    old = {path: info for path, info in found.old.items() if table_id_in(path) is not None}
    if old:
        mark.add_tables()
    reached = mark.tables.there
    old = {path: info for path, info in old.items() if path not in reached}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(table_root.storage, table_ids, table_root.lakehouse_id)
    orphans = {path: info.size_bytes for path, info in sorted(old.items()) if table_id_in(path) in owned}
    owners = _owners_that_go(orphans, found, reached.managed_ids)
    root = table_root.root
    return Orphans(
        sizes_bytes={f"{root}{path}": size for path, size in orphans.items() if not _is_owner_path(path)},
        owners={f"{root}{path}": orphans[path] for path in sorted(owners)},
        unowned_files=0,
        unowned_bytes=0,
    )


@dataclass(frozen=True)
class _Listing:
    """The listed files under the root: old files that may be ours, and the number in each table's folder."""

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
            if info.last_modified_ms < modified_before_ms:
                old[info.path] = info
        old.pop(lease_path(newest_lease), None)  # its number must not be given again
        old.pop(newest_record[1], None)  # the others are superseded
        return cls(old, n_table_files)


def _is_ours(path: str, tables: set[str]) -> bool:
    is_operational = is_operation_path(path) or parse_lease_path(path) is not None
    return is_operational or is_deletable(path, tables)


def _is_owner_path(path: str) -> bool:
    table_id = table_id_in(path)
    return table_id is not None and path == f"{TABLES_PREFIX}{table_id}/{OWNER_NAME}"


def _owners_that_go(orphans: Iterable[str], found: _Listing, managed_ids: FoldedSet) -> set[str]:
    """Return the owner files of tables that no kept version defines, if all other files are deleted, too."""
    going = Counter(table_id for path in orphans if (table_id := table_id_in(path)) is not None)
    return {
        path
        for path in orphans
        if _is_owner_path(path)
        and not managed_ids.has_like(table_id := table_id_in(path) or "")
        and going[table_id] == found.n_table_files[table_id]
    }
