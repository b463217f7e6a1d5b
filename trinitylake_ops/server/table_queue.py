"""The queue in which commits of the same table wait for each other, because all but one of simultaneous ones conflict.

A commit in the queue occupies no thread. The queue is in the memory of one server and no commit depends on it: other
processes change the same tables.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from trinitylake_ops.server.answers import busy_error

#: A lakehouse, a namespace and a table.
TableKey: TypeAlias = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class Place:
    """The place of a commit in the queues of its tables. ``turn`` is done when it is the first in all of them."""

    principal: str
    tables: frozenset[TableKey]
    turn: asyncio.Future[None]
    n_behind: int = 0


class TableQueue:
    """A queue for each table. A commit enters those of all its tables at once, so that none waits for a later one.

    All methods are called on the event loop.

    Args:
        most: The number of commits in all queues, including those that run.
        most_of_one: The number of commits of one principal.
    """

    def __init__(self, most: int, most_of_one: int):
        self._most = most
        self._most_of_one = most_of_one
        self._queues: dict[TableKey, OrderedDict[Place, None]] = {}
        self._n_places: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of commits in the queues, including those whose turn it is."""
        return self._n_places.total()

    def enter(self, principal: str, tables: Iterable[TableKey]) -> Place:
        """Enter the queues of tables. The caller leaves them when its commit has ended.

        Args:
            principal: The name of the principal.
            tables: The tables that the commit changes.

        Raises:
            RefusedError: 503 if too many commits are there already, in all or of this principal.
        """
        if len(self) >= self._most or self._n_places[principal] >= self._most_of_one:
            raise busy_error()
        place = Place(principal, frozenset(tables), asyncio.get_running_loop().create_future())
        self._n_places[principal] += 1
        for table in place.tables:
            queue = self._queues.setdefault(table, OrderedDict())
            place.n_behind += bool(queue)
            queue[place] = None
        if not place.n_behind:
            place.turn.set_result(None)
        return place

    def leave(self, place: Place) -> None:
        """Leave all queues, also before the turn has come. The next commit of each table moves up."""
        self._n_places -= Counter({place.principal: 1})
        for table in place.tables:
            queue = self._queues[table]
            was_first = next(iter(queue)) is place
            del queue[place]
            if not queue:
                del self._queues[table]
            elif was_first:
                self._move_up(next(iter(queue)))

    @staticmethod
    def _move_up(place: Place) -> None:
        place.n_behind -= 1
        if not place.n_behind and not place.turn.done():
            place.turn.set_result(None)
