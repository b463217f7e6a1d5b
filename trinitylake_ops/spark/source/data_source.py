"""Spark's ``format("trinitylake")``: metadata tables of a lakehouse, the data of its tables, streams and writes.

Spark creates the source in a helper process of the driver, which reads the lakehouse once. The DataFrame keeps that
version and schema for its entire lifetime. Another helper plans the tasks when they are first needed by a query. The
tasks get their input in pickled objects. The options, which Spark shows, contain no credentials. The readers do not
accept filters from Spark; :mod:`~trinitylake_ops.spark.tables.schema` explains the reason.
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
from trinitylake_ops.spark.runtime.java import HANDOVER, handover_folder, receive_input
from trinitylake_ops.spark.runtime.task_jobs import frame_by_tasks
from trinitylake_ops.spark.source.options import STREAM_OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.spark.source.opened_table import OpenedTable
    from trinitylake_ops.spark.source.writer import WriteTarget
    from trinitylake_ops.transaction.lakehouse import Lakehouse

FORMAT = "trinitylake"


def register_data_source(spark: SparkSession) -> None:
    """Register ``spark.read.format("trinitylake")`` in a session that ``build_session`` did not create.

    Also makes the session the active one of this thread, because Spark needs that to find the source for ``write``.
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
    """Return a metadata table of an open lakehouse, with the lakehouse's storage options.

    Args:
        spark: The session.
        lake: The lakehouse.
        table: The name of the metadata table.
        version: A version number, the name of an export, or None for the latest version.
        row_filter: An Iceberg filter. Versions, namespaces and tables that it excludes are not read.
        columns: The columns to read, or None for all.
        first_version: For ``changes``, the first version, inclusive.
        last_version: For ``changes``, the last version, inclusive.

    Raises:
        InvalidInputError: If an argument is invalid.
        NotFoundError: If the version or export does not exist.
        VersionExpiredError: If the version has expired.
        StorageError: If the storage fails.
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
    """Return a DataFrame of a table that this process has opened.

    Args:
        spark: The session.
        opened: The opened table.
    """
    if is_remote(spark):
        reader = opened.reader(opened.schema)
        parts = [pickle.dumps(partition) for partition in reader.partitions()]
        return frame_by_tasks(spark, opened.schema, partial(_read_part, reader), parts)
    register_data_source(spark)
    with handover_folder(opened) as folder:
        # Spark creates the data source now and keeps it with the DataFrame, so the folder can be removed.
        return spark.read.format(FORMAT).option(HANDOVER, folder).load()


def _read_part(reader: DataSourceReader, part: bytes) -> Iterator[pa.RecordBatch]:
    return cast("Iterator[pa.RecordBatch]", reader.read(pickle.loads(part)))


class TrinityLakeSource(DataSource):
    """A table of a lakehouse, opened from options or passed by a process that has opened it."""

    def __init__(self, options: dict[str, str]):
        super().__init__(options)
        self._opened: OpenedTable | None = _receive_table(options) if HANDOVER in options else None

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return self._take().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        names = {name.lower() for name in self.options}
        if stream_option := next((name for name in STREAM_OPTIONS if name in names), None):
            raise InvalidInputError(f"option {stream_option!r} is for streams; use spark.readStream")
        reader = self._taken(schema).reader(schema)
        self._opened = None  # Spark sends the source to all tasks as well, which do not need it
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
            raise too_old(STREAM_WRITES, "streaming writes")
        from trinitylake_ops.spark.source.writer import stream_writer

        return stream_writer(self._target(), schema, overwrite=overwrite)

    def _target(self) -> WriteTarget:
        from trinitylake_ops.spark.source.writer import WriteTarget

        return WriteTarget.parse(self.options)

    def _taken(self, schema: StructType) -> OpenedTable:
        opened = self._take()
        if schema.names != opened.schema.names:
            raise InvalidInputError(
                "the source has a fixed schema; read without a schema, and select columns with the option 'columns'"
            )
        return opened

    def _take(self) -> OpenedTable:
        if self._opened is None:
            self._opened = _open_table(self.options)
        return self._opened


def _receive_table(options: Mapping[str, str]) -> OpenedTable:
    opened: OpenedTable = receive_input(options[HANDOVER])
    return opened


def _open_table(options: Mapping[str, str]) -> OpenedTable:
    from trinitylake_ops.spark.source.opened_table import open_table
    from trinitylake_ops.spark.source.options import SourceOptions

    return open_table(SourceOptions.parse(options, STREAM_OPTIONS))
