"""Root files: one that this process knows, those that it probed, and their naming."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.file_names import MAX_VERSION, RootNaming, root_naming
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel

_UUID_CHARS = 36


class KnownRoot:
    """A root that this process has read or created: its bytes, which are decoded on first use."""

    def __init__(self, version: int, path: str, data: bytes, node: NodeFile | None = None):
        self.version = version
        self.path = path
        self.data = data
        self._node = node

    @property
    def node(self) -> NodeFile:
        """The decoded root. Raises CorruptFileError."""
        if self._node is None:
            self._node = decode_node(self.data, self.path)
        return self._node

    @cached_attribute
    def _mark(self) -> tuple[int, bytes]:
        """The offset and the bytes of its ``commit_id``, which no other root has.

        No bytes where it has none, where it is no UUID, or where the file is compressed.
        """
        try:
            commit_id = self.node.system.get(COMMIT_ID, "").encode()
        except CorruptFileError:
            return 0, b""
        offset = self.data.find(commit_id)
        return (offset, commit_id) if offset >= 0 and len(commit_id) == _UUID_CHARS else (0, b"")

    def still_exists(self, storage: Storage) -> bool:
        """Whether this very root is at its path, and not one of a lakehouse that replaced this one.

        Reads its ``commit_id`` only, if it has one. Raises StorageError.
        """
        offset, commit_id = self._mark
        try:
            if not commit_id:
                return storage.read(self.path) == self.data
            return storage.read(self.path, offset=offset, length=len(commit_id)) == commit_id
        except FileMissingError:
            return False


@dataclass(frozen=True, slots=True)
class JustOpened:
    """The latest version that ``open`` found: when by the storage's clock, and what this process had done by then."""

    root: KnownRoot
    read_at_ms: int
    found_at_s: float
    n_created: int


class ProbedRoots:
    """Roots that were looked for: which of them exist, and the content of those that were read (None: absent).

    ``wanted`` are versions that the caller will ask for besides the latest.
    """

    def __init__(self, storage: Storage, wanted: Iterable[int] = ()):
        self.storage = storage
        self.wanted = [version for version in wanted if 0 <= version <= MAX_VERSION]
        self.existing: set[str] = set()
        self.contents: dict[str, bytes | None] = {}

    def read(self, paths: Iterable[str]) -> None:
        """Read roots in one round. Raises the first failure to read a root that exists."""
        unread = [path for path in dict.fromkeys(paths) if path not in self.contents]
        run_parallel(in_one_round_trip(self.read_one), unread, self.storage.concurrency, self.storage.serial_read_limit)

    def read_one(self, path: str) -> None:
        """Read a root. Raises StorageError."""
        try:
            self.contents[path] = self.storage.read(path)
            self.existing.add(path)
        except FileMissingError:
            self.contents[path] = None


def one_naming(root_uri: str, paths: Iterable[str]) -> RootNaming | None:
    """Return the naming of the root nodes among paths, None if there are none.

    Raises CorruptFileError for several namings.
    """
    found: dict[RootNaming, str] = {}
    for path in sorted(paths):
        naming = root_naming(path)
        if naming is not None:
            found.setdefault(naming, path)
    if len(found) > 1:
        first, second, *_ = found.values()
        raise CorruptFileError(
            f"{root_uri} holds root files of several namings, such as {first!r} and {second!r}, but a lakehouse has"
            " one; check the storage's address, find out which of them are its own, and move the others away",
            path=second,
        )
    return next(iter(found), None)
