"""The export target of a simulated world: a lakehouse created by exports, its cleanup and its invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.simulator.model import State, contents, tree_of
from tests.simulator.world import World
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, OPERATIONS_PREFIX
from trinitylake_ops.versions.history import VersionInfo

#: Level of an export, and whether it optionally includes definitions.
LEVELS = (("minimal", False), ("partial", False), ("partial", True), ("full", False))


class ExportTarget:
    """The root that a run exports to, and the level of its exports."""

    def __init__(self, world: World, level: tuple[str, bool], leap_ms: int):
        self.root = "memory://elsewhere/"
        self.level = level
        self._world = world
        self._leap_ms = leap_ms
        self._approved: set[str] = set()  # paths that may be deleted

    def clean_up(self, rng: random.Random, pause: Callable[[random.Random], None]) -> object:
        """Remove orphans of the target lakehouse, or expire and purge its older versions."""
        if rng.random() < 0.5:
            self._world.clock_ms += rng.randrange(self._leap_ms)
        lake = self._lake()
        try:
            if rng.random() < 0.5:
                return self._remove_orphans(lake, rng, pause)
            expired = operations.plan_expiration(lake).execute().version
            return self._purge(lake, rng, pause) or expired is not None
        except LakehouseNotFoundError:  # its first version does not exist yet
            return False

    def _remove_orphans(self, lake: Lakehouse, rng: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = operations.plan_orphan_removal(lake)
        self._approved.update(plan.paths)
        pause(rng)
        return plan.execute().version is not None

    def _purge(self, lake: Lakehouse, rng: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = operations.plan_purge(lake)
        self._approved.update(plan.sizes_bytes)
        pause(rng)
        return plan.execute().version is not None

    def _lake(self) -> Lakehouse:
        return Lakehouse(self._world.open_storage(self.root), cache="off")

    # Invariants

    def violations(self, states: Sequence[State]) -> list[str]:
        """Return violations: each live version must have the content of its source version."""
        folder = self._world.folders.get(self.root)
        if folder is None:
            return []
        violations = [
            f"{name} deleted {self.root}{path} without approval"
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
            return violations
        violations += [violation for info in infos for violation in self._violations_of_version(lake, info, states)]
        return violations + self._verify_errors(lake)

    def _violations_of_version(self, lake: Lakehouse, info: VersionInfo, states: Sequence[State]) -> list[str]:
        if info.state != "live" or info.operation != "export":
            return []
        source = int(info.properties["source_version"])
        description = f"version {info.version} at {lake.root}, of version {source},"
        try:
            content = contents(lake.snapshot(info.version))
        except TrinityLakeError as error:  # files that are not copied may be deleted after the lease has ended
            return [f"{description} cannot be read: {error}"] if self._is_self_contained else []
        return [] if tree_of(content) == tree_of(states[source]) else [f"{description} has different content"]

    def _verify_errors(self, lake: Lakehouse) -> list[str]:
        if not self._is_self_contained:
            return []
        findings = operations.verify(lake).findings
        return [f"verify of {lake.root}: {finding}" for finding in findings if finding.severity == "error"]

    @property
    def _is_self_contained(self) -> bool:
        """Whether the target lakehouse does not depend on files of its source."""
        return self.level[0] == "full"
