"""Read and cache nodes, and detect cycles in a damaged tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import CorruptFileError, InvalidLocationError, StorageError
from trinitylake_ops.format.file_names import root_of
from trinitylake_ops.format.locations import is_uri, to_location, to_uri
from trinitylake_ops.format.node_file import NodeFile, decode_node, decode_nodes
from trinitylake_ops.storage.cache.memory import ByteLru
from trinitylake_ops.storage.cache.storage import decoded
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.tree.node import messages_bytes

DEFAULT_CACHE_BYTES = 64 * 1024 * 1024
_MEMORY_PER_NODE_BYTES = 4096  # memory of a decoded node in addition to the file bytes that its columns refer to


class NodeStore:
    """Reads and caches decoded nodes of one lakehouse.

    Non-root nodes are immutable, so a cached node never becomes stale, and callers must not change it. Root nodes are
    not cached, because deleting a version overwrites its root. If cached bytes cannot be decoded, they are dropped from
    the storage's cache and the file is read once more.

    Args:
        storage: The storage of the lakehouse.
        cache_bytes: Approximate maximum memory of cached nodes.
        external_storages: Reads nodes in other lakehouses, to which the tree of an export or a copy may refer.
    """

    def __init__(
        self,
        storage: Storage,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        external_storages: ExternalStorages | None = None,
    ):
        self._storage = storage
        self.external_storages = external_storages or ExternalStorages(storage.root, StorageOptions())
        self._cache: ByteLru[str, NodeFile] = ByteLru(cache_bytes)

    def on(self, storage: Storage, external_storages: ExternalStorages) -> NodeStore:
        """Return a node store that shares this one's cache and reads through another storage of the same files.

        Args:
            storage: The other storage of the lakehouse.
            external_storages: Reads nodes in other lakehouses.
        """
        other = NodeStore(storage, external_storages=external_storages)
        other._cache = self._cache
        return other

    def load(self, location: str) -> NodeFile:
        """Return the node at a location. Raise StorageError, for example FileMissingError or CorruptFileError."""
        cached = self._cache.get(self._path(location))
        return self.load_many([location])[0] if cached is None else cached

    def load_many(self, locations: Sequence[str]) -> list[NodeFile]:
        """Return the nodes at the locations, in the same order. Uncached nodes are read in parallel."""
        nodes = []
        for node in self.load_available(locations):
            if isinstance(node, StorageError):
                raise node
            nodes.append(node)
        return nodes

    def load_available(self, locations: Sequence[str]) -> list[NodeFile | StorageError]:
        """Return nodes like :meth:`load_many`, but return an error in place of each node that cannot be read."""
        paths = [self._path_or_error(location) for location in locations]
        nodes: dict[str, NodeFile | StorageError] = {}
        missing: list[str] = []
        external: list[str] = []
        for path in dict.fromkeys(paths):
            if isinstance(path, str):
                node = self._cache.get(path)
                if node is not None:
                    nodes[path] = node
                else:
                    (external if is_uri(path) else missing).append(path)
        self._decode(missing, self._storage.read_available(missing), nodes)
        for path, data in zip(external, self.external_storages.read_available(external), strict=True):
            nodes[path] = data if isinstance(data, StorageError) else self._decoded_external(path, data)
        return [nodes[path] if isinstance(path, str) else path for path in paths]

    def unread_path(self, location: str) -> str | None:
        """Return the path of a node in this lakehouse that is not cached; None for any other location."""
        path = self._path_or_error(location)
        return path if isinstance(path, str) and not is_uri(path) and self._cache.get(path) is None else None

    def offer(self, paths: Sequence[str], read: Sequence[bytes | StorageError]) -> None:
        """Cache nodes that were read together with other files.

        Files that could not be read or decoded are ignored. A later load of such a node raises the error.

        Args:
            paths: The paths of the nodes.
            read: The content of each file, or the error of the read.
        """
        files = [(data, path) for path, data in zip(paths, read, strict=True) if isinstance(data, bytes)]
        for (_, path), node in zip(files, decode_nodes(files), strict=True):
            if isinstance(node, NodeFile):
                self._cache_node(path, node)

    def _decode(
        self, paths: Sequence[str], read: Sequence[bytes | StorageError], nodes: dict[str, NodeFile | StorageError]
    ) -> None:
        """Decode and cache nodes, and add each node or its error to ``nodes``."""
        files = []
        for path, data in zip(paths, read, strict=True):
            if isinstance(data, StorageError):
                nodes[path] = data
            else:
                files.append((data, path))
        for (data, path), node in zip(files, decode_nodes(files), strict=True):
            nodes[path] = (
                self._cache_node(path, node) if isinstance(node, NodeFile) else self._decoded_or_error(path, data)
            )

    def _decoded_or_error(self, path: str, data: bytes) -> NodeFile | StorageError:
        try:
            return self._cache_node(path, decoded(self._storage, path, data, decode_node))
        except StorageError as error:
            return error

    def _decoded_external(self, uri: str, data: bytes) -> NodeFile | StorageError:
        """Decode a node of another lakehouse, and convert its relative paths to URIs in that lakehouse."""
        try:
            node = decode_node(data, uri)
        except StorageError as error:
            return error
        root = root_of(uri)
        if root is not None:
            node = node.rebased(lambda location: to_uri(root, location))
        self._cache.put(uri, node, len(data) * 2 + messages_bytes(node.buffer) + _MEMORY_PER_NODE_BYTES)
        return node

    def _cache_node(self, path: str, node: NodeFile) -> NodeFile:
        buffer_bytes = messages_bytes(node.buffer) if node.buffer else 0
        self._cache.put(path, node, node.memory_bytes + buffer_bytes + _MEMORY_PER_NODE_BYTES)
        return node

    def _path_or_error(self, location: str) -> str | StorageError:
        try:
            return self._path(location)
        except StorageError as error:
            return error

    def _path(self, location: str) -> str:
        try:
            return to_location(self._storage.root, location)
        except InvalidLocationError as error:
            raise CorruptFileError(
                f"a node points to {location!r}, which is not a valid location", path=location
            ) from error


#: No tree has this many levels: with at least two children per node, the tree would have 2^64 leaves.
MAX_LEVELS = 64


class NodePath:
    """The nodes of one tree that were visited. In an undamaged tree, each node is reached only once."""

    def __init__(self) -> None:
        self._locations: set[str] = set()

    def add(self, locations: Iterable[str]) -> None:
        """Record nodes that are about to be read. Raise CorruptFileError if one was visited before."""
        for location in locations:
            if location in self._locations:
                raise repeated_node_error(location)
            self._locations.add(location)


def check_depth(depth: int, location: str) -> None:
    """Raise CorruptFileError if a node is so far below the root that the pointers above it must form a cycle."""
    if depth > MAX_LEVELS:
        raise repeated_node_error(location)


def repeated_node_error(location: str) -> CorruptFileError:
    """Return the error for a node that is reached twice in one tree."""
    return CorruptFileError(
        f"the tree is damaged: the node {location!r} is reached twice; run 'trinitylake verify' to find undamaged"
        " versions",
        path=location,
    )
