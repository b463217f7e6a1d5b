"""The operations as jobs, one named job each, for the launchpad and for schedules."""

import dagster as dg

from trinitylake_ops.dagster_plugin.ops import (
    run_compact,
    run_export,
    run_repair_hint,
    run_restore,
    run_rollback,
)
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.purge_ops import (
    run_orphans_apply,
    run_orphans_plan,
    run_purge_apply,
    run_purge_plan,
    run_reconcile,
)
from trinitylake_ops.dagster_plugin.retention_ops import (
    run_expire_apply,
    run_expire_plan,
    run_trim_apply,
    run_trim_plan,
    run_undelete,
)
from trinitylake_ops.dagster_plugin.verify_ops import run_repair_apply, run_repair_plan, run_verify

# A destructive or one-off operation is never repeated by the instance's retry settings.
_TAGS = {"dagster/max_retries": "0"}


def maintenance_definitions(*, lakehouse_deps: tuple[dg.AssetKey, ...] = ()) -> dg.Definitions:
    """Return the operations on the resource ``lakehouse``, and the asset that stands for it.

    ``lakehouse_deps`` are the assets that publish into it.
    """
    lakehouse = dg.AssetSpec(
        LAKEHOUSE_KEY,
        deps=lakehouse_deps,
        group_name="publish",
        description="The lakehouse: each materialization is one of its versions.",
        kinds={"trinitylake"},
    )
    jobs = [
        op_job("rollback", run_rollback),
        op_job("export", run_export),
        op_job("restore", run_restore),
        op_job("repair_hint", run_repair_hint),
        op_job("compact", run_compact),
        op_job("verify", run_verify),
        op_job("repair_plan", run_repair_plan),
        op_job("repair_apply", run_repair_apply),
        op_job("trim_plan", run_trim_plan),
        op_job("trim_apply", run_trim_apply),
        op_job("expire_plan", run_expire_plan),
        op_job("expire_apply", run_expire_apply),
        op_job("undelete", run_undelete),
        op_job("purge_plan", run_purge_plan),
        op_job("purge_apply", run_purge_apply),
        op_job("orphans_plan", run_orphans_plan),
        op_job("orphans_apply", run_orphans_apply),
        op_job("reconcile", run_reconcile),
    ]
    return dg.Definitions(assets=[lakehouse], jobs=jobs)


def op_job(name: str, op: dg.OpDefinition) -> dg.JobDefinition:
    """Return an operation as a job of its own."""
    graph = dg.GraphDefinition(name=name, node_defs=[op], description=op.description)
    return graph.to_job(name=name, description=op.description, tags=_TAGS)
