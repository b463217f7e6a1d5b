"""Filters that a caller gives to a read, in Iceberg's words: which rows there are, and what need not be read for them.

Spark's own ``where`` does not come here. Spark 4.3 can hand its filters to a source, but keeps the plan that the source
then makes with the DataFrame, for other queries of it and for other uses of it in one query, with other filters or
none: rows go missing silently. So the filters of a DataFrame are those that it was made with.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from pyiceberg import types as iceberg
from pyiceberg.expressions import (
    AlwaysTrue,
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
    LiteralPredicate,
    Not,
    Or,
    Reference,
    SetPredicate,
)
from pyiceberg.expressions.literals import Literal
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind, extract_field_ids, rewrite_not
from pyiceberg.schema import Schema
from pyparsing import ParseException
from pyspark.sql.types import DataType, LongType, StringType, TimestampType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.metadata_tables import METADATA_TABLES, Condition, Operator

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


def parsed(row_filter: str | BooleanExpression | None) -> BooleanExpression:
    """Return a filter as an expression; None leaves all rows. Raises InvalidInputError where it cannot be read."""
    if row_filter is None:
        return AlwaysTrue()
    if isinstance(row_filter, BooleanExpression):
        return row_filter
    try:
        return parse(row_filter)
    except ParseException as error:
        raise InvalidInputError(f"the filter {row_filter!r} cannot be read at column {error.column}") from error
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the filter {row_filter!r} cannot be read: {error}") from error


def bound(row_filter: str | BooleanExpression | None, schema: Schema) -> BooleanExpression:
    """Return a filter without ``not``, on the columns of a schema.

    Raises InvalidInputError where it cannot be read or does not fit.
    """
    expression = parsed(row_filter)
    try:
        _check_whole_numbers(expression, schema)
        return bind(schema, rewrite_not(expression), case_sensitive=True)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the filter {row_filter!r} does not fit the table: {error}") from error


def _check_whole_numbers(expression: BooleanExpression, schema: Schema) -> None:
    """Raise ValueError for a fraction that a column of integers is compared with: pyiceberg would round it.

    ``id > 1.5`` would leave out 2 then.
    """
    waiting = [expression]
    while waiting:
        one = waiting.pop()
        if isinstance(one, And | Or):
            waiting += [one.left, one.right]
        elif isinstance(one, Not):
            waiting.append(one.child)
        elif isinstance(one, LiteralPredicate | SetPredicate) and isinstance(one.term, Reference):
            literals = [one.literal] if isinstance(one, LiteralPredicate) else one.literals
            kind = schema.find_type(one.term.name)
            if isinstance(kind, iceberg.IntegerType | iceberg.LongType):
                fraction = next((literal.value for literal in literals if _is_fraction(literal.value)), None)
                if fraction is not None:
                    raise ValueError(f"column {one.term.name!r} holds integers, and {fraction} is none")


def _is_fraction(value: object) -> bool:
    try:
        return Decimal(str(value)) % 1 != 0
    except InvalidOperation:  # no number, or one beyond all integers
        return False


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """A filter on the rows of a metadata table; ``expression`` is bound to ``schema``, the columns that compare."""

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
        """The columns that it looks at."""
        return sorted(self.schema.find_field(field_id).name for field_id in extract_field_ids(self.expression))

    def conditions(self) -> list[Condition]:
        """Return what all rows fulfil; there may be more to the filter."""
        return _conditions(self.expression)

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that it leaves of a batch that has its columns."""
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
