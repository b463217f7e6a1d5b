"""The interface of a storage, and storages that wrap another storage.

Every durable effect of the package crosses this interface. So a wrapper around it can count, retry, delay or stop each
one. Paths are relative to the root (FORMAT.md, L2) and literal. Guarantees S1-S8 are those of docs/storages/README.md;
``tests/contract`` checks them on every storage.

A wrapper overrides the single operations (read, stat, stage, commit_lock, create, write, write_best_effort, delete,
delete_batch, list, now_ms, expect_clock, is_linked, remove_empty_folders, drop_cached, send_with_retries). It keeps
``exists`` and the ``*_many`` methods. These are inherited from Storage and call the single operations of the outermost
wrapper. So in
``Retry(Meter(Local))`` as in ``Meter(Retry(Local))`` a ``create_many`` of five files is five creates, and each passes
every wrapper once. In the first stack the meter counts each attempt, in the second each file. Beside the calls,
``parallel.current_round_trip`` tells that they belong to one parallel round.
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

#: The most by which the clocks of a storage and of its users may differ (S8).
CLOCK_MARGIN_MS = 5 * 60 * 1000
#: The most bytes of a file that is read whole, if its reader knows no bound of its own.
WHOLE_FILE_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as a listing or stat shows it; times are the storage's own clock (S8)."""

    path: str
    size_bytes: int
    last_modified_ms: int


class Storage(ABC):
    """One root in one storage system.

    All methods raise subclasses of :class:`~trinitylake_ops.errors.StorageError` (S7), or
    :class:`~trinitylake_ops.errors.InvalidLocationError` for a path no storage accepts
    (``storage/paths.py``). Implementations are thread-safe and picklable.

    The ``*_many`` methods are built from the single operations of the same object. In a stack of wrappers only the
    outermost one fans out. Each single operation then passes every wrapper exactly once, in any stacking order (see
    ``storage/interface.py``).
    """

    #: Normalized root URI, with its final ``/`` and without credentials.
    root: str
    #: How many requests ``*_many`` keep in flight.
    concurrency: int = 16
    #: So many reads are made one after the other: handing them to threads would take longer than they do.
    serial_read_limit: int = 1
    #: The same of creates.
    serial_create_limit: int = 1
    #: Whether ``stage`` does something.
    supports_staging: bool = False
    #: Whether a list asks for names with its prefix only, and not for a whole folder.
    lists_by_prefix: bool = False
    #: How many files one request of ``delete_batch`` takes.
    delete_batch_size: int = 1
    #: The most bytes that ``read`` returns when the caller gives neither a length nor a limit.
    whole_file_limit_bytes: int = WHOLE_FILE_LIMIT_BYTES

    @property
    def is_high_latency(self) -> bool:
        """Whether a create takes longer than handing it to a thread."""
        return self.concurrency > 1 and self.serial_create_limit <= 1

    @property
    def is_remote(self) -> bool:
        """Whether creates take long, and no part of one can go ahead."""
        return self.is_high_latency and not self.supports_staging

    @abstractmethod
    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        """Return the bytes of a file, or of the range ``[offset, offset + length)`` cut at its end.

        A range that starts at or past the end is empty. Without a length, at most ``limit_bytes`` are ever held, by
        default ``whole_file_limit_bytes``. Raises FileMissingError, InvalidInputError for a negative offset or length,
        CorruptFileError for a file above the limit. Never returns a part of a file that is being written (S3).
        """

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Return size and time of a file. Raises FileMissingError."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Create a file if no file is there (S1, S3).

        Raises FileExistsAlreadyError when the name is occupied, AmbiguousWriteError when the answer
        was lost and the file may have been created.

        One call sends one request. ``send_with_retries`` repeats it, and ``conditional_create`` also finds out whether
        a request with a lost response took effect.
        """

    def send_with_retries(self, send: Callable[[], None]) -> None:
        """Call ``send``, which creates a file, and repeat it after an error that says that it had no effect.

        Only ``RetryStorage`` repeats it. Raises the last error.
        """
        send()

    def stage(self, path: str, data: bytes) -> None:
        """Do ahead what a create of this very object at this path would have to wait for. It sends no request.

        Follow it by ``create``, and by ``discard_staged`` in any case. Best effort: what it cannot do, ``create`` does.
        """
        del path, data  # a request to a server has no part that could go ahead

    def discard_staged(self, data: bytes) -> None:
        """Undo a ``stage`` that no ``create`` followed."""
        del data

    def commit_lock(self, longest_s: float) -> contextlib.AbstractContextManager[bool]:
        """Wait in line with other processes that commit here, and keep the place in a block.

        At most ``longest_s`` seconds. The block gets whether others were before us: then there is a new version. Advice
        only: no commit depends on it. A storage that has no line lets everybody pass.
        """
        del longest_s
        return contextlib.nullcontext(False)

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Create or atomically replace a file (S4)."""

    def write_best_effort(self, path: str, data: bytes) -> None:
        """Write a note whose loss, damage or delay costs requests at most. It need not be atomic, nor outlive a crash.

        No folder is made for it: where the folder is gone, nothing is written.
        """
        self.write(path, data)

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; a missing file is no error (S5)."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        """Yield every file whose path starts with the string ``prefix``, in pages, in no set order (S6).

        Files under ``_ops/tmp/`` show only when the prefix starts with ``_ops/tmp/``. A file that is created or deleted
        during the listing may or may not show. All others show once.
        """

    @abstractmethod
    def now_ms(self) -> int:
        """Milliseconds since the epoch on the storage's own clock (S8)."""

    def expect_clock(self) -> None:  # noqa: B027 - most storages know the time from any answer
        """Say that ``now_ms`` is asked soon. Where that takes a request of its own, it goes out beside the next one."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""
        try:
            self.stat(path)
        except FileMissingError:
            return False
        return True

    def is_linked(self, path: str) -> bool:
        """Whether a path leads to a file by a symbolic link, so that no listing shows it. Asks no remote storage."""
        del path  # few storages have links
        return False

    def remove_empty_folders(self, paths: Sequence[str]) -> None:
        """Remove folders that deletes of these paths left empty, also the root. Best effort; few storages have any."""
        del paths

    def drop_cached(self, path: str) -> bool:
        """Forget a cached copy, so that the next read asks the storage. Returns whether there was one."""
        del path  # a storage keeps nothing
        return False

    def _check_size(self, path: str, size_bytes: int, length: int | None, limit_bytes: int | None) -> None:
        """Refuse a read of more bytes than it may return without a length, before it is made."""
        most_bytes = self.whole_file_limit_bytes if limit_bytes is None else limit_bytes
        if length is None and size_bytes > most_bytes:
            raised = ", or raise the storage option 'whole_file_limit_bytes'" if limit_bytes is None else ""
            raise CorruptFileError(
                f"{path!r} has {size_bytes} bytes, and no file of its kind more than {most_bytes}; restore it{raised}",
                path=path,
            )

    def read_many(self, paths: Sequence[str]) -> builtins.list[bytes]:
        """Read several files in parallel, in the order given. Raises the first failure."""
        return run_round_trip(self.read, paths, self.concurrency, self.serial_read_limit)

    def read_available(
        self, paths: Sequence[str], *, limit_bytes: int | None = None
    ) -> builtins.list[bytes | StorageError]:
        """Read several files in parallel. A failure takes the place of the file's content instead of being raised."""

        def read_or_error(path: str) -> bytes | StorageError:
            try:
                return self.read(path, limit_bytes=limit_bytes)
            except StorageError as error:
                return error

        return run_round_trip(read_or_error, paths, self.concurrency, self.serial_read_limit)

    def create_many(self, files: Mapping[str, bytes]) -> None:
        """Create several files in parallel, each if absent. Raises the first failure after all ended."""

        def create_one(item: tuple[str, bytes]) -> None:
            self.send_with_retries(functools.partial(self.create, *item))

        run_round_trip(create_one, list(files.items()), self.concurrency, self.serial_create_limit)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to ``delete_batch_size`` files in one request. Returns the failures by path (S5).

        Raises when the request as a whole failed. Then any of the files may or may not be deleted.
        """
        failures: dict[str, StorageError] = {}
        for path in paths:
            try:
                self.delete(path)
            except StorageError as error:
                failures[path] = error
        return failures

    def delete_many(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete several files, in parallel batches where the storage has them. Returns the failures by path (S5)."""

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
    """Hands every operation on to ``inner``. Subclasses override what they change."""

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

    def commit_lock(self, longest_s: float) -> AbstractContextManager[bool]:
        return self.inner.commit_lock(longest_s)

    def write(self, path: str, data: bytes) -> None:
        self.inner.write(path, data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self.write(path, data)  # of a wrapper that knows writes only

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
