"""Explicit-state model of exports, expiry and rollback as commits to one sequence of versions.

Each version has a definition, which lists the exported and the expired versions. The model visits every reachable
state. A design is broken if a registered export or the target of a rollback can be deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LAST_VERSION = 5
MAX_EXPORTS = 2
EXPORT_DELETED = "a registered export was deleted"
ROLLED_BACK_TO_DELETED = "rolled back to a deleted version"


@dataclass(frozen=True)
class Design:
    """A design of the protocol."""

    #: Whether versions are expired by a commit and deleted later, instead of deleted directly.
    expiry_commits: bool
    #: Whether a rollback keeps the current definition, instead of that of its target.
    keeps_definition: bool
    #: Whether a commit with a conflict continues if its version is not expired, instead of failing.
    rechecks: bool = True


class _Definition(NamedTuple):
    exported: frozenset[int] = frozenset()
    expired: frozenset[int] = frozenset()


class _State(NamedTuple):
    """The definitions by version, and the operations in progress, each with the version on which it is based."""

    definitions: tuple[_Definition, ...] = (_Definition(),)
    deleted: frozenset[int] = frozenset()
    export: tuple[int, int] | None = None  # the base and the exported version
    expiry: tuple[int, frozenset[int]] | None = None  # the base and the versions to expire
    rollback: tuple[int, int] | None = None  # the base and the target
    registered: frozenset[int] = frozenset()  # versions that were ever exported

    @property
    def latest(self) -> int:
        return len(self.definitions) - 1

    @property
    def can_commit(self) -> bool:
        return len(self.definitions) <= LAST_VERSION

    def committed(self, definition: _Definition) -> _State:
        return self._replace(definitions=(*self.definitions, definition))


def find_violations(design: Design) -> tuple[int, set[str]]:
    """Visit all states of a design. Return their number and the violations."""
    start = _State()
    visited, pending, violations = {start}, deque([start]), set[str]()
    while pending:
        state = pending.popleft()
        if state.registered & state.deleted:
            violations.add(EXPORT_DELETED)
            continue
        for successor in _steps(design, state, violations):
            if successor not in visited:
                visited.add(successor)
                pending.append(successor)
    return len(visited), violations


def _steps(design: Design, state: _State, violations: set[str]) -> Iterator[_State]:
    yield from _export_steps(design, state)
    yield from _expiry_steps(design, state)
    yield from _rollback_steps(design, state, violations)


def _export_steps(design: Design, state: _State) -> Iterator[_State]:
    current = state.definitions[-1]
    if state.export is None:
        if len(state.registered) < MAX_EXPORTS:
            for version in range(len(state.definitions)):
                if version not in current.expired | state.deleted:
                    yield state._replace(export=(state.latest, version))
        return
    base, version = state.export
    if not state.can_commit:
        return
    if base == state.latest or (design.rechecks and version not in current.expired):
        committed = state.committed(current._replace(exported=current.exported | {version}))
        yield committed._replace(export=None, registered=state.registered | {version})
    else:
        yield state._replace(export=None)


def _expiry_steps(design: Design, state: _State) -> Iterator[_State]:
    current = state.definitions[-1]
    if state.expiry is None:
        plan = frozenset(range(state.latest)) - current.exported - current.expired
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
        elif state.can_commit:
            yield state.committed(current._replace(expired=current.expired | plan))._replace(expiry=None)
    if design.expiry_commits:  # expired versions may be deleted at any time
        for version in current.expired - state.deleted:
            yield state._replace(deleted=state.deleted | {version})


def _rollback_steps(design: Design, state: _State, violations: set[str]) -> Iterator[_State]:
    current = state.definitions[-1]
    if state.rollback is None:
        for target in range(state.latest):
            if target not in current.expired | state.deleted:
                yield state._replace(rollback=(state.latest, target))
        return
    base, target = state.rollback
    if base != state.latest and not (design.rechecks and target not in current.expired):
        yield state._replace(rollback=None)
    elif state.can_commit:
        if target in state.deleted:
            violations.add(ROLLED_BACK_TO_DELETED)
        definition = current if design.keeps_definition else state.definitions[target]
        yield state.committed(definition)._replace(rollback=None)
