"""Files and folders by POSIX calls, safe against symbolic links and races."""

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
from trinitylake_ops.storage.local.errors import translated

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def write_new_file(name: bytes, data: bytes, *, fsync: bool, mode: int = 0o666) -> None:
    """Write a file that must not exist yet. With ``fsync`` its bytes are on the device on return."""
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
    """Return the seconds by which the clock of this machine is ahead of the one that stamped a file just written."""
    return (time.time_ns() - os.stat(name, follow_symlinks=False).st_mtime_ns) / 1e9


def overwrite_in_place(name: bytes, data: bytes) -> bool:
    """Overwrite a regular file of the same size where it is. Returns False where there is none."""
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


#: How a file is opened that may be anything: a named pipe would block.
READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def read_range(
    descriptor: int, offset: int, length: int | None, check_size: Callable[[int], None] | None = None
) -> bytes:
    """Read one version of a regular file, and close it. Anything else than a regular file counts as missing.

    ``check_size`` gets the number of bytes before they are read.
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
    """Bring the entries of a folder to the device."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_folder(name: bytes) -> bool:
    """Make a folder in an existing folder.

    Returns whether it was missing. Raises NotADirectoryError where a file is in the way, FileNotFoundError if the outer
    folder was removed, and PermissionError if the outer folder exists and can contain no new folder, as in ``/proc``.
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
    """Make a folder in one that was just missing, or that lists no new folders."""
    outer, _, last = name.rpartition(b"/")
    held = os.open(outer or b"/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.mkdir(last, dir_fd=held)
    except FileNotFoundError:
        if os.fstat(held).st_nlink:  # the held folder was not removed
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None
        raise
    finally:
        os.close(held)


def link_to_free_name(temporary: bytes, target: bytes) -> None:
    """Give a finished file its name, atomically, unless the name is taken (FileExistsError).

    A hard link is tried first. A file system without links is asked for a rename without replacement. One that lacks
    both cannot hold a lakehouse (OSError with EOPNOTSUPP).
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        # A network file system may repeat a link whose answer was lost. Then the file there is ours.
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
    """Whether a normalized root is another one, or lies in it: by its text, and for a folder by where it leads."""
    if root.startswith(other):
        return True
    if not (root.startswith(_FILE) and other.startswith(_FILE)):
        return False
    folder = os.path.realpath(other.removeprefix(_FILE))
    outer = _status(folder)
    return any(
        place == folder
        or (outer is not None and (status := _status(place)) is not None and os.path.samestat(status, outer))
        for place in _upwards(os.path.realpath(root.removeprefix(_FILE)))
    )


def link_target(folder: str, path: str) -> str | None:
    """Return where a path below a folder leads, if a part of the path is a symbolic link.

    Args:
        folder: The absolute path of the folder. Links in this path are not examined.
        path: The path of a file, relative to the folder. The file need not exist.

    Returns:
        The absolute path of the file behind the link, None if no part of ``path`` is a link.
    """
    place = folder.rstrip("/")
    for part in path.split("/"):
        place = f"{place}/{part}"
        if os.path.islink(place):
            return os.path.realpath(f"{folder}/{path}")
    return None


def check_can_hold(root: str) -> None:
    """Check that a folder can be made at a root, or be written to. Other storages tell it at the first write.

    Raises InvalidInputError where a file stands there or above, StoragePermissionError.
    """
    if not root.startswith(_FILE):
        return
    folder = root.removeprefix(_FILE).rstrip("/") or "/"
    existing = next(place for place in _upwards(folder) if os.path.lexists(place))
    if not os.path.isdir(existing):  # also a link that leads nowhere
        raise InvalidInputError(
            f"target {root!r} cannot be a folder: a file stands at {existing!r}; choose another one"
        )
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise StoragePermissionError(
            f"target {root!r} cannot be written: the folder {existing!r} does not allow it; check its owner and mode",
            path=root,
        )


def make_root_folder(root: str) -> None:
    """Make the folder of a root, before something records that files will go there; other storages have no folders.

    Raises StorageError if the folder cannot be made.
    """
    if not root.startswith(_FILE):
        return
    folder = root.removeprefix(_FILE).rstrip("/") or "/"
    for place in reversed([place for place in _upwards(folder) if not os.path.isdir(place)]):
        with translated(root, place, "create"):
            create_folder(place.encode())


def remove_empty(folder: bytes, paths: Iterable[bytes]) -> None:
    """Remove the folders of some paths below ``folder`` that are empty, those above them, and ``folder`` itself."""
    folders = {place for path in paths for place in _folders_above(path)}
    for place in sorted(folders, key=lambda one: one.count(b"/"), reverse=True):
        _remove(folder, place)
    outer, _, name = folder.rstrip(b"/").rpartition(b"/")
    _remove(outer or b"/", name)


@contextmanager
def folder_without_links(folder: bytes, path: bytes) -> Iterator[tuple[bytes, int]]:
    """Open the folder of a path below a folder, part by part, so that no link is followed.

    Yields the last name and the descriptor of its folder, for calls that take both. A link that somebody puts there
    meanwhile is not followed either. Raises OSError, with ELOOP for a link.
    """
    *parts, name = path.split(b"/")
    held = os.open(folder, _FOLDER)
    try:
        for part in parts:
            outer, held = held, _opened_part(part, held)
            os.close(outer)
        yield name, held
    finally:
        os.close(held)


def _opened_part(part: bytes, folder: int) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _upwards(place: str) -> Iterator[str]:
    while place != "/":
        yield place
        place = os.path.dirname(place)
    yield place


def _folders_above(path: bytes) -> Iterator[bytes]:
    while path := os.path.dirname(path):
        yield path


def _remove(folder: bytes, path: bytes) -> None:
    try:
        with folder_without_links(folder, path) as (name, outer):
            os.rmdir(name, dir_fd=outer)
    except OSError as error:  # it is not empty, or gone, or behind a link, or not ours to remove
        logger.debug("the folder %r stays: %s", path, error)


def _status(place: str) -> os.stat_result | None:
    try:
        return os.stat(place)
    except OSError:
        return None
