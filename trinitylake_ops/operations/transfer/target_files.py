"""Compare the files that a transfer to another root needs with the files there, and select missing files.

A file at the target counts as present only if its listed size matches the size in the target's table metadata.
Definitions, table metadata, manifest lists and manifests are read, so that damaged files are found as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.iceberg.copy import REWRITTEN
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import DAMAGE, FileKind, files_of
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.transfer.names import Destination
from trinitylake_ops.operations.transfer.selection import Choice, CopiedTable, Selection, Selector
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.snapshot import Snapshot

#: The number of tables that are compared in one parallel step.
_BATCH_TABLES = 256


@dataclass(frozen=True, slots=True)
class IncompleteTable:
    """An unchanged table that lacks files at the target."""

    #: The key of the table.
    key: str
    #: The location of the table's definition at the target.
    location: str
    #: The definition.
    definition: TableDef
    #: The table's intact files at the target.
    known: frozenset[str]
    #: The table's files that are missing at the target or have a wrong size.
    lost: frozenset[str]


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files at the target of an export, compared with the files that the tables of its version need."""

    #: Files of tables to copy that already exist at the target.
    known: frozenset[str] = frozenset()
    #: Files of these tables that are missing at the target or have a different size there.
    lost: frozenset[str] = frozenset()
    #: Unchanged tables that lack files.
    tables: tuple[IncompleteTable, ...] = ()

    @classmethod
    def of(cls, lake: Lakehouse, base: Snapshot, selection: Selection, existing: Mapping[str, int]) -> TargetFiles:
        """Compare the files of a target with its listing.

        Args:
            lake: The lakehouse at the target.
            base: The version of that lakehouse.
            selection: The files to copy. Entries with the same location at the target are unchanged.
            existing: The sizes in bytes of the files at the target, by path.

        Raises:
            FileMissingError: The definition of an unchanged object is missing.
            CorruptFileError: The definition of an unchanged object is damaged.
            StorageError: Another storage request failed.
        """
        copied_ids = {table.places.table_id for table in selection.tables}
        wanted, io = dict(selection.entries), reading_io(lake)
        known: set[str] = set()
        lost: set[str] = set()
        tables: list[IncompleteTable] = []

        def compare(entry: tuple[str, str]) -> tuple[TableDef | None, set[str], set[str]]:
            key, location = entry
            is_unchanged = wanted.get(key) == location
            name = base.keys.decode(key)
            if name is None or not (is_unchanged or (name.table is not None and copied_ids)):
                return None, set(), set()
            try:
                if name.table is None:
                    lake.files.definitions.namespaces([location])
                    return None, set(), set()
                (definition,) = lake.files.definitions.tables([location])
            except DAMAGE:
                if is_unchanged:
                    raise
                return None, set(), set()
            if not is_unchanged and definition.id not in copied_ids:
                return None, set(), set()
            return definition, *_compare_files(definition, io, existing)

        entries = sorted(scan(base.files.nodes, base.root))
        for first in range(0, len(entries), _BATCH_TABLES):
            batch = entries[first : first + _BATCH_TABLES]
            results = run_parallel(compare, batch, lake.storage.concurrency)
            for (key, location), (definition, intact, missing) in zip(batch, results, strict=True):
                if definition is None:
                    continue
                if definition.id in copied_ids:
                    known |= intact
                    lost |= missing
                if missing and wanted.get(key) == location:
                    tables.append(IncompleteTable(key, location, definition, frozenset(intact), frozenset(missing)))
        return cls(frozenset(known - lost), frozenset(lost), tuple(tables))


def _compare_files(definition: TableDef, io: StorageFileIO, existing: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Return the intact files of a table at the target, and the files that are missing or have a wrong size.

    If a file cannot be read, the files that it lists are unknown.
    """
    metadata = iceberg_metadata(definition)
    if not definition.is_managed or not metadata or is_uri(to_location(io.root, metadata)):
        return set(), set()
    intact: set[str] = set()
    lost: set[str] = set()
    try:
        for file in files_of(definition, io):
            if file.live and not is_uri(file.location):
                size_bytes = existing.get(file.location)
                is_intact = size_bytes is not None and file.size_bytes in (None, size_bytes)
                (intact if is_intact else lost).add(file.location)
    except DAMAGE as error:
        lost.add(to_location(io.root, error.path or metadata))
    return intact - lost, lost


def missing_target_file(root: str, path: str) -> FileMissingError:
    """Return the error for a file that the target of an export has lost.

    Args:
        root: The root of the target.
        path: The path of the file.
    """
    return FileMissingError(
        f"the lakehouse at {root} has lost {path!r}, which an earlier export copied: restore it there, or export to"
        " another target",
        path=path,
    )


def check_definitions(selection: Selection, choice: Choice, root: str, existing: Container[str]) -> None:
    """Raise FileMissingError if the target has lost a definition that its tree refers to.

    Args:
        selection: The files to copy.
        choice: The content of the export.
        root: The root of the target.
        existing: The files at the target.
    """
    new = {copy.target for copy in selection.definitions}
    for _, location in selection.entries:
        if choice.copies_definitions and not is_uri(location) and location not in new and location not in existing:
            raise missing_target_file(root, location)


def with_safe_names(
    selection: Selection,
    selector: Selector,
    base: Snapshot,
    txn: Transaction,
    listed: Iterable[FileInfo],
    reached: Container[str],
) -> Selection:
    """Return the files to copy under names that no concurrent cleanup of the target deletes.

    The target can contain files that have the names of copies but that its latest version does not reach: copies made
    by an interrupted export, or files of older versions, which can be purged. Recent files are reused, and the
    transaction takes their age. If a file is older than half of the transaction's time to live, all copies get
    different names.

    Args:
        selection: The files under their first names.
        selector: Selects the files again under other names.
        base: The version of the target that the selection was compared with.
        txn: The transaction that commits the files at the target.
        listed: The files at the target.
        reached: Files that the latest version of the target reaches.

    Raises:
        StorageError: A storage request failed.
    """
    modified_ms = {info.path: info.last_modified_ms for info in listed}
    min_modified_ms = txn.base.files.storage.now_ms() - txn.base.definition.txn_ttl_millis // 2
    for generation in itertools.count():
        renamed = _rename(selection, selector, base, generation) if generation else selection
        targets = {target for _, target in renamed.targets() if target not in reached}
        oldest_ms = min((modified_ms[target] for target in targets & modified_ms.keys()), default=None)
        if oldest_ms is None:
            return renamed
        if oldest_ms >= min_modified_ms:
            txn.backdate(oldest_ms)
            return renamed
    raise AssertionError("unreachable")


def _rename(selection: Selection, selector: Selector, base: Snapshot, generation: int) -> Selection:
    """Return the files to copy under the names of a generation. Files that exist at the target keep their names."""
    existing = dict(scan(base.files.nodes, base.root))
    unchanged = {key: location for key, location in selection.entries if existing.get(key) == location}
    changed = [(key, location) for key, location in selector.entries() if key not in unchanged]
    renamed = selector.select(names_at(base.files.storage.root, selector, generation), changed)
    renamed.entries = sorted([*unchanged.items(), *renamed.entries])
    return renamed


def names_at(root: str, selector: Selector, generation: int = 0) -> Destination:
    """Return the names of copies at another root. See :meth:`Destination.other_root`.

    Args:
        root: The target root.
        selector: Selects the files.
        generation: The generation of the names.
    """
    return Destination.other_root(root, selector.source.definition.id, selector.choice.level, generation)


def with_missing_files(
    selection: Selection, selector: Selector, tables: Collection[IncompleteTable], root: str
) -> Selection:
    """Add the files of unchanged tables that are missing at the target, under their existing names.

    Tables with unreadable files at the source are left out.

    Args:
        selection: The other files to copy.
        selector: Selects the files of the tables.
        tables: The tables.
        root: The root of the target.

    Raises:
        FileMissingError: A file that is missing at the target has an unknown name.
        StorageError: A storage request failed.
    """
    missing = _missing_files(tables, selector, names_at(root, selector))
    left_out = {table.key for table in tables} - {key for key, _ in missing.entries}
    copied = {
        table_id: [*selection.copied.get(table_id, ()), *missing.copied.get(table_id, ())]
        for table_id in selection.copied | missing.copied
    }
    return replace(
        selection,
        entries=[(key, location) for key, location in selection.entries if key not in left_out],
        tables=[*selection.tables, *missing.tables],
        damaged=selection.damaged | missing.damaged,
        copied=copied,
    )


def _missing_files(
    tables: Collection[IncompleteTable], selector: Selector, first_destination: Destination
) -> Selection:
    """Select the files of unchanged tables. Tables with unreadable files at the source count as damaged."""
    sources, selection = dict(selector.entries()), Selection()
    remaining = {table.key: table for table in tables}
    for destination in (first_destination, *first_destination.siblings):
        entries = [(key, sources[key]) for key in sorted(remaining)]
        if not entries:
            break
        selected = selector.select(destination, entries)
        selection.damaged |= selected.damaged
        copies = {table.places.table_id: table for table in selected.tables}
        names = {copied.key: copied.name for tables_of_id in selected.copied.values() for copied in tables_of_id}
        for key, table in list(remaining.items()):
            copy, name = copies.get(table.definition.id), names.get(key)
            if name is None:  # damaged at the source
                del remaining[key]
            elif copy is not None and _metadata_path(table, first_destination.root) in {
                file.target for file in copy.files if file.kind == FileKind.METADATA
            }:
                del remaining[key]
                selection.tables.append(copy)
                selection.entries.append((key, table.location))
                selection.copied.setdefault(table.definition.id, []).append(CopiedTable(key, name, table.location))
    for table in remaining.values():  # copied under names chosen by an older release
        raise missing_target_file(first_destination.root, min(table.lost))
    return selection


def _metadata_path(table: IncompleteTable, root: str) -> str:
    return to_location(root, iceberg_metadata(table.definition) or "")


def check_recopied(
    tables: Iterable[IncompleteTable], selection: Selection, lake: Lakehouse, existing: Mapping[str, int]
) -> None:
    """Check that tables with missing files are complete at the target after they were copied again.

    Data files were compared with their sources, whose metadata can record wrong sizes. Files that contain paths must
    have the sizes that are recorded in other files.

    Args:
        tables: The tables.
        selection: The copied files. Tables missing in the selection were left out.
        lake: The lakehouse at the target.
        existing: The sizes in bytes of the files at the target, by path.

    Raises:
        FileMissingError: A file is still missing.
        CorruptFileError: A file differs from the file that its table refers to.
        StorageError: Another storage request failed.
    """
    io, selected_keys = reading_io(lake), {key for key, _ in selection.entries}

    def check(table: IncompleteTable) -> None:
        for file in files_of(table.definition, io) if table.key in selected_keys else ():
            if not file.live or is_uri(file.location):
                continue
            size_bytes = existing.get(file.location)
            if size_bytes is None:
                raise missing_target_file(lake.root, file.location)
            if file.kind in REWRITTEN and file.size_bytes not in (None, size_bytes):
                raise CorruptFileError(
                    f"the lakehouse at {lake.root} has a file at {file.location!r} that differs from the one that its"
                    " table names; export to another target",
                    path=file.location,
                )

    run_parallel(check, list(tables), lake.storage.concurrency)
