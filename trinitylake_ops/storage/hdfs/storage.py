"""Storage in a folder of HDFS."""

from __future__ import annotations

import builtins
import itertools
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from hdfs_native import Client, FileReader, FileStatus, WriteOptions
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from trinitylake_ops.errors import FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.storage.error_table import MISSING
from trinitylake_ops.storage.hdfs.client import HdfsClient, NameNodeClock
from trinitylake_ops.storage.hdfs.errors import (
    FAILURES,
    Request,
    Step,
    is_missing_path,
    is_not_empty,
    is_parent_missing,
)
from trinitylake_ops.storage.hdfs.settings import HdfsLocation, HdfsSettings
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import TEMPORARY_PREFIX, check_range, is_hidden

logger = logging.getLogger(__name__)

_PAGE_ENTRIES = 1000  # the number of entries in a NameNode response
_FOLDER_MODE = 0o755
#: Files up to this size are opened and read in one call, with the time limit of a request without a body.
_SMALL_BYTES = 128 << 10
#: Maximum time that a failed write waits for the deletion of its temporary file.
_CLEANUP_SECONDS = 2.0


class HdfsStorage(Storage):
    """Files under ``hdfs://namenode:port/folder/``. The first write creates the folder.

    A file is written with a temporary name in ``_ops/tmp/`` and then renamed, so that it is visible completely or not
    at all. The rename of a create fails if the file exists. With ``fsync``, the bytes are on the disks of all DataNodes
    of the file before the rename. The NameNode syncs its log before each response.

    A killed process may leave a file in ``_ops/tmp/``, which nothing reads. Times are from the NameNode's clock.
    In a process that was forked after its parent used HDFS, each operation raises StorageError.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``HDFS_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 16
    delete_batch_size = 100

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = HdfsLocation.of(root)
        self._settings = HdfsSettings.of(self.options, self._location)
        self._client = HdfsClient(self._location, self._settings)
        self._clock = NameNodeClock()

    def __repr__(self) -> str:
        return f"HdfsStorage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[HdfsStorage], tuple[str, StorageOptions]]:
        return (HdfsStorage, (self.root, self.options))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        absolute, request = self._location.absolute(path), self._request(Step.READ, path)

        def requested_bytes(reader: FileReader) -> int:
            size_bytes = len(reader)
            n_bytes = max(0, min(size_bytes - offset, size_bytes if length is None else length))
            self._check_size(path, n_bytes, length, limit_bytes)
            return n_bytes

        def read_if_small(client: Client) -> bytes | FileReader:
            reader = client.read(absolute)
            n_bytes = requested_bytes(reader)
            if n_bytes == 0:
                return b""
            return bytes(reader.read_range(offset, n_bytes)) if n_bytes <= _SMALL_BYTES else reader

        # A small file needs one call in another thread. A large file needs two, so that its size affects the time
        # limit.
        content_or_reader = self._client.send(request, read_if_small)
        if isinstance(content_or_reader, bytes):
            return content_or_reader
        reader = content_or_reader
        n_bytes = requested_bytes(reader)
        return self._client.send(request, lambda _: bytes(reader.read_range(offset, n_bytes)), n_bytes)

    def stat(self, path: str) -> FileInfo:
        absolute = self._location.absolute(path)
        status = self._client.send(self._request(Step.STAT, path), lambda client: client.get_file_info(absolute))
        if status.isdir:
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        return _file_info(path, status)

    def create(self, path: str, data: bytes) -> None:
        self._put(Step.CREATE, path, data, makes_folder=True)

    def write(self, path: str, data: bytes) -> None:
        self._put(Step.WRITE, path, data, makes_folder=True)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._put(Step.WRITE, path, data, makes_folder=False)

    def delete(self, path: str) -> None:
        """Delete a file or an empty folder. A write to a deleted folder creates the folder again."""
        absolute = self._location.absolute(path)
        try:
            self._client.call(lambda client: client.delete(absolute, False))
        except FAILURES as error:
            if is_missing_path(error) or is_not_empty(error):
                return
            failure = self._client.typed(self._request(Step.DELETE, path), error)
        else:
            return
        raise failure

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete files serially in one thread, because HDFS has no request that deletes several files."""
        for path in paths:
            self._location.absolute(path)
        return super().delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._location.check_prefix(prefix)
        return self._walk(prefix)

    def now_ms(self) -> int:
        return self._clock.now_ms(self._stamp)

    def _request(self, step: Step, path: str) -> Request:
        return Request(step, path, self.root)

    def _put(self, step: Step, path: str, data: bytes, *, makes_folder: bool) -> None:
        absolute, temporary = self._location.absolute(path), self._new_temporary()
        body = bytes(data)
        try:
            self._client.send(self._request(Step.STAGE, path), self._staged(temporary, body), len(body))
            self._rename(step, path, temporary, absolute, makes_folder=makes_folder)
        except TrinityLakeError:
            self._remove(temporary)
            raise

    def _rename(self, step: Step, path: str, temporary: str, absolute: str, *, makes_folder: bool) -> None:
        request, replaces = self._request(step, path), step is Step.WRITE

        def rename(client: Client) -> None:
            client.rename(temporary, absolute, replaces)

        try:
            return self._client.call(rename)
        except FAILURES as error:
            failure = None if is_parent_missing(error) else self._client.typed(request, error)
        if failure is not None:
            raise failure
        if not makes_folder:
            self._remove(temporary)
            return None
        folder = absolute.rpartition("/")[0]
        self._client.send(
            self._request(Step.FOLDER, path), lambda client: client.mkdirs(folder, _FOLDER_MODE, create_parent=True)
        )
        return self._client.send(request, rename)

    def _staged(self, temporary: str, body: bytes) -> Callable[[Client], None]:
        """Return the call that writes a temporary file. The server creates its folders."""
        options = WriteOptions(replication=self._settings.replication, overwrite=False, create_parent=True)

        def stage(client: Client) -> None:
            writer = client.create(temporary, options)
            if body:
                writer.write(body)
                if self._settings.fsync:
                    writer.hsync()
            writer.close()

        return stage

    def _remove(self, temporary: str) -> None:
        """Delete a temporary file that was not renamed. Best effort, because nothing reads temporary files.

        The second attempt uses a new connection if the first one was lost.
        """
        attempts = Retrying(stop=stop_after_attempt(2), retry=retry_if_exception_type(OSError), reraise=True)
        try:
            attempts(self._client.call, lambda client: client.delete(temporary, False), max_seconds=_CLEANUP_SECONDS)
        except FAILURES as error:
            logger.debug("cannot delete the temporary file %r: %s", temporary, error)

    def _new_temporary(self) -> str:
        return f"{self._location.folder}{TEMPORARY_PREFIX}{uuid.uuid4().hex}"

    def _stamp(self) -> int:
        """Create an empty file, and return the modification time that the NameNode set."""
        temporary, request = self._new_temporary(), self._request(Step.CLOCK, "")
        self._client.send(request, self._staged(temporary, b""))
        try:
            status = self._client.send(request, lambda client: client.get_file_info(temporary))
        finally:
            self._remove(temporary)
        return int(status.modification_time)

    def _walk(self, prefix: str) -> Iterator[FileInfo]:
        """List folders serially, page by page. Keep only the names of the remaining folders in memory."""
        top, slash, name_start = prefix.rpartition("/")
        folders = [top + slash]
        while folders:
            folder = folders.pop()
            start = name_start if folder == top + slash else ""
            for page in self._pages(prefix, folder):
                for name, status in page:
                    if not name.startswith(start):
                        continue
                    if not status.isdir:
                        if not is_hidden(folder + name, prefix):
                            yield _file_info(folder + name, status)
                    elif not is_hidden(f"{folder}{name}/", prefix):
                        folders.append(f"{folder}{name}/")

    def _pages(self, prefix: str, folder: str) -> Iterator[builtins.list[tuple[str, FileStatus]]]:
        """Yield the names and statuses of a folder's entries. Yield nothing if there is no such folder."""
        absolute = self._location.absolute_folder(folder)
        start = absolute.rstrip("/") + "/"
        request, entries = self._request(Step.LIST, prefix), None
        while True:

            def next_page(client: Client) -> builtins.list[FileStatus]:
                nonlocal entries
                entries = entries if entries is not None else client.list_status(absolute, False)
                return list(itertools.islice(entries, _PAGE_ENTRIES))

            failure = None
            try:
                page = self._client.call(next_page)
            except FAILURES as error:
                if is_missing_path(error):
                    return
                failure, page = self._client.typed(request, error), []
            if failure is not None:
                raise failure
            if not page:
                return
            yield [(status.path.removeprefix(start), status) for status in page if status.path.startswith(start)]


def _file_info(path: str, status: FileStatus) -> FileInfo:
    return FileInfo(path, status.length, status.modification_time)
