"""What disturbs an operation on a clone at one of its requests, and which requests were disturbed by what."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.faults import DeathError, Fault, FaultyStorage, fail, lose_response
from tests.simulator.world import class_of
from trinitylake_ops.storage import Storage

KINDS = ("read", "stat", "list", "create", "write", "delete")
EFFECTS = ("create", "write", "delete")
SENT = "sent"
DISTURBANCES = ("dies before", "dies after", "answer lost", "upkeep", "twice at once")


class Met(NamedTuple):
    """What happened, where, and to what: such as ``dies before``, ``promote in the parent``, ``create root``."""

    what: str
    where: str
    request: str


@dataclass(frozen=True)
class Disturbance:
    """A fault, or something else that happens, at the ``at``-th request, of one kind or of any."""

    name: str
    at: int
    kind: str | None = None
    fault: Fault | None = None
    visit: Callable[[], None] | None = None

    @classmethod
    def of(cls, rng: random.Random, visits: Mapping[str, Callable[[], None]]) -> Disturbance:
        """Choose one, more often at a request that changes something: there are fewer of these."""
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
    """Lets a disturbance happen once, and notes at which request."""

    def __init__(self, inner: Storage, where: str, met: Counter[Met], disturbed: Disturbance | None):
        faults = [] if disturbed is None or disturbed.fault is None else [disturbed.fault]
        super().__init__(inner, faults, concurrency=1)
        self._where = where
        self._met = met
        self._disturbed = disturbed
        self._n_like = 0

    def _register(self, kind: str, path: str) -> Sequence[Fault]:
        faults = super()._register(kind, path)
        disturbed = self._disturbed
        self._met[Met(SENT, self._where, _shown(kind, path))] += 1
        if disturbed is None:
            return faults
        if faults:
            self._met[Met(disturbed.name, self._where, _shown(kind, path))] += 1
        is_main = threading.current_thread() is threading.main_thread()
        if disturbed.visit is not None and is_main and disturbed.kind in (None, kind):
            self._n_like += 1
            if self._n_like == disturbed.at:
                self._met[Met(disturbed.name, self._where, _shown(kind, path))] += 1
                disturbed.visit()
        return faults


def disturbances(inner: Storage, where: str, met: Counter[Met], disturbed: Disturbance | None) -> FaultyStorage:
    """Return a storage in which one disturbance happens, None for none. ``where`` names operation and side."""
    return _Disturbed(inner, where, met, disturbed)


def _shown(kind: str, path: str) -> str:
    return f"{kind} {class_of(path.split(' ', maxsplit=1)[0])}"


def table_of(met: Counter[Met]) -> str:
    """Return the requests of each operation, how often they were sent, and how often each disturbance met them."""
    sent = {(one.where, one.request): count for one, count in met.items() if one.what == SENT}
    rows = [["operation", "request", SENT, *DISTURBANCES]]
    rows += [
        [*one, *(f"{met[Met(what, *one)]:,}" if _applies(what, one[1]) else "-" for what in (SENT, *DISTURBANCES))]
        for one in sorted(sent)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def never_met(met: Counter[Met], at_least: int) -> list[Met]:
    """Return what never met a request that was sent so often."""
    return [
        Met(what, one.where, one.request)
        for one, count in sorted(met.items())
        if one.what == SENT and count >= at_least
        for what in DISTURBANCES
        if _applies(what, one.request) and not met[Met(what, one.where, one.request)]
    ]


def _applies(what: str, request: str) -> bool:
    return what != "answer lost" or request.startswith(EFFECTS)
