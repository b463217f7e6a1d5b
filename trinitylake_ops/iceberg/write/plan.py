"""Plan a write to a table: determine the metadata for the write, and the updates that produce this metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from pyiceberg.exceptions import ResolveError
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids, promote
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import TableUpdate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, IcebergType, IntegerType, LongType, NestedField, PrimitiveType

from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError, TableNotFoundError, UnsupportedTypeError
from trinitylake_ops.format.definitions import Schema as Columns
from trinitylake_ops.format.keys import check_new_name
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, writing_io
from trinitylake_ops.iceberg.managed import (
    LATEST_WRITTEN_VERSION,
    check_format_version,
    claim_location,
    managed_properties,
    new_table_location,
)
from trinitylake_ops.iceberg.metadata_rules import check_defaults, check_new_schemas
from trinitylake_ops.iceberg.table_change import SnapshotTarget
from trinitylake_ops.iceberg.types import arrow_to_iceberg_schema, storable, to_iceberg_schema
from trinitylake_ops.iceberg.write.data_files import TARGET_FILE_SIZE_BYTES, identity_columns, write_data_files
from trinitylake_ops.transaction.lakehouse import Lakehouse

AnySchema: TypeAlias = pa.Schema | Schema | Columns
#: Changes a table in a PyIceberg transaction, which is committed together with the written files.
Evolution: TypeAlias = Callable[[Transaction], None]


@dataclass(frozen=True)
class TableWrite:
    """A planned write. It can be pickled and is sent to every process that writes data files."""

    namespace: str
    table: str
    #: Version on which the plan is based.
    base_version: int
    #: Time at which the plan was made by the storage's clock, in milliseconds since the epoch. Files of the write are
    #: not older.
    begun_at_ms: int
    #: Location of the table's metadata when the plan was made; None for a new table.
    base_metadata_location: str | None
    #: Metadata of the table for the write, which is not stored yet.
    metadata: TableMetadata
    #: Writes the files.
    io: StorageFileIO
    #: Updates from the existing metadata to ``metadata``.
    updates: tuple[TableUpdate, ...] = ()

    def write(
        self, batches: Iterable[pa.RecordBatch], *, target_file_size_bytes: int = TARGET_FILE_SIZE_BYTES
    ) -> list[DataFile]:
        """Write Arrow batches as data files; see :func:`trinitylake_ops.iceberg.write.data_files.write_data_files`.

        Error messages contain the table name.
        """
        try:
            return write_data_files(self.io, self.metadata, batches, target_file_size_bytes=target_file_size_bytes)
        except InvalidInputError as error:
            raise InvalidInputError(f"table {self.namespace}.{self.table}: {error.message}") from error


def plan_write(
    lake: Lakehouse,
    namespace: str,
    table: str,
    schema: AnySchema | None = None,
    *,
    partition_by: Sequence[str] | None = None,
    properties: Mapping[str, str] | None = None,
    evolve: Evolution | None = None,
) -> TableWrite:
    """Plan a write to a table, which may not exist yet.

    This writes nothing except the owner file in a new table's folder.

    Args:
        lake: The lakehouse.
        namespace: Namespace of the table.
        table: Name of the table.
        schema: Schema of a new table. Columns that an existing table lacks are added to it.
        partition_by: Columns for identity partitions of a new table. An existing table must have these partitions.
        properties: Iceberg properties of a new table.
        evolve: Changes an existing table with PyIceberg before the write: its schema (``update_schema``), its partition
            spec (``update_spec``) or its properties. These changes become part of the same commit. Errors of this
            function are not caught.

    Returns:
        The plan.

    Raises:
        TableNotFoundError: The table does not exist and no schema was passed.
        UnsupportedTypeError: Iceberg does not have the type of a column.
        InvalidDefinitionError: The schema, partitions or properties are not valid.
        StorageError: A file cannot be read or written.
    """
    snapshot = lake.snapshot()
    catalog = TrinityLakeCatalog.on(SnapshotTarget(snapshot, lake.storage_options))
    writer_io = writing_io(lake)
    wanted_schema = None if schema is None else _iceberg_schema(schema, f"{namespace}.{table}")
    if snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table):
        current = catalog.load_table((namespace, table))
        change = current.transaction()
        if evolve is not None:
            evolve(change)
        extend_schema(change, wanted_schema)
        metadata, updates = change.table_metadata, change._updates
        _check_partitions(metadata, partition_by, f"{namespace}.{table}")
        known_schemas: Sequence[Schema] = current.metadata.schemas
        base_location: str | None = writer_io.location(current.metadata_location)
    else:
        if wanted_schema is None:
            raise TableNotFoundError(f"table {namespace}.{table} does not exist; pass a schema to create it")
        if not snapshot.has_namespace(namespace):
            check_new_name(namespace, "namespace")
        check_new_name(table, "table")
        location = new_table_location(lake.root, snapshot.definition)
        check_defaults([wanted_schema], LATEST_WRITTEN_VERSION)
        metadata, updates = _new_metadata(wanted_schema, location, partition_by or (), properties or {}), ()
        known_schemas, base_location = (), None
    check_format_version(metadata)
    check_new_schemas(metadata, known_schemas)
    identity_columns(metadata.spec(), metadata.schema())
    # A copy of a lakehouse may have no files in the table's folder yet.
    if base_location is None or is_uri(base_location):
        claim_location(lake.storage, metadata.location, snapshot.definition)
    return TableWrite(
        namespace, table, snapshot.version, snapshot.read_at_ms, base_location, metadata, writer_io, updates
    )


def _iceberg_schema(schema: AnySchema, table: str) -> Schema:
    try:
        if isinstance(schema, pa.Schema):
            return arrow_to_iceberg_schema(storable(schema))
        return to_iceberg_schema(schema) if isinstance(schema, Columns) else schema
    except UnsupportedTypeError as error:
        raise UnsupportedTypeError(f"table {table}: {error.message}") from error


def _new_metadata(
    schema: Schema, location: str, partition_by: Sequence[str], properties: Mapping[str, str]
) -> TableMetadata:
    fresh = assign_fresh_schema_ids(schema)
    return new_table_metadata(
        schema=fresh,
        partition_spec=identity_spec(fresh, partition_by),
        sort_order=UNSORTED_SORT_ORDER,
        location=location,
        properties=managed_properties(properties),
    )


def identity_spec(schema: Schema, columns: Sequence[str]) -> PartitionSpec:
    """Return identity partitions by columns. Raises InvalidDefinitionError for a column that the schema lacks."""
    names = set(schema.column_names)
    if unknown := [column for column in columns if column not in names]:
        raise InvalidDefinitionError(
            f"cannot partition by {unknown[0]!r}: the schema has no such column; use one of its columns"
        )
    return PartitionSpec(
        *(
            PartitionField(
                source_id=schema.find_field(column).field_id,
                field_id=PARTITION_FIELD_ID_START + position,
                transform=IdentityTransform(),
                name=column,
            )
            for position, column in enumerate(columns)
        )
    )


def _check_partitions(metadata: TableMetadata, partition_by: Sequence[str] | None, name: str) -> None:
    if partition_by is None:
        return
    current = [field.name for field in metadata.spec().fields]
    if current != list(partition_by):
        raise InvalidDefinitionError(
            f"table {name} is partitioned by {current}, not by {list(partition_by)}; leave partition_by out"
        )


def evolve_to(wanted: Mapping[str, IcebergType | None], *, replaces_table: bool) -> Evolution:
    """Return the schema evolution that makes a table's columns match rows, except for missing columns.

    A type is widened where Iceberg allows it: int to long, float to double, decimals to more digits. If the rows
    replace the whole table, columns that the rows lack are dropped, and columns with other types are replaced with new
    columns of the same name. Columns that are used by partitions, keys or the sort order do not change. Missing columns
    are added later.

    Args:
        wanted: Types of the row columns; None for a column that fits the table column.
        replaces_table: Whether the rows replace the whole table.
    """

    def evolve(change: Transaction) -> None:
        metadata = change.table_metadata
        needed = _needed_columns(metadata)
        with change.update_schema() as update:
            for field in metadata.schema().fields:
                kind = wanted.get(field.name)
                fits = field.name in wanted and (kind is None or _holds(field.field_type, kind))
                if kind is not None and _is_wider(field.field_type, kind):
                    update.update_column((field.name,), field_type=kind)
                elif replaces_table and not fits and field.field_id not in needed:
                    update.delete_column((field.name,))
                    if kind is not None:
                        update.add_column((field.name,), kind)

    return evolve


def _needed_columns(metadata: TableMetadata) -> set[int]:
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    sources = [*metadata.spec().fields, *(order.fields if order is not None else ())]
    return {field.source_id for field in sources} | set(metadata.schema().identifier_field_ids)


def _is_wider(before: IcebergType, after: IcebergType) -> bool:
    """Whether Iceberg can promote a column from one type to another."""
    if before == after or not (isinstance(before, PrimitiveType) and isinstance(after, PrimitiveType)):
        return False
    try:
        return promote(before, after) == after
    except ResolveError:
        return False


def _holds(table: IcebergType, rows: IcebergType) -> bool:
    """Whether a column can store rows of another type without changing its own type."""
    is_number = isinstance(table, DoubleType) and isinstance(rows, IntegerType | LongType)
    return is_number or _plain(table) == _plain(rows) or _is_wider(rows, table)


def _plain(kind: IcebergType) -> str:
    """Return a type without field ids."""
    return str(assign_fresh_schema_ids(Schema(NestedField(1, "of", kind, required=False))))


def extend_schema(change: Transaction, wanted: Schema | None) -> None:
    """Add columns that the table lacks. Existing columns keep their ids.

    Args:
        change: The transaction that changes the table.
        wanted: The wanted columns; None to change nothing.
    """
    if wanted is None:
        return
    with change.update_schema() as update:
        update.union_by_name(wanted)
