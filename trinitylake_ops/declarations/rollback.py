"""Rollback and restore: plans, which show the restored and the lost changes, and their execution."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from trinitylake_ops import operations
from trinitylake_ops.declarations.exports import ExportNameOptions, PartOptions, named
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    Committed,
    OperationContext,
    ReportingContext,
    report_entries,
)
from trinitylake_ops.declarations.options import ARGUMENT, JOBS_ONLY, Options, TimeText, VersionSource
from trinitylake_ops.declarations.planned import NOTHING_TO_DO, PlanDeclaration, PlannedOptions, options_of_plan
from trinitylake_ops.declarations.rendering import Json, listing
from trinitylake_ops.declarations.texts import time_of
from trinitylake_ops.declarations.version_rows import ACTIONS
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.rendering import MAX_SAMPLES, jsonable
from trinitylake_ops.versions.table_names import resolve_table
from trinitylake_ops.versions.undone import find_undone

if TYPE_CHECKING:
    from trinitylake_ops.operations import CommitReport, RestorePlan, RollbackPlan, VersionDiff
    from trinitylake_ops.operations.diff.versions import ChangedObject

#: How many versions a plan searches for the last version whose checks passed, and for lost commits.
MAX_VERSIONS = 200
_MAX_SECONDS = 20.0
_MAX_PARTITIONED = 20  # tables whose manifests are read
_MAX_NAMED = 5  # partitions of one table
_MAX_DETAILED = 2_000  # objects


class RollbackTarget(VersionSource):
    """Options that select the version to roll back to."""

    timestamp: TimeText | None = Field(
        default=None,
        description="The newest version at a time: ISO 8601, in UTC unless it has an offset, or milliseconds since"
        " 1970.",
    )
    last_passed: Annotated[bool, JOBS_ONLY] | None = Field(
        default=None,
        description="True: the newest version before the latest whose asset checks passed and that no rollback undid."
        " Only Dagster knows it.",
    )

    @field_validator("last_passed")
    @classmethod
    def _check_true(cls, value: bool | None) -> bool | None:
        if value is False:
            raise InvalidInputError("last_passed must be true, or left out")
        return value


class SampleOptions(Options):
    """An option that selects whether a plan shows sample rows."""

    sample_rows: Annotated[int, JOBS_ONLY] = Field(
        default=0,
        ge=0,
        le=MAX_SAMPLES,
        description="For each table, show this number of differing rows in the plan, and the minima and maxima of text"
        " columns. The records of the run then contain these rows, which may be personal data.",
    )


class RollbackOptions(PartOptions, SampleOptions, PlannedOptions):
    """Options of rollback: the target version, and the namespaces and tables to roll back."""

    to: Annotated[RollbackTarget, ARGUMENT] = Field(description="The version to return to, selected by one of these.")
    reapply: bool = Field(default=False, description="Also roll back commits that happen after the plan was made.")


class RestoreOptions(ExportNameOptions, PartOptions, SampleOptions, PlannedOptions):
    """Options of restore: the export, and the namespaces and tables to restore from it."""


def _plan_rollback(run: OperationContext[RollbackOptions]) -> RollbackPlan:
    options, target = run.options, run.options.to
    to, timestamp = None, None
    if target.timestamp is not None:
        timestamp = time_of(target.timestamp)
    else:
        to = str(_last_passed(run) if target.last_passed else target)
    return operations.plan_rollback(
        run.lake, to, options.namespaces or None, options.tables or None, timestamp=timestamp
    )


def _last_passed(run: OperationContext[Any]) -> int:
    """Return the newest version before the latest whose checks passed. Raises InvalidInputError if there is none."""
    infos = list(run.lake.history(MAX_VERSIONS))
    undone, chosen = find_undone(run.lake.files, infos), _selected_objects(run)
    version = run.page.last_passed([info for info in infos[1:] if undone.by(info.version, chosen) is None])
    if version is None:
        raise InvalidInputError(
            f"no version to go back to: none of the last {len(infos)} versions before the latest, without those that a"
            " rollback undid, is known to have passed checks; pass the number of a version"
        )
    return version


def _selected_objects(run: OperationContext[Any]) -> list[ObjectName]:
    """Return the namespaces and tables that a rollback is limited to; empty for all."""
    options = run.options
    return [*map(ObjectName, options.namespaces), *(_table_name(run, table) for table in options.tables)]


def _table_name(run: OperationContext[Any], text: str) -> ObjectName:
    """Return the name of a table, which may be missing in the latest version if the text has exactly one dot."""
    if text.count(".") == 1:
        return ObjectName(*text.split("."))
    return ObjectName(*resolve_table(text, run.lake.snapshot()))


def _resolved_options(options: RollbackOptions, plan: RollbackPlan) -> dict[str, Any]:
    """Return the options of a plan with the resolved version instead of a time or of passed checks."""
    to = {"version": plan.to_version} if options.to.export is None else {"export": options.to.export}
    return {**options_of_plan(options), "to": to}


def _rollback_metadata(plan: RollbackPlan) -> dict[str, Any]:
    from trinitylake_ops.operations.diff.versions import count_changes

    operation = plan.operation
    diff = count_changes(operation.lake, operation.base, operation.target.snapshot, plan.changes)
    metadata = _diff_metadata(diff, _partitions(plan, diff))
    warning_metadata = {"warning": plan.warning.removeprefix("warning: ")} if plan.warning else {}
    return {
        **warning_metadata,
        "to_version": plan.to_version,
        **metadata,
        **_damaged(plan),
        "details": _details(plan, diff),
    }


def _row_differences(run: ReportingContext[Any], plan: RollbackPlan) -> dict[str, Any]:
    """Return the differences in the rows of changed tables, from the latest version to the target."""
    from trinitylake_ops.operations.diff.rows import RowCounter
    from trinitylake_ops.operations.diff.versions import MAX_COUNTED, TableStates

    operation, states = plan.operation, TableStates(plan.operation.lake)
    counter = RowCounter(states.io, run.options.sample_rows)
    tables: list[tuple[object, ...]] = []
    ranges: list[tuple[object, ...]] = []
    samples: dict[str, Any] = {}
    changed = [change for change in plan.changes if change.table is not None and change.kind == "changed"]
    for change in changed[:MAX_COUNTED]:
        table = change.table or ""
        name = f"{change.namespace}.{table}"
        ends = (states.of(version, change.namespace, table) for version in (operation.base, operation.target.snapshot))
        counts = counter.count(*ends)
        numbers = ("" if number is None else f"{number:,}" for number in (counts.removed, counts.added, counts.changed))
        tables.append((name, *numbers, counts.note or ("" if counts.changed is not None else "no primary key")))
        ranges += [(name, one.column, _range(one.before), _range(one.after)) for one in counts.ranges]
        if counts.samples:
            samples[f"rows of {name}"] = listing(("version", *counts.sample_columns), counts.samples)
    return {
        "rows": listing(("table", "rows removed", "rows restored", "rows changed", "note"), tables),
        **({"columns": listing(("table", "column", "rows now", "rows then"), ranges)} if ranges else {}),
        **samples,
    }


def _range(ends: tuple[str, str]) -> str:
    low, high = ends
    return low if low == high else f"{low} to {high}"


def _damaged(plan: RollbackPlan | RestorePlan) -> dict[str, Any]:
    """Return the damaged tables of a plan with the reasons, or nothing if there are none."""
    return {"damaged": listing(("table", "reason"), sorted(plan.damaged.items()))} if plan.damaged else {}


def _details(plan: RollbackPlan | RestorePlan, diff: VersionDiff) -> Json:
    """Return a plan as JSON to copy. It lists more objects than the tables do, but not all objects of a large plan."""
    content = {name: value for name, value in plan.to_dict().items() if name != "changes"}
    objects: Sequence[object] = diff.objects or plan.changes
    more = max(0, len(objects) - _MAX_DETAILED)
    return Json({**content, "objects": jsonable(list(objects[:_MAX_DETAILED])), "more_objects": more})


def _diff_metadata(diff: VersionDiff, partitions: Mapping[str, str]) -> dict[str, Any]:
    """Return the metrics of a diff, then one row for each object."""
    sums = diff.sums
    rows = [
        (
            one.kind,
            one.name if one.table is not None else f"namespace {one.name}",
            *(_now_and_then(one, what) for what in ("rows", "files", "bytes")),
            partitions.get(one.name, ""),
            "; ".join(one.delta.schema) if one.delta else "",
        )
        for one in diff.objects
    ]
    columns = ("change", "object", "rows now -> then", "files", "bytes", "partitions", "columns")
    return {
        "objects": len(diff.objects),
        "tables": len(diff.tables),
        "rows_coming_back": "unknown" if sums.rows_added is None else sums.rows_added,
        "rows_going_away": "unknown" if sums.rows_removed is None else sums.rows_removed,
        "plan": listing(columns, rows),
    }


def _now_and_then(one: ChangedObject, what: str) -> str:
    numbers = (None if state is None else getattr(state, what) for state in (one.before, one.after))
    texts = ["?" if number is None else f"{number:,}" for number in numbers]
    return "" if texts == ["?", "?"] else " -> ".join(texts)


def _partitions(plan: RollbackPlan, diff: VersionDiff) -> dict[str, str]:
    """Return the partitions of tables whose files differ. Reads the manifests of the first tables, but no data."""
    from trinitylake_ops.iceberg.reach import DAMAGE
    from trinitylake_ops.iceberg.totals import changed_partitions
    from trinitylake_ops.operations.diff.versions import TableStates

    operation = plan.operation
    states = TableStates(operation.lake)
    end_s = time.monotonic() + _MAX_SECONDS
    texts: dict[str, str] = {}
    for one in diff.tables[:_MAX_PARTITIONED]:
        if one.kind != "changed" or time.monotonic() > end_s:
            continue
        ends = [
            states.of(version, one.namespace, one.table or "")
            for version in (operation.base, operation.target.snapshot)
        ]
        before, after = (None if state is None else state.metadata for state in ends)
        try:
            names = sorted(text for text in changed_partitions(before, after, states.io).values() if text)
        except DAMAGE:
            texts[one.name] = "?"
            continue
        more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
        texts[one.name] = ", ".join(names[:_MAX_NAMED]) + more
    return texts


def _changed_after_target(run: ReportingContext[Any], plan: RollbackPlan) -> dict[str, Any]:
    """Return the commits after the target that changed an object to roll back."""
    base, selected = plan.operation.base, plan.only
    if plan.to_version >= base.version:
        return {}
    n_later = base.version - plan.to_version
    lake = plan.operation.lake  # the lakehouse of the base; tables of another lakehouse's versions are not counted
    infos = list(lake.history(min(n_later, MAX_VERSIONS), base))

    def is_affected(diff: VersionDiff | None) -> bool:
        objects = () if diff is None else diff.objects
        return diff is None or any(not selected or one.name in selected or one.namespace in selected for one in objects)

    rows = run.page.rows(lake, base, infos, max_seconds=_MAX_SECONDS, is_wanted=is_affected)
    older = n_later - len(infos)
    columns = [column for column in run.page.columns if column != ACTIONS]
    return {
        "commits_lost": len(rows),
        **({"older_commits_not_checked": older} if older > 0 else {}),
        "lost": listing(columns, [row[: len(columns)] for row in rows]),
    }


def _report_rollback(run: ReportingContext[Any], plan: RollbackPlan | None, report: CommitReport) -> None:
    assert plan is not None
    to = run.options.to.export or str(plan.to_version)
    if not report.has_changed:
        run.report(f"{plan.table().title}; {NOTHING_TO_DO}", {"rolled_back_to": to})
        return
    metadata = {
        "rolled_back_to": to,
        **_changes(plan),
        **report_entries(report.to_dict()),
    }
    if not report.is_complete:
        run.log.warning("these restored tables cannot be read: %s", named(report.damaged))
    run.report(f"version {report.version} has the content of {to}", metadata, committed="rollback")


def _rollback_result(_run: OperationContext[Any], plan: RollbackPlan, report: CommitReport) -> CommandResult:
    damaged = f"Damaged tables, which cannot be read: {', '.join(report.damaged)}"
    return CommandResult(
        shown=Committed(
            version=report.version,
            line=f"Rolled back to the content of version {plan.to_version}",
            has_changed=report.has_changed,
            details={"changes": plan.changes, "damaged": report.damaged},
        ),
        notices=() if report.is_complete else (damaged,),
    )


def _changes(plan: RollbackPlan | RestorePlan) -> dict[str, Any]:
    rows = [(change.kind, change.namespace, change.table or "") for change in plan.changes]
    return {"objects": len(rows), "changes": listing(("change", "namespace", "table"), rows)}


ROLLBACK: PlanDeclaration[RollbackOptions, RollbackPlan, CommitReport] = PlanDeclaration(
    name="rollback",
    description="Commits the content of an earlier version, then runs the checks of the changed tables. The plan shows"
    " what is regained, and which commits are lost.",
    options=RollbackOptions,
    plan=_plan_rollback,
    plan_metadata=_rollback_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, reapply=run.options.reapply),
    report=_report_rollback,
    approved_options=_resolved_options,
    extra_metadata=lambda run, plan: {**_row_differences(run, plan), **_changed_after_target(run, plan)},
    is_proved=True,
    command=CommandSpec(result=_rollback_result),
)


def _plan_restore(run: OperationContext[RestoreOptions]) -> RollbackPlan | RestorePlan:
    options = run.options
    return operations.plan_restore(
        run.lake,
        options.name,
        options.namespaces or None,
        options.tables or None,
        target_options=run.target_options,
    )


def _restore_metadata(plan: RollbackPlan | RestorePlan) -> dict[str, Any]:
    if isinstance(plan, operations.RollbackPlan):
        return _rollback_metadata(plan)
    rows: Sequence[tuple[object, ...]] = [(one.kind, one.namespace, one.table or "") for one in plan.changes]
    return {
        "files": plan.files,
        "bytes": plan.bytes,
        "objects": len(rows),
        "plan": listing(("change", "namespace", "table"), rows),
        **_damaged(plan),
        "details": _details(
            plan, operations.VersionDiff(before=plan.base_version, after=plan.export_version, objects=())
        ),
    }


def _execute_restore(run: OperationContext[Any], plan: RollbackPlan | RestorePlan, digest: str | None) -> CommitReport:
    if isinstance(plan, operations.RollbackPlan):
        return plan.execute(digest)
    return plan.execute(digest, progress=run.progress())


def _report_restore(run: ReportingContext[Any], plan: RollbackPlan | RestorePlan | None, report: CommitReport) -> None:
    assert plan is not None
    name = run.options.name
    if not report.has_changed and report.is_complete:
        run.report(f"{plan.table().title}; {NOTHING_TO_DO}", {"restored_from": name})
        return
    copied = {} if isinstance(plan, operations.RollbackPlan) else {"files": plan.files, "bytes": plan.bytes}
    metadata = {"restored_from": name, **copied, **_changes(plan), **report_entries(report.to_dict())}
    message = f"version {report.version} has the content of export {name}"
    is_partial = not report.is_complete and isinstance(plan, operations.RestorePlan)
    if is_partial:
        message += f", without damaged tables: {named(report.damaged)}"
    elif not report.is_complete:
        run.log.warning("these restored tables cannot be read: %s", named(report.damaged))
    committed = "restore" if report.has_changed else None
    run.report(message, metadata, committed=committed, logged={} if is_partial else None)
    if is_partial:
        raise run.failure(message, metadata)


def _restore_result(
    run: OperationContext[Any], plan: RollbackPlan | RestorePlan, report: CommitReport
) -> CommandResult:
    return CommandResult(
        shown=Committed(
            version=report.version,
            line=f"Restored export {run.options.name}",
            has_changed=report.has_changed,
            details={"changes": plan.changes, "damaged": report.damaged},
        ),
        is_complete=report.is_complete or isinstance(plan, operations.RollbackPlan),
        notices=() if report.is_complete else (f"Damaged tables: {', '.join(report.damaged)}",),
    )


RESTORE: PlanDeclaration[RestoreOptions, Any, CommitReport] = PlanDeclaration(
    name="restore",
    description="Commits the content of an export, then runs the checks of the changed tables.",
    options=RestoreOptions,
    plan=_plan_restore,
    plan_metadata=_restore_metadata,
    execute=_execute_restore,
    report=_report_restore,
    changes_exports=True,
    extra_metadata=lambda run, plan: (
        {**_row_differences(run, plan), **_changed_after_target(run, plan)}
        if isinstance(plan, operations.RollbackPlan)
        else {}
    ),
    is_proved=True,
    command=CommandSpec(has_target=True, result=_restore_result),
)
