"""The content of an export: the definitions and table files to copy, and the entries of its tree.

Reading only. Under the same root every copy gets a name of its own, made of the export's id. So an export that was cut
off finds its copies again. Under another root files keep their paths, so that the next export into it tells by names
what is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trinitylake_ops.errors import (
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    LocationNotAllowedError,
    NamespaceNotFoundError,
    StoragePermissionError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import ExportLevel, TableDef
from trinitylake_ops.format.file_names import (
    owner_path,
    table_prefix,
)
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.format.locations import is_uri, normalize_root_uri, to_uri
from trinitylake_ops.iceberg.copy import FileCopy, TableFileMap, copied_definition, copies_of
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.exports.outcome import Destination
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tree.search import prefix_end, scan
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


@dataclass(frozen=True, slots=True)
class Choice:
    """What is exported: the level, the namespaces (none: all), and whether a partial export has definitions."""

    level: ExportLevel
    namespaces: tuple[str, ...] = ()
    with_definitions: bool = False

    @property
    def copies_definitions(self) -> bool:
        """Whether definitions are copied."""
        return self.level == ExportLevel.FULL or (self.level == ExportLevel.PARTIAL and self.with_definitions)


@dataclass(frozen=True, slots=True)
class DefinitionCopy:
    """A definition to copy, with its bytes where they change, else None."""

    source: str
    target: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A managed Iceberg table to copy with all its files."""

    places: TableFileMap
    files: tuple[FileCopy, ...]


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table in the export: its key, its name, and the location of the copy of its definition."""

    key: str
    name: str
    definition: str


@dataclass(slots=True)
class Content:
    """What an export copies; ``entries`` are (key, location) of its tree, ascending by key.

    ``uncopied`` are copied definitions whose tables' files stay where they are. ``registered`` are the names of those
    among them that a full export leaves so, as another catalog keeps their files. ``damaged`` are the names of managed
    tables that the export lacks, as their files cannot all be read, with the reason. ``copied`` are the
    tables whose definitions are copied, by their ids.
    """

    entries: list[tuple[str, str]] = field(default_factory=list)
    definitions: list[DefinitionCopy] = field(default_factory=list)
    tables: list[TableCopy] = field(default_factory=list)
    uncopied: list[TableDef] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)
    damaged: dict[str, TrinityLakeError] = field(default_factory=dict)
    copied: dict[str, list[CopiedTable]] = field(default_factory=dict)

    @property
    def n_files(self) -> int:
        """Definitions and table files to copy."""
        return len(self.definitions) + sum(len(table.files) for table in self.tables)

    @property
    def known_bytes(self) -> int:
        """Bytes of the table files whose tables say how large they are: all but metadata and manifest lists."""
        return sum(file.size_bytes or 0 for table in self.tables for file in table.files)

    def leave_out(self, reasons: Mapping[str, TrinityLakeError]) -> None:
        """Leave out tables, given by their ids, with the reasons. Other tables keep definitions that they share."""
        leaving = [(one, reason) for table_id, reason in reasons.items() for one in self.copied.pop(table_id, ())]
        self.damaged |= {one.name: reason for one, reason in leaving}
        keys = {one.key for one, _ in leaving}
        self.entries = [(key, location) for key, location in self.entries if key not in keys]
        needed = {location for _, location in self.entries}
        gone = {one.definition for one, _ in leaving} - needed
        self.definitions = [copy for copy in self.definitions if copy.target not in gone]
        self.tables = [table for table in self.tables if table.places.table_id not in reasons]

    def add_lakehouse_def(self, source: str, target: str) -> None:
        """Copy the definition of the lakehouse, too."""
        self.definitions.append(DefinitionCopy(source, target, None))

    def targets(self) -> Iterator[tuple[str, str]]:
        """Yield (source, target) of each file to copy."""
        for definition in self.definitions:
            yield definition.source, definition.target
        for table in self.tables:
            for file in table.files:
                yield file.source, table.places.location(file.target)


def chosen_entries(source: Snapshot, namespaces: Sequence[str]) -> list[tuple[str, str]]:
    """Return (key, location) of all objects, or of some namespaces with their tables, ascending by key.

    Raises NamespaceNotFoundError, InvalidNameError.
    """
    nodes = source.files.nodes
    if not namespaces:
        return scan(nodes, source.root)
    found: list[tuple[str, str]] = []
    for namespace in sorted(set(namespaces)):
        key = source.keys.namespace_key(namespace)
        location = source.entry(key)
        if location is None:
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r} in version {source.version}")
        prefix = source.keys.tables_prefix(namespace)
        found += [(key, location), *scan(nodes, source.root, prefix, prefix_end(prefix))]
    return sorted(found)


def gather(
    source: Snapshot,
    choice: Choice,
    destination: Destination,
    io: StorageFileIO,
    there: Mapping[str, str] | None = None,
    entries: Sequence[tuple[str, str]] | None = None,
    executor: Executor = LOCAL,
    own_io: StorageFileIO | None = None,
) -> Content:
    """Find what an export of a version copies; ``there`` are the entries that its target has already.

    ``entries`` are those to copy, by default all that were chosen. ``own_io`` reads the lakehouse to which the copies
    go, if their tables go where it has its own. That may be below its table root. Definitions, and for a full export
    manifests of all tables are read, by an executor, but for those that are there. Raises NamespaceNotFoundError,
    InvalidInputError for tables that cannot be copied, StorageError.
    """
    chosen = chosen_entries(source, choice.namespaces) if entries is None else entries
    return _Gathering(source, choice, destination, io, there or {}, executor, own_io).run(chosen)


class _Gathering:
    def __init__(
        self,
        source: Snapshot,
        choice: Choice,
        destination: Destination,
        io: StorageFileIO,
        there: Mapping[str, str],
        executor: Executor,
        own_io: StorageFileIO | None,
    ):
        self._source = source
        self._executor = executor
        table_root = source.definition.table_root
        self._copies = TableCopies(
            source.files,
            io,
            source.version,
            choice.level == ExportLevel.FULL,
            destination,
            normalize_root_uri(table_root) if table_root else "",
            own_io,
        )
        self._root = source.files.storage.root
        self._choice = choice
        self._destination = destination
        self._there = there
        self._content = Content()
        self._limit_bytes = source.definition.file_path_max_size_bytes

    def run(self, entries: Sequence[tuple[str, str]]) -> Content:
        placed: dict[str, str] = {}
        tables: list[tuple[str, ObjectName, str]] = []
        for key, location in entries:
            name = self._name(key)
            existing = self._there.get(key)
            if not self._choice.copies_definitions or name is None:
                placed[key] = self._destination.pointer(self._root, location)
            elif existing is not None and self._destination.is_copy(existing, name, location, self._limit_bytes):
                placed[key] = existing
            elif name.table is None:
                placed[key] = self._copy_definition(name, location)
            else:
                tables.append((key, name, location))
        placed |= self._copy_tables(tables)
        if not any(key.startswith(TABLE_KEY_PREFIX) for key in placed):
            self._check_rights()
        self._content.entries = [(key, placed[key]) for key, _ in entries if key in placed]
        return self._content

    def _name(self, key: str) -> ObjectName | None:
        try:
            return self._source.keys.decode(key)
        except CorruptFileError as error:
            raise CorruptFileError(error.message, path=self._source.location, version=self._source.version) from error

    def _copy_definition(self, name: ObjectName, source: str, changed: TableDef | None = None) -> str:
        target = self._destination.definition_path(name, source, self._limit_bytes, is_changed=changed is not None)
        data = None if changed is None else changed.to_bytes(target)
        self._content.definitions.append(DefinitionCopy(source, target, data))
        return target

    def _copy_tables(self, tables: Sequence[tuple[str, ObjectName, str]]) -> dict[str, str]:
        """Add tables with their definitions; returns the locations of these by key."""
        copies = self._executor.map(self._copies, [location for _, _, location in tables])
        placed = {}
        for (key, name, location), (definition, copy) in zip(tables, copies, strict=True):
            if isinstance(copy, TrinityLakeError):
                self._content.damaged[str(name)] = copy
                continue
            changed = self._changed(definition, copy, location)
            if copy is not None:
                self._content.tables.append(copy)
            else:
                self._content.uncopied.append(changed or definition)
                is_left = self._choice.level == ExportLevel.FULL and not definition.is_managed
                self._content.registered += [str(name)] if is_left else []
            placed[key] = self._copy_definition(name, location, changed)
            copied = CopiedTable(key, str(name), placed[key])
            self._content.copied.setdefault(definition.id, []).append(copied)
        return placed

    def _check_rights(self) -> None:
        """Raise StoragePermissionError if a table may not be read, and none can be: the credentials are the reason."""
        for error in self._content.damaged.values():
            if isinstance(error, StoragePermissionError) and not isinstance(error, LocationNotAllowedError):
                raise error

    def _changed(self, definition: TableDef, copy: TableCopy | None, source: str) -> TableDef | None:
        """Return a table's definition in the export, None where it does not change.

        The paths in one that stands in another lakehouse are those there: its bytes are of no use anywhere else.
        """
        metadata = iceberg_metadata(definition)
        if not metadata:
            return None
        if copy is None:
            location = self._destination.pointer(self._root, metadata)
        else:
            read_at = self._copies.io.location(to_uri(self._root, metadata))
            location = copy.places.location(copy.places.path(read_at))
        if location == metadata and not is_uri(source):
            return None
        return copied_definition(definition, location)


@dataclass(frozen=True, slots=True)
class TableCopies:
    """Work: finds out which files of tables are copied, by the locations of their definitions.

    ``copies_files`` says whether files of managed tables are; ``table_root`` is another place of theirs. ``own_io`` is
    as in :func:`gather`.
    """

    weight: ClassVar[Weight] = Weight.DEFINITION

    files: LakehouseFiles
    io: StorageFileIO
    version: int
    copies_files: bool
    destination: Destination
    table_root: str
    own_io: StorageFileIO | None = None

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the source."""
        return (self.io.storage,)

    def __call__(self, locations: Sequence[str]) -> list[tuple[TableDef, TableCopy | TrinityLakeError | None]]:
        """Return definitions, each with the files of its table to copy, None where they stay where they are.

        The error of a damaged table takes the place of its files. Raises InvalidInputError for tables that cannot be
        copied, StorageError.
        """
        definitions = self.files.definitions.tables(locations)
        copies = run_parallel(self._copy, definitions, self.io.storage.concurrency)
        return list(zip(definitions, copies, strict=True))

    def _copy(self, definition: TableDef) -> TableCopy | TrinityLakeError | None:
        try:
            return self._copy_of(definition)
        except DAMAGE as error:
            return error

    def _copy_of(self, definition: TableDef) -> TableCopy | None:
        metadata = iceberg_metadata(definition)
        if not self.copies_files or not definition.is_managed:
            return None
        if not metadata:
            self._check_without_files(definition)
            return None
        root = self.files.storage.root
        is_at_destination = not is_uri(self.destination.pointer(root, metadata))
        if is_at_destination and self.destination.root != root:
            return None
        target_root = self.destination.root if self.own_io is None else self.own_io.home_of(definition.id)
        folder, holder_root = self.destination.folder, self.destination.root
        places = TableFileMap(definition.id, root, target_root, self.table_root, folder, holder_root)
        return TableCopy(places, tuple(copies_of(definition, self.io, places)))

    def _check_without_files(self, definition: TableDef) -> None:
        """Raise InvalidInputError where a table of another format would leave its files behind."""
        if definition.is_iceberg or self.destination.root == self.files.storage.root:
            return
        try:
            prefix = table_prefix(definition.id)
        except InvalidDefinitionError:  # such an id names no folder
            return
        if any(info.path != owner_path(definition.id) for info in self.files.storage.list(prefix)):
            raise InvalidInputError(
                f"table {definition.id} of format {definition.table_format!r} has files, and only those of Iceberg"
                " tables can be copied to another root; leave its namespace out",
                path=prefix,
                version=self.version,
            )
