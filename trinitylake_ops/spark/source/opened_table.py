"""Tables that the data source has opened at one version, with their schema, ready to be scanned."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES, MetadataTable
from trinitylake_ops.spark.metadata.reader import OpenedMetadata, PinnedSnapshot
from trinitylake_ops.spark.source.options import SourceOptions, TableRequest
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader


class OpenedTable(Protocol):
    """A table of the data source. It is pickled until a query reads it."""

    @property
    def schema(self) -> StructType:
        """The columns."""
        ...

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a query, for the columns in Spark's form."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedData:
    """The data of an Iceberg table."""

    #: The columns.
    schema: StructType
    #: The pickled DataPlan, which contains everything that readers need.
    pickled_plan: bytes

    def reader(self, schema: StructType) -> DataSourceReader:
        from trinitylake_ops.spark.tables.reader import TableDataReader

        return TableDataReader(pickle.loads(self.pickled_plan), schema)


def open_table(options: SourceOptions) -> OpenedTable:
    """Open the table that the options select. Raises InvalidInputError, NotFoundError, or StorageError."""
    request = options.request
    _check_request(request)
    lake = Lakehouse.open(options.root, options.storage_options)
    return open_metadata(lake, request) if request.table in METADATA_TABLES else open_data(lake, request)


def _check_request(request: TableRequest) -> None:
    if request.table not in METADATA_TABLES and "." not in request.table:
        raise InvalidInputError(
            f"unknown metadata table {request.table!r}; use one of {', '.join(METADATA_TABLES)}, or NAMESPACE.TABLE for"
            " the data of a table"
        )
    if request.table != "changes" and (request.first_version is not None or request.last_version is not None):
        raise InvalidInputError(f"options 'from' and 'to' are not supported for {request.table!r}, only for 'changes'")
    unsupported = {"exports": ("version", "timestamp", "export"), "versions": ("export",), "changes": ("export",)}
    if request.time in unsupported.get(request.table, ()):
        raise InvalidInputError(f"option {request.time!r} is not supported for {request.table!r}")


def open_metadata(lake: Lakehouse, request: TableRequest) -> OpenedMetadata:
    """Open a metadata table.

    Args:
        lake: The lakehouse.
        request: The table, version, columns and filter.

    Raises:
        InvalidInputError: If the request is invalid, or the lakehouse is in memory.
        NotFoundError: If the version or export does not exist.
        StorageError: If the storage fails.
    """
    from trinitylake_ops.spark.metadata.columns import MetadataFilter
    from trinitylake_ops.spark.tables.reader import check_reachable

    _check_request(request)
    check_reachable(lake)
    columns_of_table = METADATA_TABLES[request.table]
    columns = tuple(columns_of_table) if request.columns is None else request.columns
    if unknown := next((column for column in columns if column not in columns_of_table), None):
        raise InvalidInputError(
            f"metadata table {request.table!r} has no column {unknown!r}; its columns are {', '.join(columns_of_table)}"
        )
    if request.row_filter is None:
        return OpenedMetadata(request.table, _metadata_table(lake, request, columns), columns)
    row_filter = MetadataFilter.parse(request.table, request.row_filter)
    table = _metadata_table(lake, request, (*columns, *row_filter.columns)).limited(row_filter.conditions())
    return OpenedMetadata(request.table, table, columns, row_filter)


def _metadata_table(lake: Lakehouse, request: TableRequest, columns: tuple[str, ...]) -> MetadataTable:
    if request.table == "exports":
        from trinitylake_ops.spark.metadata.tables import Exports

        return Exports(PinnedSnapshot.of(lake, lake.snapshot()))
    snapshot = snapshot_of(lake, request)
    if request.table in ("versions", "changes"):
        return _history_table(lake, request, snapshot)
    pinned = PinnedSnapshot.of(lake, snapshot, request.export)
    if request.table == "files":
        from trinitylake_ops.spark.metadata.tables import Files

        return Files(pinned)
    from trinitylake_ops.spark.metadata.tables import Objects

    return Objects(pinned, columns)


def _history_table(lake: Lakehouse, request: TableRequest, snapshot: Snapshot) -> MetadataTable:
    from trinitylake_ops.spark.metadata.tables import Changes, Versions

    # Only the latest version records which versions expired.
    latest = PinnedSnapshot.of(lake, snapshot if request.time is None else lake.snapshot())
    if request.table == "versions":
        return Versions(latest, range(snapshot.version + 1), request.parallelism)
    first = request.first_version if request.first_version is not None else 1
    last = request.last_version if request.last_version is not None else snapshot.version
    if not 0 <= first <= last + 1 or last > snapshot.version:
        raise InvalidInputError(
            f"invalid version range {first} to {last}; the last readable version is {snapshot.version}"
        )
    return Changes(latest, range(first, last + 1), parallelism=request.parallelism)


def snapshot_of(lake: Lakehouse, request: TableRequest) -> Snapshot:
    """Return the version that a request selects. Raises InvalidInputError, NotFoundError, or StorageError.

    Args:
        lake: The lakehouse.
        request: The requested version, timestamp or export.
    """
    if request.export is not None:
        return lake.exported(request.export)
    return lake.snapshot(request.version, request.timestamp)


def open_data(lake: Lakehouse, request: TableRequest) -> OpenedData:
    """Open the data of a table.

    Args:
        lake: The lakehouse.
        request: The table, version, columns and filter.

    Raises:
        InvalidInputError: If the request is invalid, or the lakehouse is in memory.
        NotFoundError: If the table, version or export does not exist.
        UnsupportedTypeError: If Spark does not support a column's type.
        StorageError: If the storage fails.
    """
    from trinitylake_ops.spark.tables.reader import DataPlan, open_iceberg_table, projected, resolved_name
    from trinitylake_ops.spark.tables.schema import bound, parsed, to_spark_schema

    snapshot = snapshot_of(lake, request)
    name = resolved_name(request.table, snapshot)
    opened = open_iceberg_table(lake, snapshot, *name)
    schema = projected(opened.metadata.schema(), request.columns)
    bound(request.row_filter, opened.metadata.schema())  # reject an invalid filter now
    plan = DataPlan(name, opened, schema, parsed(request.row_filter), request.parallelism)
    return OpenedData(to_spark_schema(schema), pickle.dumps(plan))
