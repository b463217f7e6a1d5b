"""``format("trinitylake")`` of Spark: metadata tables of a lakehouse, the data of its tables, streams and writes.

Spark makes the source in a helper process of the driver, which looks at the lakehouse once. The DataFrame keeps the
version and the schema of that moment for as long as it lives. Another helper plans the reads of tasks when the first
query needs it. The tasks get their input inside pickled objects. The options, which Spark shows, hold no credentials.
The readers take no filters of Spark's (``row_filters`` says why).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.runtime.connect import activate, default_parallelism, is_remote
from trinitylake_ops.spark.runtime.errors import STREAM_READS, STREAM_WRITES, TooOld, spark_version, too_old
from trinitylake_ops.spark.runtime.java import HANDOVER, handed_over, receive_input
from trinitylake_ops.spark.runtime.task_jobs import frame_by_tasks
from trinitylake_ops.spark.source.options import STREAM_OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.spark.source.opened_table import OpenedTable
    from trinitylake_ops.spark.source.writer import WriteTarget
    from trinitylake_ops.transaction.lakehouse import Lakehouse

FORMAT = "trinitylake"


def register_data_source(spark: SparkSession) -> None:
    """Make ``spark.read.format("trinitylake")`` known to a session that ``build_session`` did not make.

    Also make the session that of this thread: Spark finds the source for ``write`` only if the thread has one.
    """
    activate(spark)
    spark.dataSource.register(TrinityLakeSource)


def read_metadata(
    spark: SparkSession,
    lake: Lakehouse,
    table: str,
    version: int | str | None = None,
    *,
    row_filter: str | None = None,
    columns: Sequence[str] | None = None,
    first_version: int | None = None,
    last_version: int | None = None,
) -> DataFrame:
    """Return a metadata table of an open lakehouse, with its storage options, at a version or export.

    ``row_filter`` is the option of that name. Versions, namespaces and tables that it excludes are not read.
    ``first_version`` and ``last_version`` are of ``changes``, inclusive. Raises InvalidInputError,
    VersionNotFoundError, VersionExpiredError, ExportNotFoundError, StorageError.
    """
    from trinitylake_ops.spark.source.opened_table import open_metadata
    from trinitylake_ops.spark.source.options import TableRequest

    is_number = isinstance(version, int) or (version is not None and version.isascii() and version.isdecimal())
    request = TableRequest(
        table=table,
        version=int(version) if version is not None and is_number else None,
        export=str(version) if version is not None and not is_number else None,
        row_filter=row_filter,
        columns=None if columns is None else tuple(columns),
        first_version=first_version,
        last_version=last_version,
        parallelism=default_parallelism(spark),
    )
    return frame_of(spark, open_metadata(lake, request))


def frame_of(spark: SparkSession, opened: OpenedTable) -> DataFrame:
    """Return the DataFrame of a table that this process has opened."""
    if is_remote(spark):
        reader = opened.reader(opened.schema)
        parts = [pickle.dumps(partition) for partition in reader.partitions()]
        return frame_by_tasks(spark, opened.schema, partial(_read_part, reader), parts)
    register_data_source(spark)
    with handed_over(opened) as folder:
        # Spark makes the data source now and keeps it with the DataFrame, so the folder is not needed any more.
        return spark.read.format(FORMAT).option(HANDOVER, folder).load()


def _read_part(reader: DataSourceReader, part: bytes) -> Iterator[pa.RecordBatch]:
    return cast("Iterator[pa.RecordBatch]", reader.read(pickle.loads(part)))


class TrinityLakeSource(DataSource):
    """A table of a lakehouse, opened by options or handed over by a process that has it open."""

    def __init__(self, options: dict[str, str]):
        super().__init__(options)
        self._opened: OpenedTable | None = _handed_over(options) if HANDOVER in options else None

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return self._take().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        given = {name.lower() for name in self.options}
        if wrong := next((name for name in STREAM_OPTIONS if name in given), None):
            raise InvalidInputError(f"the option {wrong!r} is of streams: spark.readStream")
        reader = self._taken(schema).reader(schema)
        self._opened = None  # Spark sends the source to all tasks beside the reader, and they have no use for it.
        return reader

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        if spark_version() < STREAM_READS:
            return TooOld()
        from trinitylake_ops.spark.source.streams import stream_reader

        reader = stream_reader(self.options, self._taken(schema), schema)
        self._opened = None
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from trinitylake_ops.spark.source.writer import batch_writer

        return batch_writer(self._target(), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        if spark_version() < STREAM_WRITES:
            raise too_old(STREAM_WRITES, "streams that are written")
        from trinitylake_ops.spark.source.writer import stream_writer

        return stream_writer(self._target(), schema, overwrite=overwrite)

    def _target(self) -> WriteTarget:
        from trinitylake_ops.spark.source.writer import WriteTarget

        return WriteTarget.parse(self.options)

    def _taken(self, schema: StructType) -> OpenedTable:
        opened = self._take()
        if schema.names != opened.schema.names:
            raise InvalidInputError("the source has its own columns: read without a schema, and choose by 'columns'")
        return opened

    def _take(self) -> OpenedTable:
        if self._opened is None:
            self._opened = _opened(self.options)
        return self._opened


def _handed_over(options: Mapping[str, str]) -> OpenedTable:
    opened: OpenedTable = receive_input(options[HANDOVER])
    return opened


def _opened(options: Mapping[str, str]) -> OpenedTable:
    from trinitylake_ops.spark.source.opened_table import open_table
    from trinitylake_ops.spark.source.options import SourceOptions

    return open_table(SourceOptions.parse(options, STREAM_OPTIONS))
