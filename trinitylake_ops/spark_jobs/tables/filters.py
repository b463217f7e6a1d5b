"""Filters that a caller gives to a read, in Iceberg's words. They select rows, and files that need not be read.

Spark's own ``where`` does not reach this code. Spark 4.3 can pass its filters to a source. But it keeps the source's
plan with the DataFrame, for other queries, and for other uses of it in one query. These may have other filters or none,
so rows are silently missing. So the filters of a DataFrame are those that it was made with.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from pyiceberg import types as iceberg
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    LiteralPredicate,
    Not,
    Or,
    Reference,
    SetPredicate,
)
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind, rewrite_not
from pyiceberg.schema import Schema
from pyparsing import ParseException

from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    pass


def parsed(row_filter: str | BooleanExpression | None) -> BooleanExpression:
    """Return a filter as an expression. None leaves all rows. Raises InvalidInputError where it cannot be read."""
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
    """Raise ValueError for a fraction that is compared with a column of integers, as pyiceberg would round it.

    Then ``id > 1.5`` would leave out 2.
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
