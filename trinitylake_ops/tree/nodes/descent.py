"""Goes down a tree that may be damaged. Where pointers lead in a circle, no reader follows them for ever."""

from __future__ import annotations

from collections.abc import Iterable

from trinitylake_ops.errors import CorruptFileError

#: More levels than any tree has: with at least two children for each node below the root, it would have 2^64 leaves.
MOST_LEVELS = 64


class MetNodes:
    """The nodes of one tree that were met on the way down. No sound tree has a node in two places."""

    def __init__(self) -> None:
        self._locations: set[str] = set()

    def add(self, locations: Iterable[str]) -> None:
        """Note nodes that are about to be read. Raises CorruptFileError for one that was met before."""
        for location in locations:
            if location in self._locations:
                raise reached_twice(location)
            self._locations.add(location)


def check_depth(depth: int, location: str) -> None:
    """Raise CorruptFileError for a node so far below the root that the pointers above must lead in a circle."""
    if depth > MOST_LEVELS:
        raise reached_twice(location)


def reached_twice(location: str) -> CorruptFileError:
    """Return the error of a node that is in two places of a tree."""
    return CorruptFileError(
        f"the node {location!r} is reached twice in one tree, so the tree is damaged; which versions are not,"
        " trinitylake verify tells",
        path=location,
    )
