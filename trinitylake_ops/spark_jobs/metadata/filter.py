"""Filters of metadata tables: they tell which versions, namespaces and tables need not be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from pyiceberg.expressions.literals import Literal
from pyiceberg.expressions.visitors import extract_field_ids
from pyiceberg.schema import Schema
from pyspark.sql.types import DataType, LongType, StringType, TimestampType

from trinitylake_ops.spark_jobs.metadata.columns import METADATA_TABLES, Condition, Operator
from trinitylake_ops.spark_jobs.tables.filters import bound

if TYPE_CHECKING:
    import pyarrow as pa

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
    """Return the columns of a metadata table that a filter may use."""
    return [name for name, kind in METADATA_TABLES[table].items() if type(kind) in _COMPARABLE]


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """A filter on the rows of a metadata table. ``expression`` is bound to ``schema``, the columns that compare."""

    expression: BooleanExpression
    schema: Schema

    @classmethod
    def parse(cls, table: str, text: str) -> MetadataFilter:
        """Return a filter of a metadata table. Raises InvalidInputError."""
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
        """Return conditions that all rows fulfil. There may be more to the filter."""
        return _conditions(self.expression)

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that fulfil the filter. The batch has the filter's columns."""
        from pyiceberg.io.pyarrow import expression_to_pyarrow

        return batch.filter(expression_to_pyarrow(self.expression, self.schema))


def _conditions(expression: BooleanExpression) -> list[Condition]:
    if isinstance(expression, And):
        return [*_conditions(expression.left), *_conditions(expression.right)]
    operator = _OPERATORS.get(type(expression))
    if operator is None or not isinstance(expression, BoundPredicate):
        return []
    literals: set[Literal[Any]] = set()
    if isinstance(expression, BoundLiteralPredicate):
        literals = {expression.literal}
    elif isinstance(expression, BoundSetPredicate):
        literals = expression.literals
    values = frozenset(literal.value for literal in literals)
    return [Condition(expression.term.ref().field.name, operator, values)]
