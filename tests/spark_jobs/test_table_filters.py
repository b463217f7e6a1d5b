"""Spark's filters as Iceberg's, without Spark: what each becomes, and which are left to Spark alone."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg import types as iceberg
from pyiceberg.expressions import AlwaysFalse, AlwaysTrue, BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.schema import Schema
from pyspark.sql import datasource as spark

from trinitylake_ops.spark_jobs.table_data import iceberg_filter

TYPES: dict[str, iceberg.IcebergType] = {
    "number": iceberg.LongType(),
    "text": iceberg.StringType(),
    "share": iceberg.DoubleType(),
    "money": iceberg.DecimalType(10, 2),
    "day": iceberg.DateType(),
    "at": iceberg.TimestamptzType(),
    "wall": iceberg.TimestampType(),
    "flag": iceberg.BooleanType(),
    "code": iceberg.FixedType(2),
    "a.b": iceberg.LongType(),
    "place": iceberg.StructType(iceberg.NestedField(20, "x", iceberg.LongType())),
}
SCHEMA = Schema(*(iceberg.NestedField(at, name, kind) for at, (name, kind) in enumerate(TYPES.items(), 1)))
NOON = dt.datetime(2013, 1, 1, 12, tzinfo=dt.UTC)
NAN = float("nan")

TRANSLATED: list[tuple[spark.Filter, str]] = [
    (spark.EqualTo(("number",), 3), "number = 3"),
    (spark.EqualNullSafe(("number",), 3), "number = 3"),
    (spark.EqualNullSafe(("number",), None), "number is null"),
    (spark.GreaterThan(("number",), 3), "number > 3"),
    (spark.GreaterThanOrEqual(("number",), 3), "number >= 3"),
    (spark.LessThan(("number",), 3), "number < 3"),
    (spark.LessThanOrEqual(("number",), 3), "number <= 3"),
    (spark.In(("number",), (3, 4, None)), "number in (3, 4)"),
    (spark.IsNull(("text",)), "text is null"),
    (spark.IsNotNull(("text",)), "text is not null"),
    (spark.StringStartsWith(("text",), "it's"), "text like 'it''s%'"),
    (spark.Not(spark.EqualTo(("number",), 3)), "not number = 3"),
    (spark.Not(spark.In(("number",), (3, 4))), "not number in (3, 4)"),
    (spark.Not(spark.StringStartsWith(("text",), "a")), "not text like 'a%'"),
    (spark.EqualTo(("money",), Decimal("1.50")), "money = 1.50"),
    (spark.LessThan(("share",), 0.5), "share < 0.5"),
    (spark.EqualTo(("share",), 0.5), "share = 0.5"),
    (spark.EqualTo(("flag",), True), "flag = true"),
    (spark.EqualTo(("day",), dt.date(2013, 1, 1)), "day = '2013-01-01'"),
    (spark.EqualTo(("at",), NOON), "at = '2013-01-01T12:00:00+00:00'"),
    (spark.EqualTo(("wall",), NOON.replace(tzinfo=None)), "wall = '2013-01-01T12:00:00'"),
]  # fmt: skip

LEFT_TO_SPARK: list[spark.Filter] = [
    spark.GreaterThan(("share",), 0.5),
    spark.GreaterThanOrEqual(("share",), 0.5),
    spark.Not(spark.EqualTo(("share",), 0.5)),
    spark.EqualTo(("share",), NAN),
    spark.In(("share",), (1.0, NAN)),
    spark.Not(spark.In(("number",), (3, None))),
    spark.Not(spark.IsNull(("number",))),
    spark.StringEndsWith(("text",), "a"),
    spark.StringContains(("text",), "a"),
    spark.EqualTo(("place", "x"), 3),
    spark.EqualTo(("a.b",), 3),
    spark.EqualTo(("missing",), 3),
    spark.EqualTo(("money",), Decimal("1.505")),
    spark.EqualTo(("code",), b"longer"),
    spark.EqualTo(("number",), "three"),
]


def bound(expression: BooleanExpression) -> Any:
    from pyiceberg.expressions.visitors import bind, rewrite_not

    return bind(SCHEMA, rewrite_not(expression), case_sensitive=True)


@pytest.mark.parametrize(("one", "expected"), TRANSLATED, ids=[text for _, text in TRANSLATED])
def test_translated(one: spark.Filter, expected: str) -> None:
    assert bound(iceberg_filter([one], SCHEMA)) == bound(parse(expected))


@pytest.mark.parametrize("one", LEFT_TO_SPARK, ids=repr)
def test_left_to_spark(one: spark.Filter) -> None:
    assert iceberg_filter([one], SCHEMA) == AlwaysTrue()


def test_several_filters() -> None:
    several = iceberg_filter([spark.EqualTo(("number",), 3), spark.StringEndsWith(("text",), "a")], SCHEMA)
    assert bound(several) == bound(parse("number = 3"))
    both = iceberg_filter([spark.EqualTo(("number",), 3), spark.IsNull(("text",))], SCHEMA)
    assert bound(both) == bound(parse("number = 3 and text is null"))
    assert iceberg_filter([spark.In(("number",), (None,))], SCHEMA) == AlwaysFalse()
