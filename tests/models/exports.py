"""Explicit-state model of exports, expiry and rollback as commits on one sequence of versions.

Each version has a definition: the versions that are exported and those that are expired. Every reachable state is
visited; a design breaks when a registered export, or the target of a rollback, was deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LAST_VERSION = 5
MOST_EXPORTS = 2
EXPORT_DELETED = "a registered export was deleted"
ROLLED_BACK_TO_DELETED = "rolled back to a deleted version"


@dataclass(frozen=True)
class Design:
    """What a protocol does.

    ``expiry_commits``: versions are expired by a commit, and deleted later. ``carries_definition``: a rollback
    keeps the current definition instead of the old one. ``rechecks``: a commit that lost a race checks again that
    what it needs is not expired, and goes on; otherwise it gives up.
    """

    expiry_commits: bool
    carries_definition: bool
    rechecks: bool = True


class _Definition(NamedTuple):
    exported: frozenset[int] = frozenset()
    expired: frozenset[int] = frozenset()


class _State(NamedTuple):
    """``definitions`` by version; operations on their way, each with the version it read; what was ever exported."""

    definitions: tuple[_Definition, ...] = (_Definition(),)
    deleted: frozenset[int] = frozenset()
    export: tuple[int, int] | None = None  # base, and what is exported
    expiry: tuple[int, frozenset[int]] | None = None  # base, and what is to go
    rollback: tuple[int, int] | None = None  # base, and target
    registered: frozenset[int] = frozenset()

    @property
    def latest(self) -> int:
        return len(self.definitions) - 1

    @property
    def has_room(self) -> bool:
        return len(self.definitions) <= LAST_VERSION

    def committed(self, definition: _Definition) -> _State:
        return self._replace(definitions=(*self.definitions, definition))


def violations(design: Design) -> tuple[int, set[str]]:
    """Visit all states of a design; returns how many there are, and what it breaks."""
    start = _State()
    seen, waiting, broken = {start}, deque([start]), set[str]()
    while waiting:
        state = waiting.popleft()
        if state.registered & state.deleted:
            broken.add(EXPORT_DELETED)
            continue
        for after in _steps(design, state, broken):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen), broken


def _steps(design: Design, state: _State, broken: set[str]) -> Iterator[_State]:
    yield from _export_steps(design, state)
    yield from _expiry_steps(design, state)
    yield from _rollback_steps(design, state, broken)


def _export_steps(design: Design, state: _State) -> Iterator[_State]:
    now = state.definitions[-1]
    if state.export is None:
        if len(state.registered) < MOST_EXPORTS:
            for version in range(len(state.definitions)):
                if version not in now.expired | state.deleted:
                    yield state._replace(export=(state.latest, version))
        return
    base, version = state.export
    if not state.has_room:
        return
    if base == state.latest or (design.rechecks and version not in now.expired):
        done = state.committed(now._replace(exported=now.exported | {version}))
        yield done._replace(export=None, registered=state.registered | {version})
    else:
        yield state._replace(export=None)


def _expiry_steps(design: Design, state: _State) -> Iterator[_State]:
    now = state.definitions[-1]
    if state.expiry is None:
        plan = frozenset(range(state.latest)) - now.exported - now.expired
        if plan:
            yield state._replace(expiry=(state.latest, plan))
    else:
        base, plan = state.expiry
        if not design.expiry_commits:
            for version in plan - state.deleted:
                yield state._replace(deleted=state.deleted | {version})
            yield state._replace(expiry=None)
        elif base != state.latest:
            yield state._replace(expiry=None)  # plan again
        elif state.has_room:
            yield state.committed(now._replace(expired=now.expired | plan))._replace(expiry=None)
    if design.expiry_commits:  # what is expired goes at any time
        for version in now.expired - state.deleted:
            yield state._replace(deleted=state.deleted | {version})


def _rollback_steps(design: Design, state: _State, broken: set[str]) -> Iterator[_State]:
    now = state.definitions[-1]
    if state.rollback is None:
        for target in range(state.latest):
            if target not in now.expired | state.deleted:
                yield state._replace(rollback=(state.latest, target))
        return
    base, target = state.rollback
    if base != state.latest and not (design.rechecks and target not in now.expired):
        yield state._replace(rollback=None)
    elif state.has_room:
        if target in state.deleted:
            broken.add(ROLLED_BACK_TO_DELETED)
        definition = now if design.carries_definition else state.definitions[target]
        yield state.committed(definition)._replace(rollback=None)
