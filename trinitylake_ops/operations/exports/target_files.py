"""Checks which files that an export needs its target already has, as the target's own table metadata lists them.

A file at the target counts only if the listing shows it with the size that the metadata records. Definitions, table
metadata, manifest lists and manifests are read, so a damaged one is found as well.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.iceberg.copy import REWRITTEN
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import DAMAGE, FileKind, files_of
from trinitylake_ops.operations.executor import Executor
from trinitylake_ops.operations.exports.content import Choice, Content, CopiedTable, chosen_entries, gather
from trinitylake_ops.operations.exports.outcome import Destination
from trinitylake_ops.operations.exports.roots import TargetLakehouse
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
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
    def of(cls, lake: Lakehouse, base: Snapshot, content: Content, there: Mapping[str, int]) -> TargetFiles:
        """Compare the files of a target with its listing.

        Args:
            lake: The lakehouse at the target.
            base: Its version.
            content: The export. Its entries that the target has at the same location are unchanged.
            there: The sizes in bytes of the files at the target, by path.

        Raises:
            FileMissingError: The definition of an unchanged object is missing.
            CorruptFileError: The definition of an unchanged object is damaged.
            StorageError: Another failure of the storage.
        """
        copied_ids = {table.places.table_id for table in content.tables}
        wanted, io = dict(content.entries), reading_io(lake)
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
            return definition, *_compared(definition, io, there)

        entries = sorted(TargetLakehouse(lake, base).entries().items())
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


def _compared(definition: TableDef, io: StorageFileIO, there: Mapping[str, int]) -> tuple[set[str], set[str]]:
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
                size_bytes = there.get(file.location)
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


def check_definitions(content: Content, choice: Choice, root: str, there: Container[str]) -> None:
    """Raise FileMissingError if the target has lost a definition that its tree points to.

    Args:
        content: The export.
        choice: What it copies.
        root: The root of the target.
        there: The files at the target.
    """
    new = {copy.target for copy in content.definitions}
    for _, place in content.entries:
        if choice.copies_definitions and not is_uri(place) and place not in new and place not in there:
            raise missing_target_file(root, place)


def missing_content(
    tables: Collection[IncompleteTable],
    source: Snapshot,
    choice: Choice,
    names: Destination,
    io: StorageFileIO,
    executor: Executor,
) -> Content:
    """Return the files of unchanged tables, to be copied under the names that they have at the target.

    Tables whose files at the source cannot all be read are among the damaged ones.

    Args:
        tables: The tables.
        source: The exported version.
        choice: What is exported.
        names: Names of copies at the target. Its siblings are tried as well.
        io: Reads the files of the source.
        executor: Reads the manifests of the source.

    Raises:
        FileMissingError: The target has the files of a table under other names, and has lost one.
        StorageError: Another failure of the storage.
    """
    sources, content = dict(chosen_entries(source, choice.namespaces)), Content()
    remaining = {table.key: table for table in tables}
    for destination in (names, *names.siblings):
        entries = [(key, sources[key]) for key in sorted(remaining)]
        if not entries:
            break
        gathered = gather(source, choice, destination, io, entries=entries, executor=executor)
        content.damaged |= gathered.damaged
        copies = {table.places.table_id: table for table in gathered.tables}
        names_of = {copied.key: copied.name for several in gathered.copied.values() for copied in several}
        for key, table in list(remaining.items()):
            copy, name = copies.get(table.definition.id), names_of.get(key)
            if name is None:  # damaged at the source
                del remaining[key]
            elif copy is not None and _metadata_path(table, names.root) in {
                file.target for file in copy.files if file.kind == FileKind.METADATA
            }:
                del remaining[key]
                content.tables.append(copy)
                content.entries.append((key, table.location))
                content.copied.setdefault(table.definition.id, []).append(CopiedTable(key, name, table.location))
    for table in remaining.values():  # under names that an earlier version of this program made
        raise missing_target_file(names.root, min(table.lost))
    return content


def _metadata_path(table: IncompleteTable, root: str) -> str:
    return to_location(root, iceberg_metadata(table.definition) or "")


def check_recopied(
    tables: Iterable[IncompleteTable], content: Content, lake: Lakehouse, there: Mapping[str, int]
) -> None:
    """Raise an error for a table that still lacks files at the target after they were copied again.

    Data files were compared with their sources, whose metadata may record wrong sizes; files that contain paths need
    the sizes that others record.

    Args:
        tables: The tables.
        content: What was copied. Tables that it lacks were left out.
        lake: The lakehouse at the target.
        there: The sizes in bytes of the files at the target, by path.

    Raises:
        FileMissingError: A file is still missing.
        CorruptFileError: A file is not the one that its table names.
        StorageError: Another failure of the storage.
    """
    io, left = reading_io(lake), {key for key, _ in content.entries}

    def check(table: IncompleteTable) -> None:
        for file in files_of(table.definition, io) if table.key in left else ():
            if not file.live or is_uri(file.location):
                continue
            size_bytes = there.get(file.location)
            if size_bytes is None:
                raise missing_target_file(lake.root, file.location)
            if file.kind in REWRITTEN and file.size_bytes not in (None, size_bytes):
                raise CorruptFileError(
                    f"the lakehouse at {lake.root} has another file at {file.location!r} than its table names; export"
                    " to another target",
                    path=file.location,
                )

    run_parallel(check, list(tables), lake.storage.concurrency)
