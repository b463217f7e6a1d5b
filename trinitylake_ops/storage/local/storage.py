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
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES, FileInfo, Storage
from trinitylake_ops.storage.local.commit_lock import CommitLock
from trinitylake_ops.storage.local.errors import (
    ambiguous_write,
    behind_a_link,
    folder_vanished,
    link_without_folder,
    no_folder_possible,
    outcome_unknown,
    root_is_no_folder,
    storage_error,
    translated,
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

#: The same as for the date of a server.
_MAX_CLOCK_DIFFERENCE_SECONDS = 3600.0
_MAX_KNOWN_FOLDERS = 10_000


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Bytes that are on the device under a temporary name."""

    data: bytes
    temporary: bytes


class LocalStorage(Storage):
    """Files under ``file:///folder/``; the folder is made by the first write.

    A file is written under a fresh name in ``_ops/tmp/``. It is then linked (create) or renamed (write) to its own
    name, so it is visible whole or not at all. With ``fsync`` the file, its folder and the parents of new folders are
    on the device before a call returns. So an acknowledged write survives a crash of the machine. Deletes are not
    synced; a crash may bring a file back.

    A killed process may leave a file in ``_ops/tmp/``, where nothing reads it. The clock of the
    machine is the clock of its local file systems, hence of this storage (S8). Names are UTF-8;
    foreign files with other names are not listed, and neither are symbolic links. Reads follow
    links below the root unless ``follows_links`` is false. Raises InvalidLocationError for a root
    that is not ``file:///.../``.
    """

    concurrency = 8  # enough to share the waits for fsync; more threads only contend
    serial_read_limit = 4  # of files that were read or written lately
    delete_batch_size = 1000  # an unlink is faster than handing it to a thread

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
            raise InvalidLocationError("a file root names no host: write file:///folder/")
        self.root = root
        self.fsync = fsync
        self.follows_links = follows_links
        self.whole_file_limit_bytes = whole_file_limit_bytes
        self.serial_create_limit = 1 if fsync else 4  # without waits for a device
        self.supports_staging = fsync
        self._prepared: dict[int, _Prepared] = {}
        self._folder = path.encode()
        self._temporary_folder = (path + TEMPORARY_PREFIX).encode().rstrip(b"/")
        self._known_folders: set[bytes] = set()
        self._line = CommitLock(self._folder)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        with translated(self.root, path, "read"):
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
        """Yield a name and the descriptor of its folder, for calls that take both. No link leads there unless followed.

        Where links are followed, the name is the whole one, and there is no descriptor.
        """
        place = self._locate(path)
        if self.follows_links:
            yield place, None
            return
        try:
            with folder_without_links(self._folder, path.encode()) as (name, folder):
                yield name, folder
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise behind_a_link(self.root, path) from error
            raise

    def stat(self, path: str) -> FileInfo:
        with translated(self.root, path, "look up"), self._within(path) as (name, folder):
            status = os.stat(name, dir_fd=folder, follow_symlinks=self.follows_links)
        if not stat.S_ISREG(status.st_mode):
            raise FileMissingError(f"there is no file {path!r} under {self.root}", path=path)
        return _file_info(path, status)

    def is_linked(self, path: str) -> bool:
        place = self._locate(path)
        with translated(self.root, path, "look up"):
            return os.path.islink(place) or not self._is_folder_without_links(path.rpartition("/")[0])

    def stage(self, path: str, data: bytes) -> None:
        """Bring the bytes of a file to the device under a temporary name, so that ``create`` only has to link it.

        Best effort: where that fails, ``create`` does all of it, and says what is wrong.
        """
        if not self.fsync:
            return
        temporary = self._new_temporary()
        self._prepared[id(data)] = _Prepared(data, temporary)  # before there is a file: ``discard_staged`` knows of it
        try:
            self._sync(self._make_folder(self._temporary_folder))
            write_new_file(temporary, data, fsync=True)
        except OSError as error:
            logger.debug("%r is not prepared: %s", path, error)
            self.discard_staged(data)

    def discard_staged(self, data: bytes) -> None:
        prepared = self._prepared.pop(id(data), None)
        if prepared is not None:
            _remove_temporary(prepared.temporary)

    def commit_lock(self, longest_s: float) -> contextlib.AbstractContextManager[bool]:
        return self._line.acquire(longest_s)

    def create(self, path: str, data: bytes) -> None:
        self._put(path, data, link_to_free_name, "create")

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data, os.replace, "write")

    def write_best_effort(self, path: str, data: bytes) -> None:
        """Overwrite a note where it is, or replace one of another size. Nothing is synced, and no folder is made."""
        target = self._locate(path)
        with translated(self.root, path, "write"):
            if overwrite_in_place(target, data):
                return
            temporary = self._new_temporary()
            try:
                write_new_file(temporary, data, fsync=False)
                os.replace(temporary, target)
            except (FileNotFoundError, NotADirectoryError):
                return  # somebody removes the folder, which must not come back
            finally:
                _remove_temporary(temporary)

    def delete(self, path: str) -> None:
        with translated(self.root, path, "delete"):
            try:
                with self._within(path) as (name, folder):
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # there is no file of that name

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
        with translated(self.root, path, verb):
            try:
                try:
                    self._put_once(path, target, data, publish, verb)
                except FileNotFoundError:
                    # Somebody removed a folder that we knew. Nothing took effect: make it again, once.
                    self._known_folders.clear()
                    self._put_once(path, target, data, publish, verb)
            except FileNotFoundError as error:
                if self._has_link(path.rpartition("/")[0]):
                    raise link_without_folder(self.root, path, verb) from error
                raise folder_vanished(self.root, path, verb) from error
            except NotADirectoryError as error:
                raise no_folder_possible(self.root, path, verb) from error

    def _put_once(
        self, path: str, target: bytes, data: bytes, publish: Callable[[bytes, bytes], None], verb: str
    ) -> None:
        folder = os.path.dirname(target)
        made = [*self._make_folder(self._temporary_folder), *self._make_folder(folder)]
        prepared = self._prepared.pop(id(data), None)
        temporary = self._new_temporary() if prepared is None else prepared.temporary
        try:
            if prepared is None:
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
                self._sync(made, folder)
            except OSError as error:  # the file is visible, but a crash of the machine may lose it
                raise ambiguous_write(error, self.root, path, verb) from error

    def _check_clock(self, path: str, temporary: bytes) -> None:
        """Raise StorageError if a file that was just written has a time far from that of this machine.

        All times in a lakehouse count by ``now_ms``, so nothing is written with a clock that does not stamp the files.
        """
        difference_s = clock_difference_s(temporary)
        if abs(difference_s) > _MAX_CLOCK_DIFFERENCE_SECONDS:
            raise StorageError(
                f"cannot write {path!r} under {self.root}: the clock of this machine is {difference_s:.0f} s ahead of"
                " the clock of the file system; set right the one that is wrong",
                path=path,
            )

    def _new_temporary(self) -> bytes:
        return b"%b/%b" % (self._temporary_folder, os.urandom(16).hex().encode())

    def _sync(self, made: Sequence[bytes], *folders: bytes) -> None:
        """Bring the entries of folders to the device, and in the same wait those of folders that were just made."""
        run_parallel(sync_folder, list({*folders, *map(os.path.dirname, made)}), self.concurrency)
        self._known_folders.update(made)

    def _make_folder(self, folder: bytes) -> builtins.list[bytes]:
        """Make a folder and its parents. Returns those at or below the root whose entry may not be on the device.

        An existing folder is among them once, as its maker may not have synced it yet. Without ``fsync`` none are.
        """
        if folder in self._known_folders or folder == b"/":
            return []
        is_below_root = folder.startswith(self._folder)
        made = self._make_folder(os.path.dirname(folder)) if is_below_root or not os.path.isdir(folder) else []
        was_missing = create_folder(folder)
        if len(self._known_folders) >= _MAX_KNOWN_FOLDERS:
            self._known_folders.clear()
        if self.fsync and (is_below_root or was_missing):
            return [*made, folder]
        self._known_folders.add(folder)
        return made

    def _walk(self, prefix: str) -> Iterator[FileInfo]:
        """Read one folder after the other. Only the names of folders still to read are kept."""
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
        """Raise StorageError if a file or a dangling link is where the root, or a folder above it, should be.

        Without this check, a reader would report that no lakehouse exists.
        """
        folder = self._folder.rstrip(b"/")
        while folder and not os.path.isdir(folder):
            if os.path.lexists(folder):
                raise root_is_no_folder(self.root, folder)
            folder = os.path.dirname(folder)

    def _has_link(self, path: str) -> bool:
        """Whether a part of a folder's path is a link. Our writes have names of their own: a look before is enough."""
        parts = (TEMPORARY_PREFIX.rstrip("/"), path)
        places = (place for part in parts for place in itertools.accumulate(part.split("/"), "{}/{}".format) if place)
        return any(os.path.islink(self._folder + place.encode()) for place in places)

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
    """Return entries whose UTF-8 name begins with ``name_start``, none where the folder is gone."""
    try:
        scan = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with scan:
        for entry in scan:
            try:
                name = entry.name.decode()
            except UnicodeDecodeError:
                continue  # no path can spell the name, so it is no file of the lakehouse
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
        return  # renamed into place, or never made
    except OSError as error:
        logger.warning("could not remove the temporary file %r: %s", os.fsdecode(temporary), error.strerror)


def _file_info(path: str, status: os.stat_result) -> FileInfo:
    return FileInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)


def _reopen(root: str, fsync: bool, whole_file_limit_bytes: int, follows_links: bool) -> LocalStorage:
    return LocalStorage(root, fsync=fsync, whole_file_limit_bytes=whole_file_limit_bytes, follows_links=follows_links)
