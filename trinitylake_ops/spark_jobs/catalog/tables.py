"""Tables of a lakehouse as Spark's SQL knows them: list, load at a time, create, change, drop and rename."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Summary
from pyiceberg.types import BooleanType, DateType, IntegerType, LongType, StringType, TimestamptzType
from pyspark.sql.types import StructType, _parse_datatype_json_value

from trinitylake_ops.errors import InvalidInputError, NamespaceNotFoundError, TableNotFoundError
from trinitylake_ops.spark_jobs.catalog.answers import Answer, RefusedError
from trinitylake_ops.spark_jobs.catalog.changes import change_table
from trinitylake_ops.spark_jobs.catalog.namespaces import OWNER, check_no_location, one_level
from trinitylake_ops.spark_jobs.catalog.partitions import IDENTITY, described_spec, partition_columns, quoted
from trinitylake_ops.spark_jobs.metadata.columns import METADATA_TABLES
from trinitylake_ops.spark_jobs.metadata.filter import comparable_columns
from trinitylake_ops.spark_jobs.source.opened_table import open_metadata, snapshot_of
from trinitylake_ops.spark_jobs.source.options import TableRequest
from trinitylake_ops.spark_jobs.tables.reader import found_table, name_option
from trinitylake_ops.spark_jobs.tables.schema import to_iceberg_schema, to_spark_schema
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.data_files import identity_columns
from trinitylake_ops.tables.writing.write_plan import identity_spec
from trinitylake_ops.transaction.lakehouse import Lakehouse

Request = Mapping[str, Any]

COMMENT = "comment"
_EXPORTS = "exports"
_PROVIDER = "provider"
#: Spark's writers name the default format of the session, ``parquet``, where the user names none.
_FORMATS = ("iceberg", "trinitylake", "parquet")
#: Properties that Spark keeps for itself, and that a lakehouse does not choose.
_OF_SPARK = ("external", "is_managed_location", "collation")
#: What the catalog in Spark is told about a table, where there is nothing to tell.
_EMPTY: Mapping[str, Any] = {
    "partitions": [],
    "properties": {},
    "read_options": {},
    "stream_options": {},
    "write_options": {},
    "comparable": [],
    "is_writable": False,
}
#: Columns whose values compare in Iceberg as in Spark. Fractions do not: NaN is more than all numbers in Spark.
_COMPARABLE = (BooleanType, DateType, IntegerType, LongType, StringType, TimestamptzType)
_FIGURE = re.compile("[0-9]{1,18}", re.ASCII)


def list_tables(lake: Lakehouse, request: Request) -> Answer:
    """Answer the tables of a namespace, or without one the metadata tables."""
    if not request["namespace"]:
        return Answer(list(METADATA_TABLES))
    names = catalog_at(lake).list_tables((one_level(request["namespace"]),))
    return Answer([name[-1] for name in names])


def load_table(lake: Lakehouse, request: Request) -> Answer:
    """Answer a table at the latest version, at a version, at the name of an export, or at a time."""
    path = request["table"]
    if len(path) == 1 and path[0] in METADATA_TABLES:
        return _metadata_table(lake, path[0], request)
    if len(path) != 2:
        raise RefusedError("no such table", ".".join(path))
    namespace, table = path
    asked = _at(name_option(namespace, table), request)
    snapshot = snapshot_of(lake, asked)
    try:
        found = found_table(lake, snapshot, namespace, table)
    except (NamespaceNotFoundError, TableNotFoundError) as error:
        if asked.time is None:
            raise RefusedError("no such table", str(error)) from error
        raise
    pinned = {"export": asked.export} if asked.export is not None else {"version": str(snapshot.version)}
    is_latest = asked.time is None
    return _described(found.metadata, name_option(namespace, table), pinned, is_writable=is_latest)


def _at(name: str, request: Request) -> TableRequest:
    time, value = request["time"], request["value"]
    if time == "timestamp":
        return TableRequest(table=name, timestamp=int(value))
    if time == "version" and not (value.isascii() and value.isdecimal() and len(value) <= len(str(2**32))):
        return TableRequest(table=name, export=value)
    return TableRequest(table=name, version=int(value) if time == "version" else None)


def _metadata_table(lake: Lakehouse, name: str, request: Request) -> Answer:
    asked = _at(name, request)
    if asked.export is None and name != _EXPORTS:
        asked = replace(asked, version=snapshot_of(lake, asked).version, timestamp=None)
    given = {"version": asked.version, "timestamp": asked.timestamp, "export": asked.export}
    path = {"path": name}
    value = {
        **_EMPTY,
        "comparable": comparable_columns(name),
        "read_options": path | {key: str(value) for key, value in given.items() if value is not None},
        "stream_options": path,
        # Spark takes equal descriptions for one state, and exports have no version to tell theirs.
        "state": str(uuid.uuid4()) if name == _EXPORTS else None,
    }
    return Answer(value, open_metadata(lake, asked).schema)


def _described(metadata: TableMetadata, name: str, pinned: Mapping[str, str], *, is_writable: bool) -> Answer:
    path = {"path": name}
    snapshot = metadata.current_snapshot()
    summary = snapshot.summary if snapshot is not None else None
    value = {
        **_EMPTY,
        "comparable": [field.name for field in metadata.schema().fields if isinstance(field.field_type, _COMPARABLE)],
        "partitions": described_spec(metadata),
        "properties": {**metadata.properties, _PROVIDER: _FORMATS[0]},
        "read_options": {**path, **pinned},
        "stream_options": path,
        "write_options": path,
        "is_writable": is_writable,
        "rows": _count(summary, "total-records"),
        "size_bytes": _count(summary, "total-files-size"),
    }
    return Answer(value, to_spark_schema(metadata.schema()))


def _count(summary: Summary | None, name: str) -> int | None:
    """Return a figure that a snapshot tells of itself. Spark plans joins by it, and nothing depends on its truth."""
    text = None if summary is None else summary[name]
    return int(text) if text is not None and _FIGURE.fullmatch(text) else None


def create_table(lake: Lakehouse, request: Request) -> Answer:
    """Create a managed table."""
    namespace, table = _names(request["table"])
    schema = to_iceberg_schema(_columns(request["columns"]))
    spec = identity_spec(schema, partition_columns(request["partitions"]))
    identity_columns(spec, schema)
    properties = _properties(request["properties"])
    created = catalog_at(lake).create_table((namespace, table), schema, partition_spec=spec, properties=properties)
    return _described(created.metadata, name_option(namespace, table), {}, is_writable=True)


def stage_table(lake: Lakehouse, request: Request) -> Answer:
    """Answer a table that a write of rows will make, in the commit of these rows."""
    namespace, table = _names(request["table"])
    catalog = catalog_at(lake)
    if not catalog.namespace_exists((namespace,)):
        raise RefusedError("no such namespace", namespace)
    if catalog.target.reader().has_table(namespace, table):
        raise RefusedError("table exists", f"{namespace}.{table}")
    if _properties(request["properties"]):
        raise InvalidInputError(
            "CREATE TABLE ... AS SELECT takes no COMMENT and no TBLPROPERTIES: create the table, then INSERT INTO it"
        )
    partition_by = partition_columns(request["partitions"])
    columns = _columns(request["columns"])
    schema = to_spark_schema(to_iceberg_schema(columns))
    path = {"path": name_option(namespace, table)}
    value = {
        **_EMPTY,
        "partitions": [{"transform": IDENTITY, "column": quoted(column)} for column in partition_by],
        "write_options": {**path, "create": "true", **_partition_option(partition_by)},
        "is_writable": True,
    }
    return Answer(value, schema)


def _partition_option(columns: Sequence[str]) -> dict[str, str]:
    if any("," in column or column != column.strip() for column in columns):
        raise InvalidInputError("CREATE TABLE ... AS SELECT has no partitions by columns with a comma in their names")
    return {"partition_by": ",".join(columns)} if columns else {}


def alter_table(lake: Lakehouse, request: Request) -> Answer:
    """Change a table's columns and properties, in one version."""
    namespace, table = _existing(request["table"])
    changed = change_table(catalog_at(lake).load_table((namespace, table)), request["changes"])
    return _described(changed.metadata, name_option(namespace, table), {}, is_writable=True)


def drop_table(lake: Lakehouse, request: Request) -> Answer:
    """Drop a table. Older versions still have it."""
    catalog_at(lake).drop_table(_existing(request["table"]))
    return Answer()


def rename_table(lake: Lakehouse, request: Request) -> Answer:
    """Rename a table, also into another namespace. A name without a namespace stays in the same one."""
    namespace, table = _existing(request["table"])
    to = request["to"]
    catalog_at(lake).move_table((namespace, table), _names([namespace, *to] if len(to) == 1 else to))
    return Answer()


def _names(path: Sequence[str]) -> tuple[str, str]:
    if len(path) != 2:
        raise InvalidInputError(f"a table is named NAMESPACE.TABLE, unlike {'.'.join(path)!r}")
    return str(path[0]), str(path[1])


def _existing(path: Sequence[str]) -> tuple[str, str]:
    if len(path) != 2:
        raise RefusedError("no such table", ".".join(path))
    return str(path[0]), str(path[1])


def _columns(columns: Sequence[Mapping[str, Any]]) -> StructType:
    schema = StructType()
    for column in columns:
        kind = _parse_datatype_json_value(column["type"])
        comment = {COMMENT: column["comment"]} if column["comment"] is not None else None
        schema = schema.add(column["name"], kind, column["nullable"], comment)
    return schema


def _properties(given: Mapping[str, str]) -> dict[str, str]:
    """Return what a table keeps of the properties of CREATE TABLE. Raises InvalidInputError."""
    check_no_location(given)
    if given.get(_PROVIDER, _FORMATS[0]).lower() not in _FORMATS:
        raise InvalidInputError(
            f"cannot create a table of the format {given[_PROVIDER]!r}: tables are in Apache Iceberg, with files in"
            " Parquet; leave out USING, or the format of the writer, or name 'iceberg'"
        )
    if wrong := next((key for key in given if key in _OF_SPARK or key.startswith("option.")), None):
        raise InvalidInputError(f"a table has no setting {wrong!r}; TBLPROPERTIES are Iceberg's")
    return {key: value for key, value in given.items() if key not in (OWNER, _PROVIDER)}
