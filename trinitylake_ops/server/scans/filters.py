"""How much work a filter is, and a weaker filter for scans that would take too much of it.

pyiceberg evaluates a filter for each file: for its partition, its metrics, and what is left of it. A weaker filter
selects more files and no fewer, so a plan stays correct if its files name the whole filter as what is left to evaluate.
"""

from __future__ import annotations

from typing import Any

from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    BoundIn,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
    NotIn,
    Or,
)
from pyiceberg.expressions.literals import AboveMax, BelowMin
from pyiceberg.expressions.visitors import rewrite_not
from pyiceberg.schema import Schema

from trinitylake_ops.server.answers import RefusedError

#: The units of the largest filter: 50,000 values, or 5,000 predicates and operators.
MOST_UNITS = 50_000
_NODE_UNITS = 10
#: The units that are evaluated for all files of a plan together.
MOST_STEPS = 2_000_000
#: A partition spec costs as much as so many files, as the filter is projected to its partitions.
_FILES_PER_SPEC = 10
#: Sets of more values are ranges in a weaker filter. pyiceberg compares no larger ones with the metrics of a file.
_MOST_VALUES = 200


def units_of(content: Any) -> int:
    """Return the units of a filter in JSON, before anything is parsed of it. Raise RefusedError, 413, if too many."""
    units, rest = 0, [content]
    while rest:
        value = rest.pop()
        units += _NODE_UNITS if isinstance(value, dict) else 1
        if isinstance(value, dict):
            rest += [member for member in value.values() if isinstance(member, dict | list)]
        elif isinstance(value, list):
            rest += value
        if units + len(rest) > MOST_UNITS:
            raise RefusedError(
                413,
                "BadRequestException",
                f"the filter has more than {MOST_UNITS} values or {MOST_UNITS // _NODE_UNITS} predicates and operators;"
                " plan with a shorter filter, or from the manifests",
            )
    return units


def is_too_much(units: int, n_files: int, n_specs: int) -> bool:
    """Return whether to evaluate a filter for so many files is too much work.

    Args:
        units: The units of the filter.
        n_files: The number of files.
        n_specs: The number of their partition specs.
    """
    return units * (n_files + n_specs * _FILES_PER_SPEC) > MOST_STEPS


def weakened(expression: BooleanExpression, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    """Return a filter that every row of the expression satisfies, with ranges instead of large sets of values.

    Args:
        expression: The filter, which fits the schema.
        schema: The schema of the table.
        case_sensitive: Whether the names of its columns are.
    """

    def weaker(part: BooleanExpression) -> BooleanExpression:
        if isinstance(part, And):
            return And(weaker(part.left), weaker(part.right))
        if isinstance(part, Or):
            return Or(weaker(part.left), weaker(part.right))
        if isinstance(part, NotIn) and len(part.literals) > _MOST_VALUES:
            return AlwaysTrue()
        if isinstance(part, In) and len(part.literals) > _MOST_VALUES:
            return _range(part, schema, case_sensitive=case_sensitive)
        return part

    return weaker(rewrite_not(expression))


def _range(part: In, schema: Schema, *, case_sensitive: bool) -> BooleanExpression:
    bound = part.bind(schema, case_sensitive)  # values are in the order of the column's type, not of JSON
    if not isinstance(bound, BoundIn):
        return part
    literals = bound.literals
    if any(isinstance(one, AboveMax | BelowMin) or one.value != one.value for one in literals):  # or no number at all
        return AlwaysTrue()
    return And(
        GreaterThanOrEqual(term=part.term, value=min(literals)), LessThanOrEqual(term=part.term, value=max(literals))
    )


def n_units(expression: BooleanExpression) -> int:
    """Return the units of a filter that has only small sets."""
    if isinstance(expression, And | Or):
        return _NODE_UNITS + n_units(expression.left) + n_units(expression.right)
    return _NODE_UNITS
