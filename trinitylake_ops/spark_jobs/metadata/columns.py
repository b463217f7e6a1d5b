"""The metadata tables of the source: their columns, and the work of each table for the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

Row: TypeAlias = tuple[Any, ...]
Operator: TypeAlias = Literal["in", "<", "<=", ">", ">=", "is null", "is not null"]

_NUMBER, _TEXT = LongType(), StringType()
_TRANSACTIONS = ArrayType(StructType([StructField(name, _TEXT) for name in ("id", "operation", "message", "run_id")]))

#: Table -> column -> Spark's type. New columns may be added at the end. None is renamed, retyped or dropped.
METADATA_TABLES: Mapping[str, Mapping[str, DataType]] = {
    "versions": {
        "version": _NUMBER,
        "created_at": TimestampType(),
        "operation": _TEXT,
        "message": _TEXT,
        "commit_id": _TEXT,
        "run_id": _TEXT,
        "user": _TEXT,
        "host": _TEXT,
        "engine": _TEXT,
        "state": _TEXT,
        "rollback_from": _NUMBER,
        "counts": MapType(_TEXT, _NUMBER),
        "properties": MapType(_TEXT, _TEXT),
        "members": ArrayType(_TEXT),
        "transactions": _TRANSACTIONS,
        "requests": _NUMBER,
        "bytes_written": _NUMBER,
    },
    "objects": {
        "kind": _TEXT,
        "namespace": _TEXT,
        "table": _TEXT,
        "definition_location": _TEXT,
        "id": _TEXT,
        "type": _TEXT,
        "format": _TEXT,
        "metadata_location": _TEXT,
        "properties": MapType(_TEXT, _TEXT),
        "format_properties": MapType(_TEXT, _TEXT),
    },
    "files": {
        "path": _TEXT,
        "kind": _TEXT,
        "size_bytes": _NUMBER,
        "namespace": _TEXT,
        "table": _TEXT,
    },
    "changes": {
        "version": _NUMBER,
        "since_version": _NUMBER,
        "kind": _TEXT,
        "namespace": _TEXT,
        "table": _TEXT,
        "operation": _TEXT,
        "run_id": _TEXT,
        "committed_at": TimestampType(),
    },
    "exports": {
        "name": _TEXT,
        "version": _NUMBER,
        "level": _TEXT,
        "state": _TEXT,
        "location": _TEXT,
        "created_at": TimestampType(),
        "retain_until": TimestampType(),
        "manifest_path": _TEXT,
        "target": _TEXT,
        "namespaces": ArrayType(_TEXT),
    },
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a column in all wanted rows. ``values`` has one value for ``<`` and its like, none for NULL."""

    column: str
    operator: Operator
    values: frozenset[object] = frozenset()


class MetadataTable(Protocol):
    """A metadata table at one time. A helper of the driver plans it, tasks read it, and it is pickled in between."""

    def limited(self, conditions: Sequence[Condition]) -> MetadataTable:
        """Return the table without parts that are not needed for rows that fulfil all conditions."""
        ...

    def partitions(self) -> Sequence[object]:
        """Return the inputs of tasks, one each."""
        ...

    def rows(self, partition: Any) -> Iterator[Row]:
        """Yield the rows of a partition, with all columns in their order."""
        ...
