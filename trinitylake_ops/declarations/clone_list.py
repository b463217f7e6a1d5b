"""Operations on all clones of a lakehouse: list them, and drop the overdue ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.declarations.operation import (
    CommandSpec,
    Operation,
    OperationContext,
    ReportingContext,
    direct,
)
from trinitylake_ops.declarations.options import LIMITS_APPROVE
from trinitylake_ops.declarations.planned import limits_of
from trinitylake_ops.declarations.rendering import Json, listing
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.rendering import Table, jsonable, new_table
from trinitylake_ops.operations.retention import span_text
from trinitylake_ops.versions.snapshot import utc_of

if TYPE_CHECKING:
    from trinitylake_ops.operations import CloneInfo
    from trinitylake_ops.operations.clones.drop import DropClonePlan


@dataclass(frozen=True)
class CloneList:
    """The clones of a lakehouse, and the current time according to its storage."""

    clones: Sequence[CloneInfo]
    now: datetime

    def to_dict(self) -> Any:
        """Return the clones."""
        return self.clones

    def table(self) -> Table:
        """Return one row for each clone."""
        rows = [
            (
                *(
                    clone.name,
                    clone.state,
                    clone.cloned_version,
                    clone.version if clone.version != clone.cloned_version else None,
                ),
                *(span_text(max(0, (self.now - clone.created_at) // timedelta(milliseconds=1))), clone.retain_until),
                *(clone.versions, clone.parent_versions, clone.own_bytes, clone.root),
            )
            for clone in self.clones
        ]
        columns = ("name", "state", "of version", "refreshed to", "age", "time until (UTC)", "ahead", "behind")
        return new_table("" if rows else "No clones", *columns, "own bytes", "root", rows=rows)


def _list(run: OperationContext[None]) -> CloneList:
    return CloneList(operations.list_clones(run.lake, run.target_options), utc_of(run.lake.storage.now_ms()))


def _report_clones(run: ReportingContext[None], report: CloneList) -> None:
    table = report.table()
    metadata = {"list": listing(table.columns, table.rows), "details": Json(jsonable(report.clones))}
    run.report(f"{len(report.clones)} clones", {"clones": len(report.clones), **metadata})


CLONES = direct(
    job="clones",
    description="Lists the clones: their age, how far they differ, and the bytes of their own files. Read-only.",
    execute=_list,
    report=_report_clones,
    command=CommandSpec(has_target=True),
)

_INTERRUPTED_AFTER = timedelta(days=1)


def find_clone_problems(lake: Lakehouse) -> tuple[list[str], Mapping[str, Any]]:
    """Return the problems with clones, and metadata about them. Raises StorageError if the lakehouse cannot be read."""
    clones, now = operations.list_clones(lake), utc_of(lake.storage.now_ms())
    problems = [message for clone in clones if (message := _problem(clone, now))]
    rows = [
        (clone.name, clone.state.value, clone.retain_until or "dropped", clone.versions, clone.own_bytes, clone.root)
        for clone in clones
    ]
    return problems, {
        "clones": len(clones),
        "own_bytes": sum(clone.own_bytes or 0 for clone in clones),
        "list": listing(("clone", "state", "kept until", "versions", "own bytes", "root"), rows),
    }


def _problem(clone: CloneInfo, now: datetime) -> str:
    if clone.retain_until is not None and clone.retain_until <= now:
        return f"clone {clone.name!r} is overdue since {clone.retain_until:%Y-%m-%d %H:%M} (UTC)"
    if clone.state == operations.CloneState.INCOMPLETE and now - clone.created_at > _INTERRUPTED_AFTER:
        return f"clone {clone.name!r} was started more than a day ago and is not finished"
    if clone.state in (operations.CloneState.MISSING, operations.CloneState.UNREADABLE):
        return f"clone {clone.name!r} is {clone.state.value}: {clone.reason}"
    return ""


def _drop_overdue(run: ReportingContext[None]) -> None:
    """Drop all overdue clones with their files, if their total is within the limits.

    The retention of each clone replaces the minimum age in the limits.
    """
    limits = limits_of(run)
    plans, failures = _drop_plans(run.lake)
    files, size_bytes = sum(plan.files for plan in plans), sum(plan.bytes for plan in plans)
    metadata: dict[str, Any] = {"limits": str(limits), "files": files, "bytes": size_bytes}
    if not limits.allow(files, size_bytes):
        raise run.failure(
            f"overdue clones have {files} files with {size_bytes} bytes, which exceeds the limits of an unattended run"
            f" ({limits}), so nothing was done; run {run.job('drop_clone')} for each of"
            f" {', '.join(plan.name for plan in plans)}, and approve the plans",
            metadata,
        )
    dropped = []
    for plan in plans:
        try:
            report = plan.execute(progress=run.progress())
        except TrinityLakeError as error:
            failures[plan.name] = str(error)
            continue
        if report.version is None:
            failures[plan.name] = f"{len(report.failures)} files were not deleted"
        else:
            dropped.append(plan.name)
    metadata |= {"dropped": ", ".join(dropped), "kept": listing(("clone", "why"), failures.items())}
    committed = "drop-clone" if dropped else None
    run.report(f"{len(dropped)} clones dropped", metadata, committed=committed, logged={} if failures else None)
    if failures:
        name, why = next(iter(failures.items()))
        raise run.failure(f"{len(failures)} clones were not dropped, for example {name}: {why}", metadata)


DROP_OVERDUE_CLONES = Operation(
    job="drop_overdue_clones",
    description="Drops overdue clones with their files, without approval and within the limits that the code sets.",
    step=_drop_overdue,
    is_pooled=True,
    approved_by=LIMITS_APPROVE,
    needs_limits=True,
)


def _drop_plans(lake: Lakehouse) -> tuple[list[DropClonePlan], dict[str, str]]:
    """Return the drop plans of clones, and the reasons why other clones cannot be dropped."""
    from trinitylake_ops.operations.clones.clone_records import overdue_clones

    plans, failures = [], {}
    for name in overdue_clones(lake):
        try:
            plans.append(operations.plan_drop_clone(lake, name, delete_files=True))
        except TrinityLakeError as error:
            failures[name] = str(error)
    return plans, failures
