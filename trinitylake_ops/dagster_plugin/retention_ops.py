"""Letting versions go as Dagster ops: trim, expire, undelete."""

from typing import Any

import dagster as dg
from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.dagster_plugin.metadata import markdown_table, picture
from trinitylake_ops.dagster_plugin.ops import log_version, logged_progress, operating, report_metadata
from trinitylake_ops.dagster_plugin.plans import DELETES_POOL, RulesConfig, digest_field, show_plan
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.maintenance import ExpirationPlan, TrimPlan
from trinitylake_ops.maintenance.page import expiration_picture


class ExpireConfig(RulesConfig):
    """Which versions are kept."""


class ExpireApplyConfig(ExpireConfig):
    """The options of the plan, and its digest."""

    approved_digest: str = digest_field("expire_plan")


class TrimConfig(RulesConfig):
    """Which tables are trimmed, and the versions whose snapshots they keep."""

    tables: list[str] = Field(
        default=[], description="Only these tables, each as namespace.table; empty: all managed tables."
    )


class TrimApplyConfig(TrimConfig):
    """The options of the plan, and its digest."""

    approved_digest: str = digest_field("trim_plan")


class UndeleteConfig(dg.Config):
    """Which versions come back."""

    versions: str = Field(description="The expired versions to bring back, such as 3-90,95.")


@dg.op(description="Shows which versions would expire, and why; reads only.")
def run_expire_plan(context: dg.OpExecutionContext, config: ExpireConfig, lakehouse: TrinityLakeResource) -> None:
    """Plan an expiry."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_expiration(lake, config.policy(lake), progress=logged_progress(context))
        show_plan(
            context, plan, expire_shown(plan), apply_op="run_expire_apply", options=config, is_empty=plan.is_empty
        )


def expire_shown(plan: ExpirationPlan) -> dict[str, Any]:
    """Return what a plan of an expiry shows."""
    verdicts = sorted(plan.verdicts, key=lambda verdict: not verdict.expires)  # the others are cut off first
    rows = [(v.version, "expires" if v.expires else "kept", v.reason) for v in verdicts]
    return {
        "versions": plan.versions,
        "versions_expired": sum(verdict.expires for verdict in verdicts),
        "versions_kept": sum(not verdict.expires for verdict in verdicts),
        "exports_ended": ", ".join(plan.exports),
        "files": sum(plan.files.values()),
        "bytes": plan.bytes,
        "files_by_kind": markdown_table(("kind", "files"), plan.files.items()),
        "timeline": picture(expiration_picture(plan)),
        "plan": markdown_table(("version", "verdict", "why"), rows),
    }


@dg.op(
    pool=DELETES_POOL,
    description="Lets the versions of an approved plan expire. Undelete brings them back until their purge begins.",
)
def run_expire_apply(context: dg.OpExecutionContext, config: ExpireApplyConfig, lakehouse: TrinityLakeResource) -> None:
    """Carry out the plan of an expiry."""
    with operating(context, lakehouse) as lake:
        progress = logged_progress(context)
        plan = maintenance.plan_expiration(lake, config.policy(lake), progress=progress)
        report = plan.execute(config.approved_digest, progress=progress)
        context.log.info("%s", report.table().title)
        metadata = report_metadata(report.to_dict())
        if report.version is not None:
            log_version(context, lake, "expire", metadata)
        context.add_output_metadata(metadata)


@dg.op(description="Shows which snapshots of managed Iceberg tables no kept version needs; reads only.")
def run_trim_plan(context: dg.OpExecutionContext, config: TrimConfig, lakehouse: TrinityLakeResource) -> None:
    """Plan a trim."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_trim_tables(lake, config.policy(lake), tables=config.tables or None)
        warn_of_unreadable(context, plan)
        show_plan(context, plan, trim_shown(plan), apply_op="run_trim_apply", options=config, is_empty=not plan.tables)


def trim_shown(plan: TrimPlan) -> dict[str, Any]:
    """Return what a plan of a trim shows."""
    rows = [(f"{trim.namespace}.{trim.table}", len(trim.dropped), len(trim.kept)) for trim in plan.tables]
    return {
        "tables": len(plan.tables),
        "snapshots_dropped": plan.snapshots_dropped,
        "unreadable": ", ".join(plan.unreadable),
        "plan": markdown_table(("table", "snapshots dropped", "snapshots kept"), rows),
    }


def warn_of_unreadable(context: dg.OpExecutionContext, plan: TrimPlan) -> None:
    """Say in the log which tables are left as they are."""
    if plan.unreadable:
        names = ", ".join(plan.unreadable)
        context.log.warning("left as they are, since their metadata cannot be read: %s; verify says why", names)


@dg.op(
    pool=DELETES_POOL,
    description="Drops the snapshots of an approved plan from the latest version of tables; older ones keep them.",
)
def run_trim_apply(context: dg.OpExecutionContext, config: TrimApplyConfig, lakehouse: TrinityLakeResource) -> None:
    """Carry out the plan of a trim."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_trim_tables(lake, config.policy(lake), tables=config.tables or None)
        report = plan.execute(config.approved_digest)
        context.log.info("%s", report.table().title)
        warn_of_unreadable(context, plan)
        metadata = {
            **report_metadata(report.to_dict()),
            "tables": len(report.tables),
            "left": ", ".join(report.left),
            "unreadable": ", ".join(plan.unreadable),
        }
        if report.tables:
            log_version(context, lake, "trim", metadata)
        context.add_output_metadata(metadata)


@dg.op(description="Brings expired versions back, as long as their purge has not begun.")
def run_undelete(context: dg.OpExecutionContext, config: UndeleteConfig, lakehouse: TrinityLakeResource) -> None:
    """Undelete versions."""
    with operating(context, lakehouse) as lake:
        version = maintenance.undelete(lake, config.versions)
        context.log.info("version %s brings back %s", version, config.versions)
        log_version(context, lake, "undelete", {"versions": config.versions})
