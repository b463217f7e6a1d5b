"""Compare the files that a transfer to another root needs with those that the root has, and select what is missing.

A file at the target counts only if the listing shows it with the size that the target's own table metadata records.
Definitions, table metadata, manifest lists and manifests are read, so a damaged one is found as well.
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

#: Tables whose files are compared before those of the next ones are read.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class IncompleteTable:
    """An unchanged table that lacks files at the target: its key and definition there, and its files."""

    key: str
    location: str
    definition: TableDef
    known: frozenset[str]
    lost: frozenset[str]


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files at the target of an export, compared with what the tables of its version need.

    ``known`` are files of tables to copy that the target already has. ``lost`` are files of these tables that it lacks,
    or has with another size. ``tables`` are the unchanged tables that lack files.
    """

    known: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    tables: tuple[IncompleteTable, ...] = ()

    @classmethod
    def of(cls, lake: Lakehouse, base: Snapshot, selection: Selection, existing: Mapping[str, int]) -> TargetFiles:
        """Compare the files of a target with its listing.

        Args:
            lake: The lakehouse at the target.
            base: Its version.
            selection: What is copied. Its entries that the target has at the same location are unchanged.
            existing: The sizes in bytes of the files at the target, by path.

        Raises:
            FileMissingError: The definition of an unchanged object is missing.
            CorruptFileError: The definition of an unchanged object is damaged.
            StorageError: Another failure of the storage.
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
            return definition, *_compared(definition, io, existing)

        entries = sorted(scan(base.files.nodes, base.root))
        for first in range(0, len(entries), _BATCH):
            batch = entries[first : first + _BATCH]
            compared = run_parallel(compare, batch, lake.storage.concurrency)
            for (key, location), (definition, intact, missing) in zip(batch, compared, strict=True):
                if definition is None:
                    continue
                if definition.id in copied_ids:
                    known |= intact
                    lost |= missing
                if missing and wanted.get(key) == location:
                    tables.append(IncompleteTable(key, location, definition, frozenset(intact), frozenset(missing)))
        return cls(frozenset(known - lost), frozenset(lost), tuple(tables))


def _compared(definition: TableDef, io: StorageFileIO, existing: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Return the files of a table at the target that are as its metadata says, and those that are not.

    The first file that cannot be read hides the files that it lists.
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
                is_same = size_bytes is not None and file.size_bytes in (None, size_bytes)
                (intact if is_same else lost).add(file.location)
    except DAMAGE as error:
        lost.add(to_location(io.root, error.path or metadata))
    return intact - lost, lost


def missing_target_file(root: str, path: str) -> FileMissingError:
    """Return the error for a file that the target of an export has lost."""
    return FileMissingError(
        f"the lakehouse at {root} has lost {path!r}, which an earlier export copied: restore it there, or export to"
        " another target",
        path=path,
    )


def check_definitions(selection: Selection, choice: Choice, root: str, existing: Container[str]) -> None:
    """Raise FileMissingError if the target has lost a definition that its tree points to.

    Args:
        selection: What is copied.
        choice: What was chosen.
        root: The root of the target.
        existing: The files at the target.
    """
    new = {copy.target for copy in selection.definitions}
    for _, place in selection.entries:
        if choice.copies_definitions and not is_uri(place) and place not in new and place not in existing:
            raise missing_target_file(root, place)


def unendangered(
    selection: Selection,
    selector: Selector,
    base: Snapshot,
    txn: Transaction,
    listed: Iterable[FileInfo],
    known: Container[str],
) -> Selection:
    """Return the files to copy into a lakehouse that other processes may clean up meanwhile.

    The target may have files under the names of copies that its latest version does not reach: copies of an export that
    was cut off, or files of older versions, which can be purged. Young files are reused, and the transaction becomes as
    old as they are. If one is older than half its time to live, all copies get other names.

    Args:
        selection: The files under their first names.
        selector: Selects them again under other names.
        base: The version of the target that the selection was compared with.
        txn: The transaction that commits them at the target.
        listed: The files at the target.
        known: Files that the latest version of the target reaches.

    Raises:
        StorageError: A file of the source cannot be read.
    """
    modified_ms = {info.path: info.last_modified_ms for info in listed}
    eldest_ms = txn.base.files.storage.now_ms() - txn.base.definition.txn_ttl_millis // 2
    for generation in itertools.count():
        named = _renamed(selection, selector, base, generation) if generation else selection
        targets = {target for _, target in named.targets() if target not in known}
        oldest_ms = min((modified_ms[target] for target in targets & modified_ms.keys()), default=None)
        if oldest_ms is None:
            return named
        if oldest_ms >= eldest_ms:
            txn.backdate(oldest_ms)
            return named
    raise AssertionError("unreachable")


def _renamed(selection: Selection, selector: Selector, base: Snapshot, generation: int) -> Selection:
    """Return the files to copy under the names of a generation. Files that the target has keep their names."""
    existing = dict(scan(base.files.nodes, base.root))
    unchanged = {key: place for key, place in selection.entries if existing.get(key) == place}
    changed = [(key, location) for key, location in selector.entries() if key not in unchanged]
    renamed = selector.select(names_at(base.files.storage.root, selector, generation), changed)
    renamed.entries = sorted([*unchanged.items(), *renamed.entries])
    return renamed


def names_at(root: str, selector: Selector, generation: int = 0) -> Destination:
    """Return the names of copies at another root, as :meth:`Destination.other_root` does."""
    return Destination.other_root(root, selector.source.definition.id, selector.choice.level, generation)


def with_missing_files(
    selection: Selection, selector: Selector, tables: Collection[IncompleteTable], root: str
) -> Selection:
    """Return the files to copy with those of unchanged tables that the target lacks.

    They get the names that they have at the target. Tables whose files at the source cannot all be read are left out.

    Args:
        selection: The other files to copy.
        selector: Selects the files of the tables.
        tables: The tables.
        root: The root of the target.

    Raises:
        FileMissingError: The target has the files of a table under other names, and has lost one.
        StorageError: A file of the source cannot be read.
    """
    again = _missing_files(tables, selector, names_at(root, selector))
    left_out = {table.key for table in tables} - {key for key, _ in again.entries}
    copied = {
        table_id: [*selection.copied.get(table_id, ()), *again.copied.get(table_id, ())]
        for table_id in selection.copied | again.copied
    }
    return replace(
        selection,
        entries=[(key, location) for key, location in selection.entries if key not in left_out],
        tables=[*selection.tables, *again.tables],
        damaged=selection.damaged | again.damaged,
        copied=copied,
    )


def _missing_files(tables: Collection[IncompleteTable], selector: Selector, names: Destination) -> Selection:
    """Return the files of unchanged tables. Tables whose files at the source cannot all be read are damaged ones."""
    sources, selection = dict(selector.entries()), Selection()
    remaining = {table.key: table for table in tables}
    for destination in (names, *names.siblings):
        entries = [(key, sources[key]) for key in sorted(remaining)]
        if not entries:
            break
        selected = selector.select(destination, entries)
        selection.damaged |= selected.damaged
        copies = {table.places.table_id: table for table in selected.tables}
        names_of = {copied.key: copied.name for several in selected.copied.values() for copied in several}
        for key, table in list(remaining.items()):
            copy, name = copies.get(table.definition.id), names_of.get(key)
            if name is None:  # damaged at the source
                del remaining[key]
            elif copy is not None and _metadata_path(table, names.root) in {
                file.target for file in copy.files if file.kind == FileKind.METADATA
            }:
                del remaining[key]
                selection.tables.append(copy)
                selection.entries.append((key, table.location))
                selection.copied.setdefault(table.definition.id, []).append(CopiedTable(key, name, table.location))
    for table in remaining.values():  # under names that an earlier version of this program made
        raise missing_target_file(names.root, min(table.lost))
    return selection


def _metadata_path(table: IncompleteTable, root: str) -> str:
    return to_location(root, iceberg_metadata(table.definition) or "")


def check_recopied(
    tables: Iterable[IncompleteTable], selection: Selection, lake: Lakehouse, existing: Mapping[str, int]
) -> None:
    """Raise an error for a table that still lacks files at the target after they were copied again.

    Data files were compared with their sources, whose metadata may record wrong sizes; files that contain paths need
    the sizes that others record.

    Args:
        tables: The tables.
        selection: What was copied. Tables that it lacks were left out.
        lake: The lakehouse at the target.
        existing: The sizes in bytes of the files at the target, by path.

    Raises:
        FileMissingError: A file is still missing.
        CorruptFileError: A file is not the one that its table names.
        StorageError: Another failure of the storage.
    """
    io, left = reading_io(lake), {key for key, _ in selection.entries}

    def check(table: IncompleteTable) -> None:
        for file in files_of(table.definition, io) if table.key in left else ():
            if not file.live or is_uri(file.location):
                continue
            size_bytes = existing.get(file.location)
            if size_bytes is None:
                raise missing_target_file(lake.root, file.location)
            if file.kind in REWRITTEN and file.size_bytes not in (None, size_bytes):
                raise CorruptFileError(
                    f"the lakehouse at {lake.root} has another file at {file.location!r} than its table names; export"
                    " to another target",
                    path=file.location,
                )

    run_parallel(check, list(tables), lake.storage.concurrency)
