"""Repair: repairs the findings of verify, as far as that is safe (docs/internals/protocol.md, "Repair").

Each step is a new commit, the hint file, or a missing owner file. Nothing is deleted, and no file is overwritten except
the hint. All other findings are listed with advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    NotFoundError,
    PlanChangedError,
    StorageError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, LakehouseDef
from trinitylake_ops.format.keys import KeyCodec, ObjectName
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import TableFile, files_of
from trinitylake_ops.operations.base import (
    Cost,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
    uncached,
)
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.repair_steps import (
    OPERATION,
    ClaimFolders,
    DropExports,
    RestoreEntries,
    RollbackStep,
    SetHint,
    SettleDefinition,
    Step,
    advice_on,
    missing_exports,
)
from trinitylake_ops.operations.verification.report import Finding, VerifyReport
from trinitylake_ops.operations.verification.verify import verify
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

#: The findings of damaged files, not of a storage that does not return them.
_DAMAGED = (FileMissingError, CorruptFileError)

_TO_LAST_GOOD = "repair --to-last-good"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairStep:
    """A step of a repair: ``action``, and its target. ``version`` is the version to which it goes back, if it does."""

    action: str
    what: str
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrepairedFinding:
    """A finding that repair leaves alone, with advice on it."""

    severity: str
    code: str
    path: str | None
    version: int | None
    advice: str


@dataclass(frozen=True, kw_only=True)
class RepairReport(Document):
    """The result of a repair.

    ``version`` is the latest version after it, and ``not_mended`` has the remaining findings.
    """

    base_version: int
    version: int
    steps: tuple[RepairStep, ...]
    not_mended: tuple[UnrepairedFinding, ...]
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether no error is left."""
        return _is_complete(self.not_mended)

    def table(self) -> Table:
        """Return a row for each step, and for each finding that is left."""
        title = f"Repaired in {_counted(self.steps)}, the latest version is {self.version}"
        return _table(title if self.steps else "Nothing to repair", self.steps, self.not_mended, "done")


@dataclass(frozen=True, kw_only=True)
class RepairPlan(Plan):
    """The steps of a repair, in order, and the findings that it would leave."""

    base_version: int
    to_last_good: bool
    steps: tuple[RepairStep, ...]
    not_mended: tuple[UnrepairedFinding, ...]
    to_take: tuple[Step, ...] = field(repr=False, compare=False)
    operation: Repair = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all steps."""
        steps = [[step.action, step.what, step.version] for step in self.steps]
        return digest_of(self.base_version, self.base_id, OPERATION, self.to_last_good, steps)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that repair can do."""
        return not self.steps

    @property
    def is_complete(self) -> bool:
        """Whether no error would be left."""
        return _is_complete(self.not_mended)

    def table(self) -> Table:
        """Return a row for each step, and for each finding that is left."""
        title = f"Repair of version {self.base_version}: {_counted(self.steps)}"
        return _table(title, self.steps, self.not_mended, "to do")

    def execute(self, approved_digest: str | None = None) -> RepairReport:
        """Take all steps.

        Each first checks whether it is still needed, so that a repair that was cut off can be run again. Raises
        PlanChangedError when the plan is not the approved one or a version was committed since. Raises
        CommitConflictError when one is committed meanwhile. Raises MaintenanceBlockedError while another operation has
        the lease that reconcile needs, StorageError.
        """
        return self.operation.execute(self, approved_digest)


def _is_complete(not_mended: Sequence[UnrepairedFinding]) -> bool:
    return all(finding.severity != "error" for finding in not_mended)


@dataclass(frozen=True, kw_only=True)
class Repair(PlannedOperation[RepairPlan, RepairReport]):
    """The repair of a report's findings, None for a new report."""

    telemetry_name = "repair"

    report: VerifyReport | None
    to_last_good: bool

    def plan(self) -> RepairPlan:
        """Plan on the latest version. Raises what :func:`plan_repair` raises."""
        report = self.report or verify(self.lake)
        if not report.is_complete:
            raise InvalidInputError(
                f"this report of verify ended early, as {report.stopped}: verify without limits first"
            )
        if self.lake.latest_version() != report.latest_version:
            raise PlanChangedError(f"a version was committed after version {report.latest_version}: verify again")
        if self.to_last_good and report.unanswered:
            raise StorageError(
                f"the storage did not give {len(report.unanswered)} files, so that nobody can tell what is whole;"
                " nothing was changed: repair again",
                path=report.unanswered[0],
            )
        return _Planner(self, report).plan()

    def run(self, plan: RepairPlan, approved_digest: str | None) -> RepairReport:
        """Take all steps of a plan."""
        if approved_digest is not None:
            plan.check_approved(approved_digest)
        metered = MeteredLakehouse(self.lake)
        version = plan.base_version
        if plan.steps and metered.lake.latest_version() != version:
            raise PlanChangedError(f"a version was committed after version {version}: verify, and review the new plan")
        for step in plan.to_take:
            version = step.take(metered.lake, version)
        return RepairReport(
            base_version=plan.base_version,
            version=version,
            steps=plan.steps,
            not_mended=plan.not_mended,
            cost=metered.cost(),
        )


def _counted(steps: Sequence[RepairStep]) -> str:
    return "1 step" if len(steps) == 1 else f"{len(steps)} steps"


def _table(title: str, steps: Sequence[RepairStep], left: Sequence[UnrepairedFinding], done: str) -> Table:
    rows: list[tuple[object, ...]] = [(done, step.action, step.what, step.version, "") for step in steps]
    rows += [("left", finding.code, finding.path, finding.version, finding.advice) for finding in left]
    return new_table(title, "", "what", "of", "version", "what you can do", rows=rows)


def plan_repair(lake: Lakehouse, report: VerifyReport | None = None, *, to_last_good: bool = False) -> RepairPlan:
    """Plan a repair of the findings of a report, by default of a new one. Only reads.

    With ``to_last_good`` a damaged latest version is repaired, too. Objects whose definitions or files are damaged go
    back to the newest version that has them whole, unless their name was another object's then. If the tree is damaged,
    all goes back to the newest whole version. Later commits to them are lost. Raises InvalidInputError for a report
    that a limit ended early, PlanChangedError for one of an earlier version. Raises StorageError, also if the storage
    did not return what ``to_last_good`` needs.
    """
    return Repair(lake=uncached(lake), report=report, to_last_good=to_last_good).plan()


def repair(lake: Lakehouse, report: VerifyReport | None = None, *, to_last_good: bool = False) -> RepairReport:
    """Plan and execute a repair. Raises the errors of both."""
    with operation_span(Repair.telemetry_name):
        plan = plan_repair(lake, report, to_last_good=to_last_good)
        return plan.operation.run(plan, None)


class _Planner:
    def __init__(self, repair: Repair, report: VerifyReport):
        self._repair = repair
        self._lake = repair.lake
        self._report = report
        self._to_last_good = repair.to_last_good
        self._wrong = {finding.path for finding in report.findings if finding.severity == "error"}
        self._steps: list[RepairStep] = []
        self._to_take: list[Step] = []
        self._repaired: set[Finding] = set()
        self._nowhere_whole: set[str | None] = set()

    def plan(self) -> RepairPlan:
        base = self._base()
        if base is not None:
            self._plan_reconcile()
            self._plan_exports(base.definition)
            self._plan_owners()
            if self._to_last_good and self._is_latest_damaged() and not self._has_other_settings(base):
                self._plan_last_good(base)
        self._plan_hint()
        open_findings = (finding for finding in self._report.findings if finding.severity != "past")
        left = [finding for finding in open_findings if finding not in self._repaired]
        return RepairPlan(
            base_version=self._report.latest_version,
            base_id="" if base is None else base_id_of(base),
            to_last_good=self._to_last_good,
            steps=tuple(self._steps),
            not_mended=tuple(map(self._unrepaired, left)),
            to_take=tuple(self._to_take),
            operation=self._repair,
        )

    def _is_latest_damaged(self) -> bool:
        return self._report.latest_version in VersionRanges.parse(self._report.damaged_versions)

    def _has_other_settings(self, base: Snapshot) -> bool:
        """Whether the latest settings differ from those of creation.

        Then every tree under them is damaged, older ones, too.
        """
        return any(finding.path == base.definition_location for finding in self._found("definition-changed"))

    def _unrepaired(self, finding: Finding) -> UnrepairedFinding:
        advice = advice_on(finding.code)
        if finding.path in self._nowhere_whole:
            advice += "; no older version has it whole: drop the object, or roll back to a version without it"
        elif finding.mend == _TO_LAST_GOOD and not self._to_last_good:
            advice += f"; {_TO_LAST_GOOD} goes back to what is whole"
        return UnrepairedFinding(
            severity=finding.severity, code=finding.code, path=finding.path, version=finding.version, advice=advice
        )

    def _base(self) -> Snapshot | None:
        """Return the latest version, None if it or its definition cannot be read. Nothing can be committed then."""
        try:
            base = self._lake.snapshot()
            _ = base.definition
        except _DAMAGED:
            return None
        return base

    def _add(self, step: Step, action: str, what: str, version: int | None = None) -> None:
        self._steps.append(RepairStep(action=action, what=what, version=version))
        self._to_take.append(step)

    def _found(self, *codes: str) -> list[Finding]:
        return [finding for finding in self._report.findings if finding.code in codes]

    def _plan_reconcile(self) -> None:
        if found := self._found("reconcile-needed"):
            self._repaired.update(found)
            self._add(SettleDefinition(), "reconcile", "settings that another program replaced")

    def _plan_exports(self, definition: LakehouseDef) -> None:
        gone = missing_exports(self._lake, definition)
        if not gone:
            return
        paths = {definition.exported_snapshots.get(name, "") for name in gone}
        records = [record for record in definition.exports if record.name in gone]
        paths |= {path for record in records for path in (record.root_location, record.manifest_path)}
        found = self._found("export-unreadable", "export-damaged")
        self._repaired.update(finding for finding in found if finding.path in paths)
        self._add(DropExports(tuple(gone)), "drop-export", f"exports without their root: {', '.join(gone)}")

    def _plan_owners(self) -> None:
        if table_ids := self._report.unclaimed:
            self._repaired.update(self._found("owner-missing"))
            what = f"folders of {len(table_ids)} tables, such as {table_ids[0]!r}, by an owner file"
            self._add(ClaimFolders(tuple(table_ids)), "claim", what)

    def _plan_hint(self) -> None:
        if found := self._found("hint-wrong"):
            self._repaired.update(found)
            self._add(SetHint(), "hint", "the hint file")

    # Back to what is whole

    def _plan_last_good(self, base: Snapshot) -> None:
        if self._report.damaged_objects:
            self._plan_objects(base)
            return
        damaged = VersionRanges.parse(self._report.damaged_versions)
        target = next((snapshot for snapshot in self._older(base) if snapshot.version not in damaged), None)
        if target is not None:
            what = "all, with the tree of the newest version that is whole"
            self._add(RollbackStep(target.version, target.root), "rollback", what, target.version)

    def _older(self, base: Snapshot) -> Iterator[Snapshot]:
        """Yield the older versions that can be gone back to, newest first."""
        for version in range(base.version - 1, -1, -1):
            try:
                yield self._lake.snapshot(version)
            except (NotFoundError, *_DAMAGED):
                continue  # expired, or damaged itself

    def _plan_objects(self, base: Snapshot) -> None:
        """Find, for each damaged object, the newest version that has it whole.

        In versions before one without it, its name was that of another object, which somebody dropped.
        """
        missing = {_key(base.keys, name): name for name in self._report.damaged_objects}
        damaged = {key: location for key in missing if (location := base.entry(key)) is not None}
        ids = {key: self._id_of(base, location, missing[key]) for key, location in damaged.items()}
        rejected = set(damaged.values())
        restored: dict[str, tuple[ObjectName, int, str]] = {}
        for snapshot in self._older(base):
            if not missing:
                break
            for key, name in list(missing.items()):
                if not _may_have(snapshot, key):
                    del missing[key]
                    continue
                location = self._whole_entry(snapshot, key, name, rejected, ids.get(key))
                if location is not None:
                    restored[key] = (missing.pop(key), snapshot.version, location)
        self._nowhere_whole = {location for key, location in damaged.items() if key not in restored}
        for version in sorted({version for _, version, _ in restored.values()}, reverse=True):
            chosen = {key: location for key, (_, at, location) in restored.items() if at == version}
            names = sorted(str(name) for name, at, _ in restored.values() if at == version)
            self._add(RestoreEntries(version, chosen), "rollback", ", ".join(names), version)

    def _id_of(self, snapshot: Snapshot, location: str, name: ObjectName) -> str | None:
        """Return the id in a definition, None where it cannot be read."""
        try:
            return snapshot.namespace_at(location).id if name.table is None else snapshot.table_at(location).id
        except _DAMAGED:
            return None

    def _whole_entry(
        self, snapshot: Snapshot, key: str, name: ObjectName, rejected: set[str], known_id: str | None
    ) -> str | None:
        """Return a version's definition of an object, if it is whole and has that id, where that is known."""
        try:
            location = snapshot.entry(key)
            if location is None or location in rejected:
                return None
            rejected.add(location)
            is_same = known_id in (None, self._id_of(snapshot, location, name))
            is_whole = is_same and location not in self._wrong and self._is_whole(snapshot, location, name)
        except (InvalidInputError, *_DAMAGED):
            return None
        return location if is_whole else None

    def _is_whole(self, snapshot: Snapshot, location: str, name: ObjectName) -> bool:
        """Whether a definition can be read and all files of its table are there. Raises StorageError."""
        if name.table is None:
            return bool(snapshot.namespace_at(location).id)
        definition = snapshot.table_at(location)
        if (
            not definition.is_managed
            or not definition.is_iceberg
            or METADATA_LOCATION not in definition.format_properties
        ):
            return True
        io = reading_io(self._lake)
        return all(self._exists(io, file) for file in files_of(definition, io) if file.live)

    def _exists(self, io: StorageFileIO, file: TableFile) -> bool:
        if file.location in self._wrong:
            return False
        size_bytes = io.size_bytes(file.location)
        return size_bytes is not None and file.size_bytes in (None, size_bytes)


def _may_have(snapshot: Snapshot, key: str) -> bool:
    """Whether a version has an object, or its tree cannot tell."""
    try:
        return snapshot.entry(key) is not None
    except _DAMAGED:
        return True


def _key(keys: KeyCodec, name: ObjectName) -> str:
    return keys.namespace_key(name.namespace) if name.table is None else keys.table_key(name.namespace, name.table)
