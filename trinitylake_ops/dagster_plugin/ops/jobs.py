"""The operations as jobs, one named job each, for the launchpad and for schedules."""

from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.ops.clones.operations import CLONES
from trinitylake_ops.dagster_plugin.ops.compaction import COMPACT_TABLES
from trinitylake_ops.dagster_plugin.ops.exports import OPERATIONS
from trinitylake_ops.dagster_plugin.ops.looking.history import LOOKING
from trinitylake_ops.dagster_plugin.ops.operation import Operation, build_job
from trinitylake_ops.dagster_plugin.ops.purge import ORPHANS, PURGE, RECONCILE
from trinitylake_ops.dagster_plugin.ops.retention import EXPIRE, RELOCATE, TRIM, UNDELETE
from trinitylake_ops.dagster_plugin.ops.table_events import TableKey
from trinitylake_ops.dagster_plugin.ops.undoing.rollback import RESTORE, ROLLBACK
from trinitylake_ops.dagster_plugin.ops.undoing.upkeep import COMPACT, DROP_EXPORT, RECONCILE_PLANNED
from trinitylake_ops.dagster_plugin.ops.verify import REPAIR, REPAIR_AT_ONCE, VERIFY
from trinitylake_ops.dagster_plugin.resources import SparkResource

_ALL: tuple[Operation[Any], ...] = (
    *OPERATIONS,
    *CLONES,
    *ROLLBACK.operations(),
    *RESTORE.operations(),
    *DROP_EXPORT.operations(),
    *COMPACT.operations(),
    *RECONCILE_PLANNED.operations(),
    *LOOKING,
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


def build_jobs(
    names: LakehouseNames = ONLY, spark: SparkResource | None = None, *, table_key: TableKey | None = None
) -> list[dg.JobDefinition]:
    """Return the operations on a lakehouse as jobs, each of one op.

    ``spark`` gives the sessions of the jobs that use Spark. By default they are of this machine. A job that changes
    tables reports the assets that hold them, or those that ``table_key(namespace, table)`` names.
    """
    return [build_job(operation, names, spark, table_key) for operation in _ALL]
