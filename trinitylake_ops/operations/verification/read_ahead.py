"""Reading ahead for verify, where an executor prefetches: each file once, level by level.

What was read well is told to verify, which then finds it known and asks the storage for nothing of it. What was not is
passed over, so that verify reads it itself and says what is wrong: the report is the same.
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
from trinitylake_ops.operations.verification.objects import Kind, WholeDefinitions, is_empty
from trinitylake_ops.operations.verification.storage import KnownFilesStorage
from trinitylake_ops.operations.verification.tables import CONTENT_KINDS, ContentReader, ReadContent
from trinitylake_ops.operations.verified_files import PackedBytes
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.opening import with_environment
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.change_set import views_in

#: So many definitions are waited for before they are read: enough for every task, few enough to be held.
_DEFINITIONS_HELD = 65_536


@dataclass(frozen=True, slots=True)
class ReadNode:
    """A node that was read: its bytes, and what it points to."""

    packed: PackedBytes
    sha256: bytes
    pointers: Pointers
    is_sealed: bool

    @classmethod
    def of(cls, path: str, data: bytes, root_uri: str) -> ReadNode:
        """Return what bytes hold. Raises CorruptFileError, InvalidLocationError."""
        node = decode_node(data, path)
        return cls(
            PackedBytes.of(data),
            hashlib.sha256(data).digest(),
            Pointers.of(node, located(root_uri)),
            check_file(data, path),
        )


@dataclass(frozen=True, slots=True)
class NodeRead:
    """Work: reads nodes and roots, by their paths."""

    weight: ClassVar[Weight] = Weight.NODE

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[ReadNode | None]:
        """Return nodes, None in the place of one that cannot be read or decoded."""
        contents = self.storage.read_available(paths)
        return [self._read(path, data) for path, data in zip(paths, contents, strict=True)]

    def _read(self, path: str, data: bytes | StorageError) -> ReadNode | None:
        try:
            return None if isinstance(data, StorageError) else ReadNode.of(path, data, self.storage.root)
        except TrinityLakeError:
            return None


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """A definition that is whole; ``packed`` are its bytes where they are kept, ``table`` that of one with files.

    ``views`` are the names of the views of a namespace.
    """

    sha256: bytes
    packed: PackedBytes | None
    table: TableDef | None
    is_sealed: bool
    views: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DefinitionCheck:
    """Work: reads definitions of a kind, by their paths, and checks that they are whole."""

    weight: ClassVar[Weight] = Weight.ANSWER

    storage: Storage
    kind: Kind
    keeps_bytes: bool

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[CheckedDefinition | None]:
        """Return definitions, None in the place of one that is not whole, or cannot be read."""
        contents = self.storage.read_available(paths)
        return [self._checked(path, data) for path, data in zip(paths, contents, strict=True)]

    def _checked(self, path: str, data: bytes | StorageError) -> CheckedDefinition | None:
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
    """What a file of a table names, the file's SHA-256, and whether it has seals."""

    files: list[TableFile]
    sha256: bytes
    has_seals: bool


@dataclass(frozen=True, slots=True)
class TableNames:
    """Work: reads the metadata, manifest lists and manifests of tables; each thing is all definitions of one."""

    weight: ClassVar[Weight] = Weight.TABLE

    storage: Storage
    storage_options: StorageOptions

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.storage,)

    def __call__(self, tables: Sequence[Sequence[TableDef]]) -> list[dict[str, ReadNames]]:
        """Return, of each table, what its files name; nothing of what cannot be read."""
        return run_parallel(self._named, tables, self.storage.concurrency)

    def _named(self, definitions: Sequence[TableDef]) -> dict[str, ReadNames]:
        known = KnownFilesStorage(self.storage, {}, {}, reads_all=True)
        has_seals: dict[str, bool] = {}
        io = WholeFileIO.reading(known, self.storage_options, has_seals.__setitem__)
        found: dict[str, list[TableFile]] = {}
        for definition in definitions:
            try:
                found |= _names_of(TableFiles(definition, io), found)
            except TrinityLakeError:
                continue
        checksums = known.checksums
        return {
            path: ReadNames(names, checksums[path], has_seals[path])
            for path, names in found.items()
            if path in checksums
        }


def _names_of(files: TableFiles, known: Mapping[str, object]) -> dict[str, list[TableFile]]:
    """Return what the files of a table at one version name, without those that are known. Raises StorageError."""
    found = {files.metadata_location: files.in_metadata()}
    named = found[files.metadata_location]
    lists = [file.location for file in named if file.kind == FileKind.MANIFEST_LIST and file.location not in known]
    found |= dict(zip(lists, files.in_lists(lists), strict=True))
    manifests = dict.fromkeys(file.location for path in lists for file in found[path] if file.location not in known)
    return found | dict(zip(manifests, files.in_manifests(list(manifests)), strict=True))


@dataclass(frozen=True, slots=True)
class ContentCheck:
    """Work: reads files of data whole, and looks at their footers."""

    weight: ClassVar[Weight] = Weight.FILE

    storage: Storage
    storage_options: StorageOptions

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.storage,)

    def __call__(self, files: Sequence[TableFile]) -> list[ReadContent]:
        """Return what is wrong with each file, if anything, and its checksum."""
        reader = ContentReader(KnownFilesStorage(self.storage, {}, {}, reads_all=True), self.storage_options)
        return run_parallel(reader.read, files, self.storage.concurrency)


class ReadAhead:
    """Reads ahead through ``storage`` what is listed and not known, and tells ``known``.

    ``definitions`` are those that are whole, ``contents`` files of data that were read, ``has_seals`` says of the
    files that name others which have seals. With ``keeps_bytes`` all that
    is read is kept for a record, and ``listing`` has all files; else it has none of the catalog's.
    """

    def __init__(
        self,
        executor: Executor,
        storage: Storage,
        storage_options: StorageOptions,
        known: KnownFilesStorage,
        listing: Mapping[str, FileInfo],
        *,
        keeps_bytes: bool,
    ):
        self._executor = executor
        self._storage = storage
        self._storage_options = with_environment(storage.root, storage_options)  # for tasks elsewhere
        self._known = known
        self._listing = listing
        self._keeps_bytes = keeps_bytes
        self.definitions = WholeDefinitions(known.count_taken)
        self.contents: dict[str, ReadContent] = {}
        self.has_seals: dict[str, bool] = {}

    def walk(self, roots: Iterable[str], *, is_deep: bool) -> None:
        """Read roots, by their paths, and all that they reach, data files only with ``is_deep``."""
        walked: set[str] = set()
        frontier = list(dict.fromkeys(roots))
        while frontier:
            walked.update(frontier)
            below: dict[str, None] = {}
            definitions: dict[Kind, list[str]] = {"namespace": [], "table": []}
            for node in self._nodes(frontier):
                below |= dict.fromkeys(node.pointers.nodes)
                named: dict[Kind, Sequence[str]] = {"namespace": node.pointers.others, "table": node.pointers.tables}
                for kind, paths in named.items():
                    definitions[kind] += (path for path in paths if self.definitions.is_new(path, kind))
                    if len(definitions[kind]) >= _DEFINITIONS_HELD:
                        self._check_definitions(definitions[kind], kind)
                        definitions[kind] = []
            for kind, rest in definitions.items():
                self._check_definitions(rest, kind)
            frontier = [path for path in below if path not in walked and not is_uri(path)]
        files = self._walk_tables()
        if is_deep:
            self._read_contents(files)

    def _nodes(self, paths: Sequence[str]) -> Iterator[ReadNode]:
        """Yield the nodes that can be read, those from a record, too."""
        for path in paths:
            if self._known.recorded(path) is not None:
                with contextlib.suppress(TrinityLakeError):
                    yield ReadNode.of(path, self._known.read(path), self._storage.root)
        missing = [path for path in paths if self._is_listed(path) and self._known.recorded(path) is None]
        for path, node in zip(missing, self._executor.map(NodeRead(self._storage), missing), strict=True):
            if node is not None:
                self._known.take(path, node.sha256, node.packed, node.is_sealed)
                yield node

    def _check_definitions(self, paths: Sequence[str], kind: Kind) -> None:
        missing = [path for path in paths if self._is_listed(path) and self._known.recorded(path) is None]
        work = DefinitionCheck(self._storage, kind, self._keeps_bytes)
        for path, found in zip(missing, self._executor.map(work, missing), strict=True):
            if found is not None:
                self._known.take(path, found.sha256, found.packed, found.is_sealed)
                self.definitions.add(path, kind, found.table, found.views)

    def _walk_tables(self) -> list[TableFile]:
        """Read what names the files of tables; returns all that is named."""
        tables: dict[str, list[TableDef]] = {}
        for definition in self.definitions.tables.values():
            if self._known.names(self._metadata_path(definition)) is None:
                tables.setdefault(definition.id, []).append(definition)
        named: list[TableFile] = []
        work = TableNames(self._storage, self._storage_options)
        for found in self._executor.map(work, [tables[key] for key in sorted(tables)]):
            for path, read in found.items():
                self._known.take(path, read.sha256, None)
                self.has_seals[path] = read.has_seals
                named += self._known.add_names(path, read.files)
        return named

    def _metadata_path(self, definition: TableDef) -> str:
        metadata = iceberg_metadata(definition) or ""
        return metadata.removeprefix(self._storage.root)

    def _read_contents(self, named: Iterable[TableFile]) -> None:
        files = {file.location: file for file in named if file.kind in CONTENT_KINDS and self._is_listed(file.location)}
        work = ContentCheck(self._storage, self._storage_options)
        for path, read in zip(files, self._executor.map(work, list(files.values())), strict=True):
            self.contents[path] = read

    def _is_listed(self, path: str) -> bool:
        """Whether a file seems to stand: of the catalog's that is seen when it is read, where they are not listed."""
        return path in self._listing or (is_immutable_path(path) and not self._keeps_bytes)
