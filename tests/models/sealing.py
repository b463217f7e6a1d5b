"""Explicit-state model of the removal of old roots, with create-if-absent versions, a hint and lost responses.

The model visits every reachable state. A design may have these violations:

- V1: a writer's commit of a version is acknowledged, but the version does not exist or belongs to another writer.
- V2: a transaction is in two versions.
- V3: a reader with any hint that ever existed finds a version other than the latest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

LAST_VERSION = 4
MAX_ATTEMPTS = 3

#: How the roots of expired versions are removed: deleted in any order, deleted below a recorded boundary, sealed, which
#: keeps their commit id, or sealed and then deleted.
Design = Literal["delete", "boundary", "seal", "seal, then delete"]
#: A program that ignores the recorded boundary, or one that respects it.
Program = Literal["foreign", "cooperating"]
Root = tuple[Literal["live", "sealed"], str] | None  # its state and commit id
FALSE_ACKNOWLEDGEMENT = "V1 acknowledged a version that does not exist or belongs to another writer"
COMMITTED_TWICE = "V2 a transaction was committed twice"
STALE_READ = "V3 a reader found a stale or missing version"


@dataclass(frozen=True)
class Writer:
    """A writer with one transaction."""

    program: Program
    #: Whether the response to its create may be lost.
    is_lossy: bool = False


class _Progress(NamedTuple):
    """The next step of a writer: find its base, create a version, create it again, check the result, or none."""

    step: Literal["find", "create", "retry create", "check", "done"] = "find"
    version: int = 0
    attempt: int = 0


class _State(NamedTuple):
    """A state of the storage and of the writers."""

    #: The roots by version.
    roots: tuple[Root, ...]
    #: The version below which roots may be removed.
    boundary: int
    #: The commit id of the first root of each version.
    history: tuple[tuple[int, str], ...]
    writers: tuple[_Progress, ...]
    n_other_commits: int


def find_violations(design: Design, writers: tuple[Writer, ...], reader: Program) -> tuple[int, set[str]]:
    """Visit all states of a design. Return their number and the violations."""
    roots: tuple[Root, ...] = (("live", "first"), *[None] * LAST_VERSION)
    start = _State(roots, 0, ((0, "first"),), tuple(_Progress() for _ in writers), 0)
    visited, pending, violations = {start}, deque([start]), set[str]()
    while pending:
        state = pending.popleft()
        latest = max(version for version, _ in state.history)
        if any(version != latest for version in _possible_latest(reader, state)):
            violations.add(STALE_READ)
        for successor in _steps(design, writers, state, latest, violations):
            if successor not in visited:
                visited.add(successor)
                pending.append(successor)
    return len(visited), violations


def _possible_latest(program: Program, state: _State) -> set[int]:
    """Return the versions that a program may find as the latest, with any hint that ever existed or none."""
    hints = [None, *(version for version, _ in state.history)]
    if program == "foreign":
        return {_last_before_gap(state.roots, hint or 0) for hint in hints}
    # A hint beyond the latest version is ignored, because its root does not exist.
    without_hint = {_last_before_gap(state.roots, state.boundary) for root in state.roots if root is None}
    return without_hint | {_last_before_gap(state.roots, max(hint or 0, state.boundary)) for hint in hints}


def _last_before_gap(roots: tuple[Root, ...], start: int) -> int:
    """Return the last version of the consecutive roots from ``start``."""
    version = start
    while version <= LAST_VERSION and roots[version] is not None:
        version += 1
    return version - 1


def _steps(
    design: Design, writers: tuple[Writer, ...], state: _State, latest: int, violations: set[str]
) -> Iterator[_State]:
    """Yield the states after one step of any writer or of the cleanup."""
    if latest < LAST_VERSION and state.roots[latest + 1] is None:  # another writer commits
        other = f"other {state.n_other_commits}"
        yield state._replace(
            roots=_with_root(state.roots, latest + 1, ("live", other)),
            history=_with_commit(state.history, latest + 1, other),
            n_other_commits=state.n_other_commits + 1,
        )
    yield from _clean_up_steps(design, state, latest)
    for number, writer in enumerate(writers):
        yield from _writer_steps(design, writer, number, state, violations)


def _clean_up_steps(design: Design, state: _State, latest: int) -> Iterator[_State]:
    if design == "delete":
        for version in range(latest):
            if state.roots[version] is not None:
                yield state._replace(roots=_with_root(state.roots, version, None))
        return
    for boundary in range(state.boundary + 1, latest + 1):
        yield state._replace(boundary=boundary)
    for version in range(min(state.boundary, LAST_VERSION + 1)):
        root = state.roots[version]
        if root is None:
            continue
        if design == "boundary":
            yield state._replace(roots=_with_root(state.roots, version, None))
        elif root[0] == "live":
            yield state._replace(roots=_with_root(state.roots, version, ("sealed", root[1])))
        elif design == "seal, then delete":
            yield state._replace(roots=_with_root(state.roots, version, None))


def _writer_steps(design: Design, writer: Writer, number: int, state: _State, violations: set[str]) -> Iterator[_State]:
    progress, own_id = state.writers[number], f"writer {number}"
    restarted = _Progress("find", 0, progress.attempt)

    def advance(progress: _Progress, state: _State = state) -> _State:
        writers = (*state.writers[:number], progress, *state.writers[number + 1 :])
        return state._replace(writers=writers)

    if progress.step == "find" and progress.attempt < MAX_ATTEMPTS:
        for base in _possible_latest(writer.program, state):
            if base < LAST_VERSION:
                yield advance(_Progress("create", base + 1, progress.attempt + 1))
    elif progress.step in ("create", "retry create"):
        root, check = state.roots[progress.version], progress._replace(step="check")
        if root is None:
            created = _created(state, progress.version, own_id, violations)
            yield advance(check, created)
            if writer.is_lossy and progress.step == "create":
                yield advance(progress._replace(step="retry create"), created)
        else:
            yield advance(check if writer.program == "cooperating" and root[1] == own_id else restarted)
    elif progress.step == "check":
        is_committed = _is_acknowledged(design, writer, state, progress.version, own_id)
        if is_committed and dict(state.history).get(progress.version) != own_id:
            violations.add(FALSE_ACKNOWLEDGEMENT)
        yield advance(progress._replace(step="done") if is_committed else restarted)


def _created(state: _State, version: int, own_id: str, violations: set[str]) -> _State:
    history = _with_commit(state.history, version, own_id)
    if [owner for _, owner in history].count(own_id) > 1:
        violations.add(COMMITTED_TWICE)
    return state._replace(roots=_with_root(state.roots, version, ("live", own_id)), history=history)


def _is_acknowledged(design: Design, writer: Writer, state: _State, version: int, own_id: str) -> bool:
    if writer.program == "foreign" or design == "delete" or version >= state.boundary:
        return True
    root = state.roots[version]
    return design != "boundary" and root is not None and root[1] == own_id


def _with_root(roots: tuple[Root, ...], version: int, root: Root) -> tuple[Root, ...]:
    return (*roots[:version], root, *roots[version + 1 :])


def _with_commit(history: tuple[tuple[int, str], ...], version: int, owner: str) -> tuple[tuple[int, str], ...]:
    ids = dict(history)
    return history if version in ids else tuple(sorted({**ids, version: owner}.items()))
