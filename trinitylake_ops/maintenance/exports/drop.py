"""Dropping an export, as a plan to look at first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import ExportNotFoundError
from trinitylake_ops.format.definitions import ExportLevel
from trinitylake_ops.maintenance.plans.cost import MeteredLakehouse
from trinitylake_ops.maintenance.plans.document import Table, new_table
from trinitylake_ops.maintenance.plans.plan import CommitReport, Plan, PlannedOperation, digest_of
from trinitylake_ops.maintenance.state.export_records import (
    ExportInfo,
    check_no_clone,
    drop_export,
    list_exports,
    record_of,
)
from trinitylake_ops.transaction.lakehouse import Lakehouse

_OPERATION = "drop-export"


@dataclass(frozen=True, kw_only=True)
class DropExportPlan(Plan):
    """The export that would be forgotten. ``other_exports`` keep its version, too.

    ``loses_files`` says whether a lakehouse at another root reads files from here that nothing keeps from then on.
    """

    base_version: int
    export: ExportInfo
    other_exports: tuple[str, ...]
    loses_files: bool
    operation: DropExport = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the export, and of what else keeps its version."""
        export = self.export
        known = [export.name, export.version, export.level, export.state, export.location, export.manifest_path]
        return digest_of(self.base_version, _OPERATION, known, list(self.other_exports), self.loses_files)

    @property
    def is_empty(self) -> bool:
        """Never: the export is there."""
        return False

    @property
    def consequences(self) -> tuple[str, ...]:
        """What follows from the drop, a sentence each."""
        export = self.export
        if export.version is None:
            said = [f"nothing keeps {export.location}"]
        elif self.other_exports:
            said = [f"version {export.version} is still kept by {', '.join(self.other_exports)}"]
        else:
            said = [f"version {export.version} can expire from then on"]
        if export.target:
            said.append(f"the lakehouse at {export.target} stays")
        if self.loses_files:
            said.append(f"{export.target} reads files from here that nothing keeps any more")
        return tuple(said)

    def table(self) -> Table:
        """Return one row for the export."""
        export = self.export
        columns = ("export", "version", "level", "state", "created (UTC)", "what follows")
        row = (export.name, export.version, export.level, export.state, export.created_at, "; ".join(self.consequences))
        return new_table(f"Drop of export {export.name}", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Forget it in one commit, then delete its root and manifest.

        Raises PlanChangedError when an approved digest is not that of the plan made again now. Raises what
        :func:`drop_export` raises.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropExport(PlannedOperation[DropExportPlan, CommitReport]):
    """The drop of the export of a name."""

    name: str

    def plan(self) -> DropExportPlan:
        """Plan on the latest version. Raises what :func:`plan_drop_export` raises."""
        latest = self.lake.snapshot()
        record = record_of(latest.definition, self.name)
        check_no_clone(record)
        exports = list_exports(self.lake, latest)
        export = next((one for one in exports if one.name == self.name), None)
        if export is None:
            raise ExportNotFoundError(f"there is no export {self.name!r}")
        others = (one.name for one in exports if one.version == export.version and one.name != self.name)
        return DropExportPlan(
            base_version=latest.version,
            export=export,
            other_exports=() if export.version is None else tuple(others),
            loses_files=record is not None and bool(record.target_uri) and record.level != ExportLevel.FULL,
            operation=self,
        )

    def execute(self, plan: DropExportPlan, approved_digest: str | None = None) -> CommitReport:
        """Forget it. Raises what :meth:`DropExportPlan.execute` raises."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        plan = replace(self, lake=metered.lake).checked(plan, approved_digest)
        return CommitReport(
            operation=_OPERATION,
            base_version=plan.base_version,
            version=drop_export(metered.lake, self.name),
            changed=1,
            cost=metered.cost(),
        )


def plan_drop_export(lake: Lakehouse, name: str) -> DropExportPlan:
    """Plan to forget an export; reads only. Raises ExportNotFoundError, InvalidInputError for a clone."""
    return DropExport(lake=lake, name=name).plan()
