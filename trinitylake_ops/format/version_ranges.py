"""Sets of versions as text: inclusive ranges such as ``3-90,95`` (FORMAT.md, "Object definitions")."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.file_names import MAX_VERSION

_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class VersionRanges:
    """A set of versions."""

    #: Inclusive ranges (first, last), in ascending order and not adjacent to each other.
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, versions: Iterable[int]) -> VersionRanges:
        """Return the set of these versions."""
        return cls._merge((version, version) for version in versions)

    @classmethod
    @functools.lru_cache(maxsize=64)  # the same few texts are parsed for each version of a history
    def parse(cls, text: str) -> VersionRanges:
        """Parse text such as ``3-90,95``; empty text is the empty set. Raise InvalidInputError if it is invalid."""
        ranges = []
        for part in filter(None, text.split(",")):
            match = _RANGE.fullmatch(part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not 0 <= first <= last <= MAX_VERSION:
                raise InvalidInputError(f"invalid version ranges {text[:200]!r}; use a format such as 3-90,95")
            ranges.append((first, last))
        return cls._merge(ranges)

    @classmethod
    def _merge(cls, ranges: Iterable[tuple[int, int]]) -> VersionRanges:
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        return cls(tuple(merged))

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, version: int) -> bool:
        position = bisect_right(self.ranges, version, key=lambda bounds: bounds[0]) - 1
        return position >= 0 and version <= self.ranges[position][1]

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __or__(self, other: VersionRanges) -> VersionRanges:
        return self._merge((*self.ranges, *other.ranges))

    def __sub__(self, other: VersionRanges) -> VersionRanges:
        rest = list(self.ranges)
        for first, last in other.ranges:
            cut: list[tuple[int, int]] = []
            for low, high in rest:
                cut += [(low, min(high, first - 1)), (max(low, last + 1), high)]
            rest = sorted({(low, high) for low, high in cut if low <= high})
        return VersionRanges(tuple(rest))
