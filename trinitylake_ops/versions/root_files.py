"""Files that identify versions: known and probed roots, their naming, and the hint."""

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

#: Number of bytes that suffices for any version number and white space. A corrupt hint may be larger.
HINT_READ_BYTES = 64
_UUID_CHARS = 36


class KnownRoot:
    """A root that this process has read or created. It is decoded on first use."""

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
        """The offset and the bytes of the ``commit_id``, which identifies this root.

        Empty bytes if there is no ``commit_id``, if it is not a UUID, or if the file is compressed.
        """
        try:
            commit_id = self.node.system.get(COMMIT_ID, "").encode()
        except CorruptFileError:
            return 0, b""
        offset = self.data.find(commit_id)
        return (offset, commit_id) if offset >= 0 and len(commit_id) == _UUID_CHARS else (0, b"")

    def still_exists(self, storage: Storage) -> bool:
        """Whether the path still contains this root, and not the root of a lakehouse that replaced this one.

        Reads only the ``commit_id``, if there is one. Raises StorageError.
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
    """The latest version when a lakehouse was opened."""

    #: The root of the version.
    root: KnownRoot
    #: When the root was read, according to the storage's clock.
    read_at_ms: int
    #: When the root was read, according to the process clock.
    opened_at_s: float
    #: The number of roots that this process had created before the read.
    n_created: int


class ProbedRoots:
    """The probed roots, with the content of each root that was read (None for a missing root).

    Args:
        storage: The storage of the lakehouse.
        wanted: Versions that the caller needs in addition to the latest one.
    """

    def __init__(self, storage: Storage, wanted: Iterable[int] = ()):
        self.storage = storage
        self.wanted = [version for version in wanted if 0 <= version <= MAX_VERSION]
        self.existing: set[str] = set()
        self.contents: dict[str, bytes | None] = {}

    def read(self, paths: Iterable[str]) -> None:
        """Read roots in one round trip. Raises StorageError for the first root that exists and cannot be read."""
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
    """Return the naming of the roots among paths, None if there are no roots.

    Args:
        root_uri: The root of the lakehouse, for the error message.
        paths: Paths of files.

    Raises:
        CorruptFileError: There are roots of several namings.
    """
    examples: dict[RootNaming, str] = {}
    for path in sorted(paths):
        naming = root_naming(path)
        if naming is not None:
            examples.setdefault(naming, path)
    if len(examples) > 1:
        first, second, *_ = examples.values()
        raise CorruptFileError(
            f"{root_uri} contains root files of several namings, for example {first!r} and {second!r}, but a lakehouse"
            " uses only one; check the address of the storage, and move the root files of other lakehouses away",
            path=second,
        )
    return next(iter(examples), None)


def read_hint(storage: Storage) -> int | None:
    """Return the version in the hint, None if the hint is missing, invalid or cannot be read."""
    try:
        return parse_hint(storage.read(HINT_PATH, length=HINT_READ_BYTES))
    except FileMissingError:
        return None
    except StorageError as error:
        logger.warning("the hint cannot be read, continuing without it: %s", error)
        return None


class HintWriter:
    """Writes the hint, best-effort. The hint only saves requests, so failures are only logged and counted."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._newest = -1
        self._failed: list[int] = []

    @property
    def n_failures(self) -> int:
        """The number of hints that could not be written."""
        background.drain()
        return len(self._failed)

    def note(self, version: int) -> None:
        """Update the hint to a version that was just committed, unless this object has committed a newer version.

        The write runs in the background. Of several versions in quick succession, only the last one is written.
        """
        if version >= self._newest:
            self._newest = version
            background.submit(self._write_newest)

    def _write_newest(self) -> None:
        version = self._newest
        try:
            self._storage.write_best_effort(HINT_PATH, str(version).encode("ascii"))
        except TrinityLakeError as error:
            self._failed.append(version)
            logger.warning("version %d is committed, but its hint could not be written: %s", version, error)
