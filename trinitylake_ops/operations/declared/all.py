"""All operations, each once."""

from collections.abc import Mapping
from typing import Any

from trinitylake_ops.operations.declared.clones import CLONES
from trinitylake_ops.operations.declared.compaction import COMPACT_TABLES
from trinitylake_ops.operations.declared.exports import OPERATIONS
from trinitylake_ops.operations.declared.history import LOOKING
from trinitylake_ops.operations.declared.purge import ORPHANS, PURGE, RECONCILE
from trinitylake_ops.operations.declared.retention import EXPIRE, RELOCATE, TRIM, UNDELETE
from trinitylake_ops.operations.declared.rollback import RESTORE, ROLLBACK
from trinitylake_ops.operations.declared.upkeep import COMPACT, DROP_EXPORT, RECONCILE_PLANNED
from trinitylake_ops.operations.declared.verify import REPAIR, REPAIR_AT_ONCE, VERIFY
from trinitylake_ops.operations.operation import Operation

ALL: tuple[Operation[Any], ...] = (
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

#: The same by their names, which jobs of Dagster have, and operators of Airflow take.
BY_NAME: Mapping[str, Operation[Any]] = {operation.job: operation for operation in ALL}
