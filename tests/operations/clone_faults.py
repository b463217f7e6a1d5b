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
DISTURBANCES = ("dies before", "dies after", "response lost", "maintenance", "concurrent run")


class Event(NamedTuple):
    """An event, for example ``dies before`` at the request ``create root`` of ``promote in the parent``."""

    name: str
    operation: str
    request: str


@dataclass(frozen=True)
class Disturbance:
    """A fault or an action at the ``at``-th request; only requests of ``kind`` count, unless it is None."""

    name: str
    at: int
    kind: str | None = None
    fault: Fault | None = None
    action: Callable[[], None] | None = None

    @classmethod
    def of(cls, rng: random.Random, actions: Mapping[str, Callable[[], None]]) -> Disturbance:
        """Choose a random disturbance. Requests that change files are preferred, because they are rarer."""
        kind = rng.choice((None, None, *KINDS, *EFFECTS, *EFFECTS))
        at = rng.randint(1, 90) if kind is None else rng.randint(1, 6 if kind in EFFECTS else 12)
        name = rng.choice(
            ("dies before", "dies after", "dies after", "response lost", "response lost", *actions, *actions)
        )
        if name in actions:
            return cls(name, at, kind, action=actions[name])
        if name == "response lost":
            kind = rng.choice(EFFECTS)
            at = rng.randint(1, 8)
            return cls(name, at, kind, lose_response(at, kind=kind))
        return cls(name, at, kind, fail(at, DeathError, "before" if name == "dies before" else "after", kind=kind))  # type: ignore[arg-type]


class _DisturbedStorage(FaultyStorage):
    """Trigger a disturbance once, and count disturbances by request."""

    def __init__(self, inner: Storage, operation: str, counts: Counter[Event], disturbance: Disturbance | None):
        faults = [] if disturbance is None or disturbance.fault is None else [disturbance.fault]
        super().__init__(inner, faults, concurrency=1)
        self._operation = operation
        self._events = counts
        self._disturbance = disturbance
        self._n_matching = 0

    def _register(self, kind: str, path: str) -> Sequence[Fault]:
        faults = super()._register(kind, path)
        disturbance = self._disturbance
        self._events[Event(SENT, self._operation, _describe(kind, path))] += 1
        if disturbance is None:
            return faults
        if faults:
            self._events[Event(disturbance.name, self._operation, _describe(kind, path))] += 1
        is_main = threading.current_thread() is threading.main_thread()
        if disturbance.action is not None and is_main and disturbance.kind in (None, kind):
            self._n_matching += 1
            if self._n_matching == disturbance.at:
                self._events[Event(disturbance.name, self._operation, _describe(kind, path))] += 1
                disturbance.action()
        return faults


def storage_with_disturbance(
    inner: Storage, operation: str, counts: Counter[Event], disturbance: Disturbance | None
) -> FaultyStorage:
    """Return a storage with one disturbance, if any. ``operation`` is the operation and the side."""
    return _DisturbedStorage(inner, operation, counts, disturbance)


def _describe(kind: str, path: str) -> str:
    return f"{kind} {file_class(path.split(' ', maxsplit=1)[0])}"


def format_counts(counts: Counter[Event]) -> str:
    """Return a table with the number of requests and disturbances of each operation."""
    totals = {(event.operation, event.request): count for event, count in counts.items() if event.name == SENT}
    rows = [["operation", "request", SENT, *DISTURBANCES]]
    rows += [
        [
            *item,
            *(f"{counts[Event(name, *item)]:,}" if _applies(name, item[1]) else "-" for name in (SENT, *DISTURBANCES)),
        ]
        for item in sorted(totals)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def missing_events(counts: Counter[Event], min_requests: int) -> list[Event]:
    """Return the disturbances that never happened at requests that were sent at least ``min_requests`` times."""
    return [
        Event(name, event.operation, event.request)
        for event, count in sorted(counts.items())
        if event.name == SENT and count >= min_requests
        for name in DISTURBANCES
        if _applies(name, event.request) and not counts[Event(name, event.operation, event.request)]
    ]


def _applies(name: str, request: str) -> bool:
    return name != "response lost" or request.startswith(EFFECTS)
