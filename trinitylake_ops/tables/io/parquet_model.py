"""Makes pyiceberg write sealed Parquet files wherever they go to a lakehouse.

The data of ``Table.append``, ``overwrite`` and ``delete``, and of tasks, all come from one writer, given by pyiceberg's
registry of file formats. Only there can checksums of pages, or key-value pairs of a footer, be asked for. Files that go
elsewhere, through other FileIOs, are written as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyiceberg.io import OutputFile
from pyiceberg.io.fileformat import FileFormatFactory, FileFormatModel, FileFormatWriter
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Properties
from pyiceberg.types import NestedField


class SealedOutputFile(OutputFile):
    """An output file whose stream fills in the digits of seals."""


def write_sealed_parquet() -> None:
    """Let pyiceberg write sealed Parquet files to every SealedOutputFile. A second call does nothing."""
    if not isinstance(FileFormatFactory._registry, _Models):
        FileFormatFactory._registry = _Models(FileFormatFactory._registry)


class _Models(dict[FileFormat, FileFormatModel]):
    """Return the models of file formats. Its own of Parquet, pyiceberg registers when it first reads or writes rows."""

    def __init__(self, models: Mapping[FileFormat, FileFormatModel]):
        super().__init__()
        for file_format, model in models.items():
            self[file_format] = model

    def __setitem__(self, file_format: FileFormat, model: FileFormatModel) -> None:
        super().__setitem__(file_format, _SealingModel(model) if file_format == FileFormat.PARQUET else model)


class _SealingModel:
    """pyiceberg's model of Parquet, with a writer of its own for files that are sealed."""

    def __init__(self, model: FileFormatModel):
        self._model = model

    def create_writer(self, output_file: OutputFile, file_schema: Schema, properties: Properties) -> FileFormatWriter:
        """Return a writer of one file."""
        if not isinstance(output_file, SealedOutputFile):
            return self._model.create_writer(output_file, file_schema, properties)
        from trinitylake_ops.tables.io.parquet_writer import SealedParquetWriter  # importing it loads pandas

        return SealedParquetWriter(output_file, file_schema, properties)

    @property
    def format(self) -> FileFormat:
        """The format of the files."""
        return self._model.format

    def file_extension(self) -> str:
        """Return the ending of their names, without the dot."""
        return self._model.file_extension()

    def add_field_metadata(self, field: NestedField, metadata: dict[bytes, bytes], include_field_ids: bool) -> None:
        """Return the format's properties of a column."""
        self._model.add_field_metadata(field, metadata, include_field_ids)
