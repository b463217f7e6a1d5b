"""ALTER TABLE: Spark's changes of columns and properties as one change of an Iceberg table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.table import Table
from pyiceberg.table.update.schema import UpdateSchema
from pyspark.sql.types import StructType, _parse_datatype_json_value

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.catalog.namespaces import LOCATION
from trinitylake_ops.spark_jobs.tables.schema import to_iceberg_schema

Change = Mapping[str, Any]

_FIXED = (LOCATION, "provider", "owner", "external")


def change_table(table: Table, changes: Sequence[Change]) -> Table:
    """Make changes in one commit and return the table.

    Raises InvalidInputError, and pyiceberg's ValidationError, ValueError and errors of commits.
    """
    properties = [change for change in changes if "property" in change]
    if fixed := next((change["property"] for change in properties if change["property"] in _FIXED), None):
        raise InvalidInputError(f"the property {fixed!r} of a table cannot be changed")
    columns = [change for change in changes if "path" in change]
    with table.transaction() as transaction:
        for change in properties:
            if "value" in change:
                transaction.set_properties({change["property"]: change["value"]})
            else:
                transaction.remove_properties(change["property"])
        if columns:
            with transaction.update_schema() as schema:
                for change in columns:
                    _change_column(schema, change)
    return table


def _change_column(schema: UpdateSchema, change: Change) -> None:
    path = tuple(change["path"])
    kind = change["change"]
    if kind == "AddColumn":
        _add(schema, path, change)
    elif kind == "RenameColumn":
        schema.rename_column(path, change["name"])
    elif kind == "DeleteColumn":
        schema.delete_column(path)
    elif kind == "UpdateColumnType":
        schema.update_column(path, field_type=_iceberg_type(path, change["type"]))
    elif kind == "UpdateColumnComment":
        schema.update_column(path, doc=change["comment"])
    elif kind == "UpdateColumnNullability":
        _set_nullable(schema, path, is_nullable=change["nullable"])
    elif kind == "UpdateColumnPosition":
        _move(schema, path, change)
    else:
        raise InvalidInputError(f"a column cannot be changed by {kind}")


def _add(schema: UpdateSchema, path: tuple[str, ...], change: Change) -> None:
    if not change["nullable"]:
        raise InvalidInputError(f"column {'.'.join(path)!r} is new, so rows lack it: it cannot be NOT NULL")
    schema.add_column(path, _iceberg_type(path, change["type"]), change["comment"])
    _move(schema, path, change)


def _set_nullable(schema: UpdateSchema, path: tuple[str, ...], *, is_nullable: bool) -> None:
    if not is_nullable:
        raise InvalidInputError(f"column {'.'.join(path)!r} may hold NULL already: it cannot become NOT NULL")
    schema.make_column_optional(path)


def _move(schema: UpdateSchema, path: tuple[str, ...], change: Change) -> None:
    if change.get("first"):
        schema.move_first(path)
    elif "after" in change:
        schema.move_after(path, (*path[:-1], change["after"]))


def _iceberg_type(path: tuple[str, ...], described: Any) -> Any:
    column = StructType().add(path[-1], _parse_datatype_json_value(described))
    return to_iceberg_schema(column).fields[0].field_type
