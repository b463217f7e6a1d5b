"""Selects tables that Spark's own Parquet reader can read, which is far faster than a reader in Python.

Spark's reader matches columns by name and ignores delete files. It can read local files only, because Spark ships
without object storage clients. It is used only if every data file has, according to its footer, exactly the table's
columns: the same names, field ids and types. All other tables need the reader that supports Iceberg: those with a
column that was renamed, added, dropped or promoted, with partition columns that files omit, with files of other types
from another writer, or with a file that is listed twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyiceberg import types as iceberg
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.io.checked_files import parquet_end
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.validation.files import read_footer
from trinitylake_ops.spark.tables.schema import to_spark_schema
from trinitylake_ops.storage.parallel import run_parallel

_LOCAL = "file://"
_FIELD_ID = b"PARQUET:field_id"
_HIDDEN_FROM_SPARK = ("_", ".")
#: Characters that are invalid in Hadoop's paths, or have a special meaning.
_NOT_IN_A_PATH = re.compile(r"[:\\]")
_PATTERNS = re.compile(r"[\[\]{}*?]")
_FOOTERS_AT_ONCE = 16

#: Override the session's settings: read all files, without conversions.
_OPTIONS = {
    "datetimeRebaseMode": "CORRECTED",
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "int96RebaseMode": "CORRECTED",
    "mergeSchema": "false",
    "recursiveFileLookup": "false",
}

_PRIMITIVES: dict[type[iceberg.IcebergType], tuple[pa.DataType, ...]] = {
    iceberg.BooleanType: (pa.bool_(),),
    iceberg.IntegerType: (pa.int32(),),
    iceberg.LongType: (pa.int64(),),
    iceberg.FloatType: (pa.float32(),),
    iceberg.DoubleType: (pa.float64(),),
    iceberg.StringType: (pa.string(), pa.large_string()),
    iceberg.BinaryType: (pa.binary(), pa.large_binary()),
    iceberg.DateType: (pa.date32(),),
    iceberg.TimestampType: (pa.timestamp("us"),),
    iceberg.TimestamptzType: (pa.timestamp("us", "UTC"),),
}


def frame_of(spark: SparkSession, schema: Schema, tasks: Sequence[FileScanTask], io: StorageFileIO) -> DataFrame | None:
    """Return the rows of a table's files through Spark's own reader, or None if it would not read them correctly.

    Args:
        spark: The session.
        schema: The schema of the table.
        tasks: The files.
        io: The FileIO of the table, which maps locations to real paths.

    Raises:
        LocationNotAllowedError: If a file is in a location that is not allowed.
    """
    if not _has_plain_columns(schema.fields):
        return None
    paths = [_local_path(task, io) for task in tasks]
    local_paths = [path for path in paths if path is not None]
    if len(set(local_paths)) < len(paths) or not all(run_parallel(_Footers(schema).fit, local_paths, _FOOTERS_AT_ONCE)):
        return None
    columns = to_spark_schema(schema)
    if not local_paths:
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).options(**_OPTIONS).parquet(*map(_as_pattern, local_paths))


def selected(frame: DataFrame, schema: Schema) -> DataFrame:
    """Return a frame with the columns of a schema, in the schema's order.

    Args:
        frame: The frame.
        schema: The schema.
    """
    return frame.select(*(F.col(f"`{field.name.replace('`', '``')}`") for field in schema.fields))


def _local_path(task: FileScanTask, io: StorageFileIO) -> str | None:
    """Return the local path of a file that Spark's reader can see and that has no delete files, otherwise None."""
    uri = io.real_uri(task.file.file_path)
    if task.delete_files or task.file.file_format != FileFormat.PARQUET or not uri.startswith(_LOCAL):
        return None
    path = uri.removeprefix(_LOCAL)
    is_seen = not path.rpartition("/")[2].startswith(_HIDDEN_FROM_SPARK)
    return path if is_seen and not _NOT_IN_A_PATH.search(path) else None


def _as_pattern(path: str) -> str:
    """Return a glob pattern that matches only this path, because Spark treats all paths as patterns."""
    return _LOCAL + _PATTERNS.sub(r"\\\g<0>", path)


class _Footers:
    """Compares the footers of files with the columns of a table."""

    def __init__(self, schema: Schema):
        self._fields = schema.fields

    def fit(self, path: str) -> bool:
        """Whether a file has exactly the columns of the table.

        Returns False for an unreadable file, so that the other reader reports the error.
        """
        try:
            with open(path, "rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                end = parquet_end(size_bytes, lambda offset, length: os.pread(file.fileno(), length, offset), path)
            columns = read_footer(end, path).schema.to_arrow_schema()
        except (OSError, CorruptFileError, pa.ArrowException):
            return False
        return _same_fields(list(columns), self._fields)


def _has_plain_columns(fields: Iterable[iceberg.NestedField]) -> bool:
    """Whether Spark can distinguish all columns, because it ignores the case of names."""
    names = [field.name.lower() for field in fields]
    return len(set(names)) == len(names)


def _same_fields(columns: Sequence[pa.Field], fields: Sequence[iceberg.NestedField]) -> bool:
    by_name = {column.name: column for column in columns}
    return (
        len(by_name) == len(columns) == len(fields)
        and _has_plain_columns(fields)
        and all(field.name in by_name and _same_field(by_name[field.name], field) for field in fields)
    )


def _same_field(column: pa.Field, field: iceberg.NestedField) -> bool:
    metadata: dict[bytes, bytes] = column.metadata or {}
    return metadata.get(_FIELD_ID) == str(field.field_id).encode() and _same_type(column.type, field.field_type)


def _same_type(kind: pa.DataType, expected: iceberg.IcebergType) -> bool:
    if isinstance(expected, iceberg.StructType):
        return pa.types.is_struct(kind) and _same_fields(list(kind), expected.fields)
    if isinstance(expected, iceberg.ListType):
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and _same_field(kind.value_field, expected.element_field)
    if isinstance(expected, iceberg.MapType):
        return (
            pa.types.is_map(kind)
            and _same_field(kind.key_field, expected.key_field)
            and _same_field(kind.item_field, expected.value_field)
        )
    if isinstance(expected, iceberg.DecimalType):
        return bool(kind == pa.decimal128(expected.precision, expected.scale))
    return kind in _PRIMITIVES.get(type(expected), ())
