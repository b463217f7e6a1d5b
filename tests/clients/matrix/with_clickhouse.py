"""ClickHouse in chdb. The argument is the server's address."""

from __future__ import annotations

import re
import sys
from typing import Any

import pyarrow as pa
from chdb import session
from driver import Dialect, SqlEngine, serve

CLICKHOUSE = Dialect(
    types={
        "long": "Nullable(Int64)",
        "int": "Nullable(Int32)",
        "double": "Nullable(Float64)",
        "string": "Nullable(String)",
        "date": "Nullable(Date32)",
        "timestamp": "Nullable(DateTime64(6))",
        "decimal": "Nullable(Decimal(9, 2))",
        "list": "Array(Nullable(String))",
        "struct": "Tuple(city Nullable(String), zip Nullable(Int32))",
    },
    list_of=lambda items: f"[{', '.join(items)}]",
    struct_of=lambda fields: f"tuple({', '.join(fields.values())})",
    widen="MODIFY COLUMN {name} {type}",
    update="ALTER TABLE {table} UPDATE {name} = {value} WHERE id = {id}",
    delete="ALTER TABLE {table} DELETE WHERE id = {id}",
)


def run_query(statement: str, output: str = "CSV") -> Any:
    """Run a statement. Errors are raised as a class with the name of ClickHouse's error code."""
    try:
        return engine.query(statement, output)
    except Exception as error:
        names = re.findall(r"\(([A-Z][A-Z_0-9]+)\)", str(error))
        if not names:
            raise
        raise type(names[-1], (RuntimeError,), {})(str(error)) from error


def fetch(query: str) -> list[dict[str, Any]]:
    return pa.ipc.open_file(run_query(query, "Arrow").bytes()).read_all().to_pylist()


engine = session.Session()
engine.query("SET allow_experimental_database_iceberg = 1, allow_insert_into_iceberg = 1, session_timezone = 'UTC'")
engine.query(
    f"CREATE DATABASE lake ENGINE = DataLakeCatalog('{sys.argv[1]}/v1')"
    " SETTINGS catalog_type = 'rest', warehouse = 'main'"
)
serve(SqlEngine(CLICKHOUSE, run_query, fetch, lambda table: f"lake.`{table}`").commands())
