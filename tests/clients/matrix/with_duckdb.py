"""DuckDB with its Iceberg extension. Arguments: the server's address, and the files of the extensions to load."""

from __future__ import annotations

import sys
from typing import Any

import duckdb
from driver import Dialect, SqlEngine, serve

DUCKDB = Dialect(
    types={
        "long": "BIGINT",
        "int": "INTEGER",
        "double": "DOUBLE",
        "string": "VARCHAR",
        "date": "DATE",
        "timestamp": "TIMESTAMP",
        "decimal": "DECIMAL(9, 2)",
        "list": "VARCHAR[]",
        "struct": "STRUCT(city VARCHAR, zip INTEGER)",
    },
    list_of=lambda items: f"[{', '.join(items)}]",
    struct_of=lambda fields: "{" + ", ".join(f"'{name}': {text}" for name, text in fields.items()) + "}",
)

url, *extensions = sys.argv[1:]
connection = duckdb.connect(config={"allow_unsigned_extensions": "true"})
for extension in extensions:
    connection.execute(f"LOAD '{extension}'")
connection.execute(f"ATTACH 'main' AS lake (TYPE iceberg, ENDPOINT '{url}', AUTHORIZATION_TYPE 'none')")


def fetch(query: str) -> list[dict[str, Any]]:
    result = connection.execute(query)
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


serve(SqlEngine(DUCKDB, connection.execute, fetch, lambda table: f"lake.{table}").commands())
