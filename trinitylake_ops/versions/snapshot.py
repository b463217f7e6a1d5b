"""Read one version: its settings, keys and definitions.

Keys are padded to sizes that are stored in the lakehouse definition. Most lakehouses use the default sizes, so keys
that are padded to these predict which nodes will be read next. A wrong prediction only costs requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidNameError,
    NamespaceNotFoundError,
    StorageError,
    TableNotFoundError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import LakehouseDef, NamespaceDef, TableDef
from trinitylake_ops.format.file_names import RootNaming
from trinitylake_ops.format.keys import (
    LAKEHOUSE_DEF,
    MAX_TIME_MS,
    NAMESPACE_KEY_PREFIX,
    SEALED_AT_MILLIS,
    KeyCodec,
    ObjectName,
)
from trinitylake_ops.format.node_file import NodeFile, decode_node, decode_system_rows
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import KeyRange, Lookup, Subtree, find_keys, get, get_many, prefix_keys
from trinitylake_ops.tree.shape import TreeShape, damaged_pointer_error, is_damaged_pointer, measure_tree
from trinitylake_ops.tree.store import NodeStore
from trinitylake_ops.versions.definition_store import DefinitionStore
from trinitylake_ops.versions.root_files import HintWriter
from trinitylake_ops.versions.roots import Roots

#: The keys that a caller is about to read, in the encoding of the lakehouse.
Wanted = Callable[[KeyCodec], KeyRange]

_MAX_NODES = 1_000  # maximum number of nodes that are read ahead; each takes a separate request
_DEFAULTS = LakehouseDef(id="")
_LIKELY_KEYS = KeyCodec(_DEFAULTS.namespace_name_max_size_bytes, _DEFAULTS.table_name_max_size_bytes)


def read_ahead(
    storage: Storage,
    definitions: DefinitionStore,
    nodes: NodeStore,
    definition_location: str,
    root: NodeFile,
    wanted: Wanted,
) -> None:
    """Read the lakehouse definition, unless it is cached, together with the nodes that likely contain the wanted keys.

    Ignores files that cannot be read or decoded; the error is raised when they are needed.

    Args:
        storage: The storage of the lakehouse.
        definitions: The cache of definitions.
        nodes: The cache of nodes.
        definition_location: The location of the lakehouse definition.
        root: The root of the version.
        wanted: The keys that the caller is about to read.
    """
    definition_path = None if root.is_leaf else definitions.unread_path(definition_location)
    if definition_path is None:
        return
    try:
        keys = wanted(_LIKELY_KEYS)
    except InvalidNameError:  # the name may only be too long for the default sizes
        return
    node_paths = [path for child in keys.part_of(root).children if (path := nodes.unread_path(child)) is not None]
    if not 0 < len(node_paths) <= _MAX_NODES:
        return
    definition, *contents = storage.read_available([definition_path, *node_paths])
    definitions.offer_lakehouse(definition_location, definition_path, definition)
    nodes.offer(node_paths, contents)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def utc_datetime(time_ms: int) -> datetime:
    """Return milliseconds since the epoch, up to the year 9999, as an exact datetime."""
    return _EPOCH + time_ms * _MILLISECOND


def epoch_ms(time: datetime) -> int:
    """Return an aware datetime as whole milliseconds since the epoch, rounded down."""
    return (time - _EPOCH) // _MILLISECOND


@dataclass(frozen=True)
class LakehouseFiles:
    """The files of one lakehouse, read through shared caches."""

    #: The storage with a file cache.
    storage: Storage
    #: Decoded nodes.
    nodes: NodeStore
    #: Decoded definitions.
    definitions: DefinitionStore
    #: Writes the hint.
    hint: HintWriter
    #: The roots, which are read without a cache.
    roots: Roots

    def __reduce__(self) -> tuple[object, ...]:
        # Caches are not pickled.
        return (
            _reopened_files,
            (self.storage, self.nodes.external_storages, self.roots.storage, self.roots.known_naming),
        )


def _reopened_files(
    storage: Storage, external_storages: ExternalStorages, root_storage: Storage, naming: RootNaming | None
) -> LakehouseFiles:
    nodes, definitions = (
        NodeStore(storage, external_storages=external_storages),
        DefinitionStore(storage, external_storages=external_storages),
    )
    return LakehouseFiles(storage, nodes, definitions, HintWriter(root_storage), Roots(root_storage, naming))


#: The entry of a key: the location of a definition, or a definition that a transaction has not written yet.
Entry = str | NamespaceDef | TableDef


class CatalogReader(ABC):
    """The read methods of snapshots and transactions."""

    @property
    @abstractmethod
    def definition(self) -> LakehouseDef:
        """The lakehouse definition."""

    @abstractmethod
    def entry(self, key: str) -> Entry | None:
        """Return the entry of a key, None if there is none."""

    @abstractmethod
    def prefix_keys(self, prefix: str) -> pa.ChunkedArray:
        """Return all keys with a prefix in ascending order as a string column."""

    @abstractmethod
    def namespace_at(self, location: str) -> NamespaceDef:
        """Return the namespace definition at a location. Raises CorruptFileError, StorageError."""

    @abstractmethod
    def table_at(self, location: str) -> TableDef:
        """Return the table definition at a location. Raises CorruptFileError, StorageError."""

    @cached_attribute
    def keys(self) -> KeyCodec:
        """The encoding of the lakehouse's keys."""
        definition = self.definition
        return KeyCodec(definition.namespace_name_max_size_bytes, definition.table_name_max_size_bytes)

    def expect(self, wanted: Wanted) -> None:
        """Prepare for reading these keys. Does nothing by default."""
        del wanted

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces in ascending order of their padded UTF-8 bytes."""
        self.expect(lambda keys: KeyRange.prefixed(NAMESPACE_KEY_PREFIX))
        return [self.object_name(key).namespace for key in self.prefix_keys(NAMESPACE_KEY_PREFIX).to_pylist()]

    def has_namespace(self, namespace: str) -> bool:
        """Whether a namespace exists. Raises InvalidNameError."""
        return self._expected_entry(lambda keys: keys.namespace_key(namespace)) is not None

    def namespace(self, namespace: str) -> NamespaceDef:
        """Return a namespace. Raises NamespaceNotFoundError, InvalidNameError."""
        entry = self._expected_entry(lambda keys: keys.namespace_key(namespace))
        if entry is None:
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r}")
        return entry if isinstance(entry, NamespaceDef) else self.namespace_at(_location(entry))

    def tables(self, namespace: str) -> list[str]:
        """Return the names of a namespace's tables in ascending order.

        Raises NamespaceNotFoundError, InvalidNameError.
        """
        names: list[str] = self.table_names(namespace).to_pylist()
        return names

    def table_names(self, namespace: str) -> pa.StringArray:
        """Return the names of a namespace's tables as an Arrow array, without creating Python strings.

        Raises NamespaceNotFoundError, InvalidNameError.
        """
        self.expect(lambda keys: KeyRange.prefixed(keys.tables_prefix(namespace)))
        keys = self.prefix_keys(self.keys.tables_prefix(namespace))
        if not len(keys) and not self.has_namespace(namespace):  # a namespace with tables exists
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r}")
        return self.keys.table_names(keys)

    def has_table(self, namespace: str, table: str) -> bool:
        """Whether a table exists. Raises InvalidNameError."""
        return self._expected_entry(lambda keys: keys.table_key(namespace, table)) is not None

    def table(self, namespace: str, table: str) -> TableDef:
        """Return a table.

        Args:
            namespace: The namespace of the table.
            table: The name of the table.

        Raises:
            TableNotFoundError: The table does not exist.
            NamespaceNotFoundError: The namespace does not exist.
            InvalidNameError: A name is invalid.
        """
        entry = self._expected_entry(lambda keys: keys.table_key(namespace, table))
        if entry is None:
            self.namespace(namespace)
            raise TableNotFoundError(f"there is no table {namespace}.{table}")
        return entry if isinstance(entry, TableDef) else self.table_at(_location(entry))

    def _expected_entry(self, key_of: Callable[[KeyCodec], str]) -> Entry | None:
        """Prepare for the read of a key, and return its entry, None if there is none."""
        self.expect(lambda keys: KeyRange.only(key_of(keys)))
        return self.entry(key_of(self.keys))

    def object_name(self, key: str) -> ObjectName:
        """Return the names of a key. Raises CorruptFileError if it is not the key of a namespace or table."""
        name = self.keys.decode(key)
        if name is None:
            raise CorruptFileError(f"key {key!r} is not the key of a namespace or table")
        return name


def _location(entry: Entry) -> str:
    if not isinstance(entry, str):
        raise CorruptFileError(f"a key maps to a {type(entry).__name__} of the wrong kind")
    return entry


class Snapshot(CatalogReader):
    """One version of a lakehouse, read-only. Nodes and definitions are read on first use.

    Args:
        files: The files of the lakehouse.
        version: The version number.
        location: The location of the root, which can be that of an export.
        root: The root.
        read_at_ms: The storage's time just before the latest version was read. The time to live of changes that are
            based on this version counts from then.
    """

    def __init__(self, files: LakehouseFiles, version: int, location: str, root: NodeFile, read_at_ms: int = 0):
        self.files = files
        self.version = version
        self.location = location
        self.root = root
        self.read_at_ms = read_at_ms

    @classmethod
    def of(cls, files: LakehouseFiles, version: int) -> Snapshot:
        """Return a version that is known to exist. Raises CorruptFileError, StorageError."""
        path = files.roots.path(version)
        return cls(files, version, path, decode_node(files.storage.read(path), path))

    def __repr__(self) -> str:
        return f"Snapshot(version={self.version}, root={self.files.storage.root!r})"

    @property
    def created_at_ms(self) -> int:
        """When the version was committed, in milliseconds since the epoch."""
        return self.root.created_at_ms

    @property
    def created_at(self) -> datetime:
        """When the version was committed, in UTC."""
        return utc_datetime(self.created_at_ms)

    @property
    def definition_location(self) -> str:
        """The location of the lakehouse definition. Raises CorruptFileError if the root does not contain it."""
        try:
            return self.root.system[LAKEHOUSE_DEF]
        except KeyError:
            raise CorruptFileError(
                "the root contains no location of a lakehouse definition", path=self.location, version=self.version
            ) from None

    @cached_attribute
    def definition(self) -> LakehouseDef:
        """The lakehouse definition of this version."""
        with self.reading():
            return self.files.definitions.lakehouse(self.definition_location, self.version)

    @cached_attribute
    def limits(self) -> TreeLimits:
        """The limits of this lakehouse's nodes."""
        return TreeLimits.of(self.definition)

    def expect(self, wanted: Wanted) -> None:
        files = self.files
        read_ahead(files.storage, files.definitions, files.nodes, self.definition_location, self.root, wanted)

    def tree_shape(self) -> TreeShape:
        """Return the shape of this version's tree. Reads all its nodes."""
        with self.reading():
            return measure_tree(self.files.nodes, self.root, self.location, self.limits)

    def entry(self, key: str) -> str | None:
        """Return the location of a key's definition, None if there is none."""
        with self.reading():
            return get(self.files.nodes, self.root, key)

    def entries(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Return the location of each key's definition, None if there is none.

        Reads each node once, and the nodes of each level in parallel.
        """
        with self.reading():
            results = dict(find_keys(self.root, keys))
            locations = {key: result.location for key, result in results.items() if isinstance(result, Lookup)}
            subtrees = {key: result for key, result in results.items() if isinstance(result, Subtree)}
            return locations | get_many(self.files.nodes, subtrees)

    def prefix_keys(self, prefix: str) -> pa.ChunkedArray:
        """Return all keys with a prefix in ascending order as a string column."""
        with self.reading():
            return prefix_keys(self.files.nodes, self.root, prefix)

    def namespace_at(self, location: str) -> NamespaceDef:
        with self.reading():
            return self.files.definitions.namespace(location)

    def table_at(self, location: str) -> TableDef:
        with self.reading():
            return self.files.definitions.table(location)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read files of this version in the block, and detect files that are missing because the version was purged.

        Raises VersionExpiredError instead of FileMissingError in that case (docs/internals/protocol.md, "Time travel").
        """
        try:
            yield
        except FileMissingError as error:
            if self.is_sealed_now():
                raise VersionExpiredError(
                    "the version was expired and purged while it was read", path=self.location, version=self.version
                ) from error
            if is_damaged_pointer(error):
                raise damaged_pointer_error(error) from error
            raise

    def is_sealed_now(self) -> bool:
        """Whether the version was purged since it was opened. False if its root cannot be read."""
        return is_sealed_root(self.files.storage, self.location)


def is_sealed_root(storage: Storage, path: str) -> bool:
    """Whether the root at a path is sealed now. False if it cannot be read."""
    try:
        return SEALED_AT_MILLIS in decode_system_rows(storage.read(path), path)
    except StorageError:
        return False  # the caller reports its own error


def utc_of(time_ms: int) -> datetime:
    """Return milliseconds since the epoch as a datetime in UTC, clamped to the range of datetime."""
    return utc_datetime(min(max(time_ms, 0), MAX_TIME_MS))
