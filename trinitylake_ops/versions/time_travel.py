"""Version times: the time of the next version, and the version at a given time (protocol.md, "Time travel")."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from trinitylake_ops.errors import StorageError, VersionNotFoundError
from trinitylake_ops.format.keys import CLOCK_RESET, COMMIT_ID, CREATED_AT_MILLIS, MAX_TIME_MS, clock_reset
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.roots import Roots, read_roots
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

#: Maximum difference between the clocks of an orchestrator, its database and the storage of the lakehouse.
CLOCK_SKEW = timedelta(hours=1)

_BATCH = 64
#: Assumed maximum error of a slow clock, for example with a wrong time zone.
_MAX_BEHIND_MS = 24 * 3_600_000


def find_version_at(roots: Roots, timestamp_ms: int, latest: int, probed: ProbedRoots) -> int:
    """Return the newest version for which no version from the last clock reset up to it is later than a given time.

    Between two clock resets, each version that this package writes is later than its predecessor. Therefore bisection
    finds the version with one read per step and two more reads for each clock reset after the given time.

    Args:
        roots: The roots of the lakehouse.
        timestamp_ms: The time, in milliseconds since the epoch.
        latest: The latest version.
        probed: Collects the roots that are read.

    Raises:
        VersionNotFoundError: The time is before the oldest version.
    """
    return _find(roots, timestamp_ms, latest, probed, behind_ms=0)


def find_version_before(roots: Roots, timestamp_ms: int, latest: int, probed: ProbedRoots) -> int:
    """Return a version that precedes all commits since a given time, even if a clock was slow for a while.

    At a clock reset, either the earlier versions were ahead or the clock was slow. Only in the second case can an
    earlier version be later than the time. Therefore, for times within the first day after a clock reset, the search
    continues before the reset.

    Args:
        roots: The roots of the lakehouse.
        timestamp_ms: The time, in milliseconds since the epoch.
        latest: The latest version.
        probed: Collects the roots that are read.

    Raises:
        VersionNotFoundError: The time is before the oldest version.
    """
    return _find(roots, timestamp_ms, latest, probed, behind_ms=_MAX_BEHIND_MS)


@dataclass(frozen=True, slots=True)
class _ClockReset:
    """A version with a clock reset, and its time."""

    version: int
    created_at_ms: int


def _find(roots: Roots, timestamp_ms: int, latest: int, probed: ProbedRoots, *, behind_ms: int) -> int:
    end = latest
    while True:
        reset = _last_reset(roots, end, probed)
        if reset is None or timestamp_ms >= reset.created_at_ms + behind_ms:
            return _search_between(roots, timestamp_ms, -1 if reset is None else reset.version, end, probed)
        end = reset.version - 1


def _last_reset(roots: Roots, version: int, probed: ProbedRoots) -> _ClockReset | None:
    """Return the last clock reset up to ``version``; None if the roots name no reset that its own root confirms.

    Roots of other programs may lack this row. In this case, the last root of this package is searched for in one more
    round trip.
    """
    system = _system(roots, version, probed)
    if system is not None and CLOCK_RESET not in system and COMMIT_ID not in system:
        for number, data in read_roots(roots, range(version - 1, max(-1, version - 1 - _BATCH), -1), _BATCH):
            system = None if data is None else decode_system_rows(data, roots.path(number))
            version = number
            if system is None or COMMIT_ID in system:
                break
    reset = None if system is None else clock_reset(system, version)
    named = None if reset is None else _system(roots, reset, probed)
    if reset is None or named is None or clock_reset(named, reset) != reset:
        return None
    return _ClockReset(reset, int(named[CREATED_AT_MILLIS]))


def _search_between(roots: Roots, timestamp_ms: int, first: int, last: int, probed: ProbedRoots) -> int:
    """Return the version at a time between ``first``, which is not later than the time, and ``last``.

    ``first`` is -1 if there is no such version. A version of another program has no ``commit_id`` and may be earlier
    than its predecessors. All candidates are then read in order.
    """
    low, high = first, last + 1  # the result is at least ``low`` and less than ``high``
    high_ms, version, is_there = 0, last, first >= 0
    while high - low > 1:
        system = _system(roots, version, probed)
        if system is None:  # another program deleted this root and all roots before it
            low = version
        else:
            time_ms = int(system[CREATED_AT_MILLIS])
            if time_ms > timestamp_ms:
                high, high_ms = version, time_ms
            elif COMMIT_ID in system:
                low, is_there = version, True
            else:
                low = _along_chain(roots, timestamp_ms, low, high)
                is_there = is_there or low >= 0
                break
        version = (low + high) // 2
    if not is_there:
        youngest = "" if high > last else f"; version {high} was created at {_shown(high_ms)}"
        raise VersionNotFoundError(f"no version is as old as {_shown(timestamp_ms)}{youngest}; choose a later time")
    return low


def _system(roots: Roots, version: int, probed: ProbedRoots) -> dict[str, str] | None:
    """Return the system rows of a root, None if another program deleted it."""
    path = roots.path(version)
    probed.read([path])
    data = probed.contents[path]
    return None if data is None else decode_system_rows(data, path)


def _shown(time_ms: int) -> str:
    return f"{time_ms} ms ({utc_of(time_ms):%Y-%m-%d %H:%M:%S} UTC)"


def _along_chain(roots: Roots, timestamp_ms: int, low: int, high: int) -> int:
    """Return the last version before the first one above ``low`` that is later than the time, ``low`` if none is."""
    for version, data in read_roots(roots, range(low + 1, high), _BATCH):
        if data is None:
            continue
        if int(decode_system_rows(data, roots.path(version))[CREATED_AT_MILLIS]) > timestamp_ms:
            break
        low = version
    return low


_STAMPS_BATCH = 16


@dataclass(frozen=True, slots=True)
class VersionTime:
    """The time of a version."""

    #: The time in milliseconds since the epoch.
    created_at_ms: int
    #: The last version up to this one with a clock reset; None if there is none.
    clock_reset: int | None


def time_after(base: Snapshot, now_ms: int) -> VersionTime:
    """Return the time of the version that follows ``base``.

    It is the storage's time, or just after all earlier versions if these are later. If they are ahead by more than the
    clock margin, the new version resets the clock to the storage's time.

    Args:
        base: The previous version.
        now_ms: The storage's time, in milliseconds since the epoch.

    Raises:
        StorageError: No version can have the storage's time, or a root cannot be read.
    """
    newest_ms, reset = _newest_time(base)
    created_at_ms = bounded_time_ms(newest_ms, now_ms)
    return VersionTime(created_at_ms, base.version + 1 if created_at_ms <= newest_ms else reset)


def bounded_time_ms(newest_ms: int, now_ms: int) -> int:
    """Return a time just after ``newest_ms``, unless that is too far ahead of the storage's time ``now_ms``.

    Raises:
        StorageError: No version can have the storage's time.
    """
    check_time(now_ms)
    is_ahead = newest_ms > now_ms + CLOCK_MARGIN_MS or newest_ms >= MAX_TIME_MS
    return now_ms if is_ahead else max(now_ms, newest_ms + 1)


def check_time(time_ms: int) -> None:
    """Raise StorageError for a time that a root cannot store, because such a root could never be read again."""
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise StorageError(
            f"nothing was committed: the clock shows {time_ms} ms since 1970, which is out of range; correct the clock"
        )


def _newest_time(base: Snapshot) -> tuple[int, int | None]:
    """Return the latest time of the versions since the last clock reset, and the version of that reset.

    If this package wrote ``base``, the latest time is that of ``base``. A version of another program may be earlier
    than its predecessors, which are then read back to a version that this package wrote.
    """
    newest_ms, system, version, roots = base.created_at_ms, base.root.system, base.version, base.files.roots
    earlier = read_roots(roots, range(base.version - 1, -1, -1), _STAMPS_BATCH)
    while COMMIT_ID not in system:
        number, data = next(earlier, (-1, None))
        if data is None:
            break  # before version 0, or at a root that another program deleted with all roots before it
        version, system = number, decode_system_rows(data, roots.path(number))
        newest_ms = max(newest_ms, int(system[CREATED_AT_MILLIS]))
    return newest_ms, clock_reset(system, version)
