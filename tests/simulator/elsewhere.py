"""Other roots in a simulated world: lakehouses that exports made there, who cleans them up, and what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.simulator.model import State, contents, tree_of
from tests.simulator.world import ROOT, World
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, OPERATIONS_PREFIX
from trinitylake_ops.transaction.history import VersionInfo


class Elsewhere:
    """One root for each level of export."""

    def __init__(self, world: World):
        self._world = world
        self._approved: set[tuple[str, str]] = set()  # root and path of what may be deleted

    def root(self, level: str, with_definitions: bool) -> str:
        """Return the root that exports of a level go to."""
        return f"memory://{level}{'-with-definitions' if with_definitions else ''}/"

    def clean_up(self, chance: random.Random, pause: Callable[[random.Random], None]) -> object:
        """Remove orphans of one of the lakehouses there, or expire and purge its older versions."""
        roots = sorted(self._world.folders.keys() - {ROOT})
        if not roots:
            return False
        try:
            lake = self._lake(chance.choice(roots))
            if chance.random() < 0.5:
                return self._remove_orphans(lake, chance, pause)
            expired = maintenance.plan_expiration(lake).execute().version
            return self._purge(lake, chance, pause) or expired is not None
        except LakehouseNotFoundError:  # its first version is still to come
            return False

    def _remove_orphans(self, lake: Lakehouse, chance: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = maintenance.plan_orphan_removal(lake)
        self._approved.update((lake.root, path) for path in plan.paths)
        pause(chance)
        return plan.execute().version is not None

    def _purge(self, lake: Lakehouse, chance: random.Random, pause: Callable[[random.Random], None]) -> bool:
        plan = maintenance.plan_purge(lake)
        self._approved.update((lake.root, path) for path in plan._sizes_bytes)
        pause(chance)
        return plan.execute().version is not None

    def _lake(self, root: str) -> Lakehouse:
        return Lakehouse(self._world.open_storage(root), cache="off")

    # What must hold

    def wrong(self, states: Sequence[State]) -> list[str]:
        """Return what does not hold: every version that is kept there is what was exported as it."""
        wrong = []
        for root, folder in sorted(self._world.folders.items()):
            if root == ROOT:
                continue
            wrong += [
                f"{name} deleted {root}{path}, which nobody approved"
                for name, path in folder.deleted
                if path not in folder.sent_by.get(name, ())
                and (root, path) not in self._approved
                and not path.startswith(OPERATIONS_PREFIX)
                and path != HINT_PATH
            ]
            lake = self._lake(root)
            try:
                infos = list(lake.history())
            except LakehouseNotFoundError:
                continue
            wrong += [line for info in infos for line in self._wrong_version(lake, info, states)]
            wrong += self._wrong_findings(lake)
        return wrong

    def _wrong_version(self, lake: Lakehouse, info: VersionInfo, states: Sequence[State]) -> list[str]:
        if info.state != "live" or info.operation != "export":
            return []
        source = int(info.properties["source_version"])
        what = f"version {info.version} at {lake.root}, of version {source},"
        try:
            found = contents(lake.snapshot(info.version))
        except TrinityLakeError as error:  # what is not copied may be gone when the lease has ended
            return [f"{what} cannot be read: {error}"] if self._is_whole(lake) else []
        return [] if tree_of(found) == tree_of(states[source]) else [f"{what} holds something else"]

    def _wrong_findings(self, lake: Lakehouse) -> list[str]:
        if not self._is_whole(lake):
            return []
        findings = maintenance.verify(lake).findings
        return [f"verify of {lake.root}: {finding}" for finding in findings if finding.severity == "error"]

    def _is_whole(self, lake: Lakehouse) -> bool:
        """Whether the lakehouse needs nothing of the one it was exported from."""
        return lake.root == self.root("full", False)
