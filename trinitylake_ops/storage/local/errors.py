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
from trinitylake_ops.storage.error_table import EXISTS, FULL, MISSING, RETRY, ErrorRow, find_row

_BEHIND_A_LINK = (
    "{path!r} under {root} lies behind a symbolic link, which is not followed here; put the file itself there"
)
_WITHOUT_RESPONSE = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO}


_ERRORS = (
    ErrorRow(FileMissingError, MISSING, statuses={errno.ENOENT, errno.ENOTDIR}),
    ErrorRow(FileExistsAlreadyError, EXISTS, statuses={errno.EEXIST}),
    ErrorRow(
        StoragePermissionError,
        "{what}; check owner, mode and mount options of the folder",
        statuses={errno.EACCES, errno.EPERM, errno.EROFS},
    ),
    ErrorRow(StorageFullError, FULL, statuses={errno.ENOSPC, errno.EDQUOT, errno.EFBIG}),
    ErrorRow(LocationNotAllowedError, _BEHIND_A_LINK, statuses={errno.ELOOP}),
    ErrorRow(
        TransientError,
        RETRY,
        statuses={
            errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.ENOBUFS, errno.EBUSY,
        },
    ),
    ErrorRow(InvalidLocationError, "{what}; use a shorter name", statuses={errno.ENAMETOOLONG}),
    ErrorRow(StorageError, "{failure}: there is a folder of this name; remove it", statuses={errno.EISDIR}),
    ErrorRow(
        StorageError,
        "{failure} safely: the file system has neither hard links nor renaming without replacement; keep the lakehouse"
        " on another file system",
        statuses={errno.EOPNOTSUPP},
    ),
    ErrorRow(StorageError, "{what}; check the file system"),
)  # fmt: skip


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
    """Return the typed error for an OSError: one line that says what to do.

    Args:
        error: the error of the operating system.
        root: the root of the storage.
        path: the path below the root.
        verb: the operation of the caller, such as ``read``.
    """
    row = find_row(_ERRORS, verb, error.errno, None)
    failure = f"cannot {verb} {path!r} under {root}"
    what = f"{failure}: {os.strerror(error.errno) if error.errno else error}"
    return row.error(row.message.format(failure=failure, what=what, path=path, root=root), path=path)


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
    """Return the error for a path through a link, whose target is decided by the link's creator only."""
    return LocationNotAllowedError(_BEHIND_A_LINK.format(root=root, path=path), path=path)


def no_folder_possible(root: str, path: str, verb: str) -> StorageError:
    """A part of the path is a file, so that no folder can be there."""
    return StorageError(
        f"cannot {verb} {path!r} under {root}: a file stands where a folder is needed; choose another path", path=path
    )


def root_is_no_folder(root: str, place: bytes) -> StorageError:
    """Return the error for a root that is, or is below, something other than a folder.

    Args:
        root: The URI of the root.
        place: The path that exists and is not a folder.
    """
    kind = "a link to a missing file" if os.path.islink(place) and not os.path.exists(place) else "not a folder"
    return StorageError(
        f"cannot list files under {root}: {os.fsdecode(place)!r} is {kind}; restore the folder, or pass another root"
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
