"""SQL over a lakehouse: temporary views, and table functions that take a version.

The clause ``VERSION AS OF`` of Spark's SQL needs the catalog: :mod:`trinitylake_ops.spark.catalog`.
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

#: Metadata tables that are read at a version. The other metadata tables describe the whole lakehouse.
_AT_A_VERSION = ("files", "objects")


def create_views(
    spark: SparkSession,
    lake: Lakehouse,
    version: int | str | None = None,
    *,
    tables: Sequence[str] | None = None,
    prefix: str = "",
) -> dict[str, str]:
    """Create or replace a temporary view for each table of a version. If an error is raised, no view is created.

    The view of ``NAMESPACE.TABLE`` has the name ``<prefix>NAMESPACE_TABLE``. The views of metadata tables have the
    names ``<prefix>trinitylake_versions`` and so on. ``versions``, ``changes`` and ``exports`` describe the whole
    lakehouse.

    Args:
        spark: The session.
        lake: The lakehouse.
        version: A version number, the name of an export, or None for the latest version at the time of the call.
        tables: The tables, as ``NAMESPACE.TABLE``; None for all Iceberg tables.
        prefix: The prefix of all view names.

    Returns:
        The table of each view, by the view's name.

    Raises:
        InvalidInputError: If two views would have the same name.
        NotFoundError: If a table, the version or the export does not exist.
        UnsupportedTypeError: If Spark does not support a column's type.
        StorageError: If the storage fails.
    """
    snapshot = lake.snapshot(version)
    names = _iceberg_tables(snapshot) if tables is None else [resolved_name(table, snapshot) for table in tables]
    views = {f"{prefix}trinitylake_{metadata}": metadata for metadata in METADATA_TABLES}
    existing = {view.lower(): table for view, table in views.items()}  # Spark ignores the case of names
    for namespace, table in names:
        view = f"{prefix}{namespace}_{table}"
        if view.lower() in existing:
            raise InvalidInputError(
                f"{existing[view.lower()]} and {namespace}.{table} would have the same view name {view!r}; pass"
                " 'tables'"
            )
        views[view] = existing[view.lower()] = f"{namespace}.{table}"
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
    """Return the rows of a table through Spark's own reader if possible, otherwise through this package's reader."""
    opened = open_iceberg_table(lake, snapshot, namespace, table)
    tasks = opened.tasks()
    native = opened.native_frame(spark, tasks)
    return opened.scanned_frame(spark, tasks) if native is None else native


def register_table_functions(spark: SparkSession) -> None:
    """Register ``trinitylake_table`` and ``trinitylake_versions`` in the SQL of a session.

    They read in a single task; use views for large tables.
    """
    for name, function in (("trinitylake_table", TableFunction), ("trinitylake_versions", VersionsFunction)):
        spark.udtf.register(name, cast("UserDefinedTableFunction", udtf(function, useArrow=False)))


@dataclass
class _AnalyzedCall(AnalyzeResult):
    """The analyzed call of a function, from a helper process of the driver."""

    #: The pickled table for the task.
    pickled_table: bytes = b""


class _LakehouseFunction:
    def __init__(self, analyzed: _AnalyzedCall):
        self._opened: OpenedTable = pickle.loads(analyzed.pickled_table)

    def eval(self, *arguments: Any, **named_arguments: Any) -> Iterator[Row]:
        """Yield the rows. The arguments were processed when the call was analyzed."""
        reader = self._opened.reader(self._opened.schema)
        for partition in reader.partitions():
            for batch in cast("Iterator[pa.RecordBatch]", reader.read(partition)):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    yield tuple(row.values())


class TableFunction(_LakehouseFunction):
    """``trinitylake_table(root, table [, version] [, name => ...])``; named arguments are options of the source."""

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
        """Open the table. Raises InvalidInputError if an argument is not constant, and errors of opening the table."""
        options = {
            "version": version, "timestamp": timestamp, "export": export, "columns": columns, "row_filter": row_filter,
        }  # fmt: skip
        return _analysis({ROOT: root, TABLE: table, **options})


class VersionsFunction(_LakehouseFunction):
    """``trinitylake_versions(root [, version])``: the log up to a version."""

    @staticmethod
    def analyze(root: AnalyzeArgument, version: AnalyzeArgument | None = None) -> AnalyzeResult:
        """Open the log. Raises the same errors as TableFunction."""
        return _analysis({ROOT: root, "version": version}, {TABLE: "versions"})


def _analysis(arguments: dict[str, AnalyzeArgument | None], fixed: dict[str, str] | None = None) -> _AnalyzedCall:
    options = dict(fixed or {})
    for name, argument in arguments.items():
        if argument is None:
            continue
        if not argument.isConstantExpression:
            raise InvalidInputError(f"function argument {name!r} is not constant; pass a literal")
        if argument.value is not None:
            options[name] = str(argument.value)
    opened = open_table(SourceOptions.parse(options))
    return _AnalyzedCall(opened.schema, pickled_table=pickle.dumps(opened))
