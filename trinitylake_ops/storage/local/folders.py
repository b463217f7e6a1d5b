"""Folders of this machine as they are, not as they are spelled: behind links, inside each other, or empty."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trinitylake_ops.errors import InvalidInputError, StoragePermissionError
from trinitylake_ops.storage.local.os_errors import translated
from trinitylake_ops.storage.local.posix_files import make_one_folder

logger = logging.getLogger(__name__)

_FILE = "file://"
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def lies_within(root: str, other: str) -> bool:
    """Whether a normalised root is another one, or lies in it: by its text, and for a folder by where it leads."""
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
    standing = next(place for place in _upwards(folder) if os.path.lexists(place))
    if not os.path.isdir(standing):  # also a link that leads nowhere
        raise InvalidInputError(
            f"target {root!r} cannot be a folder: a file stands at {standing!r}; choose another one"
        )
    if not os.access(standing, os.W_OK | os.X_OK, effective_ids=True):
        raise StoragePermissionError(
            f"target {root!r} cannot be written: the folder {standing!r} does not allow it; check its owner and mode",
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
            make_one_folder(place.encode())


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
