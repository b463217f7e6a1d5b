"""Read files ahead for verify if the executor prefetches. Each file is read once, level by level.

Intact files are passed to verify, which then does not read them again. Other files are skipped, so that verify reads
them itself and reports the fault. The report is therefore the same as without reading ahead.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.format.definitions import NamespaceDef, TableDef
from trinitylake_ops.format.file_names import is_immutable_path
from trinitylake_ops.format.locations import is_uri, located
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.format.sealed_files import check_file
from trinitylake_ops.iceberg.reach import FileKind, TableFile
from trinitylake_ops.iceberg.whole_files import TableFiles, WholeFileIO
from trinitylake_ops.operations.executor import Executor, Weight
from trinitylake_ops.operations.gc.survey import Pointers
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.verification.objects import Kind, PrefetchedDefinitions, is_empty
from trinitylake_ops.operations.verification.storage import KnownFilesStorage
from trinitylake_ops.operations.verification.tables import CONTENT_KINDS, ContentReader, ReadContent
from trinitylake_ops.operations.verified_files import PackedBytes
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.opening import with_environment
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.change_set import views_in

#: The number of definitions to read in one step: enough to keep every task busy, but few enough to fit into memory.
_MAX_PENDING_DEFINITIONS = 65_536


@dataclass(frozen=True, slots=True)
class ReadNode:
    """A node that was read ahead."""

    #: The bytes of the node.
    packed: PackedBytes
    #: The SHA-256 of the file.
    sha256: bytes
    #: The pointers to other files.
    pointers: Pointers
    #: Whether the file has a checksum.
    is_sealed: bool

    @classmethod
    def of(cls, path: str, data: bytes, root_uri: str) -> ReadNode:
        """Decode a node.

        Args:
            path: The path of the node.
            data: The bytes of the node.
            root_uri: The root of the lakehouse.

        Raises:
            CorruptFileError: The node is damaged.
            InvalidLocationError: A location in the node is not valid.
        """
        node = decode_node(data, path)
        return cls(
            PackedBytes.of(data),
            hashlib.sha256(data).digest(),
            Pointers.of(node, located(root_uri)),
            check_file(data, path),
        )


@dataclass(frozen=True, slots=True)
class NodeReader:
    """Work that reads nodes and roots by path."""

    weight: ClassVar[Weight] = Weight.NODE

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[ReadNode | None]:
        """Return the nodes, with None for each node that cannot be read or decoded."""
        contents = self.storage.read_available(paths)
        return [self._read(path, data) for path, data in zip(paths, contents, strict=True)]

    def _read(self, path: str, data: bytes | StorageError) -> ReadNode | None:
        try:
            return None if isinstance(data, StorageError) else ReadNode.of(path, data, self.storage.root)
        except TrinityLakeError:
            return None


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """An intact definition."""

    #: The SHA-256 of the file.
    sha256: bytes
    #: The bytes of the file, if they are kept.
    packed: PackedBytes | None
    #: The definition of a table with files; otherwise, None.
    table: TableDef | None
    #: Whether the file has a checksum.
    is_sealed: bool
    #: The names of the views of a namespace.
    views: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DefinitionReader:
    """Work that reads and checks definitions of one kind by path."""

    weight: ClassVar[Weight] = Weight.ANSWER

    storage: Storage
    kind: Kind
    keeps_bytes: bool

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[CheckedDefinition | None]:
        """Return the definitions, with None for each definition that is damaged or cannot be read."""
        contents = self.storage.read_available(paths)
        return [self._check(path, data) for path, data in zip(paths, contents, strict=True)]

    def _check(self, path: str, data: bytes | StorageError) -> CheckedDefinition | None:
        if isinstance(data, StorageError):
            return None
        decode = NamespaceDef.from_bytes if self.kind == "namespace" else TableDef.from_bytes
        try:
            definition = decode(data, path)
        except TrinityLakeError:
            return None
        if is_empty(definition):
            return None
        has_files = isinstance(definition, TableDef) and definition.is_managed and iceberg_metadata(definition)
        return CheckedDefinition(
            hashlib.sha256(data).digest(),
            PackedBytes.of(data) if self.keeps_bytes else None,
            definition if isinstance(definition, TableDef) and has_files else None,
            check_file(data, path),
            frozenset(views_in(definition.properties)) if isinstance(definition, NamespaceDef) else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class ReadNames:
    """The files that a table file refers to."""

    #: The files referred to.
    files: list[TableFile]
    #: The SHA-256 of the table file.
    sha256: bytes
    #: Whether the table file has checksums.
    has_seals: bool


@dataclass(frozen=True, slots=True)
class TableNameReader:
    """Work that reads the metadata, manifest lists and manifests of tables, given all definitions of each table."""

    weight: ClassVar[Weight] = Weight.TABLE

    storage: Storage
    storage_options: StorageOptions

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.storage,)

    def __call__(self, tables: Sequence[Sequence[TableDef]]) -> list[dict[str, ReadNames]]:
        """Return, for each table, the files that its readable files refer to."""
        return run_parallel(self._read, tables, self.storage.concurrency)

    def _read(self, definitions: Sequence[TableDef]) -> dict[str, ReadNames]:
        known_files = KnownFilesStorage(self.storage, {}, {}, reads_all=True)
        has_seals: dict[str, bool] = {}
        io = WholeFileIO.reading(known_files, self.storage_options, has_seals.__setitem__)
        names_by_path: dict[str, list[TableFile]] = {}
        for definition in definitions:
            try:
                names_by_path |= _names_of(TableFiles(definition, io), names_by_path)
            except TrinityLakeError:
                continue
        checksums = known_files.checksums
        return {
            path: ReadNames(names, checksums[path], has_seals[path])
            for path, names in names_by_path.items()
            if path in checksums
        }


def _names_of(files: TableFiles, skipped: Mapping[str, object]) -> dict[str, list[TableFile]]:
    """Return the files that a table's files at one version refer to, except known files. Raises StorageError."""
    names_by_path = {files.metadata_location: files.in_metadata()}
    in_metadata = names_by_path[files.metadata_location]
    lists = [file.location for file in in_metadata if file.kind == FileKind.MANIFEST_LIST]
    lists = [location for location in lists if location not in skipped]
    names_by_path |= dict(zip(lists, files.in_lists(lists), strict=True))
    manifests = dict.fromkeys(
        file.location for path in lists for file in names_by_path[path] if file.location not in skipped
    )
    return names_by_path | dict(zip(manifests, files.in_manifests(list(manifests)), strict=True))


@dataclass(frozen=True, slots=True)
class ContentFileReader:
    """Work that reads data files in full and checks their content."""

    weight: ClassVar[Weight] = Weight.FILE

    storage: Storage
    storage_options: StorageOptions

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.storage,)

    def __call__(self, files: Sequence[TableFile]) -> list[ReadContent]:
        """Return the checksum of each file, and its fault, if any."""
        reader = ContentReader(KnownFilesStorage(self.storage, {}, {}, reads_all=True), self.storage_options)
        return run_parallel(reader.read, files, self.storage.concurrency)


class ReadAhead:
    """Read listed files that are not known yet, and add them to the known files."""

    def __init__(
        self,
        executor: Executor,
        storage: Storage,
        storage_options: StorageOptions,
        known_files: KnownFilesStorage,
        listing: Mapping[str, FileInfo],
        *,
        keeps_bytes: bool,
    ):
        """Prepare to read ahead.

        Args:
            executor: Reads the files.
            storage: The storage of the lakehouse.
            storage_options: The options of the storage.
            known_files: Receives the files.
            listing: The listed files by path. Without ``keeps_bytes``, it contains no catalog files.
            keeps_bytes: Whether all bytes are kept for a record.
        """
        self._executor = executor
        self._storage = storage
        self._storage_options = with_environment(storage.root, storage_options)  # for tasks on other machines
        self._known = known_files
        self._listing = listing
        self._keeps_bytes = keeps_bytes
        #: The intact definitions.
        self.definitions = PrefetchedDefinitions(known_files.count_taken)
        #: The data files that were read, by path.
        self.contents: dict[str, ReadContent] = {}
        #: Whether table files that refer to other files have checksums, by path.
        self.has_seals: dict[str, bool] = {}

    def walk(self, roots: Iterable[str], *, is_deep: bool) -> None:
        """Read roots and all files that they reach.

        Args:
            roots: The paths of the roots.
            is_deep: Whether to read data files as well.
        """
        walked: set[str] = set()
        frontier = list(dict.fromkeys(roots))
        while frontier:
            walked.update(frontier)
            below: dict[str, None] = {}
            definitions: dict[Kind, list[str]] = {"namespace": [], "table": []}
            for node in self._nodes(frontier):
                below |= dict.fromkeys(node.pointers.nodes)
                paths_by_kind: dict[Kind, Sequence[str]] = {
                    "namespace": node.pointers.others,
                    "table": node.pointers.tables,
                }
                for kind, paths in paths_by_kind.items():
                    definitions[kind] += (path for path in paths if self.definitions.is_new(path, kind))
                    if len(definitions[kind]) >= _MAX_PENDING_DEFINITIONS:
                        self._check_definitions(definitions[kind], kind)
                        definitions[kind] = []
            for kind, rest in definitions.items():
                self._check_definitions(rest, kind)
            frontier = [path for path in below if path not in walked and not is_uri(path)]
        files = self._walk_tables()
        if is_deep:
            self._read_contents(files)

    def _nodes(self, paths: Sequence[str]) -> Iterator[ReadNode]:
        """Yield the nodes that can be read, including those from a record."""
        for path in paths:
            if self._known.recorded(path) is not None:
                with contextlib.suppress(TrinityLakeError):
                    yield ReadNode.of(path, self._known.read(path), self._storage.root)
        missing = [path for path in paths if self._is_listed(path) and self._known.recorded(path) is None]
        for path, node in zip(missing, self._executor.map(NodeReader(self._storage), missing), strict=True):
            if node is not None:
                self._known.take(path, node.sha256, node.packed, node.is_sealed)
                yield node

    def _check_definitions(self, paths: Sequence[str], kind: Kind) -> None:
        missing = [path for path in paths if self._is_listed(path) and self._known.recorded(path) is None]
        work = DefinitionReader(self._storage, kind, self._keeps_bytes)
        for path, definition in zip(missing, self._executor.map(work, missing), strict=True):
            if definition is not None:
                self._known.take(path, definition.sha256, definition.packed, definition.is_sealed)
                self.definitions.add(path, kind, definition.table, definition.views)

    def _walk_tables(self) -> list[TableFile]:
        """Read the table files that refer to other files, and return all files that they refer to."""
        tables: dict[str, list[TableDef]] = {}
        for definition in self.definitions.tables.values():
            if self._known.names(self._metadata_path(definition)) is None:
                tables.setdefault(definition.id, []).append(definition)
        named_files: list[TableFile] = []
        work = TableNameReader(self._storage, self._storage_options)
        for names_by_path in self._executor.map(work, [tables[key] for key in sorted(tables)]):
            for path, read in names_by_path.items():
                self._known.take(path, read.sha256, None)
                self.has_seals[path] = read.has_seals
                named_files += self._known.add_names(path, read.files)
        return named_files

    def _metadata_path(self, definition: TableDef) -> str:
        metadata = iceberg_metadata(definition) or ""
        return metadata.removeprefix(self._storage.root)

    def _read_contents(self, named: Iterable[TableFile]) -> None:
        files = {file.location: file for file in named if file.kind in CONTENT_KINDS and self._is_listed(file.location)}
        work = ContentFileReader(self._storage, self._storage_options)
        for path, read in zip(files, self._executor.map(work, list(files.values())), strict=True):
            self.contents[path] = read

    def _is_listed(self, path: str) -> bool:
        """Whether a file seems to exist. Catalog files that are not listed are assumed to exist until they are read."""
        return path in self._listing or (is_immutable_path(path) and not self._keeps_bytes)
