"""The operation that runs all due operations by the policy of the lakehouse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trinitylake_ops import operations
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import Options
from trinitylake_ops.declarations.planned import APPLY_THIS_PLAN
from trinitylake_ops.declarations.rendering import Json, Link, listing
from trinitylake_ops.errors import JavaNotFoundError, MissingExtraError
from trinitylake_ops.operations.rendering import jsonable

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.write.rewrite import GroupWriter
    from trinitylake_ops.operations import MaintenanceReport

#: The approver that commits of maintenance record.
POLICY_APPROVES = "the maintenance policy"


class MaintainOptions(Options):
    """Whether to do anything."""

    dry_run: bool = Field(default=False, description="Only show the decisions; change nothing.")


def _execute(run: OperationContext[MaintainOptions]) -> MaintenanceReport:
    @contextmanager
    def writer() -> Iterator[GroupWriter]:
        with ExitStack() as scope:
            try:
                write = scope.enter_context(run.group_writer())
            except (MissingExtraError, JavaNotFoundError):  # a job without Spark compacts in its own process
                from trinitylake_ops.iceberg.write.rewrite import rewrite_in_process

                write = rewrite_in_process
            yield write

    return operations.maintain(
        run.lake, dry_run=run.options.dry_run, executor=run.executor, writer=writer, progress=run.progress()
    )


def _report(run: ReportingContext[MaintainOptions], report: MaintenanceReport) -> None:
    shown = report.table()
    links: dict[str, Link] = {}
    for decision in report.waiting:
        approval = decision.approval
        if approval is None:
            continue
        config = {**approval.options, "approval": {"digest": approval.digest, "approved_by": None}}
        link = run.link(approval.job, config, APPLY_THIS_PLAN)
        if link is not None:
            links[f"approve {decision.step.value} {decision.what}".rstrip()] = link
    waiting = [
        (run.job(decision.approval.job), decision.what, decision.why, decision.approval.digest)
        for decision in report.waiting
        if decision.approval is not None
    ]
    metadata: dict[str, Any] = {
        **links,
        **{name: value for name, value in report_entries(report.to_dict()).items() if value is not None},
        "decisions": listing(shown.columns, shown.rows),
        "waiting": listing(("job", "what", "why", "digest"), waiting),
        "details": Json(jsonable(report.decisions)),
    }
    committed = "maintain" if report.version > report.base_version and not report.is_dry_run else None
    run.report(report.headline, metadata, committed=committed)
    if report.failed:
        first = report.failed[0]
        raise run.failure(
            f"{len(report.failed)} decisions failed, the first: {first.step.value} {first.what}: {first.why}", {}
        )


MAINTAIN = direct(
    job="maintain",
    description="Runs all due operations by the policy of the lakehouse, and reports what waits for approval.",
    options=MaintainOptions,
    execute=_execute,
    report=_report,
    is_pooled=True,
    changes_exports=True,
    approved_by=POLICY_APPROVES,
    command=CommandSpec(
        uses_engine=True,
        working="reading the lakehouse",
        result=lambda _run, _plan, report: CommandResult(
            shown=report,
            is_complete=report.is_complete,
            notices=tuple(
                f"To approve {decision.step.value} {decision.what}: trinitylake {decision.approval.command}"
                for decision in report.waiting
                if decision.approval is not None
            ),
        ),
    ),
)
