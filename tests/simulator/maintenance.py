"""Maintenance in a simulated world: expiry, undelete, purge, orphan removal and exports, and their invariants."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.simulator.export_target import LEVELS, ExportTarget
from tests.simulator.model import State, contents, tree_of
from tests.simulator.tables import TableWriter, needed_files
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

#: Errors caused by concurrent operations, after which a client would retry.
_RETRYABLE_ERRORS = (
    MaintenanceBlockedError,
    PlanChangedError,
    CommitConflictError,
    CommitAttemptsExhaustedError,
    TransactionExpiredError,
    VersionExpiredError,
    ExportNotFoundError,
)
#: The weights of the operations. The last three run only with a table or with another program.
OPERATIONS = {
    "expire": 4, "purge": 4, "orphans": 2, "undelete": 2, "export": 2, "export to target": 2, "drop export": 1,
    "restore": 2, "clean up target": 1, "verify": 1, "repair": 1, "trim": 3, "register": 1, "reconcile": 4,
}  # fmt: skip
_MAX_WAIT_STEPS = 120
_TIME_NOT_INCREASING = "time-not-rising"
LEAP_RATE = 0.3  # the share of rounds that begin with a leap of the clock


class Maintenance:
    """The operations of all maintenance processes of a run, and the files that they may delete."""

    def __init__(
        self,
        world: World,
        events: Counter[str],
        record_error: Callable[..., None],
        tables: TableWriter | None,
        operations: Sequence[str],
        leap_ms: int,
        leap_rate: float,
        export_target: ExportTarget,
    ):
        self._world = world
        self._events = events
        self._record_error = record_error
        self._leap_ms = leap_ms
        self._leap_rate = leap_rate
        self._tables = tables
        self._n_names = 0
        self._approved: set[str] = set()
        self.exported_versions: dict[str, int] = {}  # by the name of a started export
        self._exported: set[str] = set()  # names of acknowledged exports without an end of retention
        self._dropped: set[str] = set()  # names of exports whose drop was started
        self._export_target = export_target
        self._anomalies: list[str] = []
        #: Versions that verify reported as older than previous ones. Only the clock of another program may be behind.
        self.behind: set[int | None] = set()
        all_operations = self._all_operations()
        self._operations = {name: all_operations[name] for name in operations if name in all_operations}

    def _all_operations(self) -> dict[str, Callable[[Lakehouse, random.Random], object]]:
        table_operations = {} if self._tables is None else {"trim": self._trim, "register": self._tables.register}
        return {
            "expire": self._expire,
            "purge": self._purge,
            "orphans": self._remove_orphans,
            "undelete": self._undelete,
            "export": self._export,
            "export to target": lambda lake, rng: self._export(lake, rng, to_export_target=True),
            "drop export": self._drop_export,
            "restore": self._restore,
            "clean up target": lambda lake, rng: self._export_target.clean_up(rng, self._pause),
            "verify": self._verify,
            "repair": self._repair,
            "reconcile": lambda lake, rng: maintenance.reconcile(lake).version is not None,
            **table_operations,
        }

    def work(self, lake: Lakehouse, rng: random.Random) -> None:
        """Run one random operation after a random wait."""
        for _ in range(rng.randrange(_MAX_WAIT_STEPS)):
            self._world.hand_over()
        if rng.random() < self._leap_rate:
            self._world.clock_ms += rng.randrange(self._leap_ms)
        name = rng.choices(list(self._operations), [OPERATIONS[name] for name in self._operations])[0]
        try:
            has_changed = self._operations[name](lake, rng)
        except TrinityLakeError as error:
            self._record_error(error, name, *_RETRYABLE_ERRORS)
            self._events[f"{name}: {type(error).__name__}"] += 1
        else:
            self._events[name if has_changed else f"{name}: nothing to do"] += 1

    def _expire(self, lake: Lakehouse, rng: random.Random) -> object:
        plan = maintenance.plan_expiration(lake)
        digest = plan.digest if rng.random() < 0.5 else None
        if digest is not None:
            self._pause(rng)
            plan = maintenance.plan_expiration(lake)
        return plan.execute(digest).version is not None

    def _purge(self, lake: Lakehouse, rng: random.Random) -> object:
        planning_budget = Spending()
        plan = maintenance.plan_purge(lake, budget=planning_budget)
        self._approved.update(plan.sizes_bytes)
        self._pause(rng)
        extra_requests = rng.choice([10, 30, None])  # more than planning took, because execution plans again
        try:
            report = plan.execute(
                budget=maintenance.Budget(max_requests=extra_requests and planning_budget.requests + extra_requests)
            )
        except BudgetSpentBeforeError:
            self._events["purge: budget spent"] += 1
            return False
        if report.stopped:
            self._events["purge: budget spent"] += 1
        return report.version is not None

    def _remove_orphans(self, lake: Lakehouse, rng: random.Random) -> object:
        plan = maintenance.plan_orphan_removal(lake)
        self._approved.update(plan.paths)
        self._pause(rng)
        return plan.execute().version is not None

    def _trim(self, lake: Lakehouse, rng: random.Random) -> object:
        plan = maintenance.plan_trim_tables(lake)
        self._pause(rng)
        return plan.execute().tables

    def _undelete(self, lake: Lakehouse, rng: random.Random) -> object:
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
            maintenance.undelete(lake, rng.sample(expired, rng.randint(1, len(expired))))
        except InvalidInputError as error:  # another process has undeleted it
            if "not expired" not in error.message:
                raise
        return True

    def _export(self, lake: Lakehouse, rng: random.Random, *, to_export_target: bool = False) -> object:
        self._n_names += 1
        name = f"e{self._n_names}"
        version = rng.randrange(lake.latest_version() + 1)
        self.exported_versions[name] = version
        retained_ms = rng.choice([None, self._leap_ms])
        level, with_definitions = self._export_target.level if to_export_target else rng.choice(LEVELS)
        target = self._export_target.root if to_export_target else None
        plan = maintenance.plan_export(
            lake, name, level, version, target, retain_for=retained_ms, definitions=with_definitions
        )
        self._pause(rng)
        plan.execute()
        if retained_ms is None:
            self._exported.add(name)
        return True

    def _verify(self, lake: Lakehouse, rng: random.Random) -> object:
        """Verify during concurrent changes. No file is damaged, so no damage may be reported."""
        del rng
        report = maintenance.verify(lake)
        errors = [finding for finding in report.findings if finding.severity == "error"]
        if not report.unanswered:
            # After a rollback by another program, the definition lists dropped exports until it is reconciled.
            dropped = tuple(f"export {name!r}:" for name in self._dropped)
            errors = [finding for finding in errors if not (dropped and finding.message.startswith(dropped))]
            self.behind |= {finding.version for finding in errors if finding.code == _TIME_NOT_INCREASING}
            errors = [finding for finding in errors if finding.code != _TIME_NOT_INCREASING]
            self._anomalies += [f"verify reports damage that does not exist: {finding}" for finding in errors]
        return report.latest_version > 0

    def _repair(self, lake: Lakehouse, rng: random.Random) -> object:
        """Repair the hint or the effects of another program. Nothing else may need repair."""
        if rng.random() < 0.5:
            return maintenance.repair_hint(lake).repaired
        try:
            plan = maintenance.plan_repair(lake, to_last_good=rng.random() < 0.5)
        except StorageError as error:
            if self._world.fault_rate == 0 or "files could not be read" not in error.message:
                raise
            return False
        unexpected = [step for step in plan.steps if step.action not in ("hint", "reconcile")]
        self._anomalies += [f"repair would change an undamaged lakehouse: {step}" for step in unexpected]
        self._pause(rng)
        return plan.execute().steps

    def _restore(self, lake: Lakehouse, rng: random.Random) -> object:
        names = [info.name for info in maintenance.list_exports(lake) if info.state == "complete"]
        if not names:
            return False
        plan = maintenance.plan_restore(lake, rng.choice(names))
        self._pause(rng)
        version = plan.execute().version
        if isinstance(plan, maintenance.RestorePlan):
            self._events["restore from target"] += 1
        return version != plan.base_version

    def _drop_export(self, lake: Lakehouse, rng: random.Random) -> object:
        names = [info.name for info in maintenance.list_exports(lake)]
        if names:
            name = rng.choice(names)
            self._dropped.add(name)
            maintenance.drop_export(lake, name)
        return bool(names)

    def _pause(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(30)):
            self._world.hand_over()

    # Invariants

    def violations(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        """Return violations: live versions must be complete, and only approved files may be deleted."""
        return [
            *self._anomalies,
            *self._content_violations(lake, past, states),
            *self._deletion_violations(),
            *self._export_target.violations(states),
        ]

    def _content_violations(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        violations = _version_violations(lake, self._world, states) + _export_violations(lake, states)
        missing = self._exported - self._dropped - {info.name for info in maintenance.list_exports(lake)}
        violations += [f"export {name} is missing" for name in sorted(missing)]
        if self._tables is not None:
            live = {info.version for info in lake.history() if info.state == "live"}
            violations += self._tables.violations(past, live)
        return violations

    def final_violations(self, lake: Lakehouse, past: Lakehouse, states: Sequence[State]) -> list[str]:
        """Purge and remove orphans after the run. All needed files must exist, and no other files."""
        self._world.clock_ms += 10 * self._leap_ms
        for _ in range(2):
            purged = maintenance.plan_purge(lake).execute()
            removed = maintenance.plan_orphan_removal(lake).execute()
            self._world.clock_ms += 10 * self._leap_ms
        violations = [f"{path} is not needed" for path in sorted(_unneeded_files(lake, set(self._world.files)))]
        if purged.version is not None or removed.version is not None:
            violations.append("the second purge and orphan removal changed the lakehouse")
        return violations + self._content_violations(lake, past, states)

    def _deletion_violations(self) -> list[str]:
        world = self._world
        return [
            f"{name} deleted {path} without approval"
            for name, path in world.home.deleted
            if path not in world.home.sent_by.get(name, ())
            and path not in self._approved
            and not path.startswith((OPERATIONS_PREFIX, "_export_"))
            and path != HINT_PATH
        ]


def archive(world: World) -> SimulatedStorage:
    """Return a storage with every file that was ever created, with its original content."""
    past = copy.copy(world)
    past.home = Folder(world.home.root, dict(world.created))
    return SimulatedStorage(past, Process("archive", [], lambda storage: None))


def all_states(lake: Lakehouse) -> list[State]:
    """Return the states of all versions, including purged ones, of a lakehouse on an archive."""
    return [contents(Snapshot.of(lake.files, version)) for version in range(lake.latest_version() + 1)]


def _version_violations(lake: Lakehouse, world: World, states: Sequence[State]) -> list[str]:
    """Check each version against the latest lakehouse definition."""
    violations = []
    definition = lake.snapshot().definition
    listed = {version: batch.state for batch in definition.expirations for version in batch.ranges()}
    for version in range(len(states)):
        path = root_path(version)
        if path not in world.files:
            violations.append(f"the root of version {version} was deleted")
            continue
        root = decode_node(world.files[path][0], path)
        original = decode_node(world.created[path][0], path)
        state = listed.get(version)
        if root.system.get(COMMIT_ID) != original.system.get(COMMIT_ID):
            violations.append(f"the root of version {version} was replaced by another commit")
        if root.is_sealed != (state == ExpirationState.PURGED) and state != ExpirationState.PURGING:
            violations.append(f"version {version} is {'' if root.is_sealed else 'not '}sealed, but {state}")
        elif not root.is_sealed:
            try:
                content = contents(Snapshot.of(lake.files, version))
            except (FileMissingError, ConflictError) as error:
                violations.append(f"version {version} ({state}) cannot be read: {error}")
                continue
            if content != states[version]:
                violations.append(f"the content of version {version} ({state}) has changed")
    return violations


def _export_violations(lake: Lakehouse, states: Sequence[State]) -> list[str]:
    definition, now_ms = lake.snapshot().definition, lake.storage.now_ms()
    violations = [
        f"version {record.version} is expired, although export {record.name} pins it"
        for record in definition.exports
        if not is_lapsed(record, now_ms) and record.version in expired_versions(definition)
        if record.state == ExportState.COPYING or record.level != ExportLevel.FULL
    ]
    for info in maintenance.list_exports(lake):
        if info.state != "complete" or info.version is None:
            continue
        try:
            content, expected = contents(lake.snapshot(info.name)), states[info.version]
            if info.target:  # the target lakehouse keeps its own settings
                content, expected = tree_of(content), tree_of(expected)
            if content != expected:
                violations.append(f"export {info.name} differs from version {info.version}")
        except TrinityLakeError as error:
            if info.target and isinstance(error, VersionExpiredError):  # expired by the target's settings
                continue
            violations.append(f"export {info.name} cannot be read: {error}")
    return violations


def _unneeded_files(lake: Lakehouse, all_paths: set[str]) -> set[str]:
    """Return the files that no version that can be read or undeleted, no export and no operation needs."""
    definition = lake.snapshot().definition
    needed = {
        HINT_PATH,
        ORPHAN_BARRIER_PATH,
        max((path for path in all_paths if path.startswith(LEASE_PREFIX)), default="", key=_number),
    }
    needed |= {path for path in all_paths if parse_root_path(path) is not None}
    needed |= {batch.plan_path for batch in definition.expirations}
    for record in definition.exports:  # an interrupted export resumes with the copies in its manifest
        copies = () if record.target_uri else manifest_targets(lake.storage, record.manifest_path)
        needed |= {record.root_location, record.manifest_path, *copies}
    versions = [Snapshot.of(lake.files, version) for version in range(lake.latest_version() + 1)]
    snapshots = [snapshot for snapshot in versions if not snapshot.root.is_sealed]
    for name in definition.exported_snapshots:
        with suppress(VersionExpiredError):  # expired at the export target
            snapshots.append(lake.snapshot(name))
    for snapshot in snapshots:
        needed.add(snapshot.definition_location)
        is_local = snapshot.files.storage.root == lake.root
        live = () if is_local else {location for _, location in scan(snapshot.files.nodes, snapshot.root)}
        for visited in walk(snapshot.files.nodes, snapshot.root, snapshot.location):
            values = {*visited.node.values, *visited.node.buffer.values()} - {None}
            # At the source, entries that newer messages shadow are needed, too. At the export target, they may belong
            # to an earlier export that was dropped.
            uris = {to_uri(snapshot.files.storage.root, value) for value in values if is_local or value in live}
            # An export to another root points to files of the source, or to its own files.
            locations = {uri.removeprefix(ROOT) for uri in uris if uri.startswith(ROOT)} - needed
            needed |= {to_uri(snapshot.files.storage.root, visited.location).removeprefix(ROOT), *locations}
            for location in locations:
                needed |= needed_files(lake, location)
    return {path for path in all_paths - needed if not is_uri(path)}


def _number(path: str) -> int:
    return int(path.removeprefix(LEASE_PREFIX).removesuffix(".json"))
