"""Finding versions: the latest, and the one of a time (docs/protocol.md, F and time travel)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import pairwise

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    LakehouseNotFoundError,
    StorageError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    MAX_VERSION,
    ROOT_PREFIX,
    parse_hint,
    parse_root_path,
    root_path,
)
from trinitylake_ops.format.node_file import CREATED_AT_MILLIS, decode_system_rows
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)

_HINT_READ_BYTES = 64  # more than any number takes, with white space; a file of garbage may be huge


def find_latest(storage: Storage) -> tuple[int, bytes]:
    """Return the latest version and the bytes of its root.

    The hint only says where to start: a missing, garbage, stale or leading one costs requests and
    never fails. Two sequential rounds when it is right. Raises LakehouseNotFoundError.
    """
    start = read_hint(storage) or 0
    at, following = storage.read_available([root_path(start), root_path(min(start + 1, MAX_VERSION))])
    if isinstance(at, FileMissingError):
        if start != 0:
            at, following = storage.read_available([root_path(0), root_path(1)])
        start = 0
    if isinstance(at, FileMissingError):
        start = _latest_listed(storage)
        return start, storage.read(root_path(start))
    root = _raise_error(at)
    if isinstance(following, FileMissingError) or start == MAX_VERSION:
        return start, root
    _raise_error(following)
    latest = _gallop(storage, start + 1)
    return latest, storage.read(root_path(latest))


def read_hint(storage: Storage) -> int | None:
    """Return the version the hint names, or None when it is missing, holds no version or cannot be read."""
    try:
        return parse_hint(storage.read(HINT_PATH, length=_HINT_READ_BYTES))
    except FileMissingError:
        return None
    except StorageError as error:
        logger.warning("the hint cannot be read, looking from version 0: %s", error)
        return None


def _raise_error(data: bytes | StorageError) -> bytes:
    if isinstance(data, StorageError):
        raise data
    return data


def _gallop(storage: Storage, known: int) -> int:
    """Return the latest version from one that exists: names are contiguous, since none is ever freed."""
    step = 1
    while known + step <= MAX_VERSION and storage.exists(root_path(known + step)):
        known += step
        step *= 2
    absent = min(known + step, MAX_VERSION + 1)
    while absent - known > 1:
        middle = (known + absent) // 2
        if storage.exists(root_path(middle)):
            known = middle
        else:
            absent = middle
    return known


def _latest_listed(storage: Storage) -> int:
    """Return the largest version under the root, where version 0 is gone (a clean-up by others)."""
    versions = listed_versions(storage)
    if not versions:
        raise LakehouseNotFoundError(f"there is no lakehouse at {storage.root}; create one with init")
    return max(versions)


def listed_versions(storage: Storage) -> set[int]:
    """Return the versions of all root files that a listing shows."""
    found = (parse_root_path(info.path) for info in storage.list(ROOT_PREFIX))
    return {version for version in found if version is not None}


def versions_beyond_gap(storage: Storage, latest: int, listed: Iterable[int]) -> list[int]:
    """Return the listed versions above the latest, ascending; none where the next one was committed since."""
    beyond = sorted(version for version in listed if version > latest)
    return beyond if beyond and not storage.exists(root_path(latest + 1)) else []


def check_no_gap(storage: Storage, latest: int) -> None:
    """Raise CorruptFileError when a root stands beyond the latest version: one between them was deleted.

    A commit would fill the gap and be lost among the versions after it.
    """
    if beyond := versions_beyond_gap(storage, latest, listed_versions(storage)):
        raise CorruptFileError(
            f"the root of version {latest + 1} is missing, though version {max(beyond)} exists; restore it first",
            path=root_path(latest + 1),
            version=latest + 1,
        )


def find_version_at(storage: Storage, timestamp_ms: int, latest: int) -> int:
    """Return the newest version created at or before a time.

    Creation times rise strictly in what we write, so bisection finds it. Where the probes show
    that they do not rise, which only others write, every version is read and the running maximum
    decides. Raises VersionNotFoundError for a time before the oldest version.
    """
    created_at_ms = _creation_times(storage)
    oldest = _oldest(storage)
    known, after = oldest, latest + 1
    oldest_ms = created_at_ms(oldest)
    if timestamp_ms < oldest_ms:
        raise VersionNotFoundError(
            f"no version is as old as {timestamp_ms} ms; version {oldest} was created at {oldest_ms} ms", version=oldest
        )
    probes = {oldest: oldest_ms, latest: created_at_ms(latest)}
    while after - known > 1:
        middle = (known + after) // 2
        probes[middle] = created_at_ms(middle)
        if probes[middle] <= timestamp_ms:
            known = middle
        else:
            after = middle
    times = [probes[version] for version in sorted(probes)]
    if all(earlier < later for earlier, later in pairwise(times)):
        return known
    return _newest_by_running_maximum(created_at_ms, timestamp_ms, range(oldest, latest + 1))


def _oldest(storage: Storage) -> int:
    """Return the oldest version that is there: 0, unless others removed it."""
    return 0 if storage.exists(root_path(0)) else min(listed_versions(storage), default=0)


def _newest_by_running_maximum(created_at_ms: Callable[[int], int], timestamp_ms: int, versions: range) -> int:
    newest = versions.start
    for version in versions:
        if created_at_ms(version) > timestamp_ms:
            return newest
        newest = version
    return newest


def _creation_times(storage: Storage) -> Callable[[int], int]:
    known: dict[int, int] = {}

    def created_at_ms(version: int) -> int:
        if version not in known:
            path = root_path(version)
            known[version] = int(decode_system_rows(storage.read(path), path)[CREATED_AT_MILLIS])
        return known[version]

    return created_at_ms
