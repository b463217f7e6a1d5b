"""``spark.read.format("trinitylake")``: metadata tables of a lakehouse, and the data of its tables.

Spark makes the source in a helper process of the driver, which looks at the lakehouse once: the version and
the schema are those of that moment for as long as the DataFrame lives. Another helper plans each query, with
the filters that Spark hands over, and the tasks read. What they need goes to them inside pickled objects; the
options, which Spark shows, hold no credentials.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.handover import HANDOVER, handed_over, take_given
from trinitylake_ops.spark_jobs.metadata_tables import MetadataTable, Row

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.spark_jobs.opened_table import OpenedTable
    from trinitylake_ops.transaction.lakehouse import Lakehouse

FORMAT = "trinitylake"
_FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_ROWS_PER_BATCH = 4_096


def register_data_source(spark: SparkSession) -> None:
    """Make ``spark.read.format("trinitylake")`` known to a session that ``build_session`` did not make.

    Spark refuses sources that take filters unless a setting allows it; that is set for this session.
    """
    spark.conf.set(_FILTER_PUSHDOWN, "true")
    spark.dataSource.register(TrinityLakeSource)


def read_metadata(
    spark: SparkSession,
    lake: Lakehouse,
    table: str,
    version: int | str | None = None,
    *,
    columns: Sequence[str] | None = None,
    first_version: int | None = None,
    last_version: int | None = None,
) -> DataFrame:
    """Return a metadata table of an open lakehouse, with its storage options, at a version or export.

    ``first_version`` and ``last_version`` are of ``changes``, inclusive. Raises InvalidInputError,
    VersionNotFoundError, VersionExpiredError, ExportNotFoundError, StorageError.
    """
    from trinitylake_ops.spark_jobs.opened_table import open_metadata
    from trinitylake_ops.spark_jobs.source_options import TableRequest

    is_number = isinstance(version, int) or (version is not None and version.isascii() and version.isdecimal())
    request = TableRequest(
        table=table,
        version=int(version) if version is not None and is_number else None,
        export=str(version) if version is not None and not is_number else None,
        columns=None if columns is None else tuple(columns),
        first_version=first_version,
        last_version=last_version,
        parallelism=spark.sparkContext.defaultParallelism,
    )
    return frame_of(spark, open_metadata(lake, request))


def frame_of(spark: SparkSession, opened: OpenedTable) -> DataFrame:
    """Return the DataFrame of a table that this process has opened."""
    register_data_source(spark)
    with handed_over(opened) as folder:
        # Spark makes the data source now and keeps it with the DataFrame; the folder has served its purpose then.
        return spark.read.format(FORMAT).option(HANDOVER, folder).load()


class TrinityLakeSource(DataSource):
    """A table of a lakehouse, opened by options or handed over by a process that has it open."""

    def __init__(self, options: dict[str, str]):
        super().__init__(options)
        self._opened: OpenedTable | None = _handed_over(options) if HANDOVER in options else _opened(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return self._take().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        if schema.names != self.schema().names:
            raise InvalidInputError("the source has its own columns: read without a schema, and choose by 'columns'")
        reader = self._take().reader(schema)
        self._opened = None  # Spark sends the source to all tasks beside the reader, and they have no use for it.
        return reader

    def _take(self) -> OpenedTable:
        assert self._opened is not None
        return self._opened


def _handed_over(options: dict[str, str]) -> OpenedTable:
    opened: OpenedTable = take_given(options[HANDOVER])
    return opened


def _opened(options: dict[str, str]) -> OpenedTable:
    from trinitylake_ops.spark_jobs.opened_table import open_table
    from trinitylake_ops.spark_jobs.source_options import SourceOptions

    return open_table(SourceOptions.parse(options))


class MetadataReader(DataSourceReader):
    """Reads a metadata table: made and planned by a helper of the driver, pickled to the tasks."""

    def __init__(self, table: MetadataTable, positions: Sequence[int], schema: StructType):
        self._table = table
        self._positions = positions
        self._schema = schema

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._table = self._table.limited(filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(pickle.dumps(part)) for part in self._table.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # what Spark asks for where there is none
            return iter(())
        rows = self._table.rows(pickle.loads(partition.value))
        return _batches(rows, self._positions, self._schema)


def _batches(rows: Iterator[Row], positions: Sequence[int], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield rows as Arrow batches of the columns at some positions of them."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema  # what Spark checks batches against; needs no pandas

    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    waiting: list[Row] = []

    def batch() -> pa.RecordBatch:
        columns: list[Any] = [
            pa.array([row[position] for row in waiting], field.type)
            for position, field in zip(positions, arrow_schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=arrow_schema)

    for row in rows:
        waiting.append(row)
        if len(waiting) == _ROWS_PER_BATCH:
            yield batch()
            waiting.clear()
    if waiting:
        yield batch()
