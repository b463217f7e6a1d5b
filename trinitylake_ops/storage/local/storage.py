"""Storage in a folder of the local file system."""

from __future__ import annotations

import builtins
import contextlib
import errno
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import FileMissingError, InvalidLocationError, StorageError
from trinitylake_ops.storage.error_table import MISSING
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES, FileInfo, Storage
from trinitylake_ops.storage.local.commit_lock import CommitLock
from trinitylake_ops.storage.local.errors import (
    ambiguous_write,
    behind_a_link,
    folder_vanished_error,
    link_without_folder,
    no_folder_possible,
    outcome_unknown,
    root_is_not_a_folder,
    storage_error,
    translate_errors,
)
from trinitylake_ops.storage.local.posix_files import (
    READING,
    clock_difference_s,
    create_folder,
    folder_without_links,
    link_to_free_name,
    overwrite_in_place,
    read_range,
    remove_empty,
    sync_folder,
    write_new_file,
)
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import TEMPORARY_PREFIX, check_path, check_prefix, check_range, is_hidden, split_root

logger = logging.getLogger(__name__)

#: Maximum difference between the clocks of this machine and the file system. The same limit applies to servers.
_MAX_CLOCK_DIFFERENCE_SECONDS = 3600.0
_MAX_KNOWN_FOLDERS = 10_000


@dataclass(frozen=True, slots=True)
class _StagedFile:
    """A file that was written to the device with a temporary name."""

    data: bytes
    temporary: bytes


class LocalStorage(Storage):
    """Files under ``file:///folder/``. The first write creates the folder.

    A file is written with a temporary name in ``_ops/tmp/``, and then linked (create) or renamed (write) to its final
    name, so that it is visible completely or not at all. With ``fsync``, the file, its folder and the parents of new
    folders are on the device before a call returns, so that an acknowledged write survives a crash of the machine.
    Deletes are not synced: a file may reappear after a crash.

    A killed process may leave a file in ``_ops/tmp/``, which nothing reads. The clock of this storage (S8) is the clock
    of the machine. Files whose names are not UTF-8 and symbolic links are omitted from listings.

    Args:
        root: Normalized root URI, ``file:///.../``.
        fsync: Whether writes are synced to the device.
        whole_file_limit_bytes: Size limit of reads without a length or a limit.
        follows_links: Whether reads, writes and deletes follow symbolic links below the root.

    Raises:
        InvalidLocationError: The root is invalid.
    """

    concurrency = 8  # enough to overlap the waits for fsync; more threads would only contend
    serial_read_limit = 4  # for files in the page cache
    delete_batch_size = 1000  # an unlink is faster than starting it in a thread

    def __init__(
        self,
        root: str,
        *,
        fsync: bool = True,
        whole_file_limit_bytes: int = WHOLE_FILE_LIMIT_BYTES,
        follows_links: bool = True,
    ):
        host, path = split_root(root, "file")
        if host:
            raise InvalidLocationError("invalid file root: it must not contain a host; use file:///FOLDER/")
        self.root = root
        self.fsync = fsync
        self.follows_links = follows_links
        self.whole_file_limit_bytes = whole_file_limit_bytes
        self.serial_create_limit = 1 if fsync else 4  # creates without fsync do not wait
        self.supports_staging = fsync
        self._staged: dict[int, _StagedFile] = {}
        self._folder = path.encode()
        self._temporary_folder = (path + TEMPORARY_PREFIX).encode().rstrip(b"/")
        self._known_folders: set[bytes] = set()
        self._commit_lock = CommitLock(self._folder)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        with translate_errors(self.root, path, "read"):
            return read_range(
                self._opened(path), offset, length, lambda n_bytes: self._check_size(path, n_bytes, length, limit_bytes)
            )

    def _opened(self, path: str) -> int:
        if self.follows_links:
            return os.open(self._locate(path), READING)
        with self._within(path) as (name, folder):
            return os.open(name, READING | os.O_NOFOLLOW, dir_fd=folder)

    @contextlib.contextmanager
    def _within(self, path: str) -> Iterator[tuple[bytes, int | None]]:
        """Yield the name of a file and the descriptor of its folder, for system calls that take both.

        If links are not followed, the folder was opened without following links. Otherwise the name is the absolute
        path and there is no descriptor.
        """
        name = self._locate(path)
        if self.follows_links:
            yield name, None
            return
        try:
            with folder_without_links(self._folder, path.encode()) as (name, folder):
                yield name, folder
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise behind_a_link(self.root, path) from error
            raise

    def stat(self, path: str) -> FileInfo:
        with translate_errors(self.root, path, "look up"), self._within(path) as (name, folder):
            status = os.stat(name, dir_fd=folder, follow_symlinks=self.follows_links)
        if not stat.S_ISREG(status.st_mode):
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        return _file_info(path, status)

    def is_linked(self, path: str) -> bool:
        name = self._locate(path)
        with translate_errors(self.root, path, "look up"):
            return os.path.islink(name) or not self._is_folder_without_links(path.rpartition("/")[0])

    def stage(self, path: str, data: bytes) -> None:
        """Write and sync a file with a temporary name, so that ``create`` only has to link it.

        Best effort: if staging fails, ``create`` does all the work and reports the error.

        Args:
            path: Path that will be created.
            data: The same bytes object that will be passed to ``create``.
        """
        if not self.fsync:
            return
        temporary = self._new_temporary()
        self._staged[id(data)] = _StagedFile(data, temporary)  # before the file exists, so that it is always discarded
        try:
            self._sync(self._make_folder(self._temporary_folder))
            write_new_file(temporary, data, fsync=True)
        except OSError as error:
            logger.debug("cannot stage %r: %s", path, error)
            self.discard_staged(data)

    def discard_staged(self, data: bytes) -> None:
        staged = self._staged.pop(id(data), None)
        if staged is not None:
            _remove_temporary(staged.temporary)

    def commit_lock(self, max_s: float) -> contextlib.AbstractContextManager[bool]:
        return self._commit_lock.acquire(max_s)

    def create(self, path: str, data: bytes) -> None:
        self._put(path, data, link_to_free_name, "create")

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data, os.replace, "write")

    def write_best_effort(self, path: str, data: bytes) -> None:
        """Overwrite a file of the same size in place, or replace the file. Neither sync the file nor create folders.

        Args:
            path: Path relative to the root.
            data: Content of the file.
        """
        target = self._locate(path)
        with translate_errors(self.root, path, "write"):
            if overwrite_in_place(target, data):
                return
            temporary = self._new_temporary()
            try:
                write_new_file(temporary, data, fsync=False)
                os.replace(temporary, target)
            except (FileNotFoundError, NotADirectoryError):
                return  # the folder was deleted, and must not be created again
            finally:
                _remove_temporary(temporary)

    def delete(self, path: str) -> None:
        with translate_errors(self.root, path, "delete"):
            try:
                with self._within(path) as (name, folder):
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # there is no such file

    def remove_empty_folders(self, paths: Sequence[str]) -> None:
        remove_empty(self._folder, map(str.encode, [f"{TEMPORARY_PREFIX}any", *paths]))
        self._known_folders.clear()

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        check_prefix(prefix)
        return self._walk(prefix)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.root, self.fsync, self.whole_file_limit_bytes, self.follows_links))

    def _locate(self, path: str) -> bytes:
        check_path(path)
        return self._folder + path.encode()

    def _put(self, path: str, data: bytes, publish: Callable[[bytes, bytes], None], verb: str) -> None:
        target = self._locate(path)
        if not self.follows_links and self._has_link(path.rpartition("/")[0]):
            raise behind_a_link(self.root, path)
        with translate_errors(self.root, path, verb):
            try:
                try:
                    self._put_once(path, target, data, publish, verb)
                except FileNotFoundError:
                    # Another process deleted a known folder. The call had no effect, so create the folder again and
                    # retry once.
                    self._known_folders.clear()
                    self._put_once(path, target, data, publish, verb)
            except FileNotFoundError as error:
                if self._has_link(path.rpartition("/")[0]):
                    raise link_without_folder(self.root, path, verb) from error
                raise folder_vanished_error(self.root, path, verb) from error
            except NotADirectoryError as error:
                raise no_folder_possible(self.root, path, verb) from error

    def _put_once(
        self, path: str, target: bytes, data: bytes, publish: Callable[[bytes, bytes], None], verb: str
    ) -> None:
        folder = os.path.dirname(target)
        unsynced = [*self._make_folder(self._temporary_folder), *self._make_folder(folder)]
        staged = self._staged.pop(id(data), None)
        temporary = self._new_temporary() if staged is None else staged.temporary
        try:
            if staged is None:
                write_new_file(temporary, data, fsync=self.fsync)
            self._check_clock(path, temporary)
            try:
                publish(temporary, target)
            except OSError as error:
                if outcome_unknown(error):
                    raise ambiguous_write(error, self.root, path, verb) from error
                raise
        finally:
            _remove_temporary(temporary)
        if self.fsync:
            try:
                self._sync(unsynced, folder)
            except OSError as error:  # the file is visible, but may be lost if the machine crashes
                raise ambiguous_write(error, self.root, path, verb) from error

    def _check_clock(self, path: str, temporary: bytes) -> None:
        """Raise StorageError if the modification time of a new file differs much from the clock of this machine.

        The times of files are compared with ``now_ms``, so the two clocks must agree.
        """
        difference_s = clock_difference_s(temporary)
        if abs(difference_s) > _MAX_CLOCK_DIFFERENCE_SECONDS:
            raise StorageError(
                f"cannot write {path!r} under {self.root}: the clock of this machine is {difference_s:.0f} s ahead of"
                " the clock of the file system; correct the wrong one",
                path=path,
            )

    def _new_temporary(self) -> bytes:
        return b"%b/%b" % (self._temporary_folder, os.urandom(16).hex().encode())

    def _sync(self, unsynced: Sequence[bytes], *folders: bytes) -> None:
        """Sync the entries of ``folders`` and, at the same time, the entries for folders that may not be synced yet."""
        run_parallel(sync_folder, list({*folders, *map(os.path.dirname, unsynced)}), self.concurrency)
        self._known_folders.update(unsynced)

    def _make_folder(self, folder: bytes) -> builtins.list[bytes]:
        """Create a folder and its parents. Return the folders whose entries may not be on the device.

        On first use, this includes existing folders, because the process that created them may not have synced them
        yet. Without ``fsync``, the result is empty.
        """
        if folder in self._known_folders or folder == b"/":
            return []
        is_below_root = folder.startswith(self._folder)
        unsynced = self._make_folder(os.path.dirname(folder)) if is_below_root or not os.path.isdir(folder) else []
        was_missing = create_folder(folder)
        if len(self._known_folders) >= _MAX_KNOWN_FOLDERS:
            self._known_folders.clear()
        if self.fsync and (is_below_root or was_missing):
            return [*unsynced, folder]
        self._known_folders.add(folder)
        return unsynced

    def _walk(self, prefix: str) -> Iterator[FileInfo]:
        """List folders serially. Keep only the names of the remaining folders in memory."""
        top, _, name_start = prefix.rpartition("/")
        folder = prefix
        self._check_root_is_folder()
        try:
            folders = [f"{top}/" if top else ""] if self._is_folder_without_links(top) else []
            while folders:
                folder = folders.pop()
                start = name_start if folder in ("", f"{top}/") else ""
                for name, entry in _entries(self._folder + folder.encode(), start):
                    if entry.is_dir(follow_symlinks=False):
                        if not is_hidden(f"{folder}{name}/", prefix):
                            folders.append(f"{folder}{name}/")
                    elif (status := _status_if_file(entry)) is not None:
                        yield _file_info(folder + name, status)
        except OSError as error:
            raise storage_error(error, self.root, folder, "list") from error

    def _check_root_is_folder(self) -> None:
        """Raise StorageError if the root, or a folder above it, is a file or a dangling link.

        Without this check, a reader would report that there is no lakehouse.
        """
        folder = self._folder.rstrip(b"/")
        while folder:
            try:
                mode = os.lstat(folder).st_mode
            except OSError:  # missing, as far as this process can see
                folder = os.path.dirname(folder)
                continue
            if stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and os.path.isdir(folder)):
                return
            raise root_is_not_a_folder(self.root, folder)

    def _has_link(self, path: str) -> bool:
        """Whether a part of the path of a folder, or of the temporary folder, is a link.

        A check before a write is sufficient, because writes use unique temporary names.
        """
        paths = (TEMPORARY_PREFIX.rstrip("/"), path)
        folders = (outer for part in paths for outer in itertools.accumulate(part.split("/"), "{}/{}".format) if outer)
        return any(os.path.islink(self._folder + folder.encode()) for folder in folders)

    def _is_folder_without_links(self, path: str) -> bool:
        name = self._folder
        for segment in path.split("/") if path else ():
            name = os.path.join(name, segment.encode())
            try:
                status = os.lstat(name)
            except (FileNotFoundError, NotADirectoryError):
                return False
            if not stat.S_ISDIR(status.st_mode):
                return False
        return True


def _entries(folder: bytes, name_start: str) -> Iterator[tuple[str, os.DirEntry[bytes]]]:
    """Yield the entries of a folder whose names begin with ``name_start``. Yield nothing if there is no such folder."""
    try:
        scan = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with scan:
        for entry in scan:
            try:
                name = entry.name.decode()
            except UnicodeDecodeError:
                continue  # paths are UTF-8, so it is not a file of the lakehouse
            if name.startswith(name_start):
                yield name, entry


def _status_if_file(entry: os.DirEntry[bytes]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None  # deleted during the listing


def _remove_temporary(temporary: bytes) -> None:
    try:
        os.unlink(temporary)
    except FileNotFoundError:
        return  # it was renamed, or never created
    except OSError as error:
        logger.warning("cannot delete the temporary file %r: %s", os.fsdecode(temporary), error.strerror)


def _file_info(path: str, status: os.stat_result) -> FileInfo:
    return FileInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)


def _reopen(root: str, fsync: bool, whole_file_limit_bytes: int, follows_links: bool) -> LocalStorage:
    return LocalStorage(root, fsync=fsync, whole_file_limit_bytes=whole_file_limit_bytes, follows_links=follows_links)
