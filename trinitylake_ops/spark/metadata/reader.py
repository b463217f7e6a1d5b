"""The reader of metadata tables, and the pinned snapshot that its tasks share."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructField, StructType

from trinitylake_ops.errors import VersionExpiredError
from trinitylake_ops.format.file_names import RootNaming
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES, MetadataTable, Row
from trinitylake_ops.spark.runtime.errors import arrow_schema, value_of
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.opening import with_environment
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.spark.metadata.columns import MetadataFilter

_ROWS_PER_BATCH = 4_096


@dataclass(frozen=True, slots=True)
class OpenedMetadata:
    """A metadata table, with the columns and rows to read."""

    #: The name of the metadata table.
    name: str
    #: The table's data at one point in time.
    table: MetadataTable
    #: The columns to read, in this order.
    columns: tuple[str, ...]
    #: The rows to read, or None for all.
    row_filter: MetadataFilter | None = None

    def of(self, table: MetadataTable) -> OpenedMetadata:
        """Return the same columns and rows of another state of the metadata table."""
        limited = table if self.row_filter is None else table.limited(self.row_filter.conditions())
        return replace(self, table=limited)

    @property
    def schema(self) -> StructType:
        types = METADATA_TABLES[self.name]
        return StructType([StructField(column, types[column]) for column in self.columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        return MetadataReader(self, schema)


class MetadataReader(DataSourceReader):
    """Reads a metadata table. A helper process of the driver creates and plans it, and it is pickled to the tasks."""

    def __init__(self, opened: OpenedMetadata, schema: StructType):
        self._opened = opened
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(pickle.dumps(part)) for part in self._opened.table.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        value = value_of(partition)
        if value is None:
            return iter(())
        return metadata_batches(self._opened, self._opened.table.rows(pickle.loads(value)), self._schema)


def metadata_batches(opened: OpenedMetadata, rows: Iterator[Row], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield batches of the requested columns and rows.

    Args:
        opened: The columns and the filter.
        rows: Rows with all columns of the metadata table.
        schema: The schema that Spark expects.
    """
    import pyarrow as pa

    row_filter = opened.row_filter
    types = METADATA_TABLES[opened.name]
    names = dict.fromkeys([*opened.columns, *(() if row_filter is None else row_filter.columns)])
    positions = [list(types).index(name) for name in names]
    read_schema = arrow_schema(StructType([StructField(name, types[name]) for name in names]))
    wanted_schema = arrow_schema(schema)
    while waiting := list(islice(rows, _ROWS_PER_BATCH)):
        columns: list[Any] = [
            pa.array([row[position] for row in waiting], field.type)
            for position, field in zip(positions, read_schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=read_schema)
        if row_filter is not None:
            batch = row_filter.rows_of(batch)
        if batch.num_rows:
            yield batch.select(wanted_schema.names).cast(wanted_schema)


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """A version or an export, with its storage. It contains credentials, which its ``repr`` does not show."""

    #: The storage of the lakehouse.
    storage: Storage
    #: The storage options, including those from the driver's environment.
    storage_options: StorageOptions
    #: How the lakehouse names its roots.
    naming: RootNaming
    #: The number of the version.
    version: int
    #: The location of the version's root.
    location: str
    #: The name of an export at another root, otherwise None.
    export_elsewhere: str | None = None

    @classmethod
    def of(cls, lake: Lakehouse, snapshot: Snapshot, export: str | None = None) -> PinnedSnapshot:
        """Pin a snapshot.

        Args:
            lake: The lakehouse.
            snapshot: The snapshot.
            export: The export by which the snapshot was selected, or None for a version.
        """
        is_external = snapshot.files.storage.root != lake.root
        return cls(
            lake.storage,
            with_environment(lake.root, lake.storage_options),
            lake.files.roots.naming,
            snapshot.version,
            snapshot.location,
            export if is_external else None,
        )

    def lakehouse(self) -> Lakehouse:
        """Return the lakehouse, with the cache shared by this process."""
        lake = Lakehouse(self.storage, self.storage_options, cache="shared")
        lake.files.roots.known_naming = self.naming
        return lake

    def open(self) -> Snapshot:
        """Read the version's root again. Raises StorageError, or VersionExpiredError if it was purged since."""
        lake = self.lakehouse()
        if self.export_elsewhere is not None:
            return lake.exported(self.export_elsewhere)
        root = decode_node(lake.storage.read(self.location), self.location)
        if root.is_sealed:
            raise VersionExpiredError("the version was expired and purged", path=self.location, version=self.version)
        return Snapshot(lake.files, self.version, self.location, root)
