"""A pyiceberg catalog over a lakehouse.

::

    from pyiceberg.catalog import load_catalog
    catalog = load_catalog("lake", **{
        "py-catalog-impl": "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog",
        "root": "file:///data/lake",         # the lakehouse
        "version": "12",                     # optional: a version, or the name of an export; read-only
        "timestamp": "1735689600000",        # or the version at a time, milliseconds or ISO 8601; read-only
        "storage.fsync": "false",            # storage options, each with the prefix "storage."
    })
    catalog.load_table("flights.daily").scan().to_arrow()

The ``properties`` of an open catalog hold no credentials. So they do not reopen a lakehouse that needs some.

Its exceptions are pyiceberg's own (NoSuchTableError, CommitFailedException, ...), as engines expect. A failure that
pyiceberg has no exception for is raised as this package's typed error. Namespaces have one level. Names that hold a dot
are given as tuples.
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
    loaded_now,
    resolve_new_location,
    staged_on,
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
    """The tables of a lakehouse: its latest version, an older one, or an open transaction.

    Callers make one with ``load_catalog`` (see the module) or with :meth:`on`. Raises InvalidInputError when ``root``
    is missing, or when both ``version`` and ``timestamp`` are given. Raises what ``Lakehouse.open`` and
    ``Lakehouse.snapshot`` raise.
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
        shown = public_properties(self.properties, target.storage.root, target.storage_options)
        self.properties = {**shown, PY_IO_IMPL: _FILE_IO}
        self.target = target
        #: Metadata files that were parsed before; None for a catalog that keeps their bytes alone.
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
        """Create a managed table. ``location`` is left out: the lakehouse chooses it.

        Raises TableAlreadyExistsError, NoSuchNamespaceError, UnsupportedTypeError,
        InvalidDefinitionError.
        """
        namespace, table = self.identifier_to_database_and_table(identifier)
        try:
            with changing(self.target, self.io, f"create table {namespace}.{table}") as change:
                change.require_namespace(namespace)
                if change.writer.has_table(namespace, table):
                    raise TableAlreadyExistsError(f"Table already exists: {namespace}.{table}")
                lakehouse = change.writer.base.definition
                place = resolve_new_location(identifier, location, self.io.root, lakehouse)
                staged = self._create_staged_table(identifier, schema, place, partition_spec, sort_order, properties)
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
        """Begin to create a managed table and to fill it, as one version.

        The table's owner file is written at once, as data files may follow from now on. Raises UnsupportedTypeError,
        InvalidDefinitionError, StorageError, and InvalidInputError when read-only.
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
        """Return a managed table that no version has, with its place, where the owner file is written.

        Raises as :meth:`create_table_transaction`.
        """
        if self.target.read_only:
            raise errors.InvalidInputError("this catalog only reads; open one on the latest version to create a table")
        lakehouse = self.target.reader().definition
        place = resolve_new_location(identifier, location, self.io.root, lakehouse)
        staged = self._create_staged_table(identifier, schema, place, partition_spec, sort_order, properties)
        staged.config = loaded_now(self.io.storage)
        claim_location(self.io.storage, staged.metadata.location, lakehouse)
        return staged

    def load_table(self, identifier: str | Identifier) -> Table:
        """Return a table. Raises NoSuchTableError, NoSuchIcebergTableError for other formats, StorageError."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        return self.load_defined(namespace, table, self.definition_of(namespace, table))

    def table_exists(self, identifier: str | Identifier) -> bool:
        """Whether an Iceberg table of that name exists. Its files are not read."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        try:
            self.definition_of(namespace, table)
        except NoSuchTableError:
            return False
        return True

    def register_table(self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False) -> Table:
        """Add a table by the URI of its metadata file. With ``overwrite`` it replaces a table of that name.

        The table is EXTERNAL, so its files are never deleted. Raises TableAlreadyExistsError, NoSuchNamespaceError,
        UnsupportedTypeError, StorageError. Raises InvalidInputError for a file in a table's folder of this lakehouse,
        which a purge may be about to delete. For such files, ``operations.register_table`` waits for purges.
        """
        namespace, table = self.identifier_to_database_and_table(identifier)
        uri = registered_uri(self.io.root, metadata_location)
        with changing(self.target, self.io, f"register table {namespace}.{table}") as change:
            if self.io.folders.is_own_file(uri):
                raise errors.InvalidInputError(
                    f"{metadata_location!r} is of a table of this lakehouse; bring it back with the command"
                    " register-table, or operations.register_table, which let no purge run beside them"
                )
            metadata, definition = registered_table(registering_io(self.io, [uri]), uri, change.writer.base.definition)
            if overwrite and change.writer.has_table(namespace, table):
                change.writer.drop_table(namespace, table)
            change.writer.create_table(namespace, table, definition)
        return self._table((namespace, table), metadata, uri, self.io.for_table(definition), definition)

    def drop_table(self, identifier: str | Identifier) -> None:
        """Drop a table. Older versions still read it, so its files stay. Raises NoSuchTableError."""
        namespace, table = self.identifier_to_database_and_table(identifier, NoSuchTableError)
        with changing(self.target, self.io, f"drop table {namespace}.{table}") as change:
            change.writer.drop_table(namespace, table)

    def purge_table(self, identifier: str | Identifier) -> None:
        """Drop a table. Its files are deleted when no kept version reads them: expire, then purge the lakehouse."""
        self.drop_table(identifier)
        logger.info("files of %s stay until the versions that read them are expired and purged", identifier)

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Rename a table, also into another namespace. Its id and files stay.

        Raises NoSuchTableError, TableAlreadyExistsError, NoSuchNamespaceError.
        """
        self.move_table(from_identifier, to_identifier)
        return self.load_table(self.identifier_to_database_and_table(to_identifier))

    def move_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> None:
        """Rename a table and do not load it. Raises as :meth:`rename_table`."""
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
        """Write a table's new metadata and point the lakehouse to it.

        Raises CommitFailedException when the table has changed meanwhile (pyiceberg then retries), and
        CommitStateUnknownException when the outcome could not be read back. Raises InvalidDefinitionError when the
        update would move a managed table, let Iceberg delete files or name code, and for a registered table. Raises
        LocationNotAllowedError for a manifest list or statistics file that the table cannot have.
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
            staged = staged_on(current, (namespace, name), stage)
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

    # Methods that MetastoreCatalog asks of its subclasses

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
        if isinstance(schema, Schema):  # pyiceberg assigns new ids, and drops default values
            check_columns([schema])
            check_defaults([schema], staged.metadata.format_version)
        return staged

    # Between definitions and tables

    def definition_of(self, namespace: str, table: str) -> TableDef:
        """Return the definition of an Iceberg table. Raises as :meth:`load_table`, which then reads the files."""
        try:
            definition = self.target.reader().table(namespace, table)
        except (errors.TableNotFoundError, errors.NamespaceNotFoundError) as error:
            raise NoSuchTableError(f"Table does not exist: {namespace}.{table}") from error
        return check_format(definition, f"{namespace}.{table}")

    def load_defined(self, namespace: str, table: str, definition: TableDef) -> Table:
        """Return the table of a definition that was just read. Raises StorageError."""
        uri = metadata_uri(definition, self.io.root)
        metadata = table_metadata(definition, self.io, self.parsed)
        return self._table((namespace, table), metadata, uri, self.io.for_table(definition), definition)

    def _current(self, table: Table, namespace: str, name: str, definition: TableDef) -> Table:
        """Return the table as the lakehouse has it. It is the caller's own, unless that is stale."""
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
        config = loaded_now(self.io.storage, is_registered=definition is not None and not definition.is_managed)
        return LoadedTable(identifier, metadata, uri, io or self.io, self, config)

    def _definition(self, staged: StagedTable, base: TableDef | None = None) -> TableDef:
        table_id = table_id_of(staged.metadata.location) or ""
        return table_definition(staged.metadata, staged.metadata_location, self.io.root, base=base, table_id=table_id)


def catalog_for(
    transaction: Transaction, storage_options: Mapping[str, str] | None = None, name: str = "trinitylake"
) -> TrinityLakeCatalog:
    """Return a catalog whose changes join an open transaction: many tables, one version.

    ``storage_options`` are for files beyond the lakehouse's root. Commits of pyiceberg only stage their changes there.
    The transaction's own commit publishes all of them or none.
    """
    return TrinityLakeCatalog.on(TransactionTarget(transaction, storage_options), name)


def catalog_at(
    lake: Lakehouse,
    version: int | str | None = None,
    timestamp: datetime | int | None = None,
    name: str = "trinitylake",
) -> TrinityLakeCatalog:
    """Return a catalog of an open lakehouse.

    At a version or time it is read-only; otherwise each change is a commit on the latest version. Raises what
    ``Lakehouse.snapshot`` raises.
    """
    if version is None and timestamp is None:
        return TrinityLakeCatalog.on(LatestTarget(lake), name)
    return TrinityLakeCatalog.on(SnapshotTarget(lake.snapshot(version, timestamp), lake.storage_options), name)
