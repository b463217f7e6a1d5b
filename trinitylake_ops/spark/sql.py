"""SQL over a lakehouse: temporary views, and table functions that take a version.

The clause ``VERSION AS OF`` of Spark's SQL is of the catalog: :mod:`trinitylake_ops.spark.catalog`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udtf
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES, Row
from trinitylake_ops.spark.source.data_source import read_metadata
from trinitylake_ops.spark.source.opened_table import OpenedTable, open_table
from trinitylake_ops.spark.source.options import ROOT, TABLE, SourceOptions
from trinitylake_ops.spark.tables.reader import open_iceberg_table, resolved_name
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.udtf import UserDefinedTableFunction

#: Metadata tables that are read at a version. The others tell of the lakehouse as a whole.
_AT_A_VERSION = ("files", "objects")


def create_views(
    spark: SparkSession,
    lake: Lakehouse,
    version: int | str | None = None,
    *,
    tables: Sequence[str] | None = None,
    prefix: str = "",
) -> dict[str, str]:
    """Create or replace a temporary view for each table of a version. Returns view -> table.

    The view of ``NAMESPACE.TABLE`` is named ``<prefix>NAMESPACE_TABLE``, those of the metadata tables
    ``<prefix>trinitylake_versions`` and so on. ``version`` is a number or an export's name, by default the latest
    version now. ``versions``, ``changes`` and ``exports`` are those of the whole lakehouse. ``tables`` are the wanted
    ones, ``NAMESPACE.TABLE``, by default all Iceberg tables. Raises InvalidInputError if two views would have one name,
    NotFoundError, UnsupportedTypeError, StorageError. No view is made then.
    """
    snapshot = lake.snapshot(version)
    names = _iceberg_tables(snapshot) if tables is None else [resolved_name(table, snapshot) for table in tables]
    views = {f"{prefix}trinitylake_{metadata}": metadata for metadata in METADATA_TABLES}
    taken = {view.lower(): table for view, table in views.items()}  # Spark ignores the case of names
    for namespace, table in names:
        view = f"{prefix}{namespace}_{table}"
        if view.lower() in taken:
            raise InvalidInputError(
                f"{taken[view.lower()]} and {namespace}.{table} would have the same view {view!r}: give 'tables'"
            )
        views[view] = taken[view.lower()] = f"{namespace}.{table}"
    frames: list[DataFrame] = []
    for metadata in METADATA_TABLES:
        pinned = (snapshot.version if version is None else version) if metadata in _AT_A_VERSION else None
        frames.append(read_metadata(spark, lake, metadata, pinned))
    frames += [_frame(spark, lake, snapshot, namespace, table) for namespace, table in names]
    for view, frame in zip(views, frames, strict=True):
        frame.createOrReplaceTempView("`" + view.replace("`", "``") + "`")
    return views


def _iceberg_tables(snapshot: Snapshot) -> list[tuple[str, str]]:
    names = [(namespace, table) for namespace in snapshot.namespaces() for table in snapshot.tables(namespace)]
    return [name for name in names if snapshot.table(*name).is_iceberg]


def _frame(spark: SparkSession, lake: Lakehouse, snapshot: Snapshot, namespace: str, table: str) -> DataFrame:
    """Return the rows of a table by Spark's own reader, or else by ours."""
    found = open_iceberg_table(lake, snapshot, namespace, table)
    tasks = found.tasks()
    native = found.native_frame(spark, tasks)
    return found.scanned_frame(spark, tasks) if native is None else native


def register_table_functions(spark: SparkSession) -> None:
    """Make ``trinitylake_table`` and ``trinitylake_versions`` known to the SQL of a session.

    They read in one task: for large tables make views.
    """
    for name, function in (("trinitylake_table", TableFunction), ("trinitylake_versions", VersionsFunction)):
        spark.udtf.register(name, cast("UserDefinedTableFunction", udtf(function, useArrow=False)))


@dataclass
class _Analyzed(AnalyzeResult):
    """The result of a call, from a helper of the driver: the columns, and the table for the task."""

    pickled_table: bytes = b""


class _LakehouseFunction:
    def __init__(self, analyzed: _Analyzed):
        self._opened: OpenedTable = pickle.loads(analyzed.pickled_table)

    def eval(self, *arguments: Any, **named_arguments: Any) -> Iterator[Row]:
        """Yield the rows. The arguments were looked at when the call was analyzed."""
        reader = self._opened.reader(self._opened.schema)
        for partition in reader.partitions():
            for batch in cast("Iterator[pa.RecordBatch]", reader.read(partition)):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    yield tuple(row.values())


class TableFunction(_LakehouseFunction):
    """``trinitylake_table(root, table [, version] [, name => ...])``, by name the options of the source."""

    @staticmethod
    def analyze(
        root: AnalyzeArgument,
        table: AnalyzeArgument,
        version: AnalyzeArgument | None = None,
        timestamp: AnalyzeArgument | None = None,
        export: AnalyzeArgument | None = None,
        columns: AnalyzeArgument | None = None,
        row_filter: AnalyzeArgument | None = None,
    ) -> AnalyzeResult:
        """Open the table. Raises what opening raises, InvalidInputError for arguments that are not constant."""
        given = {
            "version": version, "timestamp": timestamp, "export": export, "columns": columns, "row_filter": row_filter,
        }  # fmt: skip
        return _analyzed({ROOT: root, TABLE: table, **given})


class VersionsFunction(_LakehouseFunction):
    """``trinitylake_versions(root [, version])``: the log, up to a version."""

    @staticmethod
    def analyze(root: AnalyzeArgument, version: AnalyzeArgument | None = None) -> AnalyzeResult:
        """Open the log. Raises as that of TableFunction."""
        return _analyzed({ROOT: root, "version": version}, {TABLE: "versions"})


def _analyzed(arguments: dict[str, AnalyzeArgument | None], fixed: dict[str, str] | None = None) -> _Analyzed:
    options = dict(fixed or {})
    for name, argument in arguments.items():
        if argument is None:
            continue
        if not argument.isConstantExpression:
            raise InvalidInputError(f"the argument {name!r} of the function is not constant")
        if argument.value is not None:
            options[name] = str(argument.value)
    opened = open_table(SourceOptions.parse(options))
    return _Analyzed(opened.schema, pickled_table=pickle.dumps(opened))
