"""The error table of the local file system (S7)."""

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
    "{path!r} under {root} is behind a symbolic link, and links are not followed; replace the link by the file"
)
_WITHOUT_RESPONSE = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO}


_ERRORS = (
    ErrorRow(FileMissingError, MISSING, statuses={errno.ENOENT, errno.ENOTDIR}),
    ErrorRow(FileExistsAlreadyError, EXISTS, statuses={errno.EEXIST}),
    ErrorRow(
        StoragePermissionError,
        "{what}; check the owner, the mode and the mount options of the folder",
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
    ErrorRow(StorageError, "{failure}: it is a folder; remove it", statuses={errno.EISDIR}),
    ErrorRow(
        StorageError,
        "{failure} safely: the file system supports neither hard links nor renames without replacement; use another"
        " file system",
        statuses={errno.EOPNOTSUPP},
    ),
    ErrorRow(StorageError, "{what}; check the file system"),
)  # fmt: skip


@contextmanager
def translate_errors(root: str, path: str, verb: str) -> Iterator[None]:
    """Raise the typed error for an OSError of the block.

    Args:
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller, for example ``read``.
    """
    try:
        yield
    except TrinityLakeError:  # some typed errors are also OSErrors
        raise
    except OSError as error:
        raise storage_error(error, root, path, verb) from error


def storage_error(error: OSError, root: str, path: str, verb: str) -> TrinityLakeError:
    """Return the typed error for an OSError.

    Args:
        error: Error of the operating system.
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller, for example ``read``.
    """
    row = find_row(_ERRORS, verb, error.errno, None)
    failure = f"cannot {verb} {path!r} under {root}"
    what = f"{failure}: {os.strerror(error.errno) if error.errno else error}"
    return row.error(row.message.format(failure=failure, what=what, path=path, root=root), path=path)


def folder_vanished_error(root: str, path: str, verb: str) -> TransientError:
    """Return the error for a write during which another process deleted the folder. The write had no effect.

    Args:
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller.
    """
    return TransientError(
        f"cannot {verb} {path!r} under {root}: another process keeps deleting its folder;"
        " stop that process, then retry",
        path=path,
    )


def link_without_folder(root: str, path: str, verb: str) -> StorageError:
    """Return the error for a write through a link that does not lead to a writable folder.

    Args:
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller.
    """
    return StorageError(
        f"cannot {verb} {path!r} under {root}: a link in its path does not lead to a writable folder; repair the link",
        path=path,
    )


def behind_a_link(root: str, path: str) -> LocationNotAllowedError:
    """Return the error for a path through a link. Links are not followed because anyone may have created them.

    Args:
        root: Root of the storage.
        path: Path below the root.
    """
    return LocationNotAllowedError(_BEHIND_A_LINK.format(root=root, path=path), path=path)


def no_folder_possible(root: str, path: str, verb: str) -> StorageError:
    """Return the error for a path whose folder cannot be created, because a part of the path is a file.

    Args:
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller.
    """
    return StorageError(
        f"cannot {verb} {path!r} under {root}: a part of its path is a file, not a folder; choose another path",
        path=path,
    )


def root_is_not_a_folder(root: str, name: bytes) -> StorageError:
    """Return the error for a root where the root, or a part of its path, is not a folder.

    Args:
        root: Root of the storage.
        name: Absolute path that exists and is not a folder.
    """
    kind = "a link to a missing file" if os.path.islink(name) and not os.path.exists(name) else "not a folder"
    return StorageError(
        f"cannot list files under {root}: {os.fsdecode(name)!r} is {kind}; restore the folder, or use another root"
    )


def outcome_unknown(error: OSError) -> bool:
    """Whether a failed system call may have taken effect."""
    return error.errno in _WITHOUT_RESPONSE


def ambiguous_write(error: OSError, root: str, path: str, verb: str) -> AmbiguousWriteError:
    """Return the error for a write that may have taken effect, or may be lost if the machine crashes.

    Args:
        error: Error of the operating system.
        root: Root of the storage.
        path: Path below the root.
        verb: Operation of the caller.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    return AmbiguousWriteError(
        f"cannot {verb} {path!r} under {root} reliably: {reason}; it may have taken effect: read the path to find out",
        path=path,
    )
