"""Conversion of schemas between Spark and Iceberg, and of filters to Iceberg.

=====================  =========================================
Spark type             Iceberg type
=====================  =========================================
boolean, int, bigint   boolean, int, long
float, double          float, double
decimal(p, s)          decimal(p, s)
string                 string
binary                 binary; reading also fixed, uuid (16 bytes)
date, time             date, time
timestamp              timestamptz
timestamp_ntz          timestamp
struct, array, map     struct, list, map
=====================  =========================================

Nullability is kept, and a column's comment becomes the field's documentation.

Filters of Spark's own ``where`` are not pushed down to this code. Spark 4.3 can push filters into a data source, but it
caches the source's plan with the DataFrame, and reuses it for other queries and for other uses in the same query. These
may have other filters or none, so rows would be silently missing. A DataFrame therefore has only the filters that it
was created with.
"""

from __future__ import annotations

from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from itertools import count

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
from pyspark.sql import types as spark

from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError, UnsupportedTypeError

_COMMENT = "comment"
_BINARY_COLLATION = "UTF8_BINARY"
_MAX_TIME_PRECISION = 6

#: Spark 4.0 has no type for a time of day.
_TIMES: tuple[type[spark.TimeType], ...] = (spark.TimeType,) if hasattr(spark, "TimeType") else ()
_PRIMITIVES: tuple[tuple[type[spark.DataType], type[iceberg.IcebergType]], ...] = (
    (spark.BooleanType, iceberg.BooleanType),
    (spark.IntegerType, iceberg.IntegerType),
    (spark.LongType, iceberg.LongType),
    (spark.FloatType, iceberg.FloatType),
    (spark.DoubleType, iceberg.DoubleType),
    (spark.StringType, iceberg.StringType),
    (spark.BinaryType, iceberg.BinaryType),
    (spark.DateType, iceberg.DateType),
    *((time, iceberg.TimeType) for time in _TIMES),
    (spark.TimestampType, iceberg.TimestamptzType),
    (spark.TimestampNTZType, iceberg.TimestampType),
)
_TO_ICEBERG = dict(_PRIMITIVES)
_TO_SPARK = {theirs: ours for ours, theirs in _PRIMITIVES}

_REPLACEMENTS: tuple[tuple[type[spark.DataType], str], ...] = (
    (spark.ByteType, "cast it to int"),
    (spark.ShortType, "cast it to int"),
    (spark.CharType, "cast it to string"),
    (spark.VarcharType, "cast it to string"),
    (spark.StringType, "cast it to string without a collation"),
    *((time, f"cast it to time({_MAX_TIME_PRECISION})") for time in _TIMES),
    (spark.NullType, "cast it to the type that its values will have"),
    (spark.DayTimeIntervalType, "store a bigint of microseconds"),
    (spark.YearMonthIntervalType, "store an int of months"),
    (spark.CalendarIntervalType, "store its parts as int columns"),
    (spark.VariantType, "store it as a JSON string with to_json"),
)


def to_iceberg_schema(
    schema: spark.StructType, *, required: Collection[str] = (), primary_key: Collection[str] = ()
) -> Schema:
    """Convert a Spark schema to an Iceberg schema with preliminary field ids, starting at 1.

    Args:
        schema: The Spark schema.
        required: Columns to mark as required, regardless of the nullability that Spark inferred.
        primary_key: The identifier columns, which are also marked as required.

    Raises:
        UnsupportedTypeError: If Iceberg has no equivalent type. The message names the column and a workaround.
        InvalidDefinitionError: If a column occurs twice, or the key contains an unknown column.
    """
    names = schema.fieldNames()
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise InvalidDefinitionError(f"duplicate column {duplicate!r}; rename one of them")
    if missing := next((name for name in primary_key if name not in names), None):
        raise InvalidDefinitionError(f"primary key column {missing!r} does not exist in the rows")
    fields = _to_iceberg_fields(schema, "", count(1))
    never_null = {*required, *primary_key}
    columns = [field.model_copy(update={"required": field.required or field.name in never_null}) for field in fields]
    return Schema(*columns, identifier_field_ids=[field.field_id for field in columns if field.name in primary_key])


def to_spark_schema(schema: Schema) -> spark.StructType:
    """Convert an Iceberg schema to a Spark schema. Raises UnsupportedTypeError if Spark has no equivalent type."""
    return _to_spark_struct(schema.fields, "")


def _to_iceberg_fields(struct: spark.StructType, prefix: str, ids: count[int]) -> list[iceberg.NestedField]:
    return [
        iceberg.NestedField(
            field_id=next(ids),
            name=field.name,
            field_type=_to_iceberg_type(field.dataType, f"{prefix}{field.name}", ids),
            required=not field.nullable,
            doc=(field.metadata or {}).get(_COMMENT),
        )
        for field in struct
    ]


def _to_iceberg_type(kind: spark.DataType, path: str, ids: count[int]) -> iceberg.IcebergType:
    if isinstance(kind, spark.StructType):
        return iceberg.StructType(*_to_iceberg_fields(kind, f"{path}.", ids))
    if isinstance(kind, spark.ArrayType):
        element_id = next(ids)
        element = _to_iceberg_type(kind.elementType, f"{path}.element", ids)
        return iceberg.ListType(element_id, element, not kind.containsNull)
    if isinstance(kind, spark.MapType):
        key_id, value_id = next(ids), next(ids)
        key = _to_iceberg_type(kind.keyType, f"{path}.key", ids)
        value = _to_iceberg_type(kind.valueType, f"{path}.value", ids)
        return iceberg.MapType(key_id, key, value_id, value, not kind.valueContainsNull)
    if isinstance(kind, spark.DecimalType):
        return iceberg.DecimalType(kind.precision, kind.scale)
    primitive = _TO_ICEBERG.get(type(kind))
    if primitive is None or not _keeps_its_meaning(kind):
        raise UnsupportedTypeError(
            f"column {path!r} has type {kind.simpleString()}, which Iceberg does not support; {_advice(kind)}"
        )
    return primitive()


def _keeps_its_meaning(kind: spark.DataType) -> bool:
    if isinstance(kind, spark.StringType):
        return kind.collation == _BINARY_COLLATION
    return not isinstance(kind, _TIMES) or kind.precision <= _MAX_TIME_PRECISION


def _advice(kind: spark.DataType) -> str:
    return next((advice for refused, advice in _REPLACEMENTS if isinstance(kind, refused)), "cast it to another type")


def _to_spark_struct(fields: Collection[iceberg.NestedField], prefix: str) -> spark.StructType:
    return spark.StructType(
        [
            spark.StructField(
                field.name,
                _to_spark_type(field.field_type, f"{prefix}{field.name}"),
                not field.required,
                {_COMMENT: field.doc} if field.doc is not None else None,
            )
            for field in fields
        ]
    )


def _to_spark_type(kind: iceberg.IcebergType, path: str) -> spark.DataType:
    if isinstance(kind, iceberg.StructType):
        return _to_spark_struct(kind.fields, f"{path}.")
    if isinstance(kind, iceberg.ListType):
        return spark.ArrayType(_to_spark_type(kind.element_type, f"{path}.element"), not kind.element_required)
    if isinstance(kind, iceberg.MapType):
        key = _to_spark_type(kind.key_type, f"{path}.key")
        return spark.MapType(key, _to_spark_type(kind.value_type, f"{path}.value"), not kind.value_required)
    if isinstance(kind, iceberg.DecimalType):
        return spark.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, iceberg.FixedType | iceberg.UUIDType):
        return spark.BinaryType()
    primitive = _TO_SPARK.get(type(kind))
    if primitive is None:
        raise UnsupportedTypeError(
            f"column {path!r} has Iceberg type {kind}, which Spark does not support; select the other columns"
        )
    return primitive()


def parsed(row_filter: str | BooleanExpression | None) -> BooleanExpression:
    """Parse a filter. None means all rows. Raises InvalidInputError if it is invalid."""
    if row_filter is None:
        return AlwaysTrue()
    if isinstance(row_filter, BooleanExpression):
        return row_filter
    try:
        return parse(row_filter)
    except ParseException as error:
        raise InvalidInputError(f"invalid filter {row_filter!r}: syntax error at column {error.column}") from error
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"invalid filter {row_filter!r}: {error}") from error


def bound(row_filter: str | BooleanExpression | None, schema: Schema) -> BooleanExpression:
    """Parse a filter, bind it to the columns of a schema, and eliminate ``not``.

    Args:
        row_filter: The filter.
        schema: The schema.

    Raises:
        InvalidInputError: If the filter is invalid, or does not match the schema.
    """
    expression = parsed(row_filter)
    try:
        _check_whole_numbers(expression, schema)
        return bind(schema, rewrite_not(expression), case_sensitive=True)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"filter {row_filter!r} does not match the table: {error}") from error


def _check_whole_numbers(expression: BooleanExpression, schema: Schema) -> None:
    """Raise ValueError if a column of integers is compared with a fraction.

    pyiceberg would round the fraction, so that ``id > 1.5`` would exclude 2.
    """
    waiting = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, And | Or):
            waiting += [node.left, node.right]
        elif isinstance(node, Not):
            waiting.append(node.child)
        elif isinstance(node, LiteralPredicate | SetPredicate) and isinstance(node.term, Reference):
            literals = [node.literal] if isinstance(node, LiteralPredicate) else node.literals
            kind = schema.find_type(node.term.name)
            if isinstance(kind, iceberg.IntegerType | iceberg.LongType):
                fraction = next((literal.value for literal in literals if _is_fraction(literal.value)), None)
                if fraction is not None:
                    raise ValueError(f"column {node.term.name!r} contains integers, but {fraction} is not an integer")


def _is_fraction(value: object) -> bool:
    try:
        return Decimal(str(value)) % 1 != 0
    except InvalidOperation:  # not a number, or infinite
        return False
