"""Engines that read and write pyiceberg tables: pyiceberg itself, Polars and Daft.

Arguments: the engine's name, and the server's address.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from driver import Columns, Row, decode_rows, encode_value, serve
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyiceberg.types import LongType, StringType

TYPES = {
    "long": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "decimal": pa.decimal128(9, 2),
    "list": pa.list_(pa.string()),
    "struct": pa.struct([("city", pa.string()), ("zip", pa.int32())]),
}
ICEBERG_TYPES = {"long": LongType(), "string": StringType()}

engine, url = sys.argv[1:]
catalog = RestCatalog("lake", uri=url, warehouse="main")


def schema_of(columns: Columns) -> pa.Schema:
    return pa.schema([(name, TYPES[type_]) for name, type_ in columns])


def arrow(columns: Columns, rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(decode_rows(columns, rows), schema_of(columns))


def create(table: str, columns: Columns) -> None:
    catalog.create_table(table, schema_of(columns))


def add_column(table: str, name: str, type_: str) -> None:
    with catalog.load_table(table).update_schema() as update:
        update.add_column(name, ICEBERG_TYPES[type_])


def rename(table: str, name: str, to: str) -> None:
    with catalog.load_table(table).update_schema() as update:
        update.rename_column(name, to)


def widen(table: str, name: str, type_: str) -> None:
    with catalog.load_table(table).update_schema() as update:
        update.update_column(name, ICEBERG_TYPES[type_])


def drop_column(table: str, name: str) -> None:
    with catalog.load_table(table).update_schema() as update:
        update.delete_column(name)


def update(table: str, row: Row, columns: Columns, **_: Any) -> None:
    catalog.load_table(table).overwrite(arrow(columns, [row]), EqualTo("id", row["id"]))


def delete(table: str, id_: int) -> None:
    catalog.load_table(table).delete(EqualTo("id", id_))


def commands_of(
    append: Callable[[Table, pa.Table], object], rows_of: Callable[[Table], list[dict[str, Any]]]
) -> dict[str, Callable[..., Any]]:
    return {
        "insert": lambda table, columns, rows: append(catalog.load_table(table), arrow(columns, rows)) and None,
        "read": lambda table: [encode_value(row) for row in rows_of(catalog.load_table(table))],
    }


match engine:
    case "pyiceberg":
        commands = commands_of(Table.append, lambda table: table.scan().to_arrow().to_pylist())
        commands |= {
            "create": create,
            "add_column": add_column,
            "rename": rename,
            "widen": widen,
            "drop_column": drop_column,
            "update": update,
            "delete": delete,
        }
    case "polars":
        os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"
        import polars as pl

        commands = commands_of(
            lambda table, rows: pl.DataFrame(rows).write_iceberg(table, mode="append"),
            lambda table: pl.scan_iceberg(table, storage_options=table.io.properties).collect().to_dicts(),
        )
    case "daft":
        import daft

        commands = commands_of(
            lambda table, rows: daft.from_arrow(rows).write_iceberg(table, mode="append") and None,
            lambda table: daft.read_iceberg(table).to_arrow().to_pylist(),
        )

        def create_with_daft(table: str, columns: Columns) -> None:
            schema = daft.Schema.from_pyarrow_schema(schema_of(columns))
            daft.Catalog.from_iceberg(catalog).create_table(table, schema)

        commands["create"] = create_with_daft

serve(commands)
