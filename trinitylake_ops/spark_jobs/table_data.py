"""Planning the data of a table for the source: which files a query reads, as Spark's filters leave them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    NotNull,
    StartsWith,
)
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, FloatType, IcebergType
from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.spark_jobs.table_reader import FoundTable, group_files
from trinitylake_ops.spark_jobs.table_tasks import ReadJob, Scan, TableScanReader

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What is read of a table: ``schema`` has the columns, and so many tasks at least share what is large enough."""

    found: FoundTable
    schema: Schema
    parallelism: int


class TableDataReader(DataSourceReader):
    """Plans the files of a query in a helper of the driver; to the tasks it goes as a TableScanReader."""

    def __init__(self, plan: DataPlan, schema: StructType):
        self._plan = plan
        self._schema = schema
        self._row_filter: BooleanExpression = AlwaysTrue()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._row_filter = iceberg_filter(filters, self._plan.found.metadata.schema())
        return filters  # Spark evaluates them again

    def partitions(self) -> Sequence[InputPartition]:
        groups = group_files(self._plan.found.tasks(self._row_filter), self._plan.parallelism)
        return [InputPartition(pickle.dumps(group)) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._for_tasks().read(partition)

    def __reduce__(self) -> tuple[type[TableScanReader], tuple[Any, ...]]:
        return (TableScanReader, (self._scan(), self._schema))

    def _for_tasks(self) -> TableScanReader:
        return TableScanReader(self._scan(), self._schema)

    def _scan(self) -> Scan:
        found = self._plan.found
        job = ReadJob(found.io, found.metadata, self._plan.schema, self._row_filter)
        return Scan(self._schema, pickle.dumps(job), ())


def iceberg_filter(filters: Iterable[Filter], schema: Schema) -> BooleanExpression:
    """Return an Iceberg expression that is true for all rows that Spark's filters leave, and for few others.

    Filters on nested columns, and those that Iceberg evaluates in another way than Spark, are left out.
    """
    found: BooleanExpression = AlwaysTrue()
    types = {field.name: field.field_type for field in schema.fields if "." not in field.name}
    for one in filters:
        translated = _translated(one, types)
        if translated is not None and _fits(translated, schema):
            found = And(found, translated)
    return found


_EXPRESSIONS: Mapping[type[Filter], Callable[..., BooleanExpression]] = {
    spark.EqualNullSafe: EqualTo,
    spark.EqualTo: EqualTo,
    spark.GreaterThan: GreaterThan,
    spark.GreaterThanOrEqual: GreaterThanOrEqual,
    spark.In: In,
    spark.IsNotNull: NotNull,
    spark.IsNull: IsNull,
    spark.LessThan: LessThan,
    spark.LessThanOrEqual: LessThanOrEqual,
    spark.StringStartsWith: StartsWith,
}
_NEGATED = (spark.EqualTo, spark.In, spark.StringStartsWith)
# To Spark NaN is the greatest number, to Iceberg none at all.
_UNLIKE_FOR_FLOATS = (spark.GreaterThan, spark.GreaterThanOrEqual, spark.Not)


def _translated(one: Filter, types: Mapping[str, IcebergType]) -> BooleanExpression | None:
    child = one.child if isinstance(one, spark.Not) else one
    path: tuple[str, ...] = getattr(child, "attribute", ())
    make = _EXPRESSIONS.get(type(child))
    if make is None or len(path) != 1 or path[0] not in types:
        return None
    name, value = path[0], getattr(child, "value", None)
    if isinstance(types[name], FloatType | DoubleType) and (isinstance(one, _UNLIKE_FOR_FLOATS) or _has_nan(value)):
        return None
    if isinstance(one, spark.Not):
        is_exact = isinstance(child, _NEGATED) and not _has_null(value)
        return Not(make(name, value)) if is_exact else None
    if isinstance(child, spark.IsNull | spark.IsNotNull):
        return make(name)
    if isinstance(child, spark.EqualNullSafe) and value is None:
        return _EXPRESSIONS[spark.IsNull](name)
    if isinstance(child, spark.In):
        return make(name, [each for each in child.value if each is not None])
    return None if value is None else make(name, value)


def _has_null(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and None in value)


def _has_nan(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, float) and each != each for each in values)  # noqa: PLR0124 - NaN alone does so


def _fits(expression: BooleanExpression, schema: Schema) -> bool:
    """Whether a filter's values can be compared with its column as Iceberg does it."""
    from pyiceberg.expressions.visitors import bind, rewrite_not

    try:
        bind(schema, rewrite_not(expression), case_sensitive=True)
    except (TypeError, ValueError):
        return False
    return True
