"""Another program in a simulated world. It implements the format's specification but none of our extensions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.foreign import ForeignLake, Row
from tests.simulator.model import TOKEN
from tests.simulator.world import Process, World
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.format.file_names import parse_root_path, root_path
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.storage import Storage

NAME = "another program"
_MAX_WAIT_STEPS = 400
_MAX_LAG_MS = 5_000


@dataclass(frozen=True)
class ForeignStep:
    """The effect of a foreign root: it writes a table with a token, or rolls back to a version."""

    namespace: str = ""
    table: str = ""
    token: str = ""
    target: int | None = None
    carries_definition: bool = False

    @property
    def name(self) -> str:
        if self.target is None:
            return "foreign commit"
        return f"foreign rollback{' that keeps settings' if self.carries_definition else ''}"


class ForeignWriter:
    """The work of the other program, and the effects of its roots."""

    def __init__(self, world: World, events: Counter[str], token: Callable[[], str]):
        self._world = world
        self._events = events
        self._token = token
        self._current_step = ForeignStep()
        self._step_by_root: dict[bytes, ForeignStep] = {}
        world.observers.append(self._observe)

    def work(self, storage: Storage, rng: random.Random) -> None:
        """Commit a table or roll back after a random wait. Any error ends the attempt."""
        for _ in range(rng.randrange(_MAX_WAIT_STEPS)):
            self._world.hand_over()
        try:
            # Sometimes its clock is behind, or it keeps all system rows that it does not know.
            behind_ms = rng.randrange(_MAX_LAG_MS) if rng.random() < 0.3 else None
            lake, keeps_unknown = _TtlCheckingLake(storage, behind_ms), rng.random() < 0.5
            if rng.random() < 0.5:
                self._current_step = ForeignStep(rng.choice("ab"), rng.choice("tuvw"), self._token())
                lake.commit_table(
                    self._current_step.namespace,
                    self._current_step.table,
                    {TOKEN: self._current_step.token},
                    keeps_unknown=keeps_unknown,
                )
            else:
                target = rng.randrange(1, lake.latest() + 1)
                self._current_step = ForeignStep(target=target, carries_definition=rng.random() < 0.3)
                lake.rollback(
                    target,
                    keeps_unknown=keeps_unknown,
                    carries_definition=self._current_step.carries_definition,
                )
        except (StorageError, KeyError, _AbortedError) as error:
            self._events[f"foreign: {type(error).__name__}"] += 1
        else:
            self._events[self._current_step.name] += 1

    def _observe(self, process: Process, path: str, data: bytes) -> None:
        if process.name == NAME and parse_root_path(path) is not None:
            self._step_by_root[data] = self._current_step

    def steps(self, n_versions: int) -> Mapping[int, ForeignStep]:
        """Return the steps of the other program by version."""
        created = {version: self._world.created[root_path(version)][0] for version in range(n_versions)}
        return {version: self._step_by_root[data] for version, data in created.items() if data in self._step_by_root}


class _AbortedError(Exception):
    """The other program aborts its commit."""


class _TtlCheckingLake(ForeignLake):
    """Enforces the time to live, as the specification requires.

    It does not roll back to a version whose purge has begun. docs/internals/protocol.md does not prevent this, because
    such a program may have read a root before it was sealed.
    """

    def __init__(self, storage: Storage, behind_ms: int | None = None):
        super().__init__(storage, behind_ms)
        self._begun_ms = storage.now_ms()
        self._target: int | None = None

    def rollback(self, version: int, *, keeps_unknown: bool, carries_definition: bool = False) -> int:
        self._target = version
        if "lakehouse_def" not in self.system(self.rows(self.root(version))):
            raise _AbortedError(f"version {version} was purged")
        return super().rollback(version, keeps_unknown=keeps_unknown, carries_definition=carries_definition)

    def commit(self, latest: int, rows: list[Row], *, keeps_unknown: bool = False) -> int:
        definition = self.definition(latest)
        purging = [batch for batch in definition.expirations if batch.state != pb.EXPIRED]
        targets = () if self._target is None else (self._target,)
        if any(target in VersionRanges.parse(batch.versions) for batch in purging for target in targets):
            raise _AbortedError(f"the purge of version {self._target} has begun")
        if self.storage.now_ms() - self._begun_ms > definition.txn_ttl_millis:
            raise _AbortedError("the time to live was exceeded")
        return super().commit(latest, rows, keeps_unknown=keeps_unknown)
