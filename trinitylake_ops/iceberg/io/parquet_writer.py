"""The writer of all Parquet files, with PyIceberg's settings, page checksums and file checksums."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import OutputFile
from pyiceberg.io.pyarrow import (
    DataFileStatistics,
    _get_parquet_writer_kwargs,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.table import TableProperties
from pyiceberg.typedef import Properties
from pyiceberg.utils.properties import property_as_int

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.validation.checksums import seal_pairs

_CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


class SealingWriter(pq.ParquetWriter):  # type: ignore[misc] # pyarrow ships no types
    """Arrow's writer, for a stream that fills in the digits of the file's checksums when it is closed."""

    is_open: bool

    def __init__(self, stream: Any, location: str, **options: Any):
        check_codec(options["compression"])
        self._location = location
        super().__init__(stream, write_page_checksum=True, **options)

    def close(self) -> None:
        """Write the footer with the checksum pairs. Later calls do nothing."""
        try:
            if self.is_open:
                self.add_key_value_metadata(seal_pairs(self._location))
            super().close()
        finally:
            self.is_open = False  # Arrow closes the writer again when the object is garbage-collected


def check_codec(codec: str) -> None:
    """Raise InvalidDefinitionError for a codec that Arrow's Parquet writer does not support."""
    if codec.lower() not in _CODECS:
        raise InvalidDefinitionError(
            f"write.parquet.compression-codec {codec[:100]!r} is not supported; use one of {', '.join(_CODECS)}"
        )


class SealedParquetWriter:
    """Writes one data file with the table's properties, behind the interface of PyIceberg's writers.

    The constructor raises InvalidDefinitionError for an unsupported codec.
    """

    def __init__(self, output_file: OutputFile, file_schema: Schema, properties: Properties):
        self._output_file = output_file
        self._schema = file_schema
        self._properties = properties
        self._options = _get_parquet_writer_kwargs(properties)
        check_codec(self._options["compression"])
        self._row_group_size = property_as_int(
            properties, TableProperties.PARQUET_ROW_GROUP_LIMIT, TableProperties.PARQUET_ROW_GROUP_LIMIT_DEFAULT
        )
        self._stream: Any = None
        self._writer: SealingWriter | None = None
        self._result: DataFileStatistics | None = None

    def write(self, table: pa.Table) -> None:
        """Write rows as row groups. All calls must use the same schema. Raises StorageError."""
        if self._writer is None:
            self._stream = self._output_file.create(overwrite=True)
            self._writer = SealingWriter(
                self._stream,
                self._output_file.location,
                schema=table.schema,
                store_decimal_as_integer=True,
                **self._options,
            )
        self._writer.write(table, row_group_size=self._row_group_size)

    def close(self) -> DataFileStatistics:
        """Finish the file and return its statistics. Raises ValueError if nothing was written, StorageError."""
        if self._result is not None:
            return self._result
        if self._writer is None:
            raise ValueError("nothing was written to this file")
        with self._stream:
            self._writer.close()
            self._result = data_file_statistics_from_parquet_metadata(
                parquet_metadata=self._writer.writer.metadata,
                stats_columns=compute_statistics_plan(self._schema, self._properties),
                parquet_column_mapping=parquet_path_to_id_mapping(self._schema),
            )
        return self._result

    def result(self) -> DataFileStatistics:
        """Return the statistics of the finished file."""
        return self.close()

    def __enter__(self) -> SealedParquetWriter:
        return self

    def __exit__(
        self, exctype: type[BaseException] | None, excinst: BaseException | None, exctb: TracebackType | None
    ) -> None:
        if exctype is None:
            self.close()
        elif self._stream is not None:
            self._stream.discard()
