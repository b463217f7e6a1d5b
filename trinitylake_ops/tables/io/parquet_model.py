"""Makes pyiceberg write sealed Parquet files wherever they go to a lakehouse.

The data of ``Table.append``, ``overwrite`` and ``delete`` come from the writer in pyiceberg's registry of file formats.
Only there can checksums of pages, or key-value pairs of a footer, be asked for. pyiceberg 0.11 has no registry and
makes Arrow's writer itself: there the place is its name for ``pyarrow.parquet``. Files that go elsewhere, through other
FileIOs, are written as before.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pyiceberg.io import OutputFile
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Properties
from pyiceberg.types import NestedField

if TYPE_CHECKING:
    from pyiceberg.io.fileformat import FileFormatModel, FileFormatWriter


class SealedOutputFile(OutputFile):
    """An output file whose stream fills in the digits of seals."""


class SealedStream:
    """The stream of such a file; pyiceberg writes it right after it was made."""

    def __init__(self, location: str):
        self.location = location
        if not _HAS_REGISTRY and location.endswith(".parquet"):
            _seal_files_of_older()


_HAS_REGISTRY = importlib.util.find_spec("pyiceberg.io.fileformat") is not None


def write_sealed_parquet() -> None:
    """Let pyiceberg write sealed Parquet files to every SealedOutputFile. A second call does nothing."""
    if not _HAS_REGISTRY:
        return  # its module of writers is heavy, and is there when the first file is opened
    from pyiceberg.io.fileformat import FileFormatFactory

    if not isinstance(FileFormatFactory._registry, _Models):
        FileFormatFactory._registry = _Models(FileFormatFactory._registry)


class _Models(dict[FileFormat, "FileFormatModel"]):
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

        return cast("FileFormatWriter", SealedParquetWriter(output_file, file_schema, properties))

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


def _seal_files_of_older() -> None:
    """Let pyiceberg 0.11 make a writer of ours for streams of ours; a second call does nothing."""
    writers: Any = importlib.import_module("pyiceberg.io.pyarrow")
    if not isinstance(writers.pq, _SealingParquet):
        writers.pq = _SealingParquet(writers.pq)


class _SealingParquet:
    """``pyarrow.parquet`` as pyiceberg 0.11 sees it."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ParquetWriter(self, where: Any, **options: Any) -> Any:  # noqa: N802 - Arrow's name
        """Return a writer of one file."""
        if not isinstance(where, SealedStream):
            return self._module.ParquetWriter(where, **options)
        from trinitylake_ops.tables.io.parquet_writer import SealingWriter

        return SealingWriter(where, where.location, **options)
