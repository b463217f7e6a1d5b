"""All operations, each once, and the groups in which a code location may choose them."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.declared.clones import (
    CLONE,
    COMPARE_CLONE,
    DROP_CLONE,
    DROP_CLOSED_BRANCH,
    PROMOTE,
    REFRESH_CLONE,
)
from trinitylake_ops.operations.declared.compaction import COMPACT_TABLES
from trinitylake_ops.operations.declared.exports import EXPORT, REPAIR_HINT
from trinitylake_ops.operations.declared.history import DIFF, HISTORY, LOG
from trinitylake_ops.operations.declared.overdue import DROP_OVERDUE_CLONES
from trinitylake_ops.operations.declared.purge import ORPHANS, PURGE
from trinitylake_ops.operations.declared.retention import EXPIRE, RELOCATE, TRIM, UNDELETE
from trinitylake_ops.operations.declared.rollback import RESTORE, ROLLBACK
from trinitylake_ops.operations.declared.upkeep import COMPACT, DROP_EXPORT, RECONCILE
from trinitylake_ops.operations.declared.verify import REPAIR, VERIFY
from trinitylake_ops.operations.operation import Operation

#: The operations of every lakehouse.
COMMON: tuple[Operation[Any], ...] = (
    ROLLBACK.operation(),
    EXPORT,
    RESTORE.operation(),
    EXPIRE.operation(),
    UNDELETE,
    PURGE.operation(),
    VERIFY,
    REPAIR.operation(),
)

#: The other operations, by the group that they are chosen with.
GROUPS: Mapping[str, tuple[Operation[Any], ...]] = {
    "clones": (
        CLONE,
        COMPARE_CLONE,
        PROMOTE.operation(),
        REFRESH_CLONE.operation(),
        DROP_CLONE.operation(),
        DROP_CLOSED_BRANCH,
        DROP_OVERDUE_CLONES,
    ),
    "tables": (COMPACT_TABLES.operation(), TRIM.operation(), HISTORY, RELOCATE.operation()),
    "admin": (
        ORPHANS.operation(),
        DROP_EXPORT.operation(),
        COMPACT.operation(),
        RECONCILE.operation(),
        REPAIR_HINT,
        LOG,
        DIFF,
    ),
}

#: The choice of all operations.
EVERYTHING = "all"

ALL: tuple[Operation[Any], ...] = (*COMMON, *(operation for group in GROUPS.values() for operation in group))

#: The same by their names, which jobs of Dagster have, and operators of Airflow take.
BY_NAME: Mapping[str, Operation[Any]] = {operation.job: operation for operation in ALL}


def chosen_operations(chosen: str | Sequence[str] = ()) -> tuple[Operation[Any], ...]:
    """Return the operations of every lakehouse, and those that are chosen.

    Args:
        chosen: Names of operations or of groups, or ``"all"``; one of them, or several.

    Raises:
        InvalidInputError: There is no operation and no group of a name.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    if unknown := sorted(names - {EVERYTHING, *GROUPS, *BY_NAME}):
        raise InvalidInputError(
            f"operations: there is no operation and no group {unknown[0]!r}; choose among {EVERYTHING},"
            f" {', '.join([*GROUPS, *BY_NAME])}"
        )
    groups = GROUPS if EVERYTHING in names else {name: GROUPS[name] for name in GROUPS if name in names}
    grouped = {operation.job for group in groups.values() for operation in group}
    return tuple(one for one in ALL if one in COMMON or one.job in names or one.job in grouped)
