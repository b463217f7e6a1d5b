"""Select the files of a version for a transfer: definitions, table files, and the entries of the target's tree.

Selecting only reads files. Under the same root, each copy gets a name that no other transfer uses. The name is derived
from the id of the transfer, so that an interrupted transfer finds its copies again. Under another root, files keep
their paths, so that the next transfer recognizes the files that the target already has.
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
from trinitylake_ops.format.file_names import owner_path, table_prefix
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.format.locations import is_uri, normalize_root_uri
from trinitylake_ops.iceberg.copy import TableCopy, TableFileMap, copied_definition
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.transfer.names import Destination
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tree.search import prefix_end, scan
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


@dataclass(frozen=True, slots=True)
class Choice:
    """The content of an export."""

    #: The level of the export.
    level: ExportLevel
    #: The selected namespaces; empty for all.
    namespaces: tuple[str, ...] = ()
    #: Whether a partial export copies definitions.
    with_definitions: bool = False

    @property
    def copies_definitions(self) -> bool:
        """Whether definitions are copied."""
        return self.level == ExportLevel.FULL or (self.level == ExportLevel.PARTIAL and self.with_definitions)


@dataclass(frozen=True, slots=True)
class DefinitionCopy:
    """A definition to copy."""

    #: The location of the definition.
    source: str
    #: The path of the copy.
    target: str
    #: The bytes of the copy if they differ from the source; otherwise, None.
    data: bytes | None


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table at the target."""

    #: The key of the table.
    key: str
    #: The name of the table.
    name: str
    #: The location of the copy of its definition.
    definition: str


@dataclass(slots=True)
class Selection:
    """The files of a version that a transfer copies."""

    #: The (key, location) pairs of the objects in the tree at the target, in ascending order of keys.
    entries: list[tuple[str, str]] = field(default_factory=list)
    #: The definitions to copy.
    definitions: list[DefinitionCopy] = field(default_factory=list)
    #: The tables whose files are copied.
    tables: list[TableCopy] = field(default_factory=list)
    #: Copied definitions of tables whose files are not copied.
    uncopied: list[TableDef] = field(default_factory=list)
    #: The names of tables in ``uncopied`` that a full export does not copy because another catalog owns them.
    registered: list[str] = field(default_factory=list)
    #: The errors of managed tables that are left out because some of their files cannot be read, by name.
    damaged: dict[str, TrinityLakeError] = field(default_factory=dict)
    #: The tables whose definitions are copied, by id.
    copied: dict[str, list[CopiedTable]] = field(default_factory=dict)

    @property
    def n_files(self) -> int:
        """The number of definitions and table files to copy."""
        return len(self.definitions) + sum(len(table.files) for table in self.tables)

    @property
    def known_bytes(self) -> int:
        """The total size of table files whose sizes are recorded: all except metadata files and manifest lists."""
        return sum(file.size_bytes or 0 for table in self.tables for file in table.files)

    @property
    def table_ids(self) -> list[str]:
        """The ids of the tables whose files are copied, in ascending order."""
        return sorted({table.places.table_id for table in self.tables})

    def add_definition(self, source: str, target: str, changed: TableDef | None = None) -> None:
        """Add a definition to copy.

        Args:
            source: The location of the definition.
            target: The path of the copy.
            changed: The content of the copy if it differs from the source.
        """
        data = None if changed is None else changed.to_bytes(target)
        self.definitions.append(DefinitionCopy(source, target, data))

    def leave_out(self, reasons: Mapping[str, TrinityLakeError]) -> None:
        """Remove damaged tables. Definitions that other tables share with them are kept.

        Args:
            reasons: The errors of the tables, by id.
        """
        removed = [(table, reason) for table_id, reason in reasons.items() for table in self.copied.pop(table_id, ())]
        self.damaged |= {table.name: reason for table, reason in removed}
        keys = {table.key for table, _ in removed}
        self.entries = [(key, location) for key, location in self.entries if key not in keys]
        needed = {location for _, location in self.entries}
        unneeded = {table.definition for table, _ in removed} - needed
        self.definitions = [copy for copy in self.definitions if copy.target not in unneeded]
        self.tables = [table for table in self.tables if table.places.table_id not in reasons]

    def targets(self) -> Iterator[tuple[str, str]]:
        """Yield (source, target) for each file to copy."""
        for definition in self.definitions:
            yield definition.source, definition.target
        for table in self.tables:
            for file in table.files:
                yield file.source, table.places.location(file.target)


def selected_entries(source: Snapshot, namespaces: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (key, location) pairs of all objects, or of some namespaces and their tables, in ascending order of
    keys.

    Args:
        source: The version.
        namespaces: The namespaces; empty for all objects.

    Raises:
        NamespaceNotFoundError: A namespace does not exist in the version.
        InvalidNameError: A name is not valid.
        StorageError: A storage request failed.
    """
    nodes = source.files.nodes
    if not namespaces:
        return scan(nodes, source.root)
    entries: list[tuple[str, str]] = []
    for namespace in sorted(set(namespaces)):
        key = source.keys.namespace_key(namespace)
        location = source.entry(key)
        if location is None:
            raise NamespaceNotFoundError(f"namespace {namespace!r} does not exist in version {source.version}")
        prefix = source.keys.tables_prefix(namespace)
        entries += [(key, location), *scan(nodes, source.root, prefix, prefix_end(prefix))]
    return sorted(entries)


@dataclass(frozen=True, slots=True)
class Selector:
    """Select files of one version for transfers."""

    source: Snapshot
    choice: Choice
    #: Reads the files of the version.
    io: StorageFileIO
    #: Reads definitions and, for full exports, the manifests of all tables.
    executor: Executor = LOCAL

    def entries(self) -> list[tuple[str, str]]:
        """Return the (key, location) pairs of all selected objects. See :func:`selected_entries` for the errors."""
        return selected_entries(self.source, self.choice.namespaces)

    def select(
        self,
        destination: Destination,
        entries: Sequence[tuple[str, str]] | None = None,
        existing: Mapping[str, str] | None = None,
        own_io: StorageFileIO | None = None,
    ) -> Selection:
        """Return the files to copy.

        Args:
            destination: The names of the copies.
            entries: The (key, location) pairs of the objects to select; None for all in the selected namespaces.
            existing: The locations of definitions at the target by key. Definitions that are already copies are not
                read again.
            own_io: Reads the lakehouse that receives the copies, if the copied tables are stored where that lakehouse
                stores its own tables, which can be below its table root.

        Raises:
            NamespaceNotFoundError: A selected namespace does not exist.
            InvalidInputError: A table cannot be copied.
            StorageError: A storage request failed.
        """
        builder = _SelectionBuilder(self, destination, existing or {}, own_io)
        return builder.build(self.entries() if entries is None else entries)


class _SelectionBuilder:
    def __init__(
        self, selector: Selector, destination: Destination, existing: Mapping[str, str], own_io: StorageFileIO | None
    ):
        self._source = source = selector.source
        self._root = source.files.storage.root
        self._limit_bytes = source.definition.file_path_max_size_bytes
        self._choice = selector.choice
        self._io = selector.io
        self._executor = selector.executor
        self._destination = destination
        self._existing = existing
        is_full = selector.choice.level == ExportLevel.FULL
        table_root = source.definition.table_root and normalize_root_uri(source.definition.table_root)
        self._copies = TableCopies(source.files, selector.io, source.version, is_full, destination, table_root, own_io)
        self._selection = Selection()

    def build(self, entries: Sequence[tuple[str, str]]) -> Selection:
        locations: dict[str, str] = {}
        tables: list[tuple[str, ObjectName, str]] = []
        for key, location in entries:
            name = self._name(key)
            existing = self._existing.get(key)
            if not self._choice.copies_definitions or name is None:
                locations[key] = self._destination.pointer(self._root, location)
            elif existing is not None and self._destination.is_copy(existing, name, location, self._limit_bytes):
                locations[key] = existing
            elif name.table is None:
                locations[key] = self._copy_definition(name, location)
            else:
                tables.append((key, name, location))
        locations |= self._copy_tables(tables)
        if not any(key.startswith(TABLE_KEY_PREFIX) for key in locations):
            self._check_rights()
        self._selection.entries = [(key, locations[key]) for key, _ in entries if key in locations]
        return self._selection

    def _name(self, key: str) -> ObjectName | None:
        try:
            return self._source.keys.decode(key)
        except CorruptFileError as error:
            raise CorruptFileError(error.message, path=self._source.location, version=self._source.version) from error

    def _copy_definition(self, name: ObjectName, source: str, changed: TableDef | None = None) -> str:
        target = self._destination.definition_path(name, source, self._limit_bytes, is_changed=changed is not None)
        self._selection.add_definition(source, target, changed)
        return target

    def _copy_tables(self, tables: Sequence[tuple[str, ObjectName, str]]) -> dict[str, str]:
        """Add tables and their definitions. Return the locations of the definitions by key."""
        copies = self._executor.map(self._copies, [location for _, _, location in tables])
        locations = {}
        for (key, name, location), (definition, copy) in zip(tables, copies, strict=True):
            if isinstance(copy, TrinityLakeError):
                self._selection.damaged[str(name)] = copy
                continue
            changed = self._changed(definition, copy, location)
            if copy is not None:
                self._selection.tables.append(copy)
            else:
                self._selection.uncopied.append(changed or definition)
                is_registered = self._choice.level == ExportLevel.FULL and not definition.is_managed
                self._selection.registered += [str(name)] if is_registered else []
            locations[key] = self._copy_definition(name, location, changed)
            copied = CopiedTable(key, str(name), locations[key])
            self._selection.copied.setdefault(definition.id, []).append(copied)
        return locations

    def _check_rights(self) -> None:
        """Raise StoragePermissionError if no table can be read and access to one is denied, due to the credentials."""
        for error in self._selection.damaged.values():
            if isinstance(error, StoragePermissionError) and not isinstance(error, LocationNotAllowedError):
                raise error

    def _changed(self, definition: TableDef, copy: TableCopy | None, source: str) -> TableDef | None:
        """Return the definition of a table at the target, or None if it does not change.

        Paths in a definition of another lakehouse are relative to that lakehouse, so such a definition always changes.
        """
        metadata = iceberg_metadata(definition)
        if not metadata:
            return None
        if copy is None:
            location = self._destination.pointer(self._root, metadata)
        else:
            location = copy.metadata_location(definition, self._io)
        if location == metadata and not is_uri(source):
            return None
        return copied_definition(definition, location)


@dataclass(frozen=True, slots=True)
class TableCopies:
    """Work that selects the files of tables, identified by the locations of their definitions."""

    weight: ClassVar[Weight] = Weight.DEFINITION

    files: LakehouseFiles
    io: StorageFileIO
    version: int
    #: Whether the files of managed tables are copied.
    copies_files: bool
    destination: Destination
    #: Another root below which tables of the source have files; empty if there is none.
    table_root: str
    #: See :meth:`Selector.select`.
    own_io: StorageFileIO | None = None

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the source."""
        return (self.io.storage,)

    def __call__(self, locations: Sequence[str]) -> list[tuple[TableDef, TableCopy | TrinityLakeError | None]]:
        """Read definitions, and select the files to copy for each table.

        Returns:
            A definition and the table's files for each location. The files are None if they are not copied, or the
            error of a damaged table.

        Raises:
            InvalidInputError: A table cannot be copied.
            StorageError: A storage request failed.
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
        file_map = TableFileMap(definition.id, root, target_root, self.table_root, folder, holder_root)
        return TableCopy.of(definition, self.io, file_map)

    def _check_without_files(self, definition: TableDef) -> None:
        """Raise InvalidInputError for a table in another format whose files would not be copied."""
        if definition.is_iceberg or self.destination.root == self.files.storage.root:
            return
        try:
            prefix = table_prefix(definition.id)
        except InvalidDefinitionError:  # the id is not a folder name
            return
        if any(info.path != owner_path(definition.id) for info in self.files.storage.list(prefix)):
            raise InvalidInputError(
                f"table {definition.id} of format {definition.table_format!r} cannot be copied to another root: only"
                " files of Iceberg tables can be copied; leave its namespace out",
                path=prefix,
                version=self.version,
            )
