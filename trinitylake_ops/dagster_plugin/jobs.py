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
        _job("rollback", run_rollback),
        _job("export", run_export),
        _job("restore", run_restore),
        _job("repair_hint", run_repair_hint),
        _job("compact", run_compact),
        _job("verify", run_verify),
        _job("repair_plan", run_repair_plan),
        _job("repair_apply", run_repair_apply),
        _job("trim_plan", run_trim_plan),
        _job("trim_apply", run_trim_apply),
        _job("expire_plan", run_expire_plan),
        _job("expire_apply", run_expire_apply),
        _job("undelete", run_undelete),
        _job("purge_plan", run_purge_plan),
        _job("purge_apply", run_purge_apply),
        _job("orphans_plan", run_orphans_plan),
        _job("orphans_apply", run_orphans_apply),
        _job("reconcile", run_reconcile),
    ]
    return dg.Definitions(assets=[lakehouse], jobs=jobs)


def _job(name: str, op: dg.OpDefinition) -> dg.JobDefinition:
    graph = dg.GraphDefinition(name=name, node_defs=[op], description=op.description)
    return graph.to_job(name=name, description=op.description, tags=_TAGS)
