"""The meaning of an error of the operating system for the caller of a storage (S7)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    LocationNotAllowedError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
)

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PASSING = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.ENOBUFS, errno.EBUSY}
_WITHOUT_RESPONSE = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO}


@contextmanager
def translated(root: str, path: str, verb: str) -> Iterator[None]:
    """Raise the typed error for an OSError of the block. ``verb`` names the caller's operation."""
    try:
        yield
    except TrinityLakeError:  # some of ours are errors of the operating system, too
        raise
    except OSError as error:
        raise storage_error(error, root, path, verb) from error


def storage_error(error: OSError, root: str, path: str, verb: str) -> TrinityLakeError:
    """The typed error that an OSError stands for: one line that says what to do."""
    number = error.errno
    reason = os.strerror(number) if number else str(error)
    what = f"cannot {verb} {path!r} under {root}: {reason}"
    if number in _MISSING:
        return FileMissingError(f"there is no file {path!r} under {root}", path=path)
    if number == errno.EEXIST:
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if number in _FORBIDDEN:
        return StoragePermissionError(f"{what}; check owner, mode and mount options of the folder", path=path)
    if number in _FULL:
        return StorageFullError(f"{what}; free space or raise the quota, then retry", path=path)
    if number == errno.ELOOP:
        return behind_a_link(root, path)
    if number in _PASSING:
        return TransientError(f"{what}; retry", path=path)
    if number == errno.ENAMETOOLONG:
        return InvalidLocationError(f"{what}; use a shorter name", path=path)
    if number == errno.EISDIR:
        return StorageError(f"cannot {verb} {path!r} under {root}: a folder stands there; remove it", path=path)
    if number == errno.EOPNOTSUPP:
        return StorageError(
            f"cannot {verb} {path!r} under {root} safely: the file system has neither hard links nor renaming "
            "without replacement; keep the lakehouse on another file system",
            path=path,
        )
    return StorageError(f"{what}; check the file system", path=path)


def folder_vanished(root: str, path: str, verb: str) -> TransientError:
    """A folder was removed again while a file was put into it; nothing took effect."""
    return TransientError(
        f"cannot {verb} {path!r} under {root}: its folder keeps being removed; retry when that ended", path=path
    )


def link_without_folder(root: str, path: str, verb: str) -> StorageError:
    """Return the error of a write through a link that leads to no folder, or to one that takes no files."""
    return StorageError(
        f"cannot {verb} {path!r} under {root}: a link in its path leads to no folder that takes files; repair the link",
        path=path,
    )


def behind_a_link(root: str, path: str) -> LocationNotAllowedError:
    """A link stands in the way, and leads to where only the maker of the link knows."""
    return LocationNotAllowedError(
        f"{path!r} under {root} lies behind a symbolic link, which is not followed here; put the file itself there",
        path=path,
    )


def no_folder_possible(root: str, path: str, verb: str) -> StorageError:
    """A part of the path is a file, so that no folder can be there."""
    return StorageError(
        f"cannot {verb} {path!r} under {root}: a file stands where a folder is needed; choose another path", path=path
    )


def outcome_unknown(error: OSError) -> bool:
    """Whether the failed system call may have taken effect all the same."""
    return error.errno in _WITHOUT_RESPONSE


def ambiguous_write(error: OSError, root: str, path: str, verb: str) -> AmbiguousWriteError:
    """The name may be there, or may be lost by a crash of the machine."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return AmbiguousWriteError(
        f"could not {verb} {path!r} under {root} for certain: {reason}; read it to see what stands there", path=path
    )
