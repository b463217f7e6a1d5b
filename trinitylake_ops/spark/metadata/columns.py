"""Columns of the metadata tables, and what to read for the conditions of a filter.

Conditions only reduce what is read: the whole filter is evaluated on the rows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pyiceberg import types as iceberg
from pyiceberg.expressions import (
    And,
    BooleanExpression,
    BoundEqualTo,
    BoundGreaterThan,
    BoundGreaterThanOrEqual,
    BoundIn,
    BoundIsNull,
    BoundLessThan,
    BoundLessThanOrEqual,
    BoundLiteralPredicate,
    BoundNotNull,
    BoundPredicate,
    BoundSetPredicate,
)
from pyiceberg.expressions.literals import Literal as IcebergLiteral
from pyiceberg.expressions.visitors import extract_field_ids
from pyiceberg.schema import Schema
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

from trinitylake_ops.errors import InvalidNameError
from trinitylake_ops.format.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, KeyCodec
from trinitylake_ops.spark.tables.schema import bound
from trinitylake_ops.tree.search import KeyRange

if TYPE_CHECKING:
    import pyarrow as pa

Row: TypeAlias = tuple[Any, ...]
Operator: TypeAlias = Literal["in", "<", "<=", ">", ">=", "is null", "is not null"]

_NUMBER, _TEXT = LongType(), StringType()
_TRANSACTIONS = ArrayType(StructType([StructField(name, _TEXT) for name in ("id", "operation", "message", "run_id")]))

#: Table -> column -> Spark type. New columns are added at the end. Columns are never renamed, retyped or dropped.
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
    """A condition that all requested rows satisfy."""

    #: The column.
    column: str
    #: The operator.
    operator: Operator
    #: The operands: one for comparisons, none for NULL tests.
    values: frozenset[object] = frozenset()


class MetadataTable(Protocol):
    """A metadata table at one point in time.

    It is planned in a helper process of the driver, pickled, and read in tasks.
    """

    def limited(self, conditions: Sequence[Condition]) -> MetadataTable:
        """Return the table without parts in which no row can satisfy all conditions."""
        ...

    def partitions(self) -> Sequence[object]:
        """Return the inputs of the tasks."""
        ...

    def rows(self, partition: Any) -> Iterator[Row]:
        """Yield the rows of a partition with all columns, in order."""
        ...


_MAX_TABLE_KEYS = 1_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values of a column that conditions allow."""

    #: The allowed values, or None for any.
    values: frozenset[object] | None = None
    #: Whether NULL is allowed.
    has_null: bool = True

    @classmethod
    def of(cls, conditions: Iterable[Condition], column: str) -> Wanted:
        """Return the values of a column that satisfy all conditions.

        Args:
            conditions: The conditions, which may also concern other columns.
            column: The column.
        """
        combined = cls()
        for condition in conditions:
            if condition.column == column:
                combined = combined._and(condition)
        return combined

    def _and(self, condition: Condition) -> Wanted:
        if condition.operator == "is null":
            return Wanted(frozenset(), self.has_null)
        if condition.operator == "in":
            return Wanted(condition.values if self.values is None else condition.values & self.values, False)
        return Wanted(self.values, False)

    def __contains__(self, value: object) -> bool:
        return self.has_null if value is None else self.values is None or value in self.values

    @property
    def has_values(self) -> bool:
        """Whether any value other than NULL is allowed."""
        return self.values is None or bool(self.values)


@dataclass(frozen=True, slots=True)
class WantedNames:
    """The objects that conditions on ``namespace`` and ``table`` allow. A namespace has NULL as its table."""

    namespaces: Wanted = field(default_factory=Wanted)
    tables: Wanted = field(default_factory=Wanted)

    @classmethod
    def of(cls, conditions: Sequence[Condition]) -> WantedNames:
        """Return the objects that satisfy conditions."""
        return cls(Wanted.of(conditions, "namespace"), Wanted.of(conditions, "table"))

    def has(self, namespace: str, table: str | None) -> bool:
        """Whether an object is allowed.

        Args:
            namespace: The namespace name.
            table: The name of the table, or None for the namespace itself.
        """
        return namespace in self.namespaces and table in self.tables

    def key_ranges(self, keys: KeyCodec) -> list[KeyRange]:
        """Return disjoint ranges that contain the keys of all allowed objects, in ascending order."""
        ranges: list[KeyRange] = []
        if self.namespaces.values is None:
            namespaces, tables = KeyRange.prefixed(NAMESPACE_KEY_PREFIX), KeyRange.prefixed(TABLE_KEY_PREFIX)
            if self.tables.has_null and self.tables.has_values:
                return [KeyRange(namespaces.lower, tables.upper)]  # there are no other keys in between
            return [namespaces] if self.tables.has_null else [tables] if self.tables.has_values else []
        for namespace in filter(None, map(str, self.namespaces.values)):
            ranges += self._of_namespace(namespace, keys)
        return sorted(ranges, key=lambda key_range: key_range.lower or "")

    def _of_namespace(self, namespace: str, keys: KeyCodec) -> list[KeyRange]:
        try:
            key, prefix = keys.namespace_key(namespace), keys.tables_prefix(namespace)
        except InvalidNameError:  # no object can have this name
            return []
        ranges = [KeyRange.only(key)] if self.tables.has_null else []
        tables = self.tables.values
        if tables is None or len(tables) > _MAX_TABLE_KEYS:
            return [*ranges, KeyRange.prefixed(prefix)]
        return [*ranges, *(key_range for table in tables for key_range in _of_table(namespace, str(table), keys))]


def _of_table(namespace: str, table: str, keys: KeyCodec) -> list[KeyRange]:
    try:
        return [KeyRange.only(keys.table_key(namespace, table))]
    except InvalidNameError:  # no table can have this name
        return []


def wanted_versions(conditions: Sequence[Condition], first: int, last: int) -> Sequence[int]:
    """Return the versions that conditions on ``version`` allow.

    Args:
        conditions: The conditions, which may also concern other columns.
        first: The first version, inclusive.
        last: The last version, inclusive.
    """
    for condition in conditions:
        if condition.column == "version" and condition.operator in (">", ">="):
            first = max(
                [first, *(value + (condition.operator == ">") for value in condition.values if isinstance(value, int))]
            )
        elif condition.column == "version" and condition.operator in ("<", "<="):
            last = min(
                [last, *(value - (condition.operator == "<") for value in condition.values if isinstance(value, int))]
            )
    values = Wanted.of(conditions, "version").values
    if values is None:
        return range(first, last + 1)
    return sorted(value for value in values if isinstance(value, int) and first <= value <= last)


_COMPARABLE: dict[type[DataType], iceberg.PrimitiveType] = {
    LongType: iceberg.LongType(),
    StringType: iceberg.StringType(),
    TimestampType: iceberg.TimestamptzType(),
}

_OPERATORS: dict[type[BooleanExpression], Operator] = {
    BoundEqualTo: "in",
    BoundIn: "in",
    BoundLessThan: "<",
    BoundLessThanOrEqual: "<=",
    BoundGreaterThan: ">",
    BoundGreaterThanOrEqual: ">=",
    BoundIsNull: "is null",
    BoundNotNull: "is not null",
}


def comparable_columns(table: str) -> list[str]:
    """Return the columns of a metadata table that filters may use."""
    return [name for name, kind in METADATA_TABLES[table].items() if type(kind) in _COMPARABLE]


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """A filter on the rows of a metadata table."""

    #: The expression, bound to ``schema``.
    expression: BooleanExpression
    #: The columns that filters may use.
    schema: Schema

    @classmethod
    def parse(cls, table: str, text: str) -> MetadataFilter:
        """Parse a filter of a metadata table. Raises InvalidInputError.

        Args:
            table: The name of the metadata table.
            text: The filter.
        """
        schema = Schema(
            *(
                iceberg.NestedField(number, name, _COMPARABLE[type(kind)])
                for number, (name, kind) in enumerate(METADATA_TABLES[table].items(), 1)
                if type(kind) in _COMPARABLE
            )
        )
        return cls(bound(text, schema), schema)

    @property
    def columns(self) -> list[str]:
        """The columns that the filter uses."""
        return sorted(self.schema.find_field(field_id).name for field_id in extract_field_ids(self.expression))

    def conditions(self) -> list[Condition]:
        """Return conditions that all matching rows satisfy. The filter may be stricter."""
        return _conditions(self.expression)

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that satisfy the filter. The batch must have the filter's columns."""
        from pyiceberg.io.pyarrow import expression_to_pyarrow

        return batch.filter(expression_to_pyarrow(self.expression, self.schema))


def _conditions(expression: BooleanExpression) -> list[Condition]:
    if isinstance(expression, And):
        return [*_conditions(expression.left), *_conditions(expression.right)]
    operator = _OPERATORS.get(type(expression))
    if operator is None or not isinstance(expression, BoundPredicate):
        return []
    literals: set[IcebergLiteral[Any]] = set()
    if isinstance(expression, BoundLiteralPredicate):
        literals = {expression.literal}
    elif isinstance(expression, BoundSetPredicate):
        literals = expression.literals
    values = frozenset(literal.value for literal in literals)
    return [Condition(expression.term.ref().field.name, operator, values)]
