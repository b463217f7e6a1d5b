"""The table class of the catalog, and checks of changes before they are committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from pyiceberg.exceptions import NoSuchIcebergTableError
from pyiceberg.table import CommitTableResponse, StagedTable, Table
from pyiceberg.table import Transaction as IcebergTransaction
from pyiceberg.table.locations import LocationProvider
from pyiceberg.table.metadata import TableMetadata, TableMetadataV2
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
    TableUpdate,
    update_table_metadata,
)
from pyiceberg.typedef import Identifier

from trinitylake_ops import errors
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.keys import check_new_name
from trinitylake_ops.format.limits import validate_properties
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import ICEBERG, check_managed_properties, new_table_location
from trinitylake_ops.iceberg.metadata import InlineSnapshot
from trinitylake_ops.iceberg.metadata_rules import (
    check_new_layouts,
    check_new_schemas,
    check_new_snapshots,
    check_types_kept,
)
from trinitylake_ops.iceberg.new_files import oldest_file_ms, oldest_of
from trinitylake_ops.iceberg.properties import location_provider
from trinitylake_ops.iceberg.types import check_keeps_source_types, with_typed_specs
from trinitylake_ops.iceberg.updates import named_statistics
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.transaction.transaction import Transaction

#: Iceberg's Java library rejects tables whose times decrease by more than this.
_MAX_TIME_DECREASE_MS = 60_000
#: Maximum increase of a table's last sequence number in one commit. Writers increase it by one per snapshot.
MAX_SEQUENCE_STEP = 2**32
_LOADED_AT_MS = "trinitylake.loaded-at-ms"
#: Whether another catalog owns the table's files.
_IS_REGISTERED = "trinitylake.is-registered"


class TableTransaction(IcebergTransaction):
    """A PyIceberg transaction that computes its metadata once per change.

    PyIceberg recomputes and copies all metadata at each access, about twenty times per append.
    """

    #: The base metadata, the updates, and the metadata with these updates.
    _cached: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata of the table with the updates so far. Callers must not change it."""
        cached = self._cached
        if cached is None or cached[0] is not self._table.metadata or cached[1] is not self._updates:
            base = self._table.metadata
            changed = update_table_metadata(with_numbered_log(base), self._updates)
            cached = self._cached = (base, self._updates, with_log_of(base, changed))
        return cached[2]

    def commit_transaction(self) -> Table:
        """Commit the changes. Raises the errors of :meth:`TrinityLakeCatalog.commit_table`."""
        if all(isinstance(update, SetPropertiesUpdate | RemovePropertiesUpdate) for update in self._updates):
            # PyIceberg then needs only the table's UUID, which the base metadata has.
            self._cached = (self._table.metadata, self._updates, self._table.metadata)
        return super().commit_transaction()


class _SharedMetadata(TableMetadataV2):
    """Metadata whose copies share their parts. PyIceberg deep-copies each part at every update."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a shallow copy."""
        return self.__copy__()


def with_numbered_log(metadata: TableMetadata) -> TableMetadata:
    """Return metadata that PyIceberg can update cheaply: its log contains numbers, and copies share their parts.

    PyIceberg would otherwise deep-copy each log entry and each part at every update, which dominates the time.
    """
    numbered = metadata.model_copy(update={"metadata_log": list(range(len(metadata.metadata_log)))})
    return _with_class(_SharedMetadata, numbered) if type(metadata) is TableMetadataV2 else numbered


def with_log_of(base: TableMetadata, metadata: TableMetadata) -> TableMetadata:
    """Undo :func:`with_numbered_log` after an update.

    Args:
        base: The metadata before the update, whose log entries replace the numbers.
        metadata: The updated metadata.
    """
    log, base_log = metadata.metadata_log, base.metadata_log
    if log and isinstance(log[0], int):  # PyIceberg drops the oldest entries and appends new ones
        first = int(log[0])
        log = [*base_log[first:], *log[len(base_log) - first :]]
    updated = metadata.model_copy(update={"metadata_log": log})
    return _with_class(TableMetadataV2, updated) if isinstance(metadata, _SharedMetadata) else updated


def _with_class(kind: type[TableMetadataV2], copied: TableMetadata) -> TableMetadata:
    """Set the class of a copy to another class with the same fields, without pydantic's validation."""
    object.__setattr__(copied, "__class__", kind)
    return copied


def stage_update(
    current: Table | None, identifier: Identifier, stage: Callable[[Table | None, Identifier], StagedTable]
) -> StagedTable:
    """Return the table that ``stage`` builds on the current table.

    Args:
        current: The current table, or None for a new table.
        identifier: Namespace and name.
        stage: PyIceberg's function that applies the updates. Its errors are not caught.
    """
    if current is None:
        return stage(None, identifier)
    metadata = with_numbered_log(current.metadata)
    staged = stage(Table(identifier, metadata, current.metadata_location, current.io, current.catalog), identifier)
    staged.metadata = with_log_of(current.metadata, staged.metadata)
    return staged


class LoadedTable(Table):
    """A table that records when it was loaded. Files of its commits are newer, except files added by path."""

    def refresh(self) -> Table:
        config = self.config
        super().refresh()
        self.config = config
        return self

    def transaction(self) -> IcebergTransaction:
        """Start a transaction. Raises InvalidDefinitionError for a table that is readable but not writable."""
        if _IS_REGISTERED in self.config:
            raise registered_table_error(".".join(self.name()))
        if any(isinstance(snapshot, InlineSnapshot) for snapshot in self.metadata.snapshots):
            raise errors.InvalidDefinitionError(
                f"table {'.'.join(self.name())} has snapshots of format version 1 without manifest lists; write it with"
                " another engine"
            )
        if isinstance(self.io, StorageFileIO) and self.io.writes_pending(self.metadata.location):
            return TableTransaction(TableInChange(self, self.io))
        return TableTransaction(self)

    def location_provider(self) -> LocationProvider:
        """Return the location provider for new files, which is never a class named by the metadata."""
        return location_provider(self.metadata)


class TableInChange(LoadedTable):
    """The table of a transaction, whose new files are uploaded in the background until its commit.

    It shares the state of the loaded table, so that both show the result of a commit or refresh.
    """

    def __init__(self, loaded: LoadedTable, io: StorageFileIO):
        self._loaded = loaded
        super().__init__(
            loaded.name(), loaded.metadata, loaded.metadata_location, io.for_change(), loaded.catalog, loaded.config
        )

    @property
    def metadata(self) -> TableMetadata:
        return self._loaded.metadata

    @metadata.setter
    def metadata(self, metadata: TableMetadata) -> None:
        self._loaded.metadata = metadata

    @property
    def metadata_location(self) -> str:
        return self._loaded.metadata_location

    @metadata_location.setter
    def metadata_location(self, location: str) -> None:
        self._loaded.metadata_location = location

    def transaction(self) -> IcebergTransaction:
        """Start another transaction."""
        return self._loaded.transaction()

    def refresh(self) -> Table:
        self._loaded.refresh()
        return self


def check_format(definition: TableDef, name: str) -> TableDef:
    """Return the definition of an Iceberg table. Raises NoSuchIcebergTableError for other table formats."""
    if not definition.is_iceberg:
        raise NoSuchIcebergTableError(
            f"Table {name} has the format {definition.table_format!r}; only {ICEBERG} tables are supported"
        )
    return definition


def resolve_new_location(identifier: str | Identifier, location: str | None, root: str, lakehouse: LakehouseDef) -> str:
    """Choose the location of a new table.

    Args:
        identifier: The name of the table.
        location: The location that the caller requested; must be None.
        root: The root of the lakehouse.
        lakehouse: Definition of the lakehouse.

    Raises:
        InvalidDefinitionError: The caller requested a location.
        InvalidNameError: The name is not allowed for new tables.
    """
    if not isinstance(identifier, str):
        check_new_name(identifier[-1], "table")
    if location is not None:
        name = identifier if isinstance(identifier, str) else ".".join(identifier)
        raise errors.InvalidDefinitionError(
            f"table {name}: leave location out, the lakehouse chooses locations of managed tables; use register_table"
            " for a table at an external location"
        )
    return new_table_location(root, lakehouse)


def load_time_config(storage: Storage, *, is_registered: bool = False) -> dict[str, str]:
    """Return the config of a table that is being loaded, which records the current time by the storage's clock.

    Args:
        storage: The storage of the lakehouse.
        is_registered: Whether another catalog owns the table's files.
    """
    marks = {_IS_REGISTERED: "true"} if is_registered else {}
    return {_LOADED_AT_MS: str(storage.now_ms()), **marks}


def registered_table_error(name: str) -> errors.InvalidDefinitionError:
    """Return the error for a change of a registered table, whose history another catalog maintains."""
    return errors.InvalidDefinitionError(
        f"table {name} is registered and cannot be changed here: another catalog maintains its history; change it there"
        " and register it again, or copy its rows into a table of this lakehouse"
    )


def backdate(
    writer: Transaction, table: Table, metadata: TableMetadata, updates: tuple[TableUpdate, ...], io: StorageFileIO
) -> None:
    """Backdate the transaction to the oldest file that it adds.

    Orphan removal keeps files for the duration of the transaction TTL, so the transaction must not start later than its
    files were written.

    Files of added snapshots were written after the table was loaded. If the table was loaded longer ago than the
    transaction TTL, the modification times are read from the storage. The modification times of statistics files, which
    may be of any age, are always read.

    Args:
        writer: The transaction.
        table: The table as it was loaded.
        metadata: Its new metadata.
        updates: The changes to the metadata.
        io: The table's file IO.

    Raises:
        TransactionExpiredError: A file was deleted.
    """
    added = {update.snapshot.snapshot_id for update in updates if isinstance(update, AddSnapshotUpdate)}
    statistics = set(named_statistics(updates))
    if statistics:
        writer.backdate(oldest_of(lambda: statistics, io))
    if not added:
        return
    begun_at_ms = int(table.config.get(_LOADED_AT_MS, "0"))
    if io.storage.now_ms() - begun_at_ms > writer.base.definition.txn_ttl_millis:
        begun_at_ms = oldest_file_ms(metadata, added, io)
    writer.backdate(begun_at_ms)


def check_update(name: str, metadata: TableMetadata, current: Table | None, base: TableDef | None) -> None:
    """Check that a change of a table may be committed.

    Args:
        name: Name of the table.
        metadata: Its new metadata.
        current: The table before the change, or None for a new table.
        base: Its definition before the change, or None for a new table.

    Raises:
        InvalidDefinitionError: The table is registered; a managed table would move, get forbidden or too many
            properties, get a schema that some engines cannot read, or lose the last schema that contains the source
            column of a partition spec; or a new snapshot has a time or sequence number that is too far ahead.
    """
    if base is not None and not base.is_managed:
        raise registered_table_error(name)
    check_managed_properties(metadata.properties)
    before = {} if current is None else current.metadata.properties
    if metadata.properties != before:
        validate_properties(f"table {name}", metadata.properties, before)
    if current is not None and metadata.location != current.metadata.location:
        raise errors.InvalidDefinitionError(
            f"managed table {name} cannot leave its location {current.metadata.location!r}; create another table and"
            " copy the rows"
        )
    _check_times(name, metadata, None if current is None else current.metadata)
    _check_sequence_number(name, metadata, None if current is None else current.metadata)
    check_new_snapshots(name, metadata, None if current is None else current.metadata)
    check_new_schemas(metadata, () if current is None else current.metadata.schemas)
    check_new_layouts(metadata, None if current is None else current.metadata)
    if current is not None:
        check_types_kept(metadata, current.metadata)
        if len(metadata.schemas) < len(current.metadata.schemas):
            check_keeps_source_types(current.metadata, metadata)


def _check_sequence_number(name: str, metadata: TableMetadata, current: TableMetadata | None) -> None:
    """Raise InvalidDefinitionError for a last sequence number that is far ahead of the previous one.

    Sequence numbers have 63 bits and only increase. A writer that used them up would block the table for all other
    writers.
    """
    last = 0 if current is None else current.next_sequence_number() - 1
    number = metadata.next_sequence_number() - 1
    if number > max(last, 0) + MAX_SEQUENCE_STEP:
        raise errors.InvalidDefinitionError(
            f"table {name} would get the sequence number {number} after {last}: one commit may increase it by at most"
            f" {MAX_SEQUENCE_STEP}; use {last + 1} for the next snapshot"
        )


def _check_times(name: str, metadata: TableMetadata, current: TableMetadata | None) -> None:
    """Raise InvalidDefinitionError for a new snapshot whose time is ahead of this machine's clock.

    Iceberg's Java library rejects commits more than a minute before the newest snapshot, so one writer with a fast
    clock would block the table for other writers. A table whose times are already ahead may continue from its newest
    time.
    """
    existing_ids = set() if current is None else {snapshot.snapshot_id for snapshot in current.snapshots}
    newest_ms = max([time.time_ns() // 1_000_000, *([] if current is None else [current.last_updated_ms])])
    for snapshot in metadata.snapshots:
        if snapshot.snapshot_id not in existing_ids and snapshot.timestamp_ms > newest_ms + CLOCK_MARGIN_MS:
            raise errors.InvalidDefinitionError(
                f"snapshot {snapshot.snapshot_id} of table {name} has the time {snapshot.timestamp_ms} ms since 1970,"
                f" {(snapshot.timestamp_ms - newest_ms) // 1000} s ahead of this machine's clock; correct the writer's"
                " clock"
            )


def with_rising_times(updates: tuple[TableUpdate, ...], current: TableMetadata | None) -> tuple[TableUpdate, ...]:
    """Return the updates of a commit with the times of new snapshots moved after the newest time of the table.

    Iceberg's Java library cannot read a table whose times decrease by more than a minute. If the newest time is far
    ahead, each new snapshot is one millisecond later than the previous one.
    """
    if current is None:
        return updates
    newest_ms = current.last_updated_ms
    rising: list[TableUpdate] = []
    for update in updates:
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.timestamp_ms < newest_ms - _MAX_TIME_DECREASE_MS:
            newest_ms += 1
            snapshot = update.snapshot.model_copy(update={"timestamp_ms": newest_ms})
            rising.append(update.model_copy(update={"snapshot": snapshot}))
        else:
            rising.append(update)
    return tuple(rising)


def commit_message(table: str, updates: tuple[TableUpdate, ...]) -> str:
    """Return the message of a commit that changes a table.

    Args:
        table: Name of the table.
        updates: The changes to its metadata.
    """
    operations = [
        update.snapshot.summary.operation.value
        for update in updates
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.summary is not None
    ]
    return f"{' and '.join(dict.fromkeys(operations)) or 'update'} {table}"


def commit_response(table: Table) -> CommitTableResponse:
    """Return the response to a commit that results in this table."""
    return CommitTableResponse.model_validate(
        {"metadata": with_typed_specs(table.metadata), "metadata-location": table.metadata_location}
    )
