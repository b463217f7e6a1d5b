"""File and folder operations with POSIX calls, safe against symbolic links and races."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from trinitylake_ops.errors import InvalidInputError, StoragePermissionError
from trinitylake_ops.storage.local.errors import translate_errors

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def write_new_file(name: bytes, data: bytes, *, fsync: bool, mode: int = 0o666) -> None:
    """Write a new file. Raise FileExistsError if it exists.

    Args:
        name: Absolute path.
        data: Content of the file.
        fsync: Whether to sync the content to the device.
        mode: Permissions, which the umask restricts.
    """
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clock_difference_s(name: bytes) -> float:
    """Return the number of seconds by which this machine's clock is ahead of the modification time of a new file."""
    return (time.time_ns() - os.stat(name, follow_symlinks=False).st_mtime_ns) / 1e9


def overwrite_in_place(name: bytes, data: bytes) -> bool:
    """Overwrite a regular file of the same size in place. Return whether there was such a file.

    Args:
        name: Absolute path.
        data: New content.
    """
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(data):
            return False
        os.pwrite(descriptor, data, 0)
        return True
    finally:
        os.close(descriptor)


#: Flags for opening a file of any type, for example a named pipe, without blocking.
READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def read_range(
    descriptor: int, offset: int, length: int | None, check_size: Callable[[int], None] | None = None
) -> bytes:
    """Read a range of a file and close it. Raise FileNotFoundError if it is not a regular file.

    Args:
        descriptor: Descriptor of the file.
        offset: First byte of the range.
        length: Length of the range. None reads to the end of the file.
        check_size: Called with the number of bytes before they are read.
    """
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        end = status.st_size if length is None else min(status.st_size, offset + length)
        if check_size is not None:
            check_size(end - offset)
        parts = []
        while offset < end and (part := os.pread(descriptor, end - offset, offset)):
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)


def sync_folder(name: bytes) -> None:
    """Sync the entries of a folder to the device."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_folder(name: bytes) -> bool:
    """Create a folder in an existing folder. Return whether the folder was created.

    Raises:
        NotADirectoryError: There is a file at the path.
        FileNotFoundError: The outer folder was deleted.
        PermissionError: The outer folder cannot contain new folders, for example in ``/proc``.
    """
    try:
        try:
            os.mkdir(name)
        except FileNotFoundError:
            _create_in_unlisted_folder(name)
    except FileExistsError:
        if not os.path.isdir(name):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        return False
    return True


def _create_in_unlisted_folder(name: bytes) -> None:
    """Create a folder in a folder that was just deleted, or that cannot contain new folders."""
    outer, _, last = name.rpartition(b"/")
    descriptor = os.open(outer or b"/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.mkdir(last, dir_fd=descriptor)
    except FileNotFoundError:
        if os.fstat(descriptor).st_nlink:  # the open folder was not deleted
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None
        raise
    finally:
        os.close(descriptor)


def link_to_free_name(temporary: bytes, target: bytes) -> None:
    """Move a complete file to its final name, atomically and without replacing an existing file.

    This creates a hard link or, if the file system does not support links, renames the file without replacement.

    Args:
        temporary: Path of the complete file.
        target: Path to create.

    Raises:
        FileExistsError: The target exists.
        OSError: The file system supports neither method (EOPNOTSUPP), or the call failed.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        # A network file system may repeat a link call whose response was lost. Then the target is our file.
        status = os.lstat(target)
        if os.path.samestat(status, os.lstat(temporary)):
            return
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_to_free_name(temporary, target)


def _rename_to_free_name(temporary: bytes, target: bytes) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, temporary, _AT_FDCWD, target, _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
    if number in _NO_RENAMEAT2:
        number = errno.EOPNOTSUPP
    raise OSError(number, os.strerror(number))


logger = logging.getLogger(__name__)

_FILE = "file://"
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def lies_within(root: str, other: str) -> bool:
    """Whether a normalized root equals another root or is inside it. Links in ``file://`` roots are resolved.

    Args:
        root: The inner root.
        other: The outer root.
    """
    if root.startswith(other):
        return True
    if not (root.startswith(_FILE) and other.startswith(_FILE)):
        return False
    folder = os.path.realpath(other.removeprefix(_FILE))
    outer = _status(folder)
    return any(
        ancestor == folder
        or (outer is not None and (status := _status(ancestor)) is not None and os.path.samestat(status, outer))
        for ancestor in _parent_folders(os.path.realpath(root.removeprefix(_FILE)))
    )


def link_target(folder: str, path: str) -> str | None:
    """Return the resolved path of a file if a part of its path is a symbolic link.

    Args:
        folder: Absolute path of a folder. Links in this path are not examined.
        path: Path of a file, relative to the folder. The file need not exist.

    Returns:
        The absolute path of the file behind the link, or None if no part of ``path`` is a link.
    """
    name = folder.rstrip("/")
    for part in path.split("/"):
        name = f"{name}/{part}"
        if os.path.islink(name):
            return os.path.realpath(f"{folder}/{path}")
    return None


def check_can_hold(root: str) -> None:
    """Check that the folder of a ``file://`` root can be created or written to.

    Other roots are not checked: their first write reports the error.

    Raises:
        InvalidInputError: The root, or a folder above it, is a file.
        StoragePermissionError: The folder is not writable.
    """
    if not root.startswith(_FILE):
        return
    folder = root.removeprefix(_FILE).rstrip("/") or "/"
    existing = next(name for name in _parent_folders(folder) if os.path.lexists(name))
    if not os.path.isdir(existing):  # includes a dangling link
        raise InvalidInputError(f"target {root!r} cannot be created: {existing!r} is a file; choose another target")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise StoragePermissionError(
            f"target {root!r} cannot be written: no permission for the folder {existing!r}; check its owner and mode",
            path=root,
        )


def make_root_folder(root: str) -> None:
    """Create the folder of a ``file://`` root. Other storages have no folders.

    Raises a StorageError if the folder cannot be created.
    """
    if not root.startswith(_FILE):
        return
    folder = root.removeprefix(_FILE).rstrip("/") or "/"
    for name in reversed([name for name in _parent_folders(folder) if not os.path.isdir(name)]):
        with translate_errors(root, name, "create"):
            create_folder(name.encode())


def remove_empty(folder: bytes, paths: Iterable[bytes]) -> None:
    """Remove empty folders: those above ``paths``, and the root folder.

    Args:
        folder: Absolute path of the root folder.
        paths: Paths of deleted files, relative to the root folder.
    """
    folders = {outer for path in paths for outer in _folders_above(path)}
    for path in sorted(folders, key=lambda path: path.count(b"/"), reverse=True):
        _remove(folder, path)
    outer, _, name = folder.rstrip(b"/").rpartition(b"/")
    _remove(outer or b"/", name)


@contextmanager
def folder_without_links(folder: bytes, path: bytes) -> Iterator[tuple[bytes, int]]:
    """Open the folder of a file part by part, so that no link is followed, even if it is created in the meantime.

    Yields the name of the file and the descriptor of its folder, for system calls that take both.

    Args:
        folder: Absolute path of a folder, in which links are followed.
        path: Path of the file, relative to the folder.

    Raises:
        OSError: A part of the path is a link (ELOOP), or cannot be opened.
    """
    *parts, name = path.split(b"/")
    descriptor = os.open(folder, _FOLDER)
    try:
        for part in parts:
            outer, descriptor = descriptor, _opened_part(part, descriptor)
            os.close(outer)
        yield name, descriptor
    finally:
        os.close(descriptor)


def _opened_part(part: bytes, folder: int) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _parent_folders(name: str) -> Iterator[str]:
    while name != "/":
        yield name
        name = os.path.dirname(name)
    yield name


def _folders_above(path: bytes) -> Iterator[bytes]:
    while path := os.path.dirname(path):
        yield path


def _remove(folder: bytes, path: bytes) -> None:
    try:
        with folder_without_links(folder, path) as (name, outer):
            os.rmdir(name, dir_fd=outer)
    except OSError as error:  # not empty, missing, behind a link, or no permission
        logger.debug("cannot remove the folder %r: %s", path, error)


def _status(name: str) -> os.stat_result | None:
    try:
        return os.stat(name)
    except OSError:
        return None
