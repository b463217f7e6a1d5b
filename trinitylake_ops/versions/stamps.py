"""The time of the next version, which may set the clock back (docs/protocol.md, "Times of versions")."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.nodes.node_file import decode_system_rows
from trinitylake_ops.format.nodes.system_rows import COMMIT_ID, CREATED_AT_MILLIS, MAX_TIME_MS, clock_reset
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import Snapshot

_BATCH = 16


@dataclass(frozen=True, slots=True)
class VersionTime:
    """The time of a version, and the newest version up to it at which the clock was set back, None if there is none."""

    created_at_ms: int
    clock_reset: int | None


def time_after(base: Snapshot, now_ms: int) -> VersionTime:
    """Return the time of the version that follows ``base``.

    It is the storage's time, or just after all earlier versions where that is behind them. If they are ahead by more
    than clocks may differ, the new version sets the clock back to the storage's time.

    Args:
        base: The version before.
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
    """Raise StorageError for a time that no node file can hold; such a root could never be read again."""
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise StorageError(
            f"the clock gives {time_ms} ms since 1970, which no version can have; set it right, nothing was committed"
        )


def _newest_time(base: Snapshot) -> tuple[int, int | None]:
    """Return the largest time of the versions since the clock was last set back, and where that was.

    If we wrote ``base``, that is its own time. A version of another program may be older than those before it. These
    are then read, back to one of ours.
    """
    newest_ms, system, version, roots = base.created_at_ms, base.root.system, base.version, base.files.roots
    earlier = read_roots(roots, range(base.version - 1, -1, -1), _BATCH)
    while COMMIT_ID not in system:
        number, data = next(earlier, (-1, None))
        if data is None:
            break  # before version 0, or at a root that another program deleted, with all before it
        version, system = number, decode_system_rows(data, roots.path(number))
        newest_ms = max(newest_ms, int(system[CREATED_AT_MILLIS]))
    return newest_ms, clock_reset(system, version)
