"""Names of tables and roots of lakehouses, as options give them."""

from __future__ import annotations

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.format.nodes.keys import validate_name
from trinitylake_ops.storage.schemes import check_root

#: A lakehouse allows less, or refuses with a message.
LONGEST_NAME_BYTES = 4096

#: How the name of each clone of a branch begins. No other clone should be called so.
BRANCH_PREFIX = "branch-"


def split_name(name: str) -> tuple[str, str]:
    """Return namespace and table of ``namespace.table``. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(f"{name!r} names no table; write NAMESPACE.TABLE")
    validate_name(namespace, LONGEST_NAME_BYTES, "namespace")
    validate_name(table, LONGEST_NAME_BYTES, "table")
    return namespace, table


def is_root_uri(given: str) -> bool:
    """Whether this can be the root of a lakehouse: one with credentials cannot."""
    try:
        root = normalize_root_uri(given)
        check_root(root)
    except InvalidLocationError:
        return False
    return True
