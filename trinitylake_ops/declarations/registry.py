"""All operations, and the groups by which a code location selects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinitylake_ops.declarations.index import load_operation
from trinitylake_ops.declarations.operation import Operation
from trinitylake_ops.errors import InvalidInputError


def _loaded(*jobs: str) -> tuple[Operation[Any], ...]:
    return tuple(map(load_operation, jobs))


#: The operations that every code location has.
COMMON = _loaded("maintain", "rollback", "export", "restore", "expire", "undelete", "purge", "verify", "repair")

#: The other operations by group.
GROUPS: Mapping[str, tuple[Operation[Any], ...]] = {
    "clones": _loaded(
        "clone",
        "compare_clone",
        "promote",
        "refresh_clone",
        "drop_clone",
        "clones",
        "drop_closed_branch",
        "drop_overdue_clones",
    ),
    "tables": _loaded("compact_tables", "trim", "history", "relocate"),
    "admin": _loaded(
        *("orphans", "exports", "verify_export", "prune_exports", "drop_export"),
        *("create_namespace", "drop_namespace", "resolve_commit"),
        *("compact", "reconcile", "repair_hint", "space", "log", "diff"),
    ),
}

#: Selects all operations.
EVERYTHING = "all"

ALL: tuple[Operation[Any], ...] = (*COMMON, *(operation for group in GROUPS.values() for operation in group))

#: All operations by name.
BY_NAME: Mapping[str, Operation[Any]] = {operation.job: operation for operation in ALL}


def chosen_operations(chosen: str | Sequence[str] = ()) -> tuple[Operation[Any], ...]:
    """Return the common operations and the selected ones.

    Args:
        chosen: Names of operations or groups, or ``"all"``; one name or several.

    Raises:
        InvalidInputError: One of the names is neither an operation nor a group.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    if unknown := sorted(names - {EVERYTHING, *GROUPS, *BY_NAME}):
        raise InvalidInputError(
            f"operations: {unknown[0]!r} is neither an operation nor a group; choose from {EVERYTHING},"
            f" {', '.join([*GROUPS, *BY_NAME])}"
        )
    groups = GROUPS if EVERYTHING in names else {name: GROUPS[name] for name in GROUPS if name in names}
    grouped = {operation.job for group in groups.values() for operation in group}
    return tuple(
        operation for operation in ALL if operation in COMMON or operation.job in names or operation.job in grouped
    )
