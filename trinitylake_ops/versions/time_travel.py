"""Finds the version of a time (docs/protocol.md, "Time travel")."""

from __future__ import annotations

from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.nodes.node_file import decode_system_rows
from trinitylake_ops.format.nodes.system_rows import COMMIT_ID, CREATED_AT_MILLIS
from trinitylake_ops.versions.roots import ProbedRoots, Roots, read_roots
from trinitylake_ops.versions.snapshot import utc_of

_BATCH = 64


def find_version_at(roots: Roots, timestamp_ms: int, latest: int, probed: ProbedRoots) -> int:
    """Return the newest version up to which all were created at or before a time.

    Each version that we write is younger than its predecessor. So bisection finds the answer, with one read for each
    halving. A missing ``commit_id`` shows a version of another program, which may be older than versions before it.
    Then all versions that can be the answer are read, in order. ``probed`` keeps the roots that bisection reads. Raises
    VersionNotFoundError for a time before the oldest version.
    """
    low, high = -1, latest + 1  # the answer is below ``high``, and not below ``low``
    high_ms, version, is_there = 0, latest, False
    while high - low > 1:
        path = roots.path(version)
        probed.read([path])
        data = probed.contents[path]
        if data is None:  # another program deleted this root, and all before it
            low = version
        else:
            system = decode_system_rows(data, path)
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
        youngest = "" if high > latest else f"; version {high} was created at {_shown(high_ms)}"
        raise VersionNotFoundError(f"no version is as old as {_shown(timestamp_ms)}{youngest}")
    return low


def _shown(time_ms: int) -> str:
    return f"{time_ms} ms ({utc_of(time_ms):%Y-%m-%d %H:%M:%S} UTC)"


def _along_chain(roots: Roots, timestamp_ms: int, low: int, high: int) -> int:
    """Return the last version before the first one above ``low`` that is younger than the time.

    It is ``low`` if there is none.
    """
    for version, data in read_roots(roots, range(low + 1, high), _BATCH):
        if data is None:
            continue
        if int(decode_system_rows(data, roots.path(version))[CREATED_AT_MILLIS]) > timestamp_ms:
            break
        low = version
    return low
