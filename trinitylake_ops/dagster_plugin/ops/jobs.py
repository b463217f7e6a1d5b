"""The operations as jobs, one for each verb, for the launchpad and for schedules."""

from collections.abc import Sequence

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.ops.operation import build_job
from trinitylake_ops.dagster_plugin.ops.table_events import TableKey
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.operations.declared.all import chosen_operations
from trinitylake_ops.operations.limits import ApplyLimits

__all__ = ["ApplyLimits", "build_jobs"]


def build_jobs(
    names: LakehouseNames = ONLY,
    spark: SparkResource | None = None,
    *,
    operations: str | Sequence[str] = (),
    table_key: TableKey | None = None,
    limits: ApplyLimits | None = None,
) -> list[dg.JobDefinition]:
    """Return the operations on a lakehouse as jobs, each of one op.

    Args:
        names: The names of the lakehouse.
        spark: The sessions of the jobs that use Spark, by default those of this machine.
        operations: Operations to add to those of every lakehouse: names of operations, the groups ``"clones"``,
            ``"tables"`` and ``"admin"``, or ``"all"``.
        table_key: Names the asset to which changes of a table are reported, by default the assets that hold it.
        limits: The limits of runs without approval. Jobs that only run within limits are left out without them.

    Raises:
        InvalidInputError: There is no such operation or group.
    """
    return [
        build_job(operation, names, spark, table_key, limits)
        for operation in chosen_operations(operations)
        if limits is not None or not operation.needs_limits
    ]
