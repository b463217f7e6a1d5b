"""Operations on clones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.declarations.operation import Operation, OperationContext, report_entries
from trinitylake_ops.declarations.options import (
    BRANCH_PREFIX,
    LIMITS_APPROVE,
    MOST_DAYS,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    TableTexts,
    TargetText,
    VersionNumber,
)
from trinitylake_ops.declarations.planned import Planned, PlannedOptions, limits_of
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.operations import CloneInfo, CloneState, DropCloneReport, PromotionPlan, RefreshPlan
from trinitylake_ops.operations.clones.drop import DropClonePlan
from trinitylake_ops.operations.clones.merge import Conflict, count_of
from trinitylake_ops.operations.clones.records import overdue_clones
from trinitylake_ops.versions.snapshot import utc_of


class CloneOptions(Options):
    """The version to clone, its target, and how long the clone is kept."""

    name: NewExportText = Field(
        description="Name of the clone, without spaces and not digits only. The name of a clone that was cut off"
        " continues it.",
    )
    target: TargetText = Field(description="The root of the clone, which must not hold a lakehouse.")
    version: VersionNumber | None = Field(
        default=None, description="The version to clone, by its number. Null: the latest."
    )
    namespaces: NamespaceTexts = Field(default=[], description="Only these namespaces. Empty: all.")
    retain_days: float | None = Field(
        default=None,
        gt=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description="Days after which the clone is overdue, and may be dropped by a schedule. Null: never.",
    )


class CloneNameOptions(Options):
    """The name of a clone."""

    name: ExportText = Field(description="Name of the clone.")


class RefreshOptions(CloneNameOptions, PlannedOptions):
    """The clone, and the sides that are chosen for conflicts."""

    ours: list[str] = Field(
        default=[],
        description="Conflicts in which the side that gets the changes stays as it is: namespaces, or namespace.table.",
    )
    theirs: list[str] = Field(default=[], description="Conflicts in which it becomes what the other side has.")


class PromoteOptions(RefreshOptions):
    """The clone, how much of it, and the sides that are chosen for conflicts."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables. Empty, and no tables either: everything."
    )
    tables: TableTexts = Field(default=[], description="Only these tables, each as namespace.table.")


class DropCloneOptions(CloneNameOptions, PlannedOptions):
    """The clone to drop, and whether its own files are deleted."""

    delete_files: bool = Field(
        default=False, description="Whether the clone's own files are deleted as well. Stop all writers there first."
    )


def _clone(run: OperationContext[CloneOptions]) -> None:
    options = run.options
    plan = operations.plan_clone(
        run.lake,
        options.target,
        options.name,
        None if options.version is None else str(options.version),
        namespaces=options.namespaces,
        retain_for=None if options.retain_days is None else timedelta(days=options.retain_days),
    )
    report = plan.execute()
    message = f"clone {report.name} is version {report.version}, at {report.target}"
    run.report(message, report_entries(report.to_dict()), committed="clone")


def _compare(run: OperationContext[CloneNameOptions]) -> None:
    found = operations.compare(run.lake, run.options.name)
    shown = found.table()
    metadata = {
        **report_entries(found.to_dict()),
        **{f"changed_in_{side.value}": len(found.on(side)) for side in operations.ChangedOn},
        "objects": listing(shown.columns, shown.rows),
    }
    run.report(found.headline, metadata)


def _conflicts(conflicts: Sequence[Conflict]) -> dict[str, Any]:
    rows = [(conflict.name, conflict.reason) for conflict in conflicts]
    return {"conflicts": len(rows), "to_choose": listing(("object", "why"), rows)}


def _merge_shown(plan: PromotionPlan | RefreshPlan) -> dict[str, Any]:
    return {
        "clone_version": plan.clone_version,
        "shared_version": plan.shared_version,
        "objects": len(plan.changes),
        **_conflicts(plan.conflicts),
        "plan": listing(("change", "object", "why"), plan.rows()),
    }


def _undecided(plan: PromotionPlan | RefreshPlan) -> str:
    """Return that somebody has to choose, nothing without conflicts."""
    if not plan.conflicts:
        return ""
    return f"{count_of(plan.conflicts)}: choose for each, such as: {plan.how_to_choose('')}"


def _plan_promotion(run: OperationContext[PromoteOptions]) -> PromotionPlan:
    options = run.options
    return operations.plan_promotion(
        run.lake,
        options.name,
        options.namespaces,
        options.tables,
        ours=options.ours,
        theirs=options.theirs,
        executor=run.executor(),
    )


def _promotion_shown(plan: PromotionPlan) -> dict[str, Any]:
    return {"files": plan.files, "bytes": plan.bytes, **_merge_shown(plan)}


def _promote(run: OperationContext[Any], plan: PromotionPlan, digest: str | None) -> None:
    report = plan.execute(digest, progress=run.progress())
    committed = "promote" if report.version != report.base_version else None
    run.report(str(report.table().title), report_entries(report.to_dict()), committed=committed)


PROMOTE: Planned[PromoteOptions, PromotionPlan] = Planned(
    name="promote",
    description="Commits the changes of a clone to this lakehouse, as one version. The plan shows what conflicts.",
    options=PromoteOptions,
    plan=_plan_promotion,
    shown=_promotion_shown,
    apply=_promote,
    is_pooled=False,
    left=_undecided,
)


def _plan_refresh(run: OperationContext[RefreshOptions]) -> RefreshPlan:
    options = run.options
    return operations.plan_refresh(run.lake, options.name, ours=options.ours, theirs=options.theirs)


def _refresh(run: OperationContext[Any], plan: RefreshPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    # What is committed here is that the version is kept for the clone.
    committed = None if report.version == report.base_version else "refresh"
    run.report(str(report.table().title), report_entries(report.to_dict()), committed=committed)


REFRESH_CLONE: Planned[RefreshOptions, RefreshPlan] = Planned(
    name="refresh_clone",
    description="Commits what changed in this lakehouse to a clone, as one version there. The plan shows what"
    " conflicts.",
    options=RefreshOptions,
    plan=_plan_refresh,
    shown=_merge_shown,
    apply=_refresh,
    is_pooled=False,
    left=_undecided,
)


def _plan_drop(run: OperationContext[DropCloneOptions]) -> DropClonePlan:
    return operations.plan_drop_clone(run.lake, run.options.name, delete_files=run.options.delete_files)


def _drop_shown(plan: DropClonePlan) -> dict[str, Any]:
    return {
        "root": plan.root,
        "clone_version": plan.clone_version,
        "not_read": plan.reason or "",
        "files": plan.files,
        "bytes": plan.bytes,
        "files_of_others": plan.left,
    }


def _drop(run: OperationContext[Any], plan: DropClonePlan, digest: str | None) -> None:
    end_drop(run, plan.execute(digest, progress=run.progress()))


def end_drop(run: OperationContext[Any], report: DropCloneReport) -> None:
    """Report a dropped clone. Raises Failure for files that the storage refused to delete: the clone is kept then."""
    metadata = {
        **report_entries(report.to_dict()),
        "failures": listing(("path", "reason"), sorted(report.failures.items())),
    }
    if report.version is None:
        raise run.failure(
            f"{len(report.failures)} files of clone {report.name} were not deleted, so it is kept; drop it again once"
            " the reason is mended",
            metadata,
        )
    run.report(str(report.table().title), metadata, committed="drop-clone")


DROP_CLONE: Planned[DropCloneOptions, DropClonePlan] = Planned(
    name="drop_clone",
    description="Releases what is kept for a clone, and deletes the clone's own files if its options ask for that.",
    options=DropCloneOptions,
    plan=_plan_drop,
    shown=_drop_shown,
    apply=_drop,
)


def _drop_closed_branch(run: OperationContext[CloneNameOptions]) -> None:
    name = run.options.name
    if not name.startswith(BRANCH_PREFIX):
        raise InvalidInputError(
            f"clone {name!r} is not that of a branch, whose name begins with {BRANCH_PREFIX!r}; drop it by"
            f" {run.job('drop_clone')}"
        )
    end_drop(run, operations.plan_drop_clone(run.lake, name, delete_files=True).execute(progress=run.progress()))


CLONE = Operation(
    job="clone",
    description="Makes a separate lakehouse of a version, at another root; copies no file of a table.",
    options=CloneOptions,
    step=_clone,
)
COMPARE_CLONE = Operation(
    job="compare_clone",
    description="Shows what changed in a clone, here, or in both, since the version that both share; reads only.",
    options=CloneNameOptions,
    step=_compare,
)
DROP_CLOSED_BRANCH = Operation(
    job="drop_closed_branch",
    description="Drops the clone of a branch that was closed, with its files. Clones of other names are refused.",
    options=CloneNameOptions,
    step=_drop_closed_branch,
    is_pooled=True,
    approved_by="the end of a branch",
)


_CUT_OFF_AFTER = timedelta(days=1)


def clones_past_their_time(lake: Lakehouse) -> tuple[list[str], Mapping[str, Any]]:
    """Return what is wrong with clones, and metadata. Raises StorageError if the lakehouse cannot be read."""
    clones, now = operations.list_clones(lake), utc_of(lake.storage.now_ms())
    wrong = [message for clone in clones if (message := _wrong(clone, now))]
    rows = [
        (one.name, one.state.value, one.retain_until or "dropped", one.versions, one.own_bytes, one.root)
        for one in clones
    ]
    return wrong, {
        "clones": len(clones),
        "own_bytes": sum(one.own_bytes or 0 for one in clones),
        "list": listing(("clone", "state", "kept until", "versions", "own bytes", "root"), rows),
    }


def _wrong(clone: CloneInfo, now: datetime) -> str:
    if clone.retain_until is not None and clone.retain_until <= now:
        return f"the time of clone {clone.name!r} is past since {clone.retain_until:%Y-%m-%d %H:%M} (UTC)"
    if clone.state == CloneState.CUT_OFF and now - clone.created_at > _CUT_OFF_AFTER:
        return f"clone {clone.name!r} was begun more than a day ago and is not finished"
    if clone.state in (CloneState.GONE, CloneState.UNREADABLE):
        return f"clone {clone.name!r} is {clone.state.value}: {clone.reason}"
    return ""


def _drop_overdue(run: OperationContext[None]) -> None:
    """Drop all clones whose time is past, with their files, within limits together.

    A clone's own time replaces the least age of the limits.
    """
    limits = limits_of(run)
    plans, failures = _planned(run.lake)
    files, size_bytes = sum(plan.files for plan in plans), sum(plan.bytes for plan in plans)
    about: dict[str, Any] = {"limits": str(limits), "files": files, "bytes": size_bytes}
    if not limits.allow(files, size_bytes):
        raise run.failure(
            f"clones whose time is past have {files} files of {size_bytes} bytes, which is beyond what an unattended"
            f" run may do ({limits}); nothing was done: run {run.job('drop_clone')} for each of"
            f" {', '.join(plan.name for plan in plans)}, and approve the plans",
            about,
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
    about |= {"dropped": ", ".join(dropped), "kept": listing(("clone", "why"), failures.items())}
    run.report(f"{len(dropped)} clones dropped", about, committed="drop-clone" if dropped else None)
    if failures:
        name, why = next(iter(failures.items()))
        raise run.failure(f"{len(failures)} clones were not dropped, such as {name}: {why}", about)


DROP_OVERDUE_CLONES = Operation(
    job="drop_overdue_clones",
    description="Drops the clones whose time is past, with their files, without approval and within the limits that the"
    " code sets.",
    step=_drop_overdue,
    is_pooled=True,
    approved_by=LIMITS_APPROVE,
    needs_limits=True,
)


def _planned(lake: Lakehouse) -> tuple[list[DropClonePlan], dict[str, str]]:
    """Return the plan of each drop, and why there is none for others."""
    plans, failures = [], {}
    for name in overdue_clones(lake):
        try:
            plans.append(operations.plan_drop_clone(lake, name, delete_files=True))
        except TrinityLakeError as error:
            failures[name] = str(error)
    return plans, failures
