"""Partitions of tables, as Spark names them: those that it may make, and those that it is told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import BucketTransform, TruncateTransform, VoidTransform

from trinitylake_ops.errors import InvalidInputError

IDENTITY = "identity"
_SPARK_NAMES = {"year": "years", "month": "months", "day": "days", "hour": "hours"}


def partition_columns(partitions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a new table's partitions. Raises InvalidInputError for what Spark could not write."""
    names = []
    for partition in partitions:
        path = [part for column in partition["columns"] for part in column["path"]]
        if partition["transform"] != IDENTITY or len(path) != 1:
            raise InvalidInputError(
                f"Spark writes tables whose partitions are columns themselves, not {partition['transform']} of"
                f" {'.'.join(path)!r}; make such a table by pyiceberg or through the server, and read it here"
            )
        names.append(str(path[0]))
    return names


def quoted(name: str) -> str:
    """Return a name as Spark's SQL quotes it."""
    return "`" + name.replace("`", "``") + "`"


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
        one: dict[str, Any] = {"column": ".".join(map(quoted, parts))}
        if isinstance(transform, BucketTransform):
            one |= {"transform": "bucket", "number": transform.num_buckets}
        elif isinstance(transform, TruncateTransform):
            one |= {"transform": "truncate", "number": transform.width}
        else:
            one["transform"] = _SPARK_NAMES.get(str(transform), str(transform))
        described.append(one)
    return described
