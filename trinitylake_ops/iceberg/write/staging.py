"""Write, audit, publish: tables that one process writes and another publishes.

::

    write = plan_write(lake, "flights", "daily", schema, partition_by=("year", "month"))  # driver
    files = write.write(batches)                                                           # executors
    staged = stage_data_files(lake, write, files, replacing=Replace.PARTITIONS)              # driver
    text = staged.to_json()                                                                # to another process
    load_staged(lake, StagedTable.from_json(text)).scan().to_arrow()                       # audit
    with lake.transaction(message="january") as txn:                                       # publish, all or none
        publish(txn, [StagedTable.from_json(text)])

Staging writes data files and Iceberg metadata below the table's location. No version of the lakehouse refers to them.
Files that are never published are orphans. ``StagingCatalog`` provides the same for writers that use PyIceberg's
``append``, ``overwrite`` and ``delete``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Literal, TypeAlias

import pyarrow as pa
from pyiceberg.expressions import BooleanExpression, Or
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CreateTableTransaction, Table, Transaction
from pyiceberg.table import StagedTable as UncommittedTable
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties, Record

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, TransactionExpiredError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.table_change import SnapshotTarget, TransactionTarget
from trinitylake_ops.iceberg.write.data_files import delete_data_files, identity_columns
from trinitylake_ops.iceberg.write.partition_key import (
    PartitionKey,
    PartitionValue,
    check_partitions,
    encode_partitions,
)
from trinitylake_ops.iceberg.write.plan import TableWrite, extend_schema
from trinitylake_ops.iceberg.write.presence import describe_change
from trinitylake_ops.iceberg.write.replacement import add_snapshot, all_files, files_in_partitions, files_matching
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.transaction.catalog_editor import IdOf
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.time_to_live import removed_before_ms
from trinitylake_ops.transaction.transaction import Transaction as LakehouseTransaction
from trinitylake_ops.versions.snapshot import CatalogReader


class Replace(Enum):
    """Which data files the new files replace."""

    NOTHING = "nothing"
    PARTITIONS = "partitions"
    #: Only the files that the staged snapshot removed. The rest of their partitions must not change.
    FILES = "files"
    ALL = "all"


class StagingCatalog(TrinityLakeCatalog):
    """A catalog whose changes are written but not published. :meth:`staged` returns a changed table.

    Reads see the catalog's base version (by default the latest version) and the catalog's own changes. Tables can be
    created, even in namespaces that do not exist yet, and changed. They cannot be dropped or renamed.
    """

    def __init__(self, lake: Lakehouse, name: str = "staging", *, version: int | None = None):
        # This transaction is never committed. It sees its own writes, and so does this catalog.
        self._transaction = lake.transaction(message="staging")
        if version is not None:
            self._transaction.base = lake.snapshot(version)
        super(TrinityLakeCatalog, self).__init__(name)
        self._bind(TransactionTarget(self._transaction, lake.storage_options))

    @property
    def base_version(self) -> int:
        """The version on which this catalog is based."""
        return self._transaction.base.version

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Create a table, and its namespace if it is missing. Parameters and errors are as in the base class."""
        namespace, _ = self.identifier_to_database_and_table(identifier)
        self.create_namespace_if_not_exists((namespace,))
        return super().create_table(identifier, schema, location, partition_spec, sort_order, properties)

    def drop_table(self, identifier: str | Identifier) -> None:
        """Raise InvalidInputError, because tables are dropped in the publishing transaction."""
        raise InvalidInputError(f"cannot drop {identifier} while staging; drop it in the publishing transaction")

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        """Raise InvalidInputError, because tables are renamed in the publishing transaction."""
        raise InvalidInputError(
            f"cannot rename {from_identifier} while staging; rename it in the publishing transaction"
        )

    def staged(self, identifier: str | Identifier) -> StagedTable:
        """Return a table as it would be published. Raises NoSuchTableError, StorageError."""
        namespace, name = self.identifier_to_database_and_table(identifier)
        base = self._transaction.base
        before = base.table(namespace, name) if base.has_table(namespace, name) else None
        definition = self.definition_of(namespace, name)
        return describe_change(self.io, namespace, name, base, before, definition)


def stage_data_files(
    lake: Lakehouse,
    write: TableWrite,
    data_files: Sequence[DataFile],
    *,
    replacing: Replace | str | BooleanExpression | tuple[DataFile, ...] = Replace.NOTHING,
    snapshot_properties: Mapping[str, str] | None = None,
    partitions: Collection[Record] | None = None,
    on_plan: bool = False,
) -> StagedTable:
    """Stage data files that were written for a plan as one Iceberg snapshot.

    A new table is created.

    Args:
        lake: The lakehouse.
        write: The plan.
        data_files: The files.
        replacing: Which files the new files replace: none, all files of their partitions, all files, the listed files,
            or the files selected by a filter over partition columns, an expression or a string such as ``"year = 2013
            and month = 2"``.
        snapshot_properties: Properties of the snapshot.
        partitions: The partitions of a filter or of listed files, if the new files contain no rows of other partitions.
            Other writers may then change the rest of the table until the staged table is published.
        on_plan: Whether to stage the table on the version of the plan even if the table has changed since.
            ``publish_once`` detects conflicts.

    Returns:
        The staged table.

    Raises:
        CommitConflictError: The table changed since the plan.
        InvalidInputError: A filter matches only some rows of a file.
        StorageError: A file cannot be read or written.
    """
    catalog = StagingCatalog(lake, version=write.base_version if on_plan else None)
    identifier = (write.namespace, write.table)
    _check_unchanged(catalog.target.reader(), identifier, write.base_metadata_location, write.base_version)
    if write.base_metadata_location is None:
        catalog.create_namespace_if_not_exists((write.namespace,))
        change: Transaction = CreateTableTransaction(
            UncommittedTable(identifier, write.metadata, "", catalog.io, catalog)
        )
        removed: list[DataFile] = []
    else:
        table = catalog.load_table(identifier)
        change = table.transaction()
        change._apply(write.updates, ())
        removed = files_to_remove(table, data_files, replacing)
    add_snapshot(change, data_files, removed, dict(snapshot_properties or {}))
    change.commit_transaction()
    staged = replace(catalog.staged(identifier), begun_at_ms=write.begun_at_ms)
    if isinstance(replacing, Replace):
        partitions = [file.partition for file in data_files] if replacing is Replace.PARTITIONS else ()
    if partitions is None:
        return staged
    values = encode_partitions(partitions, write.metadata.spec(), write.metadata.schema())
    listed = Replace.FILES if isinstance(replacing, tuple) else Replace.PARTITIONS
    kind = replacing if isinstance(replacing, Replace) else listed
    return replace(staged, replaces=kind.value, replaced_partitions=values)


def stage_appended(
    lake: Lakehouse,
    write: TableWrite,
    data_files: Sequence[DataFile],
    *,
    snapshot_properties: Mapping[str, str] | None = None,
) -> StagedTable:
    """Append data files that were written for a plan to the current table, without publishing them.

    Changes made by other writers since the plan do not conflict as long as the files still fit the table.

    Args:
        lake: The lakehouse.
        write: The plan.
        data_files: The files.
        snapshot_properties: Properties of the snapshot.

    Raises:
        CommitConflictError: The table was dropped or recreated, has another partition spec, or lacks columns of the
            files.
        StorageError: A file cannot be read or written.
    """
    if write.base_metadata_location is None:
        return stage_data_files(lake, write, data_files, snapshot_properties=snapshot_properties)
    catalog = StagingCatalog(lake)
    identifier = (write.namespace, write.table)
    reader = catalog.target.reader()
    if not (reader.has_namespace(write.namespace) and reader.has_table(*identifier)):
        raise staging_conflict(identifier, write.base_version, "it was dropped")
    table = catalog.load_table(identifier)
    if table.metadata.table_uuid != write.metadata.table_uuid:
        raise staging_conflict(identifier, write.base_version, "another table has its name")
    change = table.transaction()
    planned = write.metadata.schema()
    extend_schema(change, planned)
    now = {field.field_id: field for field in change.table_metadata.schema().fields}
    is_same_spec = change.table_metadata.default_spec_id == write.metadata.default_spec_id
    if not is_same_spec or any(now.get(field.field_id) != field for field in planned.fields):
        raise staging_conflict(identifier, write.base_version, "its columns or partitions were changed")
    add_snapshot(change, data_files, [], dict(snapshot_properties or {}))
    change.commit_transaction()
    return replace(catalog.staged(identifier), begun_at_ms=write.begun_at_ms, replaces=Replace.NOTHING.value)


def load_staged(lake: Lakehouse, staged: StagedTable) -> Table:
    """Return a staged table for reading, published or not.

    Args:
        lake: The lakehouse.
        staged: The staged table.

    Raises:
        FileMissingError: Files of the table were deleted. Files of tables that are never published are orphans.
    """
    catalog = TrinityLakeCatalog.on(SnapshotTarget(lake.snapshot(), lake.storage_options))
    uri = metadata_uri(staged.table_def, lake.root)
    metadata, io = table_metadata(staged.table_def, catalog.io), catalog.io.for_table(staged.table_def)
    return Table((staged.namespace, staged.table), metadata, uri, io, catalog)


def publish(
    transaction: LakehouseTransaction, staged_tables: Iterable[StagedTable], *, create_namespaces: bool = True
) -> None:
    """Add staged tables to an open transaction, whose commit publishes all of them.

    Args:
        transaction: The transaction. Its age counts from the start of staging.
        staged_tables: The tables.
        create_namespaces: Whether to create missing namespaces of new tables.

    Raises:
        CommitConflictError: A table changed since it was staged. The transaction's commit also checks later versions.
        TransactionExpiredError: Staging began longer ago than the lakehouse's ``txn_ttl_millis``, so its files may have
            been removed as orphans.
        NamespaceNotFoundError: The namespace of a new table does not exist.
    """
    for staged in staged_tables:
        _check_not_expired(transaction, staged)
        transaction.backdate(staged.begun_at_ms)
        identifier = (staged.namespace, staged.table)
        is_new = staged.base_metadata_location is None
        if is_new and create_namespaces and not transaction.has_namespace(staged.namespace):
            transaction.create_namespace(staged.namespace)
        current = _check_unchanged(transaction, identifier, staged.base_metadata_location, staged.base_version)
        if current is None:
            transaction.create_table(*identifier, staged.table_def, id_of=IdOf.STAGED_TABLE)
        elif current.id != staged.table_def.id:
            raise staging_conflict(identifier, staged.base_version, "another table has its name")
        elif staged.metadata_location != staged.base_metadata_location:
            # Keep lakehouse properties that concurrent commits changed.
            mirrored = replace(
                staged.table_def,
                properties=current.properties,
                format_properties={
                    **current.format_properties,
                    METADATA_LOCATION: staged.metadata_location,
                },
            )
            transaction.alter_table(*identifier, mirrored)


def files_to_remove(
    table: Table, added: Sequence[DataFile], replacing: Replace | str | BooleanExpression | tuple[DataFile, ...]
) -> list[DataFile]:
    """Return the data files of a table that new files replace. Parameters are as for :func:`stage_data_files`."""
    if isinstance(replacing, tuple):
        return list(replacing)
    if not isinstance(replacing, Replace):
        return files_matching(table, replacing)
    if replacing is Replace.ALL:
        return all_files(table)
    if replacing is Replace.NOTHING:
        return []
    return files_in_partitions(table, {data_file.partition for data_file in added})


def _check_unchanged(
    reader: CatalogReader, identifier: tuple[str, str], base_metadata_location: str | None, base_version: int
) -> TableDef | None:
    """Return a table's current definition, None for a new table. Raises CommitConflictError if the table changed."""
    exists = reader.has_namespace(identifier[0]) and reader.has_table(*identifier)
    current = reader.table(*identifier) if exists else None
    if current is None and base_metadata_location is not None:
        raise staging_conflict(identifier, base_version, "it was dropped")
    if current is not None and base_metadata_location is None:
        raise staging_conflict(identifier, base_version, "it was created")
    if current is not None and current.format_properties.get(METADATA_LOCATION) != base_metadata_location:
        raise staging_conflict(identifier, base_version, "it was changed")
    return current


def _check_not_expired(transaction: LakehouseTransaction, staged: StagedTable) -> None:
    """Raise TransactionExpiredError for a table that was staged too long ago, by the storage's clock."""
    storage, definition = transaction.base.files.storage, transaction.base.definition
    cutoff_ms = removed_before_ms(storage, definition, staged.begun_at_ms)
    age_ms = storage.now_ms() - staged.begun_at_ms
    if age_ms > definition.txn_ttl_millis or staged.begun_at_ms < cutoff_ms:
        raise TransactionExpiredError(
            f"table {staged.namespace}.{staged.table} was staged {age_ms} ms ago, more than txn_ttl_millis"
            f" ({definition.txn_ttl_millis}), or before orphans were removed: its files may be deleted; stage it again"
        )


def staging_conflict(identifier: tuple[str, str], base_version: int, how: str) -> CommitConflictError:
    """Return the error for a table that other writers changed since it was staged.

    Args:
        identifier: Namespace and name of the table.
        base_version: The version on which it was staged.
        how: What changed.
    """
    name = ".".join(identifier)
    return CommitConflictError(
        f"table {name} was staged on version {base_version} and since then {how}; stage it again",
        conflicts=(f"table {name}: staged on version {base_version}, {how} since",),
        base_version=base_version,
    )


Mode: TypeAlias = Literal["replace_table", "replace_partitions", "append"]

_REPLACING: Mapping[str, Replace] = {
    "replace_table": Replace.ALL,
    "replace_partitions": Replace.PARTITIONS,
    "append": Replace.NOTHING,
}


def check_mode(mode: str) -> None:
    """Raise InvalidInputError for an unknown mode."""
    if mode not in _REPLACING:
        raise InvalidInputError(f"mode {mode!r} is not supported; use one of {', '.join(_REPLACING)}")


def replaced_by(
    plan: TableWrite,
    mode: Mode,
    partitions: Sequence[Mapping[str, PartitionValue]] | None,
    columns: Collection[str],
) -> tuple[frozenset[Record] | None, Replace | BooleanExpression]:
    """Return the allowed partitions of rows (None for any), and the files that the rows replace.

    Appended rows may also be limited to some partitions, whose existing rows are kept.

    Args:
        plan: The write.
        mode: What the rows replace.
        partitions: Values of the partitions to which rows may belong; None for any partition.
        columns: Columns of the rows.

    Raises:
        InvalidInputError: The mode is not valid for the table or the partitions, or the rows lack required columns.
    """
    replacing, name = _REPLACING[mode], f"{plan.namespace}.{plan.table}"
    if replacing is Replace.ALL and not columns:
        raise InvalidInputError(
            f"table {name}: the new data has no columns; add the table's columns, even if there are no rows"
        )
    if replacing is Replace.PARTITIONS and plan.metadata.spec().is_unpartitioned():
        raise InvalidInputError(f"table {name} is unpartitioned; use replace_table or append")
    if replacing is Replace.PARTITIONS:
        partition_columns = identity_columns(plan.metadata.spec(), plan.metadata.schema())
        if missing := [column for column in partition_columns if column not in columns]:
            raise InvalidInputError(f"table {name}: the new rows lack the partition column {missing[0]!r}; add it")
    if partitions is None:
        return None, replacing
    if replacing is Replace.ALL or not partitions:
        raise InvalidInputError(
            "partitions is not valid: use it with replace_partitions or append, and name at least one"
        )
    keys = [PartitionKey.of(plan.metadata, values) for values in partitions]
    if replacing is Replace.NOTHING:
        return frozenset(key.record for key in keys), replacing
    rows = keys[0].rows if len(keys) == 1 else Or(*(key.rows for key in keys))
    return frozenset(key.record for key in keys), rows


def stage_replacing(
    lake: Lakehouse,
    plan: TableWrite,
    data_files: Sequence[DataFile],
    wanted: frozenset[Record] | None,
    replacing: Replace | BooleanExpression,
) -> StagedTable:
    """Stage data files that were written for a plan. If an error occurs, the files are deleted.

    Args:
        lake: The lakehouse.
        plan: The plan.
        data_files: The files.
        wanted: Allowed partitions, from :func:`replaced_by`.
        replacing: The replaced files, from :func:`replaced_by`.

    Raises:
        InvalidInputError: A file belongs to another partition.
        CommitConflictError: The table changed.
        StorageError: A file cannot be read or written.
    """
    try:
        check_partitions(data_files, wanted, [field.name for field in plan.metadata.spec().fields])
        return stage_data_files(lake, plan, data_files, replacing=replacing, partitions=wanted, on_plan=True)
    except BaseException:
        delete_data_files(plan.io, data_files)
        raise
