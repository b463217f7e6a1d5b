"""Inject faults and concurrent operations into requests of clone operations, and count them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.faults import DeathError, Fault, FaultyStorage, fail, lose_response
from tests.simulator.world import file_class
from trinitylake_ops.storage import Storage

KINDS = ("read", "stat", "list", "create", "write", "delete")
EFFECTS = ("create", "write", "delete")
SENT = "sent"
DISTURBANCES = ("dies before", "dies after", "answer lost", "upkeep", "twice at once")


class Event(NamedTuple):
    """An event, for example ``dies before`` at ``create root`` of ``promote in the parent``."""

    what: str
    where: str
    request: str


@dataclass(frozen=True)
class Disturbance:
    """A fault or another action at the ``at``-th request, of one kind or of any."""

    name: str
    at: int
    kind: str | None = None
    fault: Fault | None = None
    visit: Callable[[], None] | None = None

    @classmethod
    def of(cls, rng: random.Random, visits: Mapping[str, Callable[[], None]]) -> Disturbance:
        """Choose a random disturbance, preferably at a request that changes something, because these are rarer."""
        kind = rng.choice((None, None, *KINDS, *EFFECTS, *EFFECTS))
        at = rng.randint(1, 90) if kind is None else rng.randint(1, 6 if kind in EFFECTS else 12)
        name = rng.choice(("dies before", "dies after", "dies after", "answer lost", "answer lost", *visits, *visits))
        if name in visits:
            return cls(name, at, kind, visit=visits[name])
        if name == "answer lost":
            kind = rng.choice(EFFECTS)
            at = rng.randint(1, 8)
            return cls(name, at, kind, lose_response(at, kind=kind))
        return cls(name, at, kind, fail(at, DeathError, "before" if name == "dies before" else "after", kind=kind))  # type: ignore[arg-type]


class _Disturbed(FaultyStorage):
    """Trigger a disturbance once, and count it with its request."""

    def __init__(self, inner: Storage, where: str, counts: Counter[Event], disturbed: Disturbance | None):
        faults = [] if disturbed is None or disturbed.fault is None else [disturbed.fault]
        super().__init__(inner, faults, concurrency=1)
        self._where = where
        self._events = counts
        self._disturbed = disturbed
        self._n_matching = 0

    def _register(self, kind: str, path: str) -> Sequence[Fault]:
        faults = super()._register(kind, path)
        disturbed = self._disturbed
        self._events[Event(SENT, self._where, _describe(kind, path))] += 1
        if disturbed is None:
            return faults
        if faults:
            self._events[Event(disturbed.name, self._where, _describe(kind, path))] += 1
        is_main = threading.current_thread() is threading.main_thread()
        if disturbed.visit is not None and is_main and disturbed.kind in (None, kind):
            self._n_matching += 1
            if self._n_matching == disturbed.at:
                self._events[Event(disturbed.name, self._where, _describe(kind, path))] += 1
                disturbed.visit()
        return faults


def disturbances(inner: Storage, where: str, counts: Counter[Event], disturbed: Disturbance | None) -> FaultyStorage:
    """Return a storage with one disturbance, if any. ``where`` names the operation and the side."""
    return _Disturbed(inner, where, counts, disturbed)


def _describe(kind: str, path: str) -> str:
    return f"{kind} {file_class(path.split(' ', maxsplit=1)[0])}"


def table_of(counts: Counter[Event]) -> str:
    """Return a table of the requests of each operation, with the number of requests and of disturbances."""
    totals = {(event.where, event.request): count for event, count in counts.items() if event.what == SENT}
    rows = [["operation", "request", SENT, *DISTURBANCES]]
    rows += [
        [
            *item,
            *(f"{counts[Event(what, *item)]:,}" if _applies(what, item[1]) else "-" for what in (SENT, *DISTURBANCES)),
        ]
        for item in sorted(totals)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def never_seen(counts: Counter[Event], at_least: int) -> list[Event]:
    """Return the disturbances that frequent requests never had."""
    return [
        Event(what, event.where, event.request)
        for event, count in sorted(counts.items())
        if event.what == SENT and count >= at_least
        for what in DISTURBANCES
        if _applies(what, event.request) and not counts[Event(what, event.where, event.request)]
    ]


def _applies(what: str, request: str) -> bool:
    return what != "answer lost" or request.startswith(EFFECTS)
