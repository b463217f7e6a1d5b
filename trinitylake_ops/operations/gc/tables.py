"""The tables of a version with their definitions, the table root of a lakehouse, and files in table folders.

Files under a table root are deleted only if an operator claimed the table root for this lakehouse, no copy of the
lakehouse uses it, and the owner file of the table's folder names the lakehouse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from trinitylake_ops.access.allowed_roots import FileAddress, cut
from trinitylake_ops.access.table_owners import retention_reason
from trinitylake_ops.errors import CorruptFileError, FileMissingError, MaintenanceBlockedError, StorageError
from trinitylake_ops.format.definitions import METADATA_LOCATION, LakehouseDef, TableDef
from trinitylake_ops.format.file_names import TABLES_PREFIX, table_prefix
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, normalize_root_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.io.folder_owners import latest_definition_at
from trinitylake_ops.iceberg.reach import DAMAGE, TableFile, files_of
from trinitylake_ops.operations.budget import counted_with
from trinitylake_ops.operations.executor import Executor, Weight
from trinitylake_ops.operations.gc.listing import list_folders, list_named
from trinitylake_ops.operations.gc.table_files import iceberg_metadata, table_id_at, table_id_in
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.versions.table_names import resolve_table

#: The number of items that are read together.
BATCH_SIZE = 256
T = TypeVar("T")


def tables_of(base: Snapshot, only: Sequence[str] | None = None) -> list[tuple[ObjectName, str]]:
    """Return the tables of a version with the locations of their definitions.

    Args:
        base: The version.
        only: The tables, as ``namespace.table``; by default, all tables.

    Raises:
        TableNotFoundError: A table does not exist.
        StorageError: A storage request failed.
    """
    if only is None:
        named = ((base.keys.decode(key), location) for key, location in scan(base.files.nodes, base.root))
        return [(name, location) for name, location in named if name is not None and name.table is not None]
    chosen = dict.fromkeys(ObjectName(*resolve_table(text, base)) for text in only)
    return [(name, base.entry(base.keys.table_key(name.namespace, name.table or "")) or "") for name in chosen]


def with_definitions(
    base: Snapshot, tables: Sequence[tuple[ObjectName, str]]
) -> Iterator[list[tuple[ObjectName, str, TableDef]]]:
    """Yield batches of tables with their definitions, in order.

    Args:
        base: The version.
        tables: The tables with the locations of their definitions.

    Raises:
        StorageError: A definition cannot be read.
    """
    for batch in in_batches(tables):
        definitions = base.files.definitions.tables([location for _, location in batch])
        yield [(name, location, definition) for (name, location), definition in zip(batch, definitions, strict=True)]


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield items in batches that are read together."""
    for start in range(0, len(items), BATCH_SIZE):
        yield items[start : start + BATCH_SIZE]


def check_table_files(version: int, io: StorageFileIO, definition: TableDef) -> None:
    """Check that all files of a managed Iceberg table exist. This takes one listing, and one request for each external
    file.

    Args:
        version: The version, for the error.
        io: Reads table files.
        definition: The definition of the table.

    Raises:
        FileMissingError: A file is missing.
    """
    is_ours = definition.is_managed and definition.is_iceberg
    if not is_ours or METADATA_LOCATION not in definition.format_properties:
        return
    storage = io.storage
    existing = {info.path for info in storage.list(table_prefix(definition.id))}
    try:
        live = [file for file in files_of(definition, io) if file.live]
    except FileMissingError as error:
        path = (error.path or "").removeprefix(storage.root)
        raise missing_file_error(version, "a file of a table", path) from error
    unlisted = [file for file in live if file.location not in existing]
    sizes_bytes = run_parallel(io.size_bytes, [file.location for file in unlisted], storage.concurrency)
    for file, size_bytes in zip(unlisted, sizes_bytes, strict=True):
        if size_bytes is None:
            raise missing_file_error(version, f"a {file.kind} file of a table", file.location)


def missing_file_error(version: int, description: str, path: str | None) -> FileMissingError:
    """Return the error for a missing file of a version.

    Args:
        version: The version.
        description: The kind of file, for the message.
        path: The path of the file, if known.
    """
    return FileMissingError(
        f"cannot go back to version {version}: {description} that it needs is missing; nothing was changed", path=path
    )


@dataclass(frozen=True, slots=True)
class TableRoot:
    """A table root outside the lakehouse root."""

    storage: Storage
    lakehouse_id: str
    #: The root of the lakehouse.
    lake_root: str
    #: Why nothing may be deleted there; empty if files may be deleted.
    refusal: str

    @property
    def root(self) -> str:
        """The URI of the table root, with a trailing ``/``."""
        return self.storage.root

    def within(self, locations: Iterable[str]) -> list[str]:
        """Return the URIs among locations that are under the table root."""
        return [location for location in locations if location.startswith(self.root)]

    def check(self) -> None:
        """Raise MaintenanceBlockedError if nothing may be deleted any more. Raises StorageError."""
        if refusal := self.refusal or retention_reason(self.storage, self.lakehouse_id, self.lake_root):
            raise MaintenanceBlockedError(f"cannot delete files under the table root {cut(self.root)}: {refusal}")


def existing_named_files(
    storage: Storage, executor: Executor, locations: Collection[str], table_root: TableRoot | None
) -> Iterator[FileInfo]:
    """Yield the files that exist among the given locations, under the root and the table root.

    Args:
        storage: The storage of the lakehouse.
        executor: Lists the files.
        locations: Paths under the root, and URIs under the table root.
        table_root: The table root, if any.

    Raises:
        StorageError: A storage request failed.
    """
    if any(not is_uri(location) for location in locations):
        paths = {location for location in locations if not is_uri(location)}
        yield from (info for info in list_named(storage, executor, paths) if info.path in paths)
    if table_root is None or not (uris := set(table_root.within(locations))):
        return
    ids = {table_id_in(uri.removeprefix(table_root.root)) for uri in uris} - {None}
    folders = [f"{TABLES_PREFIX}{table_id}/" for table_id in sorted(map(str, ids))]
    for info in list_folders(table_root.storage, executor, folders):
        if (uri := f"{table_root.root}{info.path}") in uris:
            yield replace(info, path=uri)


def table_root_of(lake: Lakehouse, definition: LakehouseDef) -> TableRoot | None:
    """Return the table root that a definition specifies, or None if it is below the root or must not be accessed.

    Args:
        lake: The lakehouse.
        definition: The lakehouse definition.

    Raises:
        StorageError: A storage request to the table root failed.
    """
    root = normalize_root_uri(definition.table_root) if definition.table_root else lake.root
    places = lake.external_storages.allowed_roots
    if root.startswith(lake.root) or not (places.may_be_named(root) or places.is_allowed(root)):
        return None
    storage = counted_with(lake.storage, lake.external_storages.storage_of(FileAddress(root, "")))
    return TableRoot(storage, definition.id, lake.root, _refusal(lake, storage, definition.id))


def _refusal(lake: Lakehouse, storage: Storage, lakehouse_id: str) -> str:
    try:
        existing = latest_definition_at(storage, lake.storage_options)
    except CorruptFileError as error:
        return f"the lakehouse that uses it is unknown: {error.message}"
    if existing is not None and existing.id == lakehouse_id:
        return "it is the root of another copy of this lakehouse; 'trinitylake relocate' releases it"
    return retention_reason(storage, lakehouse_id, lake.root)


def reclaimed_table_files(
    lake: Lakehouse, locations: Sequence[str], executor: Executor, table_root: str = ""
) -> dict[str, TableFile]:
    """Return the files in the folders of tables that their definitions reach.

    Missing and damaged definitions are skipped.

    Args:
        lake: The lakehouse.
        locations: The locations of the definitions.
        executor: Reads the files.
        table_root: The URI of the table root, if any.

    Raises:
        StorageError: A storage request failed.
    """
    paths = [location for location in locations if not is_uri(location)]
    by_table: dict[str, list[TableDef]] = {}
    for definition in executor.map(DefinitionRead(lake.files), paths):
        if definition is not None and definition.is_managed and iceberg_metadata(definition):
            by_table.setdefault(definition.id, []).append(definition)
    files: dict[str, TableFile] = {}
    for files_of_table in executor.map(OwnFilesWalk(reading_io(lake), table_root), list(by_table.values())):
        files |= files_of_table
    return files


@dataclass(frozen=True, slots=True)
class DefinitionRead:
    """Work that reads table definitions by path."""

    weight: ClassVar[Weight] = Weight.ANSWER

    files: LakehouseFiles

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.files.storage,)

    def __call__(self, paths: Sequence[str]) -> list[TableDef | None]:
        """Return the definitions, with None for each missing or damaged definition. Raises StorageError."""
        return [
            _decoded(path, data) for path, data in zip(paths, self.files.storage.read_available(paths), strict=True)
        ]


def _decoded(path: str, data: bytes | StorageError) -> TableDef | None:
    try:
        if isinstance(data, StorageError):
            raise data
        return TableDef.from_bytes(data, path)
    except (FileMissingError, CorruptFileError):
        return None


@dataclass(frozen=True, slots=True)
class OwnFilesWalk:
    """Work that finds the files of tables in their own folders. Each item contains all definitions of one table."""

    weight: ClassVar[Weight] = Weight.TABLE

    io: StorageFileIO
    table_root: str = ""

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.io.storage,)

    def __call__(self, tables: Sequence[Sequence[TableDef]]) -> list[dict[str, TableFile]]:
        """Return the files of each table by path, up to the first missing or damaged file. Raises StorageError."""
        return run_parallel(
            lambda definitions: table_files(definitions, self.io, self.table_root), tables, self.io.storage.concurrency
        )


def table_files(definitions: Sequence[TableDef], io: StorageFileIO, table_root: str = "") -> dict[str, TableFile]:
    """Return the files, live or not, that MANAGED Iceberg tables reach in their own folders, by location.

    If a file of a table is missing or damaged, only the files found before it are returned. The other files become
    orphans unless another table reaches them.

    Args:
        definitions: The definitions of the tables.
        io: Reads table files.
        table_root: The URI of the table root, if any.
    """
    reached: dict[str, set[str]] = {}  # by table, so that a table cannot hide files of another table
    files: dict[str, TableFile] = {}
    walked: set[tuple[str, str]] = set()
    for definition in definitions:
        metadata = iceberg_metadata(definition)
        if not definition.is_managed or not metadata or (definition.id, metadata) in walked:
            continue
        walked.add((definition.id, metadata))
        with contextlib.suppress(*DAMAGE):
            for file in files_of(definition, io, reached.setdefault(definition.id, set()), failures=[]):
                if table_id_at(file.location, table_root) == definition.id:
                    files.setdefault(file.location, file)
    return files
