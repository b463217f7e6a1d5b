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

_PAGE_ENTRIES = 1000  # so many a NameNode gives at once
_FOLDER_MODE = 0o755
#: A file of at most so many bytes is opened and read in one go. That has no more time than a request without a body.
_SMALL_BYTES = 128 << 10
#: So long a failed write waits, at most, for the end of its temporary file.
_TIDYING_SECONDS = 2.0


class HdfsStorage(Storage):
    """Files under ``hdfs://namenode:port/folder/``; the folder is made by the first write.

    A file is written under a fresh name in ``_ops/tmp/`` and then renamed to its own. A create replaces nothing, a
    write replaces. So a file is visible whole or not at all. With ``fsync`` its bytes are on the disks of all its
    DataNodes before the rename. The NameNode syncs its log before each answer.

    A killed process may leave a file in ``_ops/tmp/``, where nothing reads it. Times are those of the NameNode. In a
    process that was forked after another root of HDFS was used, each operation raises StorageError. Raises
    InvalidLocationError for a root of another form, and InvalidInputError for an option that is not valid.
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

        def wanted(opened: FileReader) -> int:
            size_bytes = len(opened)
            n_bytes = max(0, min(size_bytes - offset, size_bytes if length is None else length))
            self._check_size(path, n_bytes, length, limit_bytes)
            return n_bytes

        def read_if_small(client: Client) -> bytes | FileReader:
            opened = client.read(absolute)
            n_bytes = wanted(opened)
            if n_bytes == 0:
                return b""
            return bytes(opened.read_range(offset, n_bytes)) if n_bytes <= _SMALL_BYTES else opened

        # One hand-over to another thread for most files. A large one has more time, once its size is known.
        found = self._client.send(request, read_if_small)
        if isinstance(found, bytes):
            return found
        n_bytes = wanted(found)
        return self._client.send(request, lambda _: bytes(found.read_range(offset, n_bytes)), n_bytes)

    def stat(self, path: str) -> FileInfo:
        absolute = self._location.absolute(path)
        found = self._client.send(self._request(Step.STAT, path), lambda client: client.get_file_info(absolute))
        if found.isdir:
            raise FileMissingError(f"there is no file {path!r} under {self.root}", path=path)
        return _file_info(path, found)

    def create(self, path: str, data: bytes) -> None:
        self._put(Step.CREATE, path, data, makes_folder=True)

    def write(self, path: str, data: bytes) -> None:
        self._put(Step.WRITE, path, data, makes_folder=True)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._put(Step.WRITE, path, data, makes_folder=False)

    def delete(self, path: str) -> None:
        """Delete a file. A folder without files goes, too, and comes back with the next file in it."""
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
        """Delete files one after the other in one thread: HDFS has no request for several."""
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
        """Return the call that writes a temporary file. Its folders are made by the server."""
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
        """Remove a temporary file that got no name, if the server answers. Nothing reads what is left.

        The connection may have broken with the request before: then the second attempt has a new one.
        """
        attempts = Retrying(stop=stop_after_attempt(2), retry=retry_if_exception_type(OSError), reraise=True)
        try:
            attempts(self._client.call, lambda client: client.delete(temporary, False), most_seconds=_TIDYING_SECONDS)
        except FAILURES as error:
            logger.debug("the temporary file %r stays: %s", temporary, error)

    def _new_temporary(self) -> str:
        return f"{self._location.folder}{TEMPORARY_PREFIX}{uuid.uuid4().hex}"

    def _stamp(self) -> int:
        """Let the NameNode stamp an empty file, and return that time."""
        temporary, request = self._new_temporary(), self._request(Step.CLOCK, "")
        self._client.send(request, self._staged(temporary, b""))
        try:
            found = self._client.send(request, lambda client: client.get_file_info(temporary))
        finally:
            self._remove(temporary)
        return int(found.modification_time)

    def _walk(self, prefix: str) -> Iterator[FileInfo]:
        """Read one folder after the other, in pages. Only the names of folders still to read are kept."""
        top, slash, name_start = prefix.rpartition("/")
        folders = [top + slash]
        while folders:
            folder = folders.pop()
            start = name_start if folder == top + slash else ""
            for page in self._pages(prefix, folder):
                for name, found in page:
                    if not name.startswith(start):
                        continue
                    if not found.isdir:
                        if not is_hidden(folder + name, prefix):
                            yield _file_info(folder + name, found)
                    elif not is_hidden(f"{folder}{name}/", prefix):
                        folders.append(f"{folder}{name}/")

    def _pages(self, prefix: str, folder: str) -> Iterator[builtins.list[tuple[str, FileStatus]]]:
        """Yield the names in a folder and what they are, none where the folder is gone or is a file."""
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
            yield [(one.path.removeprefix(start), one) for one in page if one.path.startswith(start)]


def _file_info(path: str, found: FileStatus) -> FileInfo:
    return FileInfo(path, found.length, found.modification_time)
