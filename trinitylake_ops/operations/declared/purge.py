"""Operations that delete files: purge and orphans."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.maintenance import OrphanPlan, PurgePlan
from trinitylake_ops.operations.operation import Running
from trinitylake_ops.operations.options import InventoryText, age_field
from trinitylake_ops.operations.planned import BudgetOptions, LimitedOptions, Planned, end_deletion
from trinitylake_ops.operations.shown import listing


class PurgeOptions(BudgetOptions, LimitedOptions):
    """The age of the versions to purge."""

    grace_days: float | None = age_field("Only what expired")


class OrphansOptions(BudgetOptions, LimitedOptions):
    """The files that count as left behind."""

    older_than_days: float | None = age_field("Only files last written")
    inventory: InventoryText | None = Field(
        default=None,
        description="The manifest.json of an inventory of the storage (Amazon S3 Inventory) to read instead of listing"
        " the storage. Files that are newer than the inventory are left out. It may be of the root, of the table root,"
        " or of both. Null: list.",
    )


def _plan_purge(run: Running[PurgeOptions]) -> PurgePlan:
    return _purge_of(run, timedelta(days=run.options.grace_days or 0))


def _purge_of(run: Running[PurgeOptions], grace: timedelta) -> PurgePlan:
    return maintenance.plan_purge(
        run.lake, grace, budget=run.spending, progress=run.progress(), executor=run.executor()
    )


def _purge_shown(plan: PurgePlan) -> dict[str, Any]:
    rows = [
        (batch.versions, batch.state, "now" if batch.is_due else f"{batch.purgeable_at:%Y-%m-%d %H:%M:%S}")
        for batch in plan.batches
    ]
    return {
        "versions": plan.versions,
        "files": plan.files,
        "bytes": plan.bytes,
        "still_needed": plan.still_needed,
        "plan": listing(("versions", "state", "purge from (UTC)"), rows),
    }


def _purge(run: Running[Any], plan: PurgePlan, digest: str | None) -> None:
    end_deletion(run, "purge", plan.execute(digest, budget=run.spending, progress=run.progress()))


PURGE = Planned(
    name="purge",
    description="Deletes the files that only expired versions need. They cannot come back.",
    options=PurgeOptions,
    plan=_plan_purge,
    within=lambda run, limits: _purge_of(run, limits.min_age),
    does="deletes",
    shown=_purge_shown,
    apply=_purge,
)


def _plan_orphans(run: Running[OrphansOptions]) -> OrphanPlan:
    return _orphans_of(run, timedelta(days=run.options.older_than_days or 0))


def _orphans_of(run: Running[OrphansOptions], age: timedelta) -> OrphanPlan:
    return maintenance.plan_orphan_removal(
        run.lake,
        age,
        run.options.inventory,
        budget=run.spending,
        progress=run.progress(),
        executor=run.executor(),
    )


def _orphans_shown(plan: OrphanPlan) -> dict[str, Any]:
    return {
        "files": len(plan.paths),
        "bytes": plan.bytes,
        "unowned_files": plan.unowned_files,
        "unowned_bytes": plan.unowned_bytes,
        "files_by_kind": listing(("kind", "files"), plan.files.items()),
        "plan": listing(("path",), [(path,) for path in plan.paths]),
    }


def _remove_orphans(run: Running[Any], plan: OrphanPlan, digest: str | None) -> None:
    end_deletion(run, "orphans", plan.execute(digest, budget=run.spending, progress=run.progress()))


ORPHANS = Planned(
    name="orphans",
    description="Deletes the files that failed commits and aborted writes left behind.",
    options=OrphansOptions,
    plan=_plan_orphans,
    within=lambda run, limits: _orphans_of(run, limits.min_age),
    does="deletes",
    shown=_orphans_shown,
    apply=_remove_orphans,
)
