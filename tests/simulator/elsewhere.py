"""Other roots in a simulated world: lakehouses that exports made there, who cleans them up, and what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.simulator.model import State, contents, tree_of
from tests.simulator.world import World
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, OPERATIONS_PREFIX
from trinitylake_ops.versions.history import VersionInfo

#: Levels of exports, and whether they have definitions by choice.
LEVELS = (("minimal", False), ("partial", False), ("partial", True), ("full", False))


class Elsewhere:
    """The other root of a run, and the level of all exports that go there."""

    def __init__(self, world: World, level: tuple[str, bool], leap_ms: int):
        self.root = "memory://elsewhere/"
        self.level = level
        self._world = world
        self._leap_ms = leap_ms
        self._approved: set[str] = set()  # what may be deleted

    def clean_up(self, chance: random.Random, pause: Callable[[random.Random], None]) -> object:
        """Remove orphans of the lakehouse there, or expire and purge its older versions."""
        if chance.random() < 0.5:
            self._world.clock_ms += chance.randrange(self._leap_ms)
        lake = self._lake()
        try:
            if chance.random() < 0.5:
                return self._remove_orphans(lake, chance, pause)
            expired = operations.plan_expiration(lake).execute().version
            return self._purge(lake, chance, pause) or expired is not None
        except LakehouseNotFoundError:  # its first version is still to come
            return False

    def _remove_orphans(self, lake: Lakehouse, chance: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = operations.plan_orphan_removal(lake)
        self._approved.update(plan.paths)
        pause(chance)
        return plan.execute().version is not None

    def _purge(self, lake: Lakehouse, chance: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = operations.plan_purge(lake)
        self._approved.update(plan.sizes_bytes)
        pause(chance)
        return plan.execute().version is not None

    def _lake(self) -> Lakehouse:
        return Lakehouse(self._world.open_storage(self.root), cache="off")

    # What must hold

    def wrong(self, states: Sequence[State]) -> list[str]:
        """Return what does not hold: every version that is kept there is what was exported as it."""
        folder = self._world.folders.get(self.root)
        if folder is None:
            return []
        wrong = [
            f"{name} deleted {self.root}{path}, which nobody approved"
            for name, path in folder.deleted
            if path not in folder.sent_by.get(name, ())
            and path not in self._approved
            and not path.startswith(OPERATIONS_PREFIX)
            and path != HINT_PATH
        ]
        lake = self._lake()
        try:
            infos = list(lake.history())
        except LakehouseNotFoundError:
            return wrong
        wrong += [line for info in infos for line in self._wrong_version(lake, info, states)]
        return wrong + self._wrong_findings(lake)

    def _wrong_version(self, lake: Lakehouse, info: VersionInfo, states: Sequence[State]) -> list[str]:
        if info.state != "live" or info.operation != "export":
            return []
        source = int(info.properties["source_version"])
        what = f"version {info.version} at {lake.root}, of version {source},"
        try:
            found = contents(lake.snapshot(info.version))
        except TrinityLakeError as error:  # what is not copied may be gone when the lease has ended
            return [f"{what} cannot be read: {error}"] if self._is_whole else []
        return [] if tree_of(found) == tree_of(states[source]) else [f"{what} holds something else"]

    def _wrong_findings(self, lake: Lakehouse) -> list[str]:
        if not self._is_whole:
            return []
        findings = operations.verify(lake).findings
        return [f"verify of {lake.root}: {finding}" for finding in findings if finding.severity == "error"]

    @property
    def _is_whole(self) -> bool:
        """Whether the lakehouse there needs nothing of the one it was exported from."""
        return self.level[0] == "full"
