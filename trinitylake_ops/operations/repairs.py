"""Repair the findings of verify, as far as this is safe (docs/internals/protocol.md, "Repair").

Each step makes a new commit, writes a new hint file, or adds a missing owner file. Nothing is deleted, and only the
hint file is overwritten. Other findings are listed with advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError, PlanChangedError, StorageError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.version_ranges import VersionRanges
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
from trinitylake_ops.operations.intact_versions import (
    DAMAGED_FILE_ERRORS,
    IntactDefinitionSearch,
    newest_intact_version,
)
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.repair_steps import (
    OPERATION,
    ClaimFolders,
    DropExports,
    ReconcileDefinition,
    RestoreEntries,
    RollbackStep,
    SetHint,
    Step,
    advice_on,
    missing_exports,
)
from trinitylake_ops.operations.verification.report import Finding, VerifyReport
from trinitylake_ops.operations.verification.verify import verify
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_TO_LAST_GOOD = "repair --to-last-good"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairStep:
    """A step of a repair."""

    #: What the step does.
    action: str
    #: The object of the step.
    what: str
    #: The version whose content is restored, if any.
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrepairedFinding:
    """A finding that repair does not fix."""

    #: The severity of the finding.
    severity: str
    #: The code of the finding.
    code: str
    #: The path of the file, if any.
    path: str | None
    #: The version, if any.
    version: int | None
    #: What the operator can do.
    advice: str


@dataclass(frozen=True, kw_only=True)
class RepairReport(Document):
    """The result of a repair."""

    #: The latest version before the repair.
    base_version: int
    #: The latest version after the repair.
    version: int
    #: The steps that were taken.
    steps: tuple[RepairStep, ...]
    #: The findings that were not fixed.
    remaining: tuple[UnrepairedFinding, ...]
    #: The requests and time that the repair took.
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether no error remains."""
        return _is_complete(self.remaining)

    def table(self) -> Table:
        """Return one row for each step and for each remaining finding."""
        title = f"Repaired in {_step_count(self.steps)}; the latest version is {self.version}"
        return _table(title if self.steps else "Nothing to repair", self.steps, self.remaining, "done")


@dataclass(frozen=True, kw_only=True)
class RepairPlan(Plan):
    """The steps of a repair, in order, and the findings that it would not fix."""

    #: The latest version when the plan was made.
    base_version: int
    #: Whether a damaged latest version is repaired from older versions.
    to_last_good: bool
    #: The steps, in order.
    steps: tuple[RepairStep, ...]
    #: The findings that would not be fixed.
    remaining: tuple[UnrepairedFinding, ...]
    #: The steps, in a form that can be executed.
    executable_steps: tuple[Step, ...] = field(repr=False, compare=False)
    operation: Repair = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all steps."""
        steps = [[step.action, step.what, step.version] for step in self.steps]
        return digest_of(self.base_version, self.base_id, OPERATION, self.to_last_good, steps)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that repair can fix."""
        return not self.steps

    @property
    def is_complete(self) -> bool:
        """Whether no error would remain."""
        return _is_complete(self.remaining)

    def table(self) -> Table:
        """Return one row for each step and for each remaining finding."""
        title = f"Repair of version {self.base_version}: {_step_count(self.steps)}"
        return _table(title, self.steps, self.remaining, "to do")

    def execute(self, approved_digest: str | None = None) -> RepairReport:
        """Take all steps.

        Each step first checks whether it is still needed, so that an interrupted repair can be run again.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The plan does not have the approved digest, or a version was committed since it was made.
            CommitConflictError: Another process committed during the repair.
            MaintenanceBlockedError: Another operation holds the lease that reconcile needs.
            StorageError: A storage request failed.
        """
        return self.operation.execute(self, approved_digest)


def _is_complete(remaining: Sequence[UnrepairedFinding]) -> bool:
    return all(finding.severity != "error" for finding in remaining)


@dataclass(frozen=True, kw_only=True)
class Repair(PlannedOperation[RepairPlan, RepairReport]):
    """Repair the findings of a verify report, or of a new one."""

    telemetry_name = "repair"

    #: The report; None to run verify first.
    report: VerifyReport | None
    #: Whether to repair a damaged latest version from older versions.
    to_last_good: bool

    def plan(self) -> RepairPlan:
        """Make a plan based on the latest version. See :func:`plan_repair` for the errors."""
        report = self.report or verify(self.lake)
        if not report.is_complete:
            raise InvalidInputError(
                f"the verify report is incomplete ({report.stopped}); run verify without limits first"
            )
        if self.lake.latest_version() != report.latest_version:
            raise PlanChangedError(
                f"the verify report is out of date: a version was committed after version {report.latest_version};"
                " run verify again"
            )
        if self.to_last_good and report.unanswered:
            raise StorageError(
                f"nothing was repaired: {len(report.unanswered)} files could not be read, so it is unknown which"
                " versions are intact; retry",
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
            raise PlanChangedError(
                f"the repair plan is out of date: a version was committed after version {version}; run verify again,"
                " then review the new plan"
            )
        for step in plan.executable_steps:
            version = step.take(metered.lake, version)
        return RepairReport(
            base_version=plan.base_version,
            version=version,
            steps=plan.steps,
            remaining=plan.remaining,
            cost=metered.cost(),
        )


def _step_count(steps: Sequence[RepairStep]) -> str:
    return "1 step" if len(steps) == 1 else f"{len(steps)} steps"


def _table(title: str, steps: Sequence[RepairStep], remaining: Sequence[UnrepairedFinding], state: str) -> Table:
    rows: list[tuple[object, ...]] = [(state, step.action, step.what, step.version, "") for step in steps]
    rows += [("remaining", finding.code, finding.path, finding.version, finding.advice) for finding in remaining]
    return new_table(title, "state", "step or finding", "object", "version", "advice", rows=rows)


def plan_repair(lake: Lakehouse, report: VerifyReport | None = None, *, to_last_good: bool = False) -> RepairPlan:
    """Plan a repair of the findings of a verify report, without writing anything.

    With ``to_last_good``, objects with damaged definitions or files are rolled back to the newest version in which they
    are intact, unless their name belonged to another object in that version. If the tree is damaged, everything is
    rolled back to the newest intact version. Later commits to these objects are lost.

    Args:
        lake: The lakehouse.
        report: The report; None verifies first.
        to_last_good: Also repair a damaged latest version from older versions.

    Raises:
        InvalidInputError: The report is incomplete because verify reached a limit.
        PlanChangedError: The report is about an earlier version.
        StorageError: A storage request failed, or ``to_last_good`` needs a file whose request failed during verify.
    """
    return Repair(lake=uncached(lake), report=report, to_last_good=to_last_good).plan()


def repair(lake: Lakehouse, report: VerifyReport | None = None, *, to_last_good: bool = False) -> RepairReport:
    """Plan and execute a repair.

    Args:
        lake: The lakehouse.
        report: The report; None verifies first.
        to_last_good: Also repair a damaged latest version from older versions.

    Raises:
        TrinityLakeError: See :func:`plan_repair` and :meth:`RepairPlan.execute`.
    """
    with operation_span(Repair.telemetry_name):
        plan = plan_repair(lake, report, to_last_good=to_last_good)
        return plan.operation.run(plan, None)


class _Planner:
    def __init__(self, repair: Repair, report: VerifyReport):
        self._repair = repair
        self._lake = repair.lake
        self._report = report
        self._to_last_good = repair.to_last_good
        self._steps: list[RepairStep] = []
        self._executable_steps: list[Step] = []
        self._repaired: set[Finding] = set()
        self._without_intact_version: set[str] = set()

    def plan(self) -> RepairPlan:
        base = self._base()
        if base is not None:
            self._plan_reconcile()
            self._plan_exports(base.definition)
            self._plan_owners()
            if self._to_last_good and self._is_latest_damaged() and not self._is_definition_changed(base):
                self._plan_last_good(base)
        self._plan_hint()
        open_findings = (finding for finding in self._report.findings if finding.severity != "past")
        unrepaired = [finding for finding in open_findings if finding not in self._repaired]
        return RepairPlan(
            base_version=self._report.latest_version,
            base_id="" if base is None else base_id_of(base),
            to_last_good=self._to_last_good,
            steps=tuple(self._steps),
            remaining=tuple(map(self._unrepaired, unrepaired)),
            executable_steps=tuple(self._executable_steps),
            operation=self._repair,
        )

    def _is_latest_damaged(self) -> bool:
        return self._report.latest_version in VersionRanges.parse(self._report.damaged_versions)

    def _is_definition_changed(self, base: Snapshot) -> bool:
        """Whether the latest definition changed settings that are fixed at creation.

        In that case, every tree is damaged under this definition, including the trees of older versions.
        """
        return any(finding.path == base.definition_location for finding in self._findings("definition-changed"))

    def _unrepaired(self, finding: Finding) -> UnrepairedFinding:
        advice = advice_on(finding.code)
        if finding.path in self._without_intact_version:
            advice += "; no older version has it intact: drop the object, or roll back to a version without it"
        elif finding.fix == _TO_LAST_GOOD and not self._to_last_good:
            advice += f"; or run {_TO_LAST_GOOD}, which rolls back to an intact version"
        return UnrepairedFinding(
            severity=finding.severity, code=finding.code, path=finding.path, version=finding.version, advice=advice
        )

    def _base(self) -> Snapshot | None:
        """Return the latest version, or None if it or its definition cannot be read, so that no commit is possible."""
        try:
            base = self._lake.snapshot()
            _ = base.definition
        except DAMAGED_FILE_ERRORS:
            return None
        return base

    def _add(self, step: Step, action: str, description: str, version: int | None = None) -> None:
        self._steps.append(RepairStep(action=action, what=description, version=version))
        self._executable_steps.append(step)

    def _findings(self, *codes: str) -> list[Finding]:
        return [finding for finding in self._report.findings if finding.code in codes]

    def _plan_reconcile(self) -> None:
        if findings := self._findings("reconcile-needed"):
            self._repaired.update(findings)
            self._add(ReconcileDefinition(), "reconcile", "settings that another program replaced")

    def _plan_exports(self, definition: LakehouseDef) -> None:
        missing = missing_exports(self._lake, definition)
        if not missing:
            return
        paths = {definition.exported_snapshots.get(name, "") for name in missing}
        records = [record for record in definition.exports if record.name in missing]
        paths |= {path for record in records for path in (record.root_location, record.manifest_path)}
        findings = self._findings("export-unreadable", "export-damaged")
        self._repaired.update(finding for finding in findings if finding.path in paths)
        self._add(DropExports(tuple(missing)), "drop-export", f"exports without a root: {', '.join(missing)}")

    def _plan_owners(self) -> None:
        if table_ids := self._report.unclaimed:
            self._repaired.update(self._findings("owner-missing"))
            description = f"owner files of {len(table_ids)} tables, for example {table_ids[0]!r}"
            self._add(ClaimFolders(tuple(table_ids)), "claim", description)

    def _plan_hint(self) -> None:
        if findings := self._findings("hint-wrong"):
            self._repaired.update(findings)
            self._add(SetHint(), "hint", "the hint file")

    def _plan_last_good(self, base: Snapshot) -> None:
        if not self._report.damaged_objects:
            damaged = VersionRanges.parse(self._report.damaged_versions)
            target = newest_intact_version(self._lake, base, damaged)
            if target is not None:
                description = "everything, to the newest intact version"
                self._add(RollbackStep(target.version, target.root), "rollback", description, target.version)
            return
        damaged_files = {finding.path for finding in self._report.findings if finding.severity == "error"}
        search = IntactDefinitionSearch(self._lake, damaged_files)
        restored, self._without_intact_version = search.find(base, self._report.damaged_objects)
        for version in sorted({definition.version for definition in restored}, reverse=True):
            definitions = [definition for definition in restored if definition.version == version]
            entries = {definition.key: definition.location for definition in definitions}
            names = sorted(str(definition.name) for definition in definitions)
            self._add(RestoreEntries(version, entries), "rollback", ", ".join(names), version)
