"""The versions that reach a file, as ranges.

A range that ends with ``OPEN`` contains all versions up to the summarized one, so that a commit does not change the
ranges of files that it leaves alone. Exports with a separate tree are negative even numbers, which are never adjacent
to each other or to a version.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.file_names import MAX_VERSION

#: Inclusive ranges (first, last), in ascending order and not adjacent to each other.
Presence = tuple[tuple[int, int], ...]

#: The end of a range that is still growing.
OPEN = 1 << 62
NOWHERE: Presence = ()

_RANGE = re.compile(r"(-?\d{1,10})(?::(\d{0,10}))?", re.ASCII)


def export_number(position: int) -> int:
    """Return the number that stands for the export with a position, counted from 0."""
    return -2 * (position + 1)


def started(presence: Presence, version: int) -> Presence:
    """Return the presence of a file that a version reaches again, and that may be reached from then on.

    Args:
        presence: The presence up to the version before.
        version: The version.
    """
    if presence and presence[-1][1] >= version - 1:
        return (*presence[:-1], (presence[-1][0], OPEN))
    return (*presence, (version, OPEN))


def ended(presence: Presence, last: int) -> Presence:
    """Return the presence of a file that no version after ``last`` reaches.

    Args:
        presence: The presence, which ends with an open range.
        last: The last version that reaches the file.
    """
    first = presence[-1][0]
    return (*presence[:-1], (first, last)) if first <= last else presence[:-1]


def with_export(presence: Presence, number: int) -> Presence:
    """Return the presence of a file that an export reaches as well."""
    return union(frozenset((presence, ((number, number),))))


def is_open(presence: Presence) -> bool:
    """Whether the last summarized version reaches the file."""
    return bool(presence) and presence[-1][1] == OPEN


@functools.lru_cache(maxsize=65_536)
def union(presences: frozenset[Presence]) -> Presence:
    """Return the versions in any of some presences."""
    if len(presences) == 1:
        return next(iter(presences))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for presence in presences for pair in presence):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def first_of(presence: Presence, versions: Sequence[int]) -> int | None:
    """Return the first of some versions that a presence contains, or None.

    Args:
        presence: The presence.
        versions: The versions, in ascending order.
    """
    for first, last in presence:
        index = bisect_left(versions, first)
        if index < len(versions) and versions[index] <= last:
            return versions[index]
    return None


def intersects(presence: Presence, versions: Sequence[int]) -> bool:
    """Whether a presence contains any of some versions.

    Args:
        presence: The presence.
        versions: The versions, in ascending order.
    """
    return first_of(presence, versions) is not None


def text_of(presence: Presence) -> str:
    """Return a presence as text: ``3:17,40:`` for versions 3 to 17, and from 40 on."""
    return ",".join(
        f"{first}:" if last == OPEN else str(first) if first == last else f"{first}:{last}" for first, last in presence
    )


def parse(text: str) -> Presence:
    """Parse the result of :func:`text_of`. Raises InvalidInputError."""
    ranges = []
    before: int | None = None
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _invalid(text)
        first = int(match[1])
        last = first if match[2] is None else int(match[2]) if match[2] else OPEN
        is_ordered = first <= last and (before is None or first > before + 1)
        is_export = first < 0 and first % 2 == 0 and last == first
        if not is_ordered or not (is_export or 0 <= first <= MAX_VERSION) or (last > MAX_VERSION and last != OPEN):
            raise _invalid(text)
        ranges.append((first, last))
        before = last
    return tuple(ranges)


def parse_all(texts: Iterable[str]) -> list[Presence]:
    """Parse texts. Equal texts give the same object. Raises InvalidInputError."""
    known: dict[str, Presence] = {}
    presences = []
    for text in texts:
        presence = known.get(text)
        if presence is None:
            presence = known[text] = parse(text)
        presences.append(presence)
    return presences


def _invalid(text: str) -> InvalidInputError:
    return InvalidInputError(f"invalid versions {text[:200]!r} in a space summary")
