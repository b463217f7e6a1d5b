"""The storage interface and the base class of storage wrappers.

Every durable effect of the package goes through this interface, so that a wrapper can count, retry, delay or stop each
request. Paths are literal and relative to the root (FORMAT.md, L2). The guarantees S1-S8 are defined in
docs/storages/README.md; ``tests/contract`` checks them on every storage.

A wrapper overrides single operations (read, stat, stage, commit_lock, create, write, write_best_effort, delete,
delete_batch, list, now_ms, expect_clock, is_linked, remove_empty_folders, drop_cached, send_with_retries). It does not
override ``exists`` and the ``*_many`` methods: these are inherited from Storage and call the single operations of the
outermost wrapper. A ``create_many`` of five files is therefore five creates, each of which passes every wrapper once,
both in ``Retry(Meter(Local))``, where the meter counts attempts, and in ``Meter(Retry(Local))``, where it counts files.
``parallel.current_round_trip`` shows a wrapper which requests share a round trip.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError, StorageError
from trinitylake_ops.storage.parallel import run_round_trip

#: Maximum difference between the clocks of a storage and its users (S8).
CLOCK_MARGIN_MS = 5 * 60 * 1000
#: Default size limit of a file that is read as a whole.
WHOLE_FILE_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Metadata of a file, from a listing or a ``stat``."""

    #: Path relative to the root.
    path: str
    size_bytes: int
    #: Time of the last write on the storage's clock (S8), in milliseconds since the epoch.
    last_modified_ms: int


class Storage(ABC):
    """The files below one root of a storage system.

    All methods raise subclasses of :class:`~trinitylake_ops.errors.StorageError` (S7), or
    :class:`~trinitylake_ops.errors.InvalidLocationError` for a path that no storage accepts (``storage/paths.py``).
    Implementations are thread-safe and picklable.

    The ``*_many`` methods call the single operations of the same object, so that only the outermost of several wrappers
    sends requests in parallel.
    """

    #: Normalized root URI, with a trailing ``/`` and without credentials.
    root: str
    #: Maximum number of requests that the ``*_many`` methods send in parallel.
    concurrency: int = 16
    #: Up to this many reads are sent serially, because starting threads would take longer than the reads.
    serial_read_limit: int = 1
    #: Up to this many creates are sent serially.
    serial_create_limit: int = 1
    #: Whether ``stage`` has an effect.
    supports_staging: bool = False
    #: Whether ``list`` reads only names with the given prefix. Otherwise it reads the whole folder.
    lists_by_prefix: bool = False
    #: Maximum number of files in one ``delete_batch`` request.
    delete_batch_size: int = 1
    #: Size limit of ``read`` if the caller passes neither a length nor a limit.
    whole_file_limit_bytes: int = WHOLE_FILE_LIMIT_BYTES

    @property
    def is_high_latency(self) -> bool:
        """Whether a create takes longer than starting a thread for it."""
        return self.concurrency > 1 and self.serial_create_limit <= 1

    @property
    def is_remote(self) -> bool:
        """Whether creates have a high latency and no part of a create can be staged."""
        return self.is_high_latency and not self.supports_staging

    @abstractmethod
    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        """Return the bytes of a file or a range of bytes. Never return a part of a file that is being written (S3).

        Args:
            path: Path relative to the root.
            offset: First byte of the range. The result is empty if it is at or past the end of the file.
            length: Number of bytes in the range, which is cut off at the end of the file. None reads to the end of the
                file.
            limit_bytes: Size limit of a read without a length. None: ``whole_file_limit_bytes``.

        Raises:
            FileMissingError: There is no file at the path.
            InvalidInputError: The offset or the length is negative.
            CorruptFileError: The file exceeds the limit.
        """

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Return the size and the modification time of a file. Raise FileMissingError if it does not exist."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Create a file if there is no file at the path (S1, S3).

        One call sends one request. ``send_with_retries`` repeats it, and ``conditional_create`` also resolves whether a
        request with a lost response took effect.

        Args:
            path: Path relative to the root.
            data: Content of the file.

        Raises:
            FileExistsAlreadyError: There is a file at the path.
            AmbiguousWriteError: The response was lost, so the file may have been created.
        """

    def send_with_retries(self, send: Callable[[], None]) -> None:
        """Call ``send``, which creates a file, and call it again after an error that proves that it had no effect.

        Only ``RetryStorage`` repeats the call. It raises the last error.
        """
        send()

    def stage(self, path: str, data: bytes) -> None:
        """Do the slow part of a create in advance, without sending a request.

        The caller must call ``discard_staged`` afterwards, whether or not it calls ``create``. Staging is best effort:
        ``create`` does whatever was not staged.

        Args:
            path: Path that will be created.
            data: The same bytes object that will be passed to ``create``.
        """
        del path, data  # requests to a server cannot be staged

    def discard_staged(self, data: bytes) -> None:
        """Undo a ``stage`` that was not followed by ``create``."""
        del data

    def commit_lock(self, max_s: float) -> contextlib.AbstractContextManager[bool]:
        """Wait up to ``max_s`` seconds for the lock that processes hold while they commit. Hold it while a block runs.

        The context manager yields whether another process held the lock before, in which case there is a new version.
        The lock is advisory: no commit depends on it. A storage without locks does not wait.
        """
        del max_s
        return contextlib.nullcontext(False)

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Create or atomically replace a file (S4)."""

    def write_best_effort(self, path: str, data: bytes) -> None:
        """Write a file whose loss, damage or delay has no effect other than additional requests.

        The write need not be atomic or durable, and it does not create folders: if the folder does not exist, nothing
        is written.
        """
        self.write(path, data)

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file. A missing file is not an error (S5)."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        """Yield all files whose paths start with the string ``prefix``, page by page and in no particular order (S6).

        Files under ``_ops/tmp/`` are omitted unless the prefix starts with ``_ops/tmp/``. A file that is created or
        deleted during the listing may be omitted. Every other file is yielded once.
        """

    @abstractmethod
    def now_ms(self) -> int:
        """Return the time of the storage's clock (S8), in milliseconds since the epoch."""

    def expect_clock(self) -> None:  # noqa: B027 - most storages get the time from any response
        """Announce a call to ``now_ms``. If that call needs a request, it is sent in parallel with the next request."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""
        try:
            self.stat(path)
        except FileMissingError:
            return False
        return True

    def is_linked(self, path: str) -> bool:
        """Whether a path contains a symbolic link. Listings omit such files. Sends no request to a server."""
        del path  # most storages have no links
        return False

    def remove_empty_folders(self, paths: Sequence[str]) -> None:
        """Remove folders, including the root, that became empty when the files at ``paths`` were deleted.

        Best effort. Most storages have no folders.
        """
        del paths

    def drop_cached(self, path: str) -> bool:
        """Drop the cached copy of a file, so that the next read sends a request. Return whether there was a copy."""
        del path  # only the cache wrapper has copies
        return False

    def _check_size(self, path: str, size_bytes: int, length: int | None, limit_bytes: int | None) -> None:
        """Raise CorruptFileError if a read without a length would exceed its size limit."""
        max_bytes = self.whole_file_limit_bytes if limit_bytes is None else limit_bytes
        if length is None and size_bytes > max_bytes:
            alternative = ", or raise the storage option 'whole_file_limit_bytes'" if limit_bytes is None else ""
            raise CorruptFileError(
                f"cannot read {path!r}: it has {size_bytes} bytes, more than the limit of {max_bytes} bytes for such"
                f" files; restore it{alternative}",
                path=path,
            )

    def read_many(self, paths: Sequence[str]) -> builtins.list[bytes]:
        """Read files in parallel and return their contents in the same order. Raise the first failure."""
        return run_round_trip(self.read, paths, self.concurrency, self.serial_read_limit)

    def read_available(
        self, paths: Sequence[str], *, limit_bytes: int | None = None
    ) -> builtins.list[bytes | StorageError]:
        """Read files in parallel and return their contents, or the errors of failed reads, in the same order.

        Args:
            paths: Paths relative to the root.
            limit_bytes: Size limit of each file. None: ``whole_file_limit_bytes``.
        """

        def read_or_error(path: str) -> bytes | StorageError:
            try:
                return self.read(path, limit_bytes=limit_bytes)
            except StorageError as error:
                return error

        return run_round_trip(read_or_error, paths, self.concurrency, self.serial_read_limit)

    def create_many(self, files: Mapping[str, bytes]) -> None:
        """Create files in parallel, each if absent. Raise the first failure after all requests have ended."""

        def create_one(item: tuple[str, bytes]) -> None:
            self.send_with_retries(functools.partial(self.create, *item))

        run_round_trip(create_one, list(files.items()), self.concurrency, self.serial_create_limit)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to ``delete_batch_size`` files in one request. Return the failures by path (S5).

        Raises a StorageError if the whole request failed. Each file may then have been deleted.
        """
        failures: dict[str, StorageError] = {}
        for path in paths:
            try:
                self.delete(path)
            except StorageError as error:
                failures[path] = error
        return failures

    def delete_many(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete files in parallel, in batches if the storage supports them. Return the failures by path (S5)."""

        def delete_or_errors(batch: Sequence[str]) -> dict[str, StorageError]:
            try:
                if self.delete_batch_size > 1:
                    return self.delete_batch(batch)
                self.delete(batch[0])
            except StorageError as error:
                return dict.fromkeys(batch, error)
            return {}

        size = self.delete_batch_size
        batches = [paths[start : start + size] for start in range(0, len(paths), size)]
        failures: dict[str, StorageError] = {}
        for failed in run_round_trip(delete_or_errors, batches, self.concurrency):
            failures |= failed
        return failures


class StorageWrapper(Storage):
    """Forwards every operation to ``inner``. Subclasses override the operations that they change."""

    def __init__(self, inner: Storage):
        self.inner = inner
        self.root = inner.root
        self.concurrency = inner.concurrency
        self.serial_read_limit = inner.serial_read_limit
        self.serial_create_limit = inner.serial_create_limit
        self.supports_staging = inner.supports_staging
        self.lists_by_prefix = inner.lists_by_prefix
        self.delete_batch_size = inner.delete_batch_size
        self.whole_file_limit_bytes = inner.whole_file_limit_bytes

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)

    def send_with_retries(self, send: Callable[[], None]) -> None:
        self.inner.send_with_retries(send)

    def stage(self, path: str, data: bytes) -> None:
        self.inner.stage(path, data)

    def discard_staged(self, data: bytes) -> None:
        self.inner.discard_staged(data)

    def commit_lock(self, max_s: float) -> AbstractContextManager[bool]:
        return self.inner.commit_lock(max_s)

    def write(self, path: str, data: bytes) -> None:
        self.inner.write(path, data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self.write(path, data)  # so that a wrapper that overrides only ``write`` sees it

    def delete(self, path: str) -> None:
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self.inner.delete_batch(paths)

    def is_linked(self, path: str) -> bool:
        return self.inner.is_linked(path)

    def remove_empty_folders(self, paths: Sequence[str]) -> None:
        self.inner.remove_empty_folders(paths)

    def drop_cached(self, path: str) -> bool:
        return self.inner.drop_cached(path)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self.inner.list(prefix)

    def now_ms(self) -> int:
        return self.inner.now_ms()

    def expect_clock(self) -> None:
        self.inner.expect_clock()
