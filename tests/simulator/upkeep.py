"""Whoever frees space in a simulated world: expiry, undelete, purge, orphan removal, exports; and what must hold."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.simulator.elsewhere import LEVELS, Elsewhere
from tests.simulator.model import State, contents, tree_of
from tests.simulator.tables import Tables, needed_files
from tests.simulator.world import ROOT, Folder, Process, SimulatedStorage, World
from trinitylake_ops import Lakehouse
from trinitylake_ops import operations as maintenance
from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitConflictError,
    ConflictError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    MaintenanceBlockedError,
    PlanChangedError,
    StorageError,
    TransactionExpiredError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import ExpirationState, ExportLevel, ExportState
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    LEASE_PREFIX,
    OPERATIONS_PREFIX,
    ORPHAN_BARRIER_PATH,
    parse_root_path,
    root_path,
)
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.locations import is_uri, to_uri
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.operations.budget import BudgetSpentBeforeError, Spending
from trinitylake_ops.operations.export_records import manifest_targets
from trinitylake_ops.operations.gc.survey import expired_versions, is_lapsed
from trinitylake_ops.tree.search import scan
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.versions.snapshot import Snapshot

#: Errors that say: somebody else was here, look again.
_LOOK_AGAIN = (
    MaintenanceBlockedError,
    PlanChangedError,
    CommitConflictError,
    CommitAttemptsExhaustedError,
    TransactionExpiredError,
    VersionExpiredError,
    ExportNotFoundError,
)
#: The operations, and how often each is chosen; the last three only where there is a table, or another program.
OPERATIONS = {
    "expire": 4, "purge": 4, "orphans": 2, "undelete": 2, "export": 2, "export elsewhere": 2, "drop export": 1,
    "restore": 2, "clean up elsewhere": 1, "verify": 1, "repair": 1, "trim": 3, "register": 1, "reconcile": 4,
}  # fmt: skip
_LONGEST_WAIT_STEPS = 120
_BEHIND = "time-not-rising"
LEAPS = 0.3  # of all rounds: nobody did anything for a while


class Upkeep:
    """The operations of all keepers of one run, and what they were allowed to delete."""

    def __init__(
        self,
        world: World,
        happened: Counter[str],
        note: Callable[..., None],
        tables: Tables | None,
        operations: Sequence[str],
        leap_ms: int,
        leaps: float,
        elsewhere: Elsewhere,
    ):
        self._world = world
        self._happened = happened
        self._note = note
        self._leap_ms = leap_ms
        self._leaps = leaps
        self._tables = tables
        self._names = 0
        self._approved: set[str] = set()
        self.exported_versions: dict[str, int] = {}  # by the name that somebody began to export them under
        self._exported: set[str] = set()  # names that were acknowledged, for ever
        self._dropped: set[str] = set()  # names that somebody began to drop
        self._elsewhere = elsewhere
        self._untoward: list[str] = []
        #: Versions that verify found to be older than those before: only another program's clock may be behind.
        self.behind: set[int | None] = set()
        every = self._all()
        self._operations = {name: every[name] for name in operations if name in every}

    def _all(self) -> dict[str, Callable[[Lakehouse, random.Random], object]]:
        on_tables = {} if self._tables is None else {"trim": self._trim, "register": self._tables.register}
        return {
            "expire": self._expire,
            "purge": self._purge,
            "orphans": self._remove_orphans,
            "undelete": self._undelete,
            "export": self._export,
            "export elsewhere": lambda lake, chance: self._export(lake, chance, is_elsewhere=True),
            "drop export": self._drop_export,
            "restore": self._restore,
            "clean up elsewhere": lambda lake, chance: self._elsewhere.clean_up(chance, self._pause),
            "verify": self._verify,
            "repair": self._repair,
            "reconcile": lambda lake, chance: maintenance.reconcile(lake).version is not None,
            **on_tables,
        }

    def work(self, lake: Lakehouse, chance: random.Random) -> None:
        """Do one of the operations, after a while."""
        for _ in range(chance.randrange(_LONGEST_WAIT_STEPS)):
            self._world.hand_over()
        if chance.random() < self._leaps:
            self._world.clock_ms += chance.randrange(self._leap_ms)
        name = chance.choices(list(self._operations), [OPERATIONS[name] for name in self._operations])[0]
        try:
            done = self._operations[name](lake, chance)
        except TrinityLakeError as error:
            self._note(error, name, *_LOOK_AGAIN)
            self._happened[f"{name}: {type(error).__name__}"] += 1
        else:
            self._happened[name if done else f"{name}: nothing to do"] += 1

    def _expire(self, lake: Lakehouse, chance: random.Random) -> object:
        plan = maintenance.plan_expiration(lake)
        digest = plan.digest if chance.random() < 0.5 else None
        if digest is not None:
            self._pause(chance)
            plan = maintenance.plan_expiration(lake)
        return plan.execute(digest).version is not None

    def _purge(self, lake: Lakehouse, chance: random.Random) -> object:
        spent = Spending()
        plan = maintenance.plan_purge(lake, budget=spent)
        self._approved.update(plan.sizes_bytes)
        self._pause(chance)
        more = chance.choice([10, 30, None])  # than the plan took, which is made once more
        try:
            report = plan.execute(budget=maintenance.Budget(max_requests=more and spent.requests + more))
        except BudgetSpentBeforeError:
            self._happened["purge: budget spent"] += 1
            return False
        if report.stopped:
            self._happened["purge: budget spent"] += 1
        return report.version is not None

    def _remove_orphans(self, lake: Lakehouse, chance: random.Random) -> object:
        plan = maintenance.plan_orphan_removal(lake)
        self._approved.update(plan.paths)
        self._pause(chance)
        return plan.execute().version is not None

    def _trim(self, lake: Lakehouse, chance: random.Random) -> object:
        plan = maintenance.plan_trim_tables(lake)
        self._pause(chance)
        return plan.execute().tables

    def _undelete(self, lake: Lakehouse, chance: random.Random) -> object:
        definition = lake.snapshot().definition
        expired = [
            version
            for batch in definition.expirations
            if batch.state == ExpirationState.EXPIRED
            for version in batch.ranges()
        ]
        if not expired:
            return False
        try:
            maintenance.undelete(lake, chance.sample(expired, chance.randint(1, len(expired))))
        except InvalidInputError as error:  # undeleted by somebody else meanwhile
            if "not expired" not in error.message:
                raise
        return True

    def _export(self, lake: Lakehouse, chance: random.Random, *, is_elsewhere: bool = False) -> object:
        self._names += 1
        name = f"e{self._names}"
        version = chance.randrange(lake.latest_version() + 1)
        self.exported_versions[name] = version
        retained_ms = chance.choice([None, self._leap_ms])
        level, with_definitions = self._elsewhere.level if is_elsewhere else chance.choice(LEVELS)
        target = self._elsewhere.root if is_elsewhere else None
        plan = maintenance.plan_export(
            lake, name, level, version, target, retain_for=retained_ms, definitions=with_definitions
        )
        self._pause(chance)
        plan.execute()
        if retained_ms is None:
            self._exported.add(name)
        return True

    def _verify(self, lake: Lakehouse, chance: random.Random) -> object:
        """Verify what others change meanwhile: nothing is damaged, so nothing may be found to be."""
        del chance
        report = maintenance.verify(lake)
        found = [finding for finding in report.findings if finding.severity == "error"]
        if not report.unanswered:
            # Until it is reconciled, what another program went back to knows exports that were dropped.
            dropped = tuple(f"export {name!r}:" for name in self._dropped)
            found = [finding for finding in found if not (dropped and finding.message.startswith(dropped))]
            self.behind |= {finding.version for finding in found if finding.code == _BEHIND}
            found = [finding for finding in found if finding.code != _BEHIND]
            self._untoward += [f"verify finds damage where there is none: {finding}" for finding in found]
        return report.latest_version > 0

    def _repair(self, lake: Lakehouse, chance: random.Random) -> object:
        """Put the hint right, or what another program did: there is nothing else to be mended."""
        if chance.random() < 0.5:
            return maintenance.repair_hint(lake).repaired
        try:
            plan = maintenance.plan_repair(lake, to_last_good=chance.random() < 0.5)
        except StorageError as error:
            if self._world.fault_rate == 0 or "files could not be read" not in error.message:
                raise
            return False
        unexpected = [step for step in plan.steps if step.action not in ("hint", "reconcile")]
        self._untoward += [f"repair would mend what is whole: {step}" for step in unexpected]
        self._pause(chance)
        return plan.execute().steps

    def _restore(self, lake: Lakehouse, chance: random.Random) -> object:
        names = [info.name for info in maintenance.list_exports(lake) if info.state == "complete"]
        if not names:
            return False
        plan = maintenance.plan_restore(lake, chance.choice(names))
        self._pause(chance)
        version = plan.execute().version
        if isinstance(plan, maintenance.RestorePlan):
            self._happened["restore from elsewhere"] += 1
        return version != plan.base_version

    def _drop_export(self, lake: Lakehouse, chance: random.Random) -> object:
        names = [info.name for info in maintenance.list_exports(lake)]
        if names:
            name = chance.choice(names)
            self._dropped.add(name)
            maintenance.drop_export(lake, name)
        return bool(names)

    def _pause(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(30)):
            self._world.hand_over()

    # What must hold

    def wrong(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        """Return what does not hold: what is kept must be whole, what went must have been allowed to go."""
        return [
            *self._untoward,
            *self._wrong_contents(lake, past, states),
            *self._wrong_deletions(),
            *self._elsewhere.wrong(states),
        ]

    def _wrong_contents(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        wrong = _wrong_versions(lake, self._world, states) + _wrong_exports(lake, states)
        forgotten = self._exported - self._dropped - {info.name for info in maintenance.list_exports(lake)}
        wrong += [f"export {name} is forgotten" for name in sorted(forgotten)]
        if self._tables is not None:
            live = {info.version for info in lake.history() if info.state == "live"}
            wrong += self._tables.wrong(past, live)
        return wrong

    def wrong_in_the_end(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        """Purge and remove orphans once more, when all is over; nothing may be lost, or left over."""
        self._world.clock_ms += 10 * self._leap_ms
        for _ in range(2):
            purged = maintenance.plan_purge(lake).execute()
            removed = maintenance.plan_orphan_removal(lake).execute()
            self._world.clock_ms += 10 * self._leap_ms
        wrong = [f"{path} is left over" for path in sorted(_left_over(lake, set(self._world.files)))]
        if purged.version is not None or removed.version is not None:
            wrong.append("a second purge and removal of orphans found something to do")
        return wrong + self._wrong_contents(lake, past, states)

    def _wrong_deletions(self) -> list[str]:
        world = self._world
        return [
            f"{name} deleted {path}, which nobody approved"
            for name, path in world.home.deleted
            if path not in world.home.sent_by.get(name, ())
            and path not in self._approved
            and not path.startswith((OPERATIONS_PREFIX, "_export_"))
            and path != HINT_PATH
        ]


def archive(world: World) -> SimulatedStorage:
    """Return a storage in which every file that was ever created stands as it was created."""
    past = copy.copy(world)
    past.home = Folder(world.home.root, dict(world.created))
    return SimulatedStorage(past, Process("archive", [], lambda storage: None))


def all_states(lake: Lakehouse) -> list[State]:
    """Return what each version held, expired and purged ones, too; for a lakehouse on an archive."""
    return [contents(Snapshot.of(lake.files, version)) for version in range(lake.latest_version() + 1)]


def _wrong_versions(lake: Lakehouse, world: World, states: Sequence[State]) -> list[str]:
    """Check each version by what the latest definition says of it."""
    wrong = []
    definition = lake.snapshot().definition
    listed = {version: batch.state for batch in definition.expirations for version in batch.ranges()}
    for version in range(len(states)):
        path = root_path(version)
        if path not in world.files:
            wrong.append(f"the name of version {version} is free again")
            continue
        root = decode_node(world.files[path][0], path)
        first = decode_node(world.created[path][0], path)
        state = listed.get(version)
        if root.system.get(COMMIT_ID) != first.system.get(COMMIT_ID):
            wrong.append(f"version {version} is another commit than at first")
        if root.is_sealed != (state == ExpirationState.PURGED) and state != ExpirationState.PURGING:
            wrong.append(f"version {version} is {'' if root.is_sealed else 'not '}sealed, but {state}")
        elif not root.is_sealed:
            try:
                found = contents(Snapshot.of(lake.files, version))
            except (FileMissingError, ConflictError) as error:
                wrong.append(f"version {version} ({state}) cannot be read: {error}")
                continue
            if found != states[version]:
                wrong.append(f"version {version} ({state}) is not what it was")
    return wrong


def _wrong_exports(lake: Lakehouse, states: Sequence[State]) -> list[str]:
    definition, now_ms = lake.snapshot().definition, lake.storage.now_ms()
    wrong = [
        f"version {record.version} is expired, though export {record.name} pins it"
        for record in definition.exports
        if not is_lapsed(record, now_ms) and record.version in expired_versions(definition)
        if record.state == ExportState.COPYING or record.level != ExportLevel.FULL
    ]
    for info in maintenance.list_exports(lake):
        if info.state != "complete" or info.version is None:
            continue
        try:
            found, wanted = contents(lake.snapshot(info.name)), states[info.version]
            if info.target:  # a lakehouse there keeps its settings
                found, wanted = tree_of(found), tree_of(wanted)
            if found != wanted:
                wrong.append(f"export {info.name} is not version {info.version}")
        except TrinityLakeError as error:
            if info.target and isinstance(error, VersionExpiredError):  # it expires there as that lakehouse says
                continue
            wrong.append(f"export {info.name} cannot be read: {error}")
    return wrong


def _left_over(lake: Lakehouse, standing: set[str]) -> set[str]:
    """Return the files that nothing needs: no version that can be read or undeleted, no export, no operation."""
    definition = lake.snapshot().definition
    needed = {
        HINT_PATH,
        ORPHAN_BARRIER_PATH,
        max((path for path in standing if path.startswith(LEASE_PREFIX)), default="", key=_number),
    }
    needed |= {path for path in standing if parse_root_path(path) is not None}
    needed |= {batch.plan_path for batch in definition.expirations}
    for record in definition.exports:  # one that was cut off goes on with the copies that its manifest names
        copies = () if record.target_uri else manifest_targets(lake.storage, record.manifest_path)
        needed |= {record.root_location, record.manifest_path, *copies}
    versions = [Snapshot.of(lake.files, version) for version in range(lake.latest_version() + 1)]
    snapshots = [snapshot for snapshot in versions if not snapshot.root.is_sealed]
    for name in definition.exported_snapshots:
        with suppress(VersionExpiredError):  # elsewhere
            snapshots.append(lake.snapshot(name))
    for snapshot in snapshots:
        needed.add(snapshot.definition_location)
        is_here = snapshot.files.storage.root == lake.root
        live = () if is_here else {location for _, location in scan(snapshot.files.nodes, snapshot.root)}
        for visited in walk(snapshot.files.nodes, snapshot.root, snapshot.location):
            values = {*visited.node.values, *visited.node.buffer.values()} - {None}
            # Here those that newer messages shadow, too; elsewhere they may be of an earlier export that was dropped.
            found = {to_uri(snapshot.files.storage.root, value) for value in values if is_here or value in live}
            # An export elsewhere points here, or to its own files.
            locations = {uri.removeprefix(ROOT) for uri in found if uri.startswith(ROOT)} - needed
            needed |= {to_uri(snapshot.files.storage.root, visited.location).removeprefix(ROOT), *locations}
            for location in locations:
                needed |= needed_files(lake, location)
    return {path for path in standing - needed if not is_uri(path)}


def _number(path: str) -> int:
    return int(path.removeprefix(LEASE_PREFIX).removesuffix(".json"))
