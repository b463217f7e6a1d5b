"""The operations as jobs, one named job each, for the launchpad and for schedules."""

from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.compaction_ops import COMPACT_TABLES
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.operation import Operation, build_job
from trinitylake_ops.dagster_plugin.ops import OPERATIONS
from trinitylake_ops.dagster_plugin.purge_ops import ORPHANS, PURGE, RECONCILE
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.dagster_plugin.retention_ops import EXPIRE, RELOCATE, TRIM, UNDELETE
from trinitylake_ops.dagster_plugin.verify_ops import REPAIR, REPAIR_AT_ONCE, VERIFY

_ALL: tuple[Operation[Any], ...] = (
    *OPERATIONS,
    VERIFY,
    REPAIR_AT_ONCE,
    *REPAIR.operations(),
    *COMPACT_TABLES,
    *RELOCATE.operations(),
    *TRIM.operations(),
    *EXPIRE.operations(),
    UNDELETE,
    *PURGE.operations(),
    *ORPHANS.operations(),
    RECONCILE,
)


def build_jobs(names: LakehouseNames = ONLY, spark: SparkResource | None = None) -> list[dg.JobDefinition]:
    """Return the operations on a lakehouse as jobs, each of one op.

    ``spark`` gives the sessions of those that use Spark, by default of this machine.
    """
    return [build_job(operation, names, spark) for operation in _ALL]
