"""A pyiceberg catalog over a lakehouse.

::

    from pyiceberg.catalog import load_catalog
    catalog = load_catalog("lake", **{ "py-catalog-impl": "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog", "root":
        "file:///data/lake", # the lakehouse "version": "12", # optional: a version, or the name of an export; read-only
        "timestamp": "1735689600000", # or a time (milliseconds or ISO 8601); read-only "storage.fsync": "false", #
        storage options, each with the prefix "storage."
    })
    catalog.load_table("flights.daily").scan().to_arrow()

The ``properties`` of an open catalog contain no credentials, so they cannot reopen a lakehouse that needs credentials.

Methods raise PyIceberg's exceptions (NoSuchTableError, CommitFailedException, ...), as engines expect. For failures
without a matching PyIceberg exception, they raise a typed error of this package. Namespaces have one level. Pass names
that contain a dot as tuples.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Self

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io import PY_IO_IMPL, FileIO
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, StagedTable, Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import SetPropertiesUpdate, TableRequirement, TableUpdate
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties, TableVersion

from trinitylake_ops import errors
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import is_table_metadata_path
from trinitylake_ops.format.limits import validate_properties
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.folder_owners import public_properties
from trinitylake_ops.iceberg.loaded_table import (
    LoadedTable,
    backdate,
    check_format,
    check_update,
    commit_message,
    commit_response,
    load_time_config,
    resolve_new_location,
    stage_update,
    with_rising_times,
)
from trinitylake_ops.iceberg.managed import (
    claim_location,
    managed_properties,
    metadata_uri,
    table_definition,
    table_id_of,
)
from trinitylake_ops.iceberg.metadata import ParsedMetadata, table_metadata
from trinitylake_ops.iceberg.metadata_rules import check_columns, check_defaults, check_new_layouts, check_new_schemas
from trinitylake_ops.iceberg.namespaces import NamespaceCatalog
from trinitylake_ops.iceberg.properties import check_not_reserved, check_settable
from trinitylake_ops.iceberg.table_change import (
    CatalogTarget,
    LatestTarget,
    SnapshotTarget,
    TransactionTarget,
    changing,
    registered_table,
    registered_uri,
    registering_io,
    target_of,
)
from trinitylake_ops.iceberg.totals import with_totals
from trinitylake_ops.iceberg.types import check_arrow_schema, with_typed_specs
from trinitylake_ops.iceberg.updates import named_files
from trinitylake_ops.storage.cache.storage import private_cache_view
from trinitylake_ops.transaction.catalog_editor import IdOf
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_FILE_IO = "trinitylake_ops.iceberg.io.file_io.StorageFileIO"


class TrinityLakeCatalog(NamespaceCatalog):
    """The tables of a lakehouse in its latest version, in an earlier version, or in an open transaction.

    Create a catalog with ``load_catalog`` (see the module) or with :meth:`on`. The constructor raises InvalidInputError
    if ``root`` is missing, or if both ``version`` and ``timestamp`` are set, and the errors of ``Lakehouse.open`` and
    ``Lakehouse.snapshot``.
    """

    def __init__(self, name: str, **properties: str):
        super().__init__(name, **properties)
        self._bind(target_of(properties))

    @classmethod
    def on(cls, target: CatalogTarget, name: str = "trinitylake") -> Self:
        """Return a catalog that reads and changes ``target``."""
        catalog = cls.__new__(cls)
        MetastoreCatalog.__init__(catalog, name)
        catalog._bind(target)
        return catalog

    def _bind(self, target: CatalogTarget) -> None:
        visible = public_properties(self.properties, target.storage.root, target.storage_options)
        self.properties = {**visible, PY_IO_IMPL: _FILE_IO}
        self.target = target
        #: Cache of parsed metadata files; None if the catalog caches only their bytes.
        self.parsed: ParsedMetadata | None = None
        storage = private_cache_view(target.storage, is_table_metadata_path, target.storage_options)
        self.io = StorageFileIO.on(storage, target.storage_options, read_only=target.read_only, names=target.names)

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create a managed table.

        Args:
            identifier: Namespace and name.
            schema: Iceberg schema or Arrow schema.
            location: Must be omitted, because the lakehouse chooses the location.
            partition_spec: Partitioning of the table.
            sort_order: Sort order of the table.
            properties: Table properties.

        Returns:
            The table, as committed.

        Raises:
            TableAlreadyExistsError: A table with that name exists.
            NoSuchNamespaceError: The namespace does not exist.
            UnsupportedTypeError: The schema has a type that the format version cannot store.
            InvalidDefinitionError: The schema or a property is not allowed.
        """
        namespace, table = self.identifier_to_database_and_table(identifier)
        try:
            with changing(self.target, self.io, f"create table {namespace}.{table}") as change:
                change.require_namespace(namespace)
                if change.writer.has_table(namespace, table):
                    raise TableAlreadyExistsError(f"Table already exists: {namespace}.{table}")
                lakehouse = change.writer.base.definition
                new_location = resolve_new_location(identifier, location, self.io.root, lakehouse)
                staged = self._create_staged_table(
                    identifier, schema, new_location, partition_spec, sort_order, properties
                )
                change.write_new_table(staged, lakehouse)
                change.writer.create_table(namespace, table, self._definition(staged), id_of=IdOf.NEW_TABLE)
        except CommitFailedException as error:
            if self.target.reader().has_table(namespace, table):
                raise TableAlreadyExistsError(f"Table already exists: {namespace}.{table}") from error
            raise
        return self._table((namespace, table), with_typed_specs(staged.metadata), staged.metadata_location)

    def create_table_transaction(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> CreateTableTransaction:
        """Start a transaction that creates and fills a managed table in one version.

        Data files may be written as soon as this method returns, so the table's owner file is written immediately. The
        parameters are the same as for :meth:`create_table`.

        Raises:
            UnsupportedTypeError: The schema has a type that the format version cannot store.
            InvalidDefinitionError: The schema or a property is not allowed.
            InvalidInputError: The catalog is read-only.
            StorageError: The owner file cannot be written.
        """
        staged = self.stage_table(identifier, schema, location, partition_spec, sort_order, properties)
        if self.io.writes_pending(staged.metadata.location):
            staged.io = self.io.for_change()
        return CreateTableTransaction(staged)

    def stage_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> StagedTable:
        """Return a managed table that no version contains yet, and write its owner file.

        Parameters and errors are the same as for :meth:`create_table_transaction`.
        """
        if self.target.read_only:
            raise errors.InvalidInputError(
                "this catalog is read-only; open one on the latest version to create a table"
            )
        lakehouse = self.target.reader().definition
        new_location = resolve_new_location(identifier, location, self.io.root, lakehouse)
        staged = self._create_staged_table(identifier, schema, new_location, partition_spec, sort_order, properties)
        staged.config = load_time_config(self.io.storage)
        claim_location(self.io.storage, staged.metadata.location, lakehouse)
        return staged

    def load_table(self, identifier: str | Identifier) -> Table:
        """Load a table. Raises NoSuchTableError, NoSuchIcebergTableError for other formats, StorageError."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        return self.load_defined(namespace, table, self.definition_of(namespace, table))

    def table_exists(self, identifier: str | Identifier) -> bool:
        """Whether an Iceberg table with that name exists. Does not read the table's files."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        try:
            self.definition_of(namespace, table)
        except NoSuchTableError:
            return False
        return True

    def register_table(self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False) -> Table:
        """Register a table by the URI of its metadata file.

        The table becomes EXTERNAL, so its files are never deleted.

        Args:
            identifier: Namespace and name.
            metadata_location: URI of the metadata file.
            overwrite: Whether to replace an existing table with that name.

        Returns:
            The registered table.

        Raises:
            TableAlreadyExistsError: A table with that name exists and ``overwrite`` is False.
            NoSuchNamespaceError: The namespace does not exist.
            UnsupportedTypeError: The table has a type that cannot be read.
            InvalidInputError: The file is in the folder of a table of this lakehouse, so a purge may be about to delete
                it. Use ``operations.register_table``, which waits for purges.
            StorageError: The metadata file cannot be read.
        """
        namespace, table = self.identifier_to_database_and_table(identifier)
        uri = registered_uri(self.io.root, metadata_location)
        with changing(self.target, self.io, f"register table {namespace}.{table}") as change:
            if self.io.folders.is_own_file(uri):
                raise errors.InvalidInputError(
                    f"{metadata_location!r} belongs to a table of this lakehouse; register it with the command"
                    " register-table or with operations.register_table, which exclude concurrent purges"
                )
            metadata, definition = registered_table(registering_io(self.io, [uri]), uri, change.writer.base.definition)
            if overwrite and change.writer.has_table(namespace, table):
                change.writer.drop_table(namespace, table)
            change.writer.create_table(namespace, table, definition)
        return self._table((namespace, table), metadata, uri, self.io.for_table(definition), definition)

    def drop_table(self, identifier: str | Identifier) -> None:
        """Drop a table. Its files remain because earlier versions read them. Raises NoSuchTableError."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        with changing(self.target, self.io, f"drop table {namespace}.{table}") as change:
            change.writer.drop_table(namespace, table)

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop a table. To delete its files, expire the versions that read them, then purge the lakehouse."""
        self.drop_table(identifier)
        logger.info("files of %s remain until the versions that read them are expired and purged", identifier)

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Rename a table, possibly into another namespace. Its id and files do not change.

        Args:
            from_identifier: Current namespace and name.
            to_identifier: New namespace and name.

        Returns:
            The renamed table.

        Raises:
            NoSuchTableError: The table does not exist.
            TableAlreadyExistsError: The new name is in use.
            NoSuchNamespaceError: The new namespace does not exist.
        """
        self.move_table(from_identifier, to_identifier)
        return self.load_table(self.identifier_to_database_and_table(to_identifier))

    def move_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> None:
        """Rename a table without loading it. Parameters and errors are the same as for :meth:`rename_table`."""
        old_namespace, old_table = self.identifier_to_database_and_table(from_identifier, NoSuchTableError)
        namespace, table = self.identifier_to_database_and_table(to_identifier)
        with changing(
            self.target, self.io, f"rename table {old_namespace}.{old_table} to {namespace}.{table}"
        ) as change:
            change.require_namespace(namespace)
            definition = change.writer.table(old_namespace, old_table)
            change.writer.create_table(namespace, table, definition)
            change.writer.drop_table(old_namespace, old_table)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Write a table's new metadata and commit a version that refers to it.

        Args:
            table: The table as the caller loaded it.
            requirements: Conditions on the current metadata.
            updates: Changes to the metadata.

        Returns:
            The committed metadata and its location.

        Raises:
            CommitFailedException: The table changed since it was loaded. PyIceberg retries.
            CommitStateUnknownException: Whether the commit succeeded could not be determined.
            InvalidDefinitionError: The table is registered, or the update would move a managed table, allow Iceberg to
                delete files, or name a class to load.
            LocationNotAllowedError: The table may not refer to the location of a manifest list or statistics file.
        """
        namespace, name = self.identifier_to_database_and_table(table.name(), NoSuchTableError)
        io = table.io if isinstance(table.io, StorageFileIO) else self.io
        for update in updates:
            if isinstance(update, SetPropertiesUpdate):
                check_settable(update.updates)
                check_not_reserved(update.updates)
        with changing(self.target, self.io, commit_message(f"{namespace}.{name}", updates), io) as change:
            writer = change.writer
            base = writer.table(namespace, name) if writer.has_table(namespace, name) else None
            current = self._current(table, namespace, name, base) if base is not None else None
            before = None if current is None else current.metadata
            updates = with_totals(with_rising_times(updates, before), before, io)
            stage = functools.partial(self._update_and_stage_table, requirements=requirements, updates=updates)
            staged = stage_update(current, (namespace, name), stage)
            if current is not None and staged.metadata == current.metadata:
                return commit_response(current)
            check_update(f"{namespace}.{name}", staged.metadata, current, base)
            own_io = io.for_managed(table_id_of(staged.metadata.location) or "")
            for uri in named_files(updates):
                own_io.check_may_have(uri)
            backdate(writer, table, staged.metadata, updates, io)
            change.write_metadata(staged, before)
            definition = self._definition(staged, base)
            if base is None:
                writer.create_table(namespace, name, definition, id_of=IdOf.STAGED_TABLE)
            else:
                writer.alter_table(namespace, name, definition)
        return commit_response(staged)

    # Hooks called by MetastoreCatalog

    @staticmethod
    def _convert_schema_if_needed(
        schema: Schema | pa.Schema, format_version: TableVersion = TableProperties.DEFAULT_FORMAT_VERSION
    ) -> Schema:
        if not isinstance(schema, Schema):
            check_arrow_schema(schema)
        return Catalog._convert_schema_if_needed(schema, format_version)

    def _load_file_io(self, properties: Properties = EMPTY_DICT, location: str | None = None) -> FileIO:
        return self.io

    def _create_staged_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> StagedTable:
        staged = super()._create_staged_table(
            identifier, schema, location, partition_spec, sort_order, managed_properties(properties)
        )
        check_new_schemas(staged.metadata)
        check_new_layouts(staged.metadata)
        validate_properties("the new table", staged.metadata.properties)
        if isinstance(schema, Schema):  # the staged metadata has new ids and lacks the default values
            check_columns([schema])
            check_defaults([schema], staged.metadata.format_version)
        return staged

    # Definitions and tables

    def definition_of(self, namespace: str, table: str) -> TableDef:
        """Return an Iceberg table's definition without reading its files. Raises the errors of :meth:`load_table`."""
        try:
            definition = self.target.reader().table(namespace, table)
        except (errors.TableNotFoundError, errors.NamespaceNotFoundError) as error:
            raise NoSuchTableError(f"Table does not exist: {namespace}.{table}") from error
        return check_format(definition, f"{namespace}.{table}")

    def load_defined(self, namespace: str, table: str, definition: TableDef) -> Table:
        """Return the table for a definition that has just been read.

        Args:
            namespace: The table's namespace.
            table: The table's name.
            definition: The table's current definition.

        Raises:
            StorageError: The metadata file cannot be read.
        """
        uri = metadata_uri(definition, self.io.root)
        metadata = table_metadata(definition, self.io, self.parsed)
        return self._table((namespace, table), metadata, uri, self.io.for_table(definition), definition)

    def _current(self, table: Table, namespace: str, name: str, definition: TableDef) -> Table:
        """Return the current table of the lakehouse: the caller's table, unless it is stale."""
        check_format(definition, f"{namespace}.{name}")
        if table.metadata_location == metadata_uri(definition, self.io.root):
            return table
        return self.load_defined(namespace, name, definition)

    def _table(
        self,
        identifier: Identifier,
        metadata: TableMetadata,
        uri: str,
        io: StorageFileIO | None = None,
        definition: TableDef | None = None,
    ) -> Table:
        config = load_time_config(self.io.storage, is_registered=definition is not None and not definition.is_managed)
        return LoadedTable(identifier, metadata, uri, io or self.io, self, config)

    def _definition(self, staged: StagedTable, base: TableDef | None = None) -> TableDef:
        table_id = table_id_of(staged.metadata.location) or ""
        return table_definition(staged.metadata, staged.metadata_location, self.io.root, base=base, table_id=table_id)


def catalog_for(
    transaction: Transaction, storage_options: Mapping[str, str] | None = None, name: str = "trinitylake"
) -> TrinityLakeCatalog:
    """Return a catalog whose changes join an open transaction, so that many tables change in one version.

    PyIceberg's commits only stage changes in the transaction. The commit of the transaction publishes all changes or
    none.

    Args:
        transaction: The open transaction.
        storage_options: Options for storages outside the lakehouse's root.
        name: Name of the catalog.
    """
    return TrinityLakeCatalog.on(TransactionTarget(transaction, storage_options), name)


def catalog_at(
    lake: Lakehouse,
    version: int | str | None = None,
    timestamp: datetime | int | None = None,
    name: str = "trinitylake",
) -> TrinityLakeCatalog:
    """Return a catalog of an open lakehouse.

    With a version or timestamp the catalog is read-only. Otherwise each change is committed as a new version based on
    the latest one.

    Args:
        lake: The lakehouse.
        version: Version number or name of an export.
        timestamp: Point in time, as a datetime or in milliseconds since the epoch.
        name: Name of the catalog.

    Raises:
        TrinityLakeError: The version cannot be resolved, see ``Lakehouse.snapshot``.
    """
    if version is None and timestamp is None:
        return TrinityLakeCatalog.on(LatestTarget(lake), name)
    return TrinityLakeCatalog.on(SnapshotTarget(lake.snapshot(version, timestamp), lake.storage_options), name)
