"""Handlers for requests from the catalog's jar: tables in Spark's SQL, changes to tables, and partition transforms."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Summary
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.transforms import BucketTransform, TruncateTransform, VoidTransform
from pyiceberg.types import BooleanType, DateType, IntegerType, LongType, StringType, TimestamptzType
from pyspark.sql.types import StructType, _parse_datatype_json_value

from trinitylake_ops.errors import InvalidInputError, NamespaceNotFoundError, TableNotFoundError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.data_files import identity_columns
from trinitylake_ops.iceberg.write.plan import identity_spec
from trinitylake_ops.spark.catalog import namespaces
from trinitylake_ops.spark.catalog.namespaces import (
    LOCATION,
    OWNER,
    CatalogError,
    CatalogResponse,
    check_no_location,
    in_terms_of_the_catalog,
    one_level,
)
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES, comparable_columns
from trinitylake_ops.spark.source.opened_table import open_metadata, snapshot_of
from trinitylake_ops.spark.source.options import TABLE, SourceOptions, TableRequest
from trinitylake_ops.spark.tables.reader import name_option, open_iceberg_table
from trinitylake_ops.spark.tables.schema import to_iceberg_schema, to_spark_schema
from trinitylake_ops.transaction.lakehouse import Lakehouse

Change = Mapping[str, Any]

_FIXED = (LOCATION, "provider", "owner", "external")


def change_table(table: Table, changes: Sequence[Change]) -> Table:
    """Apply changes to a table in one commit.

    Args:
        table: The table.
        changes: Changes to properties and columns, as sent by the jar.

    Returns:
        The table after the commit.

    Raises:
        InvalidInputError: If a change is not supported. Errors of pyiceberg are passed on.
    """
    properties = [change for change in changes if "property" in change]
    if fixed := next((change["property"] for change in properties if change["property"] in _FIXED), None):
        raise InvalidInputError(f"table property {fixed!r} is read-only")
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
        raise InvalidInputError(f"column change {kind} is not supported")


def _add(schema: UpdateSchema, path: tuple[str, ...], change: Change) -> None:
    if not change["nullable"]:
        raise InvalidInputError(f"new column {'.'.join(path)!r} cannot be NOT NULL, because existing rows lack it")
    schema.add_column(path, _iceberg_type(path, change["type"]), change["comment"])
    _move(schema, path, change)


def _set_nullable(schema: UpdateSchema, path: tuple[str, ...], *, is_nullable: bool) -> None:
    if not is_nullable:
        raise InvalidInputError(f"column {'.'.join(path)!r} cannot become NOT NULL, because it may contain NULL")
    schema.make_column_optional(path)


def _move(schema: UpdateSchema, path: tuple[str, ...], change: Change) -> None:
    if change.get("first"):
        schema.move_first(path)
    elif "after" in change:
        schema.move_after(path, (*path[:-1], change["after"]))


def _iceberg_type(path: tuple[str, ...], described: Any) -> Any:
    column = StructType().add(path[-1], _parse_datatype_json_value(described))
    return to_iceberg_schema(column).fields[0].field_type


IDENTITY = "identity"
_SPARK_NAMES = {"year": "years", "month": "months", "day": "days", "hour": "hours"}


def partition_columns(partitions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the partition columns of a new table. Raises InvalidInputError for transforms that Spark cannot write."""
    names = []
    for partition in partitions:
        path = [part for column in partition["columns"] for part in column["path"]]
        if partition["transform"] != IDENTITY or len(path) != 1:
            raise InvalidInputError(
                f"cannot partition by {partition['transform']} of {'.'.join(path)!r}: Spark can only write identity"
                " partitions of top-level columns; create the table with pyiceberg or through the server"
            )
        names.append(str(path[0]))
    return names


def quoted(name: str) -> str:
    """Quote a name for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def describe_spec(metadata: TableMetadata) -> list[dict[str, Any]]:
    """Return a table's partition transforms for Spark."""
    schema = metadata.schema()
    described = []
    for field in metadata.spec().fields:
        column = schema.find_column_name(field.source_id)
        transform = field.transform
        if column is None or isinstance(transform, VoidTransform):
            continue
        parts = [column] if any(top_level.name == column for top_level in schema.fields) else column.split(".")
        partition: dict[str, Any] = {"column": ".".join(map(quoted, parts))}
        if isinstance(transform, BucketTransform):
            partition |= {"transform": "bucket", "number": transform.num_buckets}
        elif isinstance(transform, TruncateTransform):
            partition |= {"transform": "truncate", "number": transform.width}
        else:
            partition["transform"] = _SPARK_NAMES.get(str(transform), str(transform))
        described.append(partition)
    return described


Request = Mapping[str, Any]

COMMENT = "comment"
_EXPORTS = "exports"
_PROVIDER = "provider"
#: Table formats that CREATE TABLE accepts. Spark's writers pass the session's default, ``parquet``, if no format is
#: specified.
_FORMATS = ("iceberg", "trinitylake", "parquet")
#: Properties that Spark reserves for itself, and that have no meaning in a lakehouse.
_OF_SPARK = ("external", "is_managed_location", "collation")
#: The default members of a table's description for Spark.
_EMPTY: Mapping[str, Any] = {
    "partitions": [],
    "properties": {},
    "read_options": {},
    "stream_options": {},
    "write_options": {},
    "comparable": [],
    "is_writable": False,
}
#: Types that Iceberg and Spark compare equally. Fractional types differ: in Spark, NaN is larger than all numbers.
_COMPARABLE = (BooleanType, DateType, IntegerType, LongType, StringType, TimestamptzType)
_FIGURE = re.compile("[0-9]{1,18}", re.ASCII)


def list_tables(lake: Lakehouse, request: Request) -> CatalogResponse:
    """List the tables of a namespace, or the metadata tables if no namespace is given.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    if not request["namespace"]:
        return CatalogResponse(list(METADATA_TABLES))
    names = catalog_at(lake).list_tables((one_level(request["namespace"]),))
    return CatalogResponse([name[-1] for name in names])


def load_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Describe a table at the latest version, or at a version number, an export or a timestamp.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    path = request["table"]
    if len(path) == 1 and path[0] in METADATA_TABLES:
        return _metadata_table(lake, path[0], request)
    if len(path) != 2:
        raise CatalogError("no such table", ".".join(path))
    namespace, table = path
    selection = _at(name_option(namespace, table), request)
    snapshot = snapshot_of(lake, selection)
    try:
        table_at_version = open_iceberg_table(lake, snapshot, namespace, table)
    except (NamespaceNotFoundError, TableNotFoundError) as error:
        if selection.time is None:
            raise CatalogError("no such table", str(error)) from error
        raise
    pinned = {"export": selection.export} if selection.export is not None else {"version": str(snapshot.version)}
    is_latest = selection.time is None
    return _describe_table(table_at_version.metadata, name_option(namespace, table), pinned, is_writable=is_latest)


def _at(name: str, request: Request) -> TableRequest:
    time, value = request["time"], request["value"]
    if time == "timestamp":
        return TableRequest(table=name, timestamp=int(value))
    if time == "version" and not (value.isascii() and value.isdecimal() and len(value) <= len(str(2**32))):
        return TableRequest(table=name, export=value)
    return TableRequest(table=name, version=int(value) if time == "version" else None)


def _metadata_table(lake: Lakehouse, name: str, request: Request) -> CatalogResponse:
    asked = _at(name, request)
    if asked.export is None and name != _EXPORTS:
        asked = replace(asked, version=snapshot_of(lake, asked).version, timestamp=None)
    selection = {"version": asked.version, "timestamp": asked.timestamp, "export": asked.export}
    path = {"path": name}
    value = {
        **_EMPTY,
        "comparable": comparable_columns(name),
        "read_options": path | {key: str(value) for key, value in selection.items() if value is not None},
        "stream_options": path,
        # Spark treats equal descriptions as the same state. Exports have no version, so each gets a unique state.
        "state": str(uuid.uuid4()) if name == _EXPORTS else None,
    }
    return CatalogResponse(value, open_metadata(lake, asked).schema)


def _describe_table(
    metadata: TableMetadata, name: str, pinned: Mapping[str, str], *, is_writable: bool
) -> CatalogResponse:
    path = {"path": name}
    snapshot = metadata.current_snapshot()
    summary = snapshot.summary if snapshot is not None else None
    value = {
        **_EMPTY,
        "comparable": [field.name for field in metadata.schema().fields if isinstance(field.field_type, _COMPARABLE)],
        "partitions": describe_spec(metadata),
        "properties": {**metadata.properties, _PROVIDER: _FORMATS[0]},
        "read_options": {**path, **pinned},
        "stream_options": path,
        "write_options": path,
        "is_writable": is_writable,
        "rows": _count(summary, "total-records"),
        "size_bytes": _count(summary, "total-files-size"),
    }
    return CatalogResponse(value, to_spark_schema(metadata.schema()))


def _count(summary: Summary | None, name: str) -> int | None:
    """Return a count from a snapshot's summary. It is untrusted: Spark uses it for planning joins only."""
    text = None if summary is None else summary[name]
    return int(text) if text is not None and _FIGURE.fullmatch(text) else None


def create_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Create a managed table, and describe it.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    namespace, table = _names(request["table"])
    schema = to_iceberg_schema(_columns(request["columns"]))
    spec = identity_spec(schema, partition_columns(request["partitions"]))
    identity_columns(spec, schema)
    properties = _properties(request["properties"])
    created = catalog_at(lake).create_table((namespace, table), schema, partition_spec=spec, properties=properties)
    return _describe_table(created.metadata, name_option(namespace, table), {}, is_writable=True)


def stage_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Describe a table that is created later, in the commit of the rows that are written to it.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    namespace, table = _names(request["table"])
    catalog = catalog_at(lake)
    if not catalog.namespace_exists((namespace,)):
        raise CatalogError("no such namespace", namespace)
    if catalog.target.reader().has_table(namespace, table):
        raise CatalogError("table exists", f"{namespace}.{table}")
    if _properties(request["properties"]):
        raise InvalidInputError(
            "CREATE TABLE ... AS SELECT supports no COMMENT and TBLPROPERTIES; create the table, then INSERT INTO it"
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
    return CatalogResponse(value, schema)


def _partition_option(columns: Sequence[str]) -> dict[str, str]:
    if any("," in column or column != column.strip() for column in columns):
        raise InvalidInputError(
            "CREATE TABLE ... AS SELECT does not support partition columns with a comma in their names"
        )
    return {"partition_by": ",".join(columns)} if columns else {}


def alter_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Change a table's columns and properties in one version.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    namespace, table = _existing(request["table"])
    changed = change_table(catalog_at(lake).load_table((namespace, table)), request["changes"])
    return _describe_table(changed.metadata, name_option(namespace, table), {}, is_writable=True)


def drop_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Drop a table. Older versions still contain it.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    catalog_at(lake).drop_table(_existing(request["table"]))
    return CatalogResponse()


def rename_table(lake: Lakehouse, request: Request) -> CatalogResponse:
    """Rename a table, possibly into another namespace. If the target has no namespace, the namespace stays the same.

    Args:
        lake: The lakehouse.
        request: The request, decoded from JSON.
    """
    namespace, table = _existing(request["table"])
    to = request["to"]
    catalog_at(lake).move_table((namespace, table), _names([namespace, *to] if len(to) == 1 else to))
    return CatalogResponse()


def _names(path: Sequence[str]) -> tuple[str, str]:
    if len(path) != 2:
        raise InvalidInputError(f"invalid table name {'.'.join(path)!r}; use NAMESPACE.TABLE")
    return str(path[0]), str(path[1])


def _existing(path: Sequence[str]) -> tuple[str, str]:
    if len(path) != 2:
        raise CatalogError("no such table", ".".join(path))
    return str(path[0]), str(path[1])


def _columns(columns: Sequence[Mapping[str, Any]]) -> StructType:
    schema = StructType()
    for column in columns:
        kind = _parse_datatype_json_value(column["type"])
        comment = {COMMENT: column["comment"]} if column["comment"] is not None else None
        schema = schema.add(column["name"], kind, column["nullable"], comment)
    return schema


def _properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of CREATE TABLE that are stored. Raises InvalidInputError for unsupported ones."""
    check_no_location(properties)
    if properties.get(_PROVIDER, _FORMATS[0]).lower() not in _FORMATS:
        raise InvalidInputError(
            f"cannot create a table of format {properties[_PROVIDER]!r}: all tables are Apache Iceberg tables with"
            " Parquet files; omit USING or the writer's format, or use 'iceberg'"
        )
    if unsupported := next((key for key in properties if key in _OF_SPARK or key.startswith("option.")), None):
        raise InvalidInputError(f"table property {unsupported!r} is not supported; use Iceberg's table properties")
    return {key: value for key, value in properties.items() if key not in (OWNER, _PROVIDER)}


_RESPONSE_SOURCE: Mapping[str, Callable[[Lakehouse, Request], CatalogResponse]] = {
    "list_namespaces": namespaces.list_namespaces,
    "load_namespace": namespaces.load_namespace,
    "create_namespace": namespaces.create_namespace,
    "alter_namespace": namespaces.alter_namespace,
    "drop_namespace": namespaces.drop_namespace,
    "list_tables": list_tables,
    "load_table": load_table,
    "create_table": create_table,
    "stage_table": stage_table,
    "alter_table": alter_table,
    "drop_table": drop_table,
    "rename_table": rename_table,
}


def handle_request(request: Request, options: Mapping[str, str]) -> CatalogResponse:
    """Handle a request from the catalog's jar.

    Args:
        request: The request, decoded from JSON.
        options: The options of the catalog: ``root``, and ``storage.*``.

    Raises:
        CatalogError: For outcomes that the jar translates to Spark's own exceptions.
        InvalidInputError: If an option is unknown or invalid. Errors of the operation are passed on.
    """
    unknown = [name for name in options if name.lower() != "root" and not name.lower().startswith("storage.")]
    if unknown:
        raise InvalidInputError(
            f"unknown catalog setting {unknown[0]!r}; use 'root' and 'storage.*', and set read options on the query"
        )
    settings = SourceOptions.parse({**options, TABLE: "objects"})
    with in_terms_of_the_catalog():
        return _RESPONSE_SOURCE[request["request"]](Lakehouse.open(settings.root, settings.storage_options), request)
