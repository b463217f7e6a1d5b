"""The operations as jobs, one named job each, for the launchpad and for schedules."""

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.ops.operation import build_job
from trinitylake_ops.dagster_plugin.ops.table_events import TableKey
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.operations.declared.all import ALL
from trinitylake_ops.operations.declared.scheduled import ApplyLimits

__all__ = ["ApplyLimits", "build_jobs"]


def build_jobs(
    names: LakehouseNames = ONLY, spark: SparkResource | None = None, *, table_key: TableKey | None = None
) -> list[dg.JobDefinition]:
    """Return the operations on a lakehouse as jobs, each of one op.

    ``spark`` gives the sessions of the jobs that use Spark. By default they are of this machine. A job that changes
    tables reports the assets that hold them, or those that ``table_key(namespace, table)`` names.
    """
    return [build_job(operation, names, spark, table_key) for operation in ALL]
