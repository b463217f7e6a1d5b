"""All operations, each once: verify, repair, and those that show the history are declared here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from trinitylake_ops import operations
from trinitylake_ops.declarations.clones import (
    CLONE,
    COMPARE_CLONE,
    DROP_CLONE,
    DROP_CLOSED_BRANCH,
    DROP_OVERDUE_CLONES,
    PROMOTE,
    REFRESH_CLONE,
)
from trinitylake_ops.declarations.exports import COMPACT, COMPACT_TABLES, DROP_EXPORT, EXPORT, RECONCILE, REPAIR_HINT
from trinitylake_ops.declarations.gc import EXPIRE, ORPHANS, PURGE, RELOCATE, TRIM, UNDELETE
from trinitylake_ops.declarations.operation import Operation, OperationContext, report_entries
from trinitylake_ops.declarations.options import Options, TableText, VersionSource, limit_field, split_name
from trinitylake_ops.declarations.planned import Planned, UnattendedOptions
from trinitylake_ops.declarations.rendering import Json, inline_chart, listing
from trinitylake_ops.declarations.rollback import RESTORE, ROLLBACK
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations import Budget, RepairPlan, RepairReport, VerifyReport, diff_versions
from trinitylake_ops.operations.diff.table_history import table_history
from trinitylake_ops.operations.diff.versions import delta_texts
from trinitylake_ops.operations.rendering import Table, jsonable
from trinitylake_ops.reports import verification_chart

_MOST_VERSIONS = 1_000
_MOST_SECONDS = 120.0


class LogOptions(Options):
    """How many versions are read."""

    limit: int = Field(
        default=50, ge=1, le=_MOST_VERSIONS, description="How many versions to read, from the latest back."
    )


class HistoryOptions(LogOptions):
    """The table, and how many versions are looked at."""

    table: TableText = Field(description="The table, as namespace.table.")


class DiffOptions(Options):
    """The two versions."""

    before: VersionSource = Field(description="The earlier version.")
    after: VersionSource = Field(description="The later version.")


def _log(run: OperationContext[LogOptions]) -> None:
    latest = run.lake.snapshot()
    infos = list(run.lake.history(run.options.limit, latest))
    rows = run.page.rows(run.lake, latest, infos, most_seconds=_MOST_SECONDS)
    metadata = {
        "versions": listing(run.page.columns, rows),
        "n_versions": len(infos),
        "details": Json(jsonable(infos)),
    }
    run.report(f"the last {len(infos)} of {latest.version + 1} versions", metadata)


def _history(run: OperationContext[HistoryOptions]) -> None:
    name, latest = run.options.table, run.lake.snapshot()
    limit = run.options.limit
    history = table_history(run.lake, *split_name(name), head=latest, most=limit, look_back=limit)
    changes = {one.info.version: (one.change.kind, *delta_texts(one.change.delta)) for one in history.versions}
    marks = {
        one.info.version: "" if one.undone_by is None else f"undone by {one.undone_by}" for one in history.versions
    }
    rows = run.page.rows_with(latest, [one.info for one in history.versions], changes, marks, only=name)
    columns = [(one.info.version, line) for one in history.versions for line in one.columns]
    metadata = {
        "table": name,
        "n_versions": len(rows),
        "looked_back_to": history.looked_back_to,
        "versions": listing(["change" if column == "tables" else column for column in run.page.columns], rows),
        "columns_changed": listing(("version", "column"), columns),
    }
    run.report(f"{len(rows)} versions since version {history.looked_back_to} changed {name}", metadata)


def _diff(run: OperationContext[DiffOptions]) -> None:
    before, after = (run.lake.snapshot(str(place)) for place in (run.options.before, run.options.after))
    diff = diff_versions(run.lake, before, after)
    table, sums = diff.table(), diff.sums
    numbers: dict[str, Any] = {
        name: getattr(sums, name) for name in ("rows_added", "rows_removed", "files_added", "files_removed")
    }
    metadata = {
        "objects": len(diff.objects),
        **numbers,
        "changes": listing(table.columns, table.rows),
        "details": Json(diff.to_dict()),
    }
    run.report(table.title, metadata)


LOG = Operation(
    job="log",
    description="Shows the last versions: who made them, what they changed, and what checks found; reads only.",
    options=LogOptions,
    step=_log,
)
HISTORY = Operation(
    job="history",
    description="Shows the versions that changed a table; reads only.",
    options=HistoryOptions,
    step=_history,
)
DIFF = Operation(
    job="diff",
    description="Shows what differs between two versions, with rows, files and bytes of tables; reads only.",
    options=DiffOptions,
    step=_diff,
)


_COLUMNS = ("severity", "code", "path", "version", "what you can do")


class VerifyOptions(Options):
    """How much is read, and when the run ends."""

    deep: bool = Field(
        default=False,
        description="Whether to read all again, data files of tables too, and compare it with what was recorded.",
    )
    incremental: bool = Field(
        default=False,
        description="Whether to keep a record in the lakehouse, and not to read again what it knows to be unchanged.",
    )
    max_requests: int | None = Field(default=None, gt=0, description="Stop after so many requests. Null: no limit.")
    max_seconds: float | None = limit_field("Stop after so many seconds")


class RepairOptions(UnattendedOptions):
    """How far repair goes."""

    to_last_good: bool = Field(
        default=False,
        description="Whether to go back, where the latest version is damaged, to what is whole: its damaged objects"
        " alone, or all where the tree is damaged.",
    )

    @model_validator(mode="after")
    def _check_unattended(self) -> Self:
        if self.unattended and self.to_last_good:
            raise InvalidInputError(
                "to_last_good: it changes what readers see; leave unattended out, and approve a plan"
            )
        return self


def _verify(run: OperationContext[VerifyOptions]) -> None:
    options = run.options
    progress = run.progress()
    report = operations.verify(
        run.lake,
        lambda done, total: progress("versions", done, total),
        deep=options.deep,
        incremental=options.incremental,
        budget=Budget(max_requests=options.max_requests, max_seconds=options.max_seconds),
        executor=run.executor(),
    )
    metadata = {
        **report_entries(report.to_dict()),
        "timeline": inline_chart(verification_chart(report)),
        "findings": findings_table(report),
        "checksums": report.checksums,
        "not_looked_at": "; ".join(report.unchecked),
    }
    if not report.is_clean:
        errors = [finding.message for finding in report.findings if finding.severity == "error"]
        metadata.update(run.entry("repair", {}))
        raise run.failure(f"{len(errors)} error{'s' if len(errors) > 1 else ''}, the first: {errors[0]}", metadata)
    if report.stopped is not None:
        run.log.warning("not finished, as %s; not looked at: %s", report.stopped, metadata["not_looked_at"])
    run.report(str(report.table().title), metadata)


VERIFY = Operation(
    job="verify",
    description="Checks all versions, nodes, definitions, tables and their files; fails when it finds errors.",
    options=VerifyOptions,
    step=_verify,
)


def findings_table(report: VerifyReport) -> Table:
    """Return the findings of verify, a row each."""
    rows = [
        (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.mend or "")
        for f in report.findings
    ]
    return listing(("severity", "code", "message", "version", "path", "mend"), rows)


def _plan_repair(run: OperationContext[RepairOptions]) -> RepairPlan:
    return operations.plan_repair(run.lake, to_last_good=run.options.to_last_good)


def _repair_shown(repair: RepairPlan | RepairReport) -> dict[str, Any]:
    """Return the steps and the remaining findings, as tables."""
    steps = [(step.action, step.what, "" if step.version is None else step.version) for step in repair.steps]
    left = [
        (f.severity, f.code, f.path or "", "" if f.version is None else f.version, f.advice) for f in repair.not_mended
    ]
    return {
        "n_steps": len(steps),
        "n_left": len(left),
        "steps": listing(("step", "of", "version"), steps),
        "left": listing(_COLUMNS, left),
    }


def _left(plan: RepairPlan) -> str:
    """Say how many errors a repair would leave. It is empty if there is none."""
    errors = sum(finding.severity == "error" for finding in plan.not_mended)
    if not errors:
        return ""
    shown = "1 error is" if errors == 1 else f"{errors} errors are"
    return f"{shown} left that repair does not mend: the table 'left' says what you can do"


def _to_last_good(run: OperationContext[RepairOptions], plan: RepairPlan) -> dict[str, Any]:
    """Return the link to the plan that goes further, where this one leaves errors."""
    if run.options.to_last_good or not _left(plan):
        return {}
    return run.entry("repair", {"to_last_good": True}, "plan to return to the last version without damage")


def _repair(run: OperationContext[Any], plan: RepairPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    if not report.is_complete:
        run.log.warning("errors are left, which repair cannot mend: the table 'left' says what you can do")
    metadata = {**report_entries(report.to_dict()), **_repair_shown(report)}
    committed = "repair" if report.version > report.base_version else None
    run.report(str(report.table().title), metadata, committed=committed)


REPAIR: Planned[RepairOptions, RepairPlan] = Planned(
    name="repair",
    description="Verifies the lakehouse and repairs findings by new commits and the hint; deletes nothing.",
    options=RepairOptions,
    plan=_plan_repair,
    shown=_repair_shown,
    apply=_repair,
    is_pooled=False,
    changes_exports=True,
    left=_left,
    more=_to_last_good,
)


#: The operations of every lakehouse.
COMMON: tuple[Operation[Any], ...] = (
    ROLLBACK.operation(),
    EXPORT,
    RESTORE.operation(),
    EXPIRE.operation(),
    UNDELETE,
    PURGE.operation(),
    VERIFY,
    REPAIR.operation(),
)

#: The other operations, by the group that they are chosen with.
GROUPS: Mapping[str, tuple[Operation[Any], ...]] = {
    "clones": (
        CLONE,
        COMPARE_CLONE,
        PROMOTE.operation(),
        REFRESH_CLONE.operation(),
        DROP_CLONE.operation(),
        DROP_CLOSED_BRANCH,
        DROP_OVERDUE_CLONES,
    ),
    "tables": (COMPACT_TABLES.operation(), TRIM.operation(), HISTORY, RELOCATE.operation()),
    "admin": (
        ORPHANS.operation(),
        DROP_EXPORT.operation(),
        COMPACT.operation(),
        RECONCILE.operation(),
        REPAIR_HINT,
        LOG,
        DIFF,
    ),
}

#: The choice of all operations.
EVERYTHING = "all"

ALL: tuple[Operation[Any], ...] = (*COMMON, *(operation for group in GROUPS.values() for operation in group))

#: The same by their names, which jobs of Dagster have, and operators of Airflow take.
BY_NAME: Mapping[str, Operation[Any]] = {operation.job: operation for operation in ALL}


def chosen_operations(chosen: str | Sequence[str] = ()) -> tuple[Operation[Any], ...]:
    """Return the operations of every lakehouse, and those that are chosen.

    Args:
        chosen: Names of operations or of groups, or ``"all"``; one of them, or several.

    Raises:
        InvalidInputError: There is no operation and no group of a name.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    if unknown := sorted(names - {EVERYTHING, *GROUPS, *BY_NAME}):
        raise InvalidInputError(
            f"operations: there is no operation and no group {unknown[0]!r}; choose among {EVERYTHING},"
            f" {', '.join([*GROUPS, *BY_NAME])}"
        )
    groups = GROUPS if EVERYTHING in names else {name: GROUPS[name] for name in GROUPS if name in names}
    grouped = {operation.job for group in groups.values() for operation in group}
    return tuple(one for one in ALL if one in COMMON or one.job in names or one.job in grouped)
