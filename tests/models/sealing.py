"""Explicit-state model of how old roots may go: create-if-absent versions, a hint, and responses that get lost.

Every reachable state is visited. What a design breaks comes out as the names of violations:

- V1: a writer was told that it committed a version that is another's, or void
- V2: one transaction is in two versions
- V3: a reader, with any hint there ever was, finds another version than the latest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

LAST_VERSION = 4
ATTEMPTS = 3

#: How the roots of expired versions go: deleted in any order; deleted below a recorded boundary; sealed, keeping
#: their commit id; or sealed and then deleted.
Design = Literal["delete", "boundary", "seal", "seal, then drop"]
Finder = Literal["foreign", "cooperating"]  # whether the recorded boundary is known
Root = tuple[Literal["live", "sealed"], str] | None  # and the commit id
ACKNOWLEDGED_VOID = "V1 acknowledged a version that is void or another's"
COMMITTED_TWICE = "V2 one transaction committed twice"
STALE_READ = "V3 a stale or missing version was found"


@dataclass(frozen=True)
class Writer:
    """A writer of one transaction; lossy when the response to its create may get lost."""

    finder: Finder
    is_lossy: bool = False


class _Progress(NamedTuple):
    """Where a writer is: about to find its base, to create a version, to create it again, to look, or done."""

    step: Literal["find", "create", "create again", "look", "done"] = "find"
    version: int = 0
    attempt: int = 0


class _State(NamedTuple):
    """``roots`` by version; ``boundary`` below which they may go; ``history``: who was first at each version."""

    roots: tuple[Root, ...]
    boundary: int
    history: tuple[tuple[int, str], ...]
    writers: tuple[_Progress, ...]
    n_background: int


def violations(design: Design, writers: tuple[Writer, ...], reader: Finder) -> tuple[int, set[str]]:
    """Visit all states of a design; returns how many there are, and what it breaks."""
    roots: tuple[Root, ...] = (("live", "first"), *[None] * LAST_VERSION)
    start = _State(roots, 0, ((0, "first"),), tuple(_Progress() for _ in writers), 0)
    seen, waiting, broken = {start}, deque([start]), set[str]()
    while waiting:
        state = waiting.popleft()
        latest = max(version for version, _ in state.history)
        if any(version != latest for version in _found(reader, state)):
            broken.add(STALE_READ)
        for after in _steps(design, writers, state, latest, broken):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen), broken


def _found(finder: Finder, state: _State) -> set[int]:
    """Return the versions that may be taken for the latest: with any hint there ever was, a wrong one or none."""
    hints = [None, *(version for version, _ in state.history)]
    if finder == "foreign":
        return {_walk(state.roots, hint or 0) for hint in hints}
    # A hint that leads is ignored, because the root it names is absent.
    leading = {_walk(state.roots, state.boundary) for root in state.roots if root is None}
    return leading | {_walk(state.roots, max(hint or 0, state.boundary)) for hint in hints}


def _walk(roots: tuple[Root, ...], start: int) -> int:
    version = start
    while version <= LAST_VERSION and roots[version] is not None:
        version += 1
    return version - 1


def _steps(
    design: Design, writers: tuple[Writer, ...], state: _State, latest: int, broken: set[str]
) -> Iterator[_State]:
    """Yield the states that one step of anybody leads to."""
    if latest < LAST_VERSION and state.roots[latest + 1] is None:  # somebody else commits
        other = f"other {state.n_background}"
        yield state._replace(
            roots=_with(state.roots, latest + 1, ("live", other)),
            history=_noted(state.history, latest + 1, other),
            n_background=state.n_background + 1,
        )
    yield from _clean_up_steps(design, state, latest)
    for number, writer in enumerate(writers):
        yield from _writer_steps(design, writer, number, state, broken)


def _clean_up_steps(design: Design, state: _State, latest: int) -> Iterator[_State]:
    if design == "delete":
        for version in range(latest):
            if state.roots[version] is not None:
                yield state._replace(roots=_with(state.roots, version, None))
        return
    for boundary in range(state.boundary + 1, latest + 1):
        yield state._replace(boundary=boundary)
    for version in range(min(state.boundary, LAST_VERSION + 1)):
        root = state.roots[version]
        if root is None:
            continue
        if design == "boundary":
            yield state._replace(roots=_with(state.roots, version, None))
        elif root[0] == "live":
            yield state._replace(roots=_with(state.roots, version, ("sealed", root[1])))
        elif design == "seal, then drop":
            yield state._replace(roots=_with(state.roots, version, None))


def _writer_steps(design: Design, writer: Writer, number: int, state: _State, broken: set[str]) -> Iterator[_State]:
    progress, own_id = state.writers[number], f"writer {number}"
    again = _Progress("find", 0, progress.attempt)

    def going_on(progress: _Progress, state: _State = state) -> _State:
        writers = (*state.writers[:number], progress, *state.writers[number + 1 :])
        return state._replace(writers=writers)

    if progress.step == "find" and progress.attempt < ATTEMPTS:
        for base in _found(writer.finder, state):
            if base < LAST_VERSION:
                yield going_on(_Progress("create", base + 1, progress.attempt + 1))
    elif progress.step in ("create", "create again"):
        root, look = state.roots[progress.version], progress._replace(step="look")
        if root is None:
            created = _created(state, progress.version, own_id, broken)
            yield going_on(look, created)
            if writer.is_lossy and progress.step == "create":
                yield going_on(progress._replace(step="create again"), created)
        else:
            yield going_on(look if writer.finder == "cooperating" and root[1] == own_id else again)
    elif progress.step == "look":
        is_committed = _takes_for_committed(design, writer, state, progress.version, own_id)
        if is_committed and dict(state.history).get(progress.version) != own_id:
            broken.add(ACKNOWLEDGED_VOID)
        yield going_on(progress._replace(step="done") if is_committed else again)


def _created(state: _State, version: int, own_id: str, broken: set[str]) -> _State:
    history = _noted(state.history, version, own_id)
    if [owner for _, owner in history].count(own_id) > 1:
        broken.add(COMMITTED_TWICE)
    return state._replace(roots=_with(state.roots, version, ("live", own_id)), history=history)


def _takes_for_committed(design: Design, writer: Writer, state: _State, version: int, own_id: str) -> bool:
    if writer.finder == "foreign" or design == "delete" or version >= state.boundary:
        return True
    root = state.roots[version]
    return design != "boundary" and root is not None and root[1] == own_id


def _with(roots: tuple[Root, ...], version: int, root: Root) -> tuple[Root, ...]:
    return (*roots[:version], root, *roots[version + 1 :])


def _noted(history: tuple[tuple[int, str], ...], version: int, owner: str) -> tuple[tuple[int, str], ...]:
    known = dict(history)
    return history if version in known else tuple(sorted({**known, version: owner}.items()))
