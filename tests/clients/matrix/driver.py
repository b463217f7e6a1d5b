"""The protocol between the test matrix and the program of each engine, and code that these programs share.

A program reads one JSON command per line from standard input, ``{"do": ..., "table": ..., ...}``, and writes one JSON
response per line. Dates, timestamps and decimals are strings, structs are objects. Only the standard library is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

Row = Mapping[str, Any]
#: Names and types of columns. The types are the keys of :attr:`Dialect.types`.
Columns = Sequence[Sequence[str]]


def encode_value(value: Any) -> Any:
    """Encode a value that an engine returned for the protocol."""
    if isinstance(value, datetime):
        naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return naive.isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {name: encode_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_value(item) for item in value]
    return value


def decode_value(value: Any, type_: str) -> Any:
    """Decode a value of the protocol to a Python type, for engines that need Python types."""
    if value is None:
        return None
    match type_:
        case "date":
            return date.fromisoformat(value)
        case "timestamp":
            return datetime.fromisoformat(value)
        case "decimal":
            return Decimal(value)
    return value


def decode_rows(columns: Columns, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{name: decode_value(row[name], type_) for name, type_ in columns} for row in rows]


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Run commands until standard input ends. An error is returned as the response.

    Args:
        commands: Functions by the name of their command. Each takes the command's other fields as keyword arguments.
    """
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines write messages to standard output
    responses.write('{"ready": true}\n')
    responses.flush()
    for line in sys.stdin:
        command = json.loads(line)
        function = commands.get(command.pop("do"))
        if function is None:
            response = {"error": "NoCommand"}
        else:
            try:
                response = {"result": function(**command)}
            except BaseException as error:  # noqa: BLE001 - the test checks its class
                response = {"error": type(error).__name__, "message": str(error)[:2_000]}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


@dataclass(frozen=True)
class Dialect:
    """The SQL dialect of one engine: type names, and the syntax of nested values and changes."""

    types: Mapping[str, str]
    #: Return the SQL of a list from the SQL of its items, and of a struct from the SQL of its fields.
    list_of: Callable[[Sequence[str]], str]
    struct_of: Callable[[Mapping[str, str]], str]
    after_create: str = ""
    widen: str = "ALTER COLUMN {name} TYPE {type}"
    update: str = "UPDATE {table} SET {name} = {value} WHERE id = {id}"
    delete: str = "DELETE FROM {table} WHERE id = {id}"

    def literal(self, value: Any, type_: str) -> str:
        """Return a value as an SQL expression of the named type."""
        if value is None:
            text = "NULL"
        elif type_ == "list":
            text = self.list_of([self.literal(item, "string") for item in value])
        elif type_ == "struct":
            fields = {"city": self.literal(value["city"], "string"), "zip": self.literal(value["zip"], "int")}
            text = self.struct_of(fields)
        else:
            text = "'" + str(value).replace("'", "''") + "'"
        return f"CAST({text} AS {self.types[type_]})"


@dataclass(frozen=True)
class SqlEngine:
    """Commands of an engine that is controlled with SQL.

    Args:
        dialect: The SQL dialect of the engine.
        run: Runs a statement.
        fetch: Runs a query and returns each row as a dictionary by column name.
        path: Returns the full SQL name of a table for its namespace and name.
    """

    dialect: Dialect
    run: Callable[[str], object]
    fetch: Callable[[str], list[dict[str, Any]]]
    path: Callable[[str], str]

    def commands(self) -> dict[str, Callable[..., Any]]:
        names = ("create", "insert", "read", "add_column", "rename", "widen", "drop_column", "update", "delete")
        return {name: getattr(self, name) for name in names}

    def create(self, table: str, columns: Columns) -> None:
        column_list = ", ".join(f"{name} {self.dialect.types[type_]}" for name, type_ in columns)
        self.run(f"CREATE TABLE {self.path(table)} ({column_list}) {self.dialect.after_create}")

    def insert(self, table: str, columns: Columns, rows: Sequence[Row]) -> None:
        values = [
            "(" + ", ".join(self.dialect.literal(row[name], type_) for name, type_ in columns) + ")" for row in rows
        ]
        self.run(f"INSERT INTO {self.path(table)} VALUES {', '.join(values)}")

    def read(self, table: str) -> list[dict[str, Any]]:
        return [encode_value(row) for row in self.fetch(f"SELECT * FROM {self.path(table)}")]

    def add_column(self, table: str, name: str, type_: str) -> None:
        self.run(f"ALTER TABLE {self.path(table)} ADD COLUMN {name} {self.dialect.types[type_]}")

    def rename(self, table: str, name: str, to: str) -> None:
        self.run(f"ALTER TABLE {self.path(table)} RENAME COLUMN {name} TO {to}")

    def widen(self, table: str, name: str, type_: str) -> None:
        change = self.dialect.widen.format(name=name, type=self.dialect.types[type_])
        self.run(f"ALTER TABLE {self.path(table)} {change}")

    def drop_column(self, table: str, name: str) -> None:
        self.run(f"ALTER TABLE {self.path(table)} DROP COLUMN {name}")

    def update(self, table: str, row: Row, name: str, type_: str, **_: Any) -> None:
        value = self.dialect.literal(row[name], type_)
        self.run(self.dialect.update.format(table=self.path(table), name=name, value=value, id=row["id"]))

    def delete(self, table: str, id_: int) -> None:
        self.run(self.dialect.delete.format(table=self.path(table), id=id_))


#: The SQL dialect of Spark and Sail.
SPARK = Dialect(
    types={
        "long": "BIGINT",
        "int": "INT",
        "double": "DOUBLE",
        "string": "STRING",
        "date": "DATE",
        "timestamp": "TIMESTAMP_NTZ",
        "decimal": "DECIMAL(9, 2)",
        "list": "ARRAY<STRING>",
        "struct": "STRUCT<city: STRING, zip: INT>",
    },
    list_of=lambda items: f"array({', '.join(items)})",
    struct_of=lambda fields: f"named_struct({', '.join(f'{name!r}, {text}' for name, text in fields.items())})",
    after_create="USING iceberg",
)
