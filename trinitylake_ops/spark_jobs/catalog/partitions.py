"""Partitions of tables, between Spark's transforms and Iceberg's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)

from trinitylake_ops.errors import InvalidInputError

IDENTITY = "identity"
#: Spark's names, and the endings of Iceberg's names of such partition columns.
_OF_TIMES: Mapping[str, tuple[type[Transform[Any, Any]], str]] = {
    "years": (YearTransform, "year"),
    "months": (MonthTransform, "month"),
    "days": (DayTransform, "day"),
    "hours": (HourTransform, "hour"),
}
_SIZED: Mapping[str, tuple[type[BucketTransform[Any] | TruncateTransform[Any]], str]] = {
    "bucket": (BucketTransform, "bucket"),
    "truncate": (TruncateTransform, "trunc"),
}
_SPARK_NAMES = {"year": "years", "month": "months", "day": "days", "hour": "hours"}


def partition_spec(schema: Schema, partitions: Sequence[Mapping[str, Any]]) -> PartitionSpec:
    """Return the partitions of a new table. Raises InvalidInputError for a transform that Iceberg lacks."""
    fields = []
    for number, partition in enumerate(partitions):
        column = ".".join(_path(partition))
        transform, ending = _transform(partition)
        source = schema.find_field(column)
        if not transform.can_transform(source.field_type):
            raise InvalidInputError(f"column {column!r} of type {source.field_type} has no partitions by {transform}")
        name = column if ending is None else f"{column}_{ending}"
        fields.append(PartitionField(source.field_id, PARTITION_FIELD_ID_START + number, transform, name))
    return PartitionSpec(*fields)


def _path(partition: Mapping[str, Any]) -> list[str]:
    columns = partition["columns"]
    if len(columns) != 1:
        raise InvalidInputError(f"partitions by {partition['transform']} take one column each")
    return [str(part) for part in columns[0]["path"]]


def _transform(partition: Mapping[str, Any]) -> tuple[Transform[Any, Any], str | None]:
    name = partition["transform"]
    if name == IDENTITY:
        return IdentityTransform(), None
    if name in _OF_TIMES:
        made, ending = _OF_TIMES[name]
        return made(), ending
    number = partition.get("number")
    if name in _SIZED and isinstance(number, int) and 0 < number < 2**31:
        sized, ending = _SIZED[name]
        return sized(number), ending
    known = ", ".join((*_OF_TIMES, *(f"{sized}(N, column)" for sized in _SIZED)))
    raise InvalidInputError(f"there are no partitions by {name!r}; there are columns themselves, {known}")


def partition_columns(partitions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of partitions by values. Raises InvalidInputError for others."""
    names = []
    for partition in partitions:
        path = _path(partition)
        if partition["transform"] != IDENTITY or len(path) != 1 or "," in path[0]:
            raise InvalidInputError(
                "CREATE TABLE ... AS SELECT is partitioned by columns themselves: create the table, then INSERT INTO it"
            )
        names.append(path[0])
    return names


def described_spec(metadata: TableMetadata) -> list[dict[str, Any]]:
    """Return a table's partitions for Spark."""
    schema = metadata.schema()
    described = []
    for field in metadata.spec().fields:
        column = schema.find_column_name(field.source_id)
        transform = field.transform
        if column is None or isinstance(transform, VoidTransform):
            continue
        parts = [column] if any(own.name == column for own in schema.fields) else column.split(".")
        one: dict[str, Any] = {"column": ".".join("`" + part.replace("`", "``") + "`" for part in parts)}
        if isinstance(transform, BucketTransform):
            one |= {"transform": "bucket", "number": transform.num_buckets}
        elif isinstance(transform, TruncateTransform):
            one |= {"transform": "truncate", "number": transform.width}
        else:
            one["transform"] = _SPARK_NAMES.get(str(transform), str(transform))
        described.append(one)
    return described
