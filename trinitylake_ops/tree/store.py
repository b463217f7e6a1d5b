"""Read nodes by their pointers, also in a tree that may be damaged."""

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
_MEMORY_PER_NODE_BYTES = 4096  # memory of a decoded node, beyond the bytes that its columns are views of


class NodeStore:
    """Decoded nodes of one lakehouse, cached by path up to about ``cache_bytes`` of memory.

    Non-root nodes are immutable, so a cached one never goes stale. Callers must not change the nodes they get. Root
    nodes are not cached: the deletion of a version overwrites its root. Bytes that do not decode are dropped from the
    storage's cache and read once more. Nodes that an export left in another lakehouse are read from
    ``external_storages``.
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
        """Return what reads by another storage of the same files, and shares the nodes that are decoded."""
        other = NodeStore(storage, external_storages=external_storages)
        other._cache = self._cache
        return other

    def load(self, location: str) -> NodeFile:
        """Return the node at a location. Raises FileMissingError, CorruptFileError, StorageError."""
        known = self._cache.get(self._path(location))
        return self.load_many([location])[0] if known is None else known

    def load_many(self, locations: Sequence[str]) -> list[NodeFile]:
        """Return nodes in the order of their locations, reading the uncached ones in parallel."""
        nodes = []
        for node in self.load_available(locations):
            if isinstance(node, StorageError):
                raise node
            nodes.append(node)
        return nodes

    def load_available(self, locations: Sequence[str]) -> list[NodeFile | StorageError]:
        """Return nodes as ``load_many`` does, but a failure takes the place of its node instead of being raised."""
        places = [self._path_or_error(location) for location in locations]
        found: dict[str, NodeFile | StorageError] = {}
        missing: list[str] = []
        distant: list[str] = []
        for path in dict.fromkeys(places):
            if isinstance(path, str):
                node = self._cache.get(path)
                if node is not None:
                    found[path] = node
                else:
                    (distant if is_uri(path) else missing).append(path)
        self._decode(missing, self._storage.read_available(missing), found)
        for path, data in zip(distant, self.external_storages.read_available(distant), strict=True):
            found[path] = data if isinstance(data, StorageError) else self._decoded_distant(path, data)
        return [found[place] if isinstance(place, str) else place for place in places]

    def unread_path(self, location: str) -> str | None:
        """Return the path of a node of this lakehouse that has not been read; None for others, and for none."""
        path = self._path_or_error(location)
        return path if isinstance(path, str) and not is_uri(path) and self._cache.get(path) is None else None

    def offer(self, paths: Sequence[str], read: Sequence[bytes | StorageError]) -> None:
        """Keep nodes that were read with other files. Who needs one that failed, or does not decode, tells of it."""
        files = [(data, path) for path, data in zip(paths, read, strict=True) if isinstance(data, bytes)]
        for (_, path), node in zip(files, decode_nodes(files), strict=True):
            if isinstance(node, NodeFile):
                self._cache_node(path, node)

    def _decode(
        self, paths: Sequence[str], read: Sequence[bytes | StorageError], found: dict[str, NodeFile | StorageError]
    ) -> None:
        """Add to ``found`` the nodes of files, or what failed. The nodes are kept."""
        files = []
        for path, data in zip(paths, read, strict=True):
            if isinstance(data, StorageError):
                found[path] = data
            else:
                files.append((data, path))
        for (data, path), node in zip(files, decode_nodes(files), strict=True):
            found[path] = (
                self._cache_node(path, node) if isinstance(node, NodeFile) else self._decoded_or_error(path, data)
            )

    def _decoded_or_error(self, path: str, data: bytes) -> NodeFile | StorageError:
        try:
            return self._cache_node(path, decoded(self._storage, path, data, decode_node))
        except StorageError as error:
            return error

    def _decoded_distant(self, uri: str, data: bytes) -> NodeFile | StorageError:
        """Return a node of another lakehouse. The paths in it lead into that lakehouse, too."""
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
            raise CorruptFileError(f"a node points to {location!r}, which is no location", path=location) from error


#: More levels than any tree has: with at least two children for each node below the root, it would have 2^64 leaves.
MOST_LEVELS = 64


class NodePath:
    """The nodes of one tree that were met on the way down. No sound tree has a node in two places."""

    def __init__(self) -> None:
        self._locations: set[str] = set()

    def add(self, locations: Iterable[str]) -> None:
        """Note nodes that are about to be read. Raises CorruptFileError for one that was met before."""
        for location in locations:
            if location in self._locations:
                raise repeated_node_error(location)
            self._locations.add(location)


def check_depth(depth: int, location: str) -> None:
    """Raise CorruptFileError for a node so far below the root that the pointers above must lead in a circle."""
    if depth > MOST_LEVELS:
        raise repeated_node_error(location)


def repeated_node_error(location: str) -> CorruptFileError:
    """Return the error of a node that is in two places of a tree."""
    return CorruptFileError(
        f"the node {location!r} is reached twice in one tree, so the tree is damaged; which versions are not,"
        " trinitylake verify tells",
        path=location,
    )
