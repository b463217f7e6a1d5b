"""Conflicts of promotions and refreshes: the changes of both sides, and the reasons that plans report.

Each function changes the side that receives the changes and the other side, and returns the conflicting object.
"""

from __future__ import annotations

import pyarrow as pa

from tests.operations.changes import ROWS, append_rows, drop, overwrite_rows
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at


def both_altered(lake: Lakehouse, clone: Lakehouse) -> str:
    append_rows(lake)
    overwrite_rows(clone, "ns.t")
    return "ns.t"


def dropped_and_altered(lake: Lakehouse, clone: Lakehouse) -> str:
    drop(lake, "ns", "t")
    append_rows(clone)
    return "ns.t"


def altered_and_dropped(lake: Lakehouse, clone: Lakehouse) -> str:
    append_rows(lake)
    drop(clone, "ns", "t")
    return "ns.t"


def both_created(lake: Lakehouse, clone: Lakehouse) -> str:
    append_rows(lake, "n1.made")
    append_rows(clone, "n1.made")
    return "n1.made"


def namespace_dropped_under_a_new_table(lake: Lakehouse, clone: Lakehouse) -> str:
    drop(lake, "n1")
    append_rows(clone, "n1.made")
    return "n1.made"


def namespace_dropped_with_a_new_table_in_it(lake: Lakehouse, clone: Lakehouse) -> str:
    append_rows(lake, "n1.made")
    drop(clone, "n1")
    return "n1"


def schema_changed_on_both(lake: Lakehouse, clone: Lakehouse) -> str:
    for side, name in ((lake, "here"), (clone, "there")):
        with catalog_at(side).load_table("ns.t").update_schema() as update:
            update.union_by_name(pa.schema([*ROWS.schema, pa.field(name, pa.int64())]))
    return "ns.t"


#: Each conflict, and its reason in a promotion of the clone "feature".
CONFLICTS = {
    both_altered: "the parent altered it, clone feature altered it (the clone changed it other than by appends)",
    dropped_and_altered: "the parent dropped it, clone feature altered it",
    altered_and_dropped: "the parent altered it, clone feature dropped it",
    both_created: "the parent created it, clone feature created it (these are two tables with the same name)",
    namespace_dropped_under_a_new_table: "the parent dropped its namespace, clone feature has it new or changed",
    namespace_dropped_with_a_new_table_in_it: (
        "clone feature dropped it, the parent has new or changed tables in it (made)"
    ),
    schema_changed_on_both: "the parent altered it, clone feature altered it (their columns differ)",
}
