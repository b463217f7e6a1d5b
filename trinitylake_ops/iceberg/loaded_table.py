"""A table as the catalog loads it, and the checks of a change before its commit."""

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

#: The most by which the times of a table may fall for Iceberg's Java library.
_MOST_FALL_MS = 60_000
#: The most by which one commit raises the last sequence number of a table. Writers raise it by one for each snapshot.
MAX_SEQUENCE_STEP = 2**32
_LOADED_AT_MS = "trinitylake.loaded-at-ms"
#: Whether the table's files are another catalog's.
_IS_REGISTERED = "trinitylake.is-registered"


class TableTransaction(IcebergTransaction):
    """pyiceberg's transaction, which makes its metadata once for each change in it.

    Otherwise all of it is copied each time that pyiceberg asks, some twenty times in an append.
    """

    _made: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata of the table with the updates so far, which nobody may change."""
        made = self._made
        if made is None or made[0] is not self._table.metadata or made[1] is not self._updates:
            base = self._table.metadata
            changed = update_table_metadata(with_numbered_log(base), self._updates)
            made = self._made = (base, self._updates, with_log_of(base, changed))
        return made[2]

    def commit_transaction(self) -> Table:
        """Commit the changes. Raises what :meth:`TrinityLakeCatalog.commit_table` raises."""
        if all(isinstance(update, SetPropertiesUpdate | RemovePropertiesUpdate) for update in self._updates):
            # All that pyiceberg still asks for is the uuid of the table, which is that of its base.
            self._made = (self._table.metadata, self._updates, self._table.metadata)
        return super().commit_transaction()


class _Shared(TableMetadataV2):
    """Metadata whose copies share its parts, which nobody changes. pyiceberg copies each part at every update."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy with the same parts."""
        return self.__copy__()


def with_numbered_log(metadata: TableMetadata) -> TableMetadata:
    """Return metadata for pyiceberg to update: its log of former files holds numbers, and its parts are shared.

    pyiceberg copies each entry and each part by itself at every update, which takes longer than all else in it.
    """
    numbered = metadata.model_copy(update={"metadata_log": list(range(len(metadata.metadata_log)))})
    return _as(_Shared, numbered) if type(metadata) is TableMetadataV2 else numbered


def with_log_of(base: TableMetadata, metadata: TableMetadata) -> TableMetadata:
    """Return metadata that was updated as its own kind again, with the entries of ``base`` for numbers in its log."""
    log, former = metadata.metadata_log, base.metadata_log
    if log and isinstance(log[0], int):  # pyiceberg leaves out the first entries and adds to the last
        first = int(log[0])
        log = [*former[first:], *log[len(former) - first :]]
    updated = metadata.model_copy(update={"metadata_log": log})
    return _as(TableMetadataV2, updated) if isinstance(metadata, _Shared) else updated


def _as(kind: type[TableMetadataV2], copied: TableMetadata) -> TableMetadata:
    """Return a copy as of another class with the same fields. pydantic would take each field apart to make one."""
    object.__setattr__(copied, "__class__", kind)
    return copied


def staged_on(
    current: Table | None, identifier: Identifier, stage: Callable[[Table | None, Identifier], StagedTable]
) -> StagedTable:
    """Return what pyiceberg stages on the present table, None for a new one. Raises what ``stage`` raises."""
    if current is None:
        return stage(None, identifier)
    metadata = with_numbered_log(current.metadata)
    staged = stage(Table(identifier, metadata, current.metadata_location, current.io, current.catalog), identifier)
    staged.metadata = with_log_of(current.metadata, staged.metadata)
    return staged


class LoadedTable(Table):
    """A table that knows when it was first loaded. No file that a commit adds is older, except files added by name."""

    def refresh(self) -> Table:
        config = self.config
        super().refresh()
        self.config = config
        return self

    def transaction(self) -> IcebergTransaction:
        """Begin a change. Raises InvalidDefinitionError for a table that can be read, but not written."""
        if _IS_REGISTERED in self.config:
            raise registered_table_error(".".join(self.name()))
        if any(isinstance(snapshot, InlineSnapshot) for snapshot in self.metadata.snapshots):
            raise errors.InvalidDefinitionError(
                f"table {'.'.join(self.name())} has snapshots of format version 1 that list their manifests by"
                " themselves; write it with another engine"
            )
        if isinstance(self.io, StorageFileIO) and self.io.writes_pending(self.metadata.location):
            return TableTransaction(TableInChange(self, self.io))
        return TableTransaction(self)

    def location_provider(self) -> LocationProvider:
        """Return the object that chooses the places of new files: never a class that the metadata names."""
        return location_provider(self.metadata)


class TableInChange(LoadedTable):
    """A loaded table as a transaction of pyiceberg holds it, whose new files are on their way until its commit.

    It has the state of the loaded table, so that both show what a commit or a refresh leaves.
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
        """Begin another change."""
        return self._loaded.transaction()

    def refresh(self) -> Table:
        self._loaded.refresh()
        return self


def check_format(definition: TableDef, name: str) -> TableDef:
    """Return the definition of an Iceberg table. Raises NoSuchIcebergTableError for a table of another format."""
    if not definition.is_iceberg:
        raise NoSuchIcebergTableError(
            f"Table {name} has the format {definition.table_format!r}; only {ICEBERG} tables can be read here"
        )
    return definition


def resolve_new_location(identifier: str | Identifier, location: str | None, root: str, lakehouse: LakehouseDef) -> str:
    """Return the place of a new table.

    Args:
        identifier: The name of the table.
        location: What the caller chose, which must be nothing.
        root: The root of the lakehouse.
        lakehouse: Its definition.

    Raises:
        InvalidDefinitionError: If the caller chose a location.
        InvalidNameError: If no new table gets this name.
    """
    if not isinstance(identifier, str):
        check_new_name(identifier[-1], "table")
    if location is not None:
        name = identifier if isinstance(identifier, str) else ".".join(identifier)
        raise errors.InvalidDefinitionError(
            f"table {name}: leave location out, a managed table's is chosen by the lakehouse; use register_table for a"
            " table elsewhere"
        )
    return new_table_location(root, lakehouse)


def loaded_now(storage: Storage, *, is_registered: bool = False) -> dict[str, str]:
    """Return the config of a table that is loaded now, by the storage's clock."""
    marks = {_IS_REGISTERED: "true"} if is_registered else {}
    return {_LOADED_AT_MS: str(storage.now_ms()), **marks}


def registered_table_error(name: str) -> errors.InvalidDefinitionError:
    """Return the error for a change of a table that was registered, whose history another catalog keeps."""
    return errors.InvalidDefinitionError(
        f"table {name} is registered, and another catalog keeps its history: a write here would fork it; write it there"
        " and register it again, or copy its rows into a table of this lakehouse"
    )


def backdate(
    writer: Transaction, table: Table, metadata: TableMetadata, updates: tuple[TableUpdate, ...], io: StorageFileIO
) -> None:
    """Let the transaction be as old as the oldest file that it adds. A removal of orphans spares no file for longer.

    Files of snapshots that are added were written after the table was loaded. If that was too long ago, the storage
    says when they were written. It is asked in any case for statistics files, which may be of any age. Raises
    TransactionExpiredError where a file is gone.
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
    """Raise InvalidDefinitionError for a registered table, which is not changed here.

    Raises it also if a managed table would move, would have forbidden properties or too many, would get a schema that
    some engines cannot read, or would lose the last schema with the source column of a partition spec. Raises it also
    for a new snapshot with a time or a sequence number far ahead.
    """
    if base is not None and not base.is_managed:
        raise registered_table_error(name)
    check_managed_properties(metadata.properties)
    before = {} if current is None else current.metadata.properties
    if metadata.properties != before:
        validate_properties(f"table {name}", metadata.properties, before)
    if current is not None and metadata.location != current.metadata.location:
        raise errors.InvalidDefinitionError(
            f"a managed table stays at its location {current.metadata.location!r}; create another one and copy"
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
    """Raise InvalidDefinitionError for a last sequence number that is far ahead of the former one.

    Sequence numbers have 63 bits and only grow. A writer that used them up would block the table for all others.
    """
    last = 0 if current is None else current.next_sequence_number() - 1
    number = metadata.next_sequence_number() - 1
    if number > max(last, 0) + MAX_SEQUENCE_STEP:
        raise errors.InvalidDefinitionError(
            f"table {name} would get the sequence number {number} after {last}: one commit"
            f" raises it by at most {MAX_SEQUENCE_STEP}; use {last + 1} for the next snapshot"
        )


def _check_times(name: str, metadata: TableMetadata, current: TableMetadata | None) -> None:
    """Raise InvalidDefinitionError for a new snapshot whose time is ahead of the clock of this machine.

    Iceberg's Java library refuses commits more than a minute before the newest snapshot. So one writer with a clock far
    ahead would block the table for others. A table that is ahead already may go on from its newest time.
    """
    known = set() if current is None else {snapshot.snapshot_id for snapshot in current.snapshots}
    newest_ms = max([time.time_ns() // 1_000_000, *([] if current is None else [current.last_updated_ms])])
    for snapshot in metadata.snapshots:
        if snapshot.snapshot_id not in known and snapshot.timestamp_ms > newest_ms + CLOCK_MARGIN_MS:
            raise errors.InvalidDefinitionError(
                f"snapshot {snapshot.snapshot_id} of table {name} has the time {snapshot.timestamp_ms} ms since 1970,"
                f" {(snapshot.timestamp_ms - newest_ms) // 1000} s ahead of the clock here; set the clock of the writer"
                " right"
            )


def with_rising_times(updates: tuple[TableUpdate, ...], current: TableMetadata | None) -> tuple[TableUpdate, ...]:
    """Return the updates of a commit, with new snapshots after the newest time of the table.

    Iceberg's Java library cannot read a table whose times fall by more than a minute. So where a table has a time far
    ahead, new snapshots follow it by milliseconds.
    """
    if current is None:
        return updates
    newest_ms = current.last_updated_ms
    rising: list[TableUpdate] = []
    for update in updates:
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.timestamp_ms < newest_ms - _MOST_FALL_MS:
            newest_ms += 1
            snapshot = update.snapshot.model_copy(update={"timestamp_ms": newest_ms})
            rising.append(update.model_copy(update={"snapshot": snapshot}))
        else:
            rising.append(update)
    return tuple(rising)


def commit_message(table: str, updates: tuple[TableUpdate, ...]) -> str:
    """Return the message of a commit that changes a table."""
    operations = [
        update.snapshot.summary.operation.value
        for update in updates
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.summary is not None
    ]
    return f"{' and '.join(dict.fromkeys(operations)) or 'update'} {table}"


def commit_response(table: Table) -> CommitTableResponse:
    """Return the answer to a commit that leaves this table."""
    return CommitTableResponse.model_validate(
        {"metadata": with_typed_specs(table.metadata), "metadata-location": table.metadata_location}
    )
