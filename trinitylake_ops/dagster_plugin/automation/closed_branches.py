"""The sensor that drops the clones of branches that are closed. It runs in production."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import dagster as dg

from trinitylake_ops.dagster_plugin.branches.branch import branch_clone
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import lakehouse_of
from trinitylake_ops.operations.names import BRANCH_PREFIX
from trinitylake_ops.versions.lookup import clones_of

_DROP_JOB = "drop_closed_branch"


def build_closed_branch_sensor(
    open_branches: Callable[[], Collection[str]],
    names: LakehouseNames = ONLY,
    *,
    minimum_interval_seconds: int = 300,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that requests the drop of each branch's clone once ``open_branches`` no longer names the branch.

    ``open_branches()`` returns the names of all open branches, as their deployments know them. It must raise where it
    cannot tell: without an open branch all clones of branches go. Clones of other names are left alone. The code
    location must have the job ``drop_closed_branch`` (``operations="clones"``). Each clone is asked for once; a run
    that fails is seen in Dagster, and the clone's own time ends it.
    """

    @dg.sensor(
        name=names.of("closed_branches"),
        job_name=names.of(_DROP_JOB),
        required_resource_keys={names.resource_key},
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Drops the clones of branches that are closed.",
    )
    def closed_branches(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        lake = lakehouse_of(context.resources, names).open()
        definition = lake.snapshot().definition
        # Asked after the clones were listed: the branch of each of them was opened before.
        kept = {branch_clone(branch) for branch in open_branches()}
        clones = [record for record in clones_of(definition) if record.name.startswith(BRANCH_PREFIX)]
        closed = [record for record in clones if record.name not in kept]
        for record in closed:
            yield dg.RunRequest(run_key=record.clone_id, run_config={"name": record.name})
        if not closed:
            yield dg.SkipReason(f"{len(clones)} clones of branches, all of them open")

    return closed_branches
