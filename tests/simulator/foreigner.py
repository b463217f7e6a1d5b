"""Another program in a simulated world, which knows the texts of the format and none of our extensions."""

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
_LONGEST_WAIT_STEPS = 400
_LONGEST_BEHIND_MS = 5_000


@dataclass(frozen=True)
class ForeignStep:
    """What one of its roots does: it puts a table with a token, or goes back to a version, with its settings or not."""

    namespace: str = ""
    table: str = ""
    token: str = ""
    target: int | None = None
    carries_definition: bool = False

    @property
    def name(self) -> str:
        if self.target is None:
            return "foreign commit"
        return f"foreign rollback{', settings carried forward' if self.carries_definition else ''}"


class Foreigner:
    """The rounds of the other program, and what its roots do."""

    def __init__(self, world: World, happened: Counter[str], token: Callable[[], str]):
        self._world = world
        self._happened = happened
        self._token = token
        self._doing = ForeignStep()
        self._sent: dict[bytes, ForeignStep] = {}
        world.observers.append(self._observe)

    def work(self, storage: Storage, chance: random.Random) -> None:
        """Commit a table, or roll back, after a while; where anything goes wrong, give up."""
        for _ in range(chance.randrange(_LONGEST_WAIT_STEPS)):
            self._world.hand_over()
        try:
            # Now and then its clock is behind, and it carries all system rows on that it does not know.
            behind_ms = chance.randrange(_LONGEST_BEHIND_MS) if chance.random() < 0.3 else None
            lake, keeps_unknown = _CarefulLake(storage, behind_ms), chance.random() < 0.5
            if chance.random() < 0.5:
                self._doing = ForeignStep(chance.choice("ab"), chance.choice("tuvw"), self._token())
                lake.commit_table(
                    self._doing.namespace, self._doing.table, {TOKEN: self._doing.token}, keeps_unknown=keeps_unknown
                )
            else:
                target = chance.randrange(1, lake.latest() + 1)
                self._doing = ForeignStep(target=target, carries_definition=chance.random() < 0.3)
                lake.rollback(
                    target,
                    keeps_unknown=keeps_unknown,
                    carries_definition=self._doing.carries_definition,
                )
        except (StorageError, KeyError, _GaveUpError) as error:
            self._happened[f"foreign: {type(error).__name__}"] += 1
        else:
            self._happened[self._doing.name] += 1

    def _observe(self, process: Process, path: str, data: bytes) -> None:
        if process.name == NAME and parse_root_path(path) is not None:
            self._sent[data] = self._doing

    def steps(self, n_versions: int) -> Mapping[int, ForeignStep]:
        """Return what it did, by version."""
        created = {version: self._world.created[root_path(version)][0] for version in range(n_versions)}
        return {version: self._sent[data] for version, data in created.items() if data in self._sent}


class _GaveUpError(Exception):
    """The other program does not go on."""


class _CarefulLake(ForeignLake):
    """Keeps to the time to live, as the text of the format asks.

    It does not go back to what a purge has begun with: that is what docs/internals/protocol.md leaves open, as such a
    program may have read a root before it was sealed.
    """

    def __init__(self, storage: Storage, behind_ms: int | None = None):
        super().__init__(storage, behind_ms)
        self._begun_ms = storage.now_ms()
        self._target: int | None = None

    def rollback(self, version: int, *, keeps_unknown: bool, carries_definition: bool = False) -> int:
        self._target = version
        if "lakehouse_def" not in self.system(self.rows(self.root(version))):
            raise _GaveUpError(f"version {version} was purged")
        return super().rollback(version, keeps_unknown=keeps_unknown, carries_definition=carries_definition)

    def commit(self, latest: int, rows: list[Row], *, keeps_unknown: bool = False) -> int:
        definition = self.definition(latest)
        purging = [batch for batch in definition.expirations if batch.state != pb.EXPIRED]
        targets = () if self._target is None else (self._target,)
        if any(target in VersionRanges.parse(batch.versions) for batch in purging for target in targets):
            raise _GaveUpError(f"the purge of version {self._target} has begun")
        if self.storage.now_ms() - self._begun_ms > definition.txn_ttl_millis:
            raise _GaveUpError("it took too long")
        return super().commit(latest, rows, keeps_unknown=keeps_unknown)
