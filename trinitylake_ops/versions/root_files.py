"""The files by which versions are found: the roots that this process knows or probed, their naming, and the hint."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CorruptFileError, FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, MAX_VERSION, RootNaming, parse_hint, root_naming
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.storage import background
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel

logger = logging.getLogger(__name__)

HINT_READ_BYTES = 64  # more than any number takes, with white space; a file of garbage may be huge
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


def read_hint(storage: Storage) -> int | None:
    """Return the version the hint names, or None when it is missing, holds no version or cannot be read."""
    try:
        return parse_hint(storage.read(HINT_PATH, length=HINT_READ_BYTES))
    except FileMissingError:
        return None
    except StorageError as error:
        logger.warning("the hint cannot be read, going on without it: %s", error)
        return None


class HintWriter:
    """Writes the hint, best effort. The hint only saves requests, so a failure is logged and counted, no more."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._newest = -1
        self._failed: list[int] = []

    @property
    def n_failures(self) -> int:
        """How many hints could not be written."""
        background.flush()
        return len(self._failed)

    def note(self, version: int) -> None:
        """Let the hint name a version that was just committed, unless we have committed a newer one, too.

        It is written beside: the caller does not wait, and of versions that follow each other at once only the last is.
        """
        if version >= self._newest:
            self._newest = version
            background.put(self._write_newest)

    def _write_newest(self) -> None:
        version = self._newest
        try:
            self._storage.write_best_effort(HINT_PATH, str(version).encode("ascii"))
        except TrinityLakeError as error:
            self._failed.append(version)
            logger.warning("version %d is committed, but its hint could not be written: %s", version, error)
