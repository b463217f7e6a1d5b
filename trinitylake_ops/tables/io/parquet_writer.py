"""The writer of every Parquet file here: pyiceberg's, with checksums of pages and the seals of the file."""

from __future__ import annotations

from pyiceberg.io import OutputFile
from pyiceberg.io.fileformat import DataFileStatistics
from pyiceberg.io.pyarrow import ParquetFormatWriter
from pyiceberg.schema import Schema
from pyiceberg.typedef import Properties

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.tables.claims.table_seals import seal_pairs

_CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


class SealedParquetWriter(ParquetFormatWriter):
    """Writes a Parquet file whose stream fills in the digits of the seals when it is closed.

    Raises InvalidDefinitionError for a codec that Parquet's writer does not have.
    """

    def __init__(self, output_file: OutputFile, file_schema: Schema, properties: Properties):
        super().__init__(output_file, file_schema, properties)
        codec = self._parquet_writer_kwargs["compression"]
        if codec.lower() not in _CODECS:
            raise InvalidDefinitionError(
                f"write.parquet.compression-codec {codec[:100]!r} cannot be written; use one of {', '.join(_CODECS)}"
            )
        self._parquet_writer_kwargs["write_page_checksum"] = True

    def close(self) -> DataFileStatistics:
        """Finish the file. Returns its statistics. Raises ValueError when nothing was written, StorageError."""
        if self._result is None and self._writer is not None:
            self._writer.add_key_value_metadata(seal_pairs(self._output_file.location))
        return super().close()
