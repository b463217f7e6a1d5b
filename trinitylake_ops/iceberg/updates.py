"""The updates of a commit, as a client sends them, made fit for pyiceberg and for the rules of a lakehouse.

pyiceberg adds what it is told. Iceberg's own server gives ids to schemas, partition specs and sort orders, and reuses
one that is there already. Its clients count on that. A lakehouse keeps some properties, and the place of a table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError as PydanticError
from pyiceberg.exceptions import CommitFailedException, ValidationError, ValidationException
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AddSortOrderUpdate,
    AssignUUIDUpdate,
    RemovePartitionSpecsUpdate,
    RemovePropertiesUpdate,
    RemoveSchemasUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
    SetLocationUpdate,
    SetPartitionStatisticsUpdate,
    SetPropertiesUpdate,
    SetStatisticsUpdate,
    TableUpdate,
    UpgradeFormatVersionUpdate,
)

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError, TrinityLakeError
from trinitylake_ops.iceberg.managed import LATEST_WRITTEN_VERSION, MANAGED_PROPERTIES
from trinitylake_ops.iceberg.properties import PATH_PROPERTIES

_WRONG = (
    ValidationError,
    ValidationException,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
    RecursionError,
    StopIteration,
)
LAST_ADDED = -1
_FORMAT_VERSION = "format-version"


def fitted(updates: Sequence[TableUpdate], current: TableMetadata | None) -> list[TableUpdate]:
    """Return the updates as pyiceberg may apply them to a managed table, None for a new one.

    The place of a table that exists is not changed, without an error, as engines name it in each commit. Raises
    InvalidDefinitionError for what no lakehouse stores.

    All changes of properties become one update for each kind, at the end, because pyiceberg copies all properties of
    the table for each update. No other update depends on properties.
    """
    fitting = _Fitting(current)
    made = [fitted for update in updates for fitted in fitting.fit(update)]
    made += fitting.property_updates()
    if current is None:
        made.append(SetPropertiesUpdate(updates=dict(MANAGED_PROPERTIES)))
    return made


def check_format(properties: Mapping[str, str]) -> None:
    """Raise InvalidDefinitionError for the properties of a new table in a format that is not written here."""
    version = properties.get(_FORMAT_VERSION, "2")
    if not (version.isascii() and version.isdecimal()) or not 1 <= int(version[:9]) <= LATEST_WRITTEN_VERSION:
        raise InvalidDefinitionError(
            f"format-version {version[:20]!r} is not written here: use {LATEST_WRITTEN_VERSION};"
            " tables of later versions can be registered and read"
        )


def location_in(updates: Sequence[TableUpdate]) -> str:
    """Return the place that updates give to a new table, empty where they give none."""
    places = [update.location for update in updates if isinstance(update, SetLocationUpdate)]
    return places[-1].rstrip("/") if places else ""


def spec_ids_after(updates: Sequence[TableUpdate], current: TableMetadata | None) -> set[int]:
    """Return the ids of the partition specs of a table after a commit.

    Args:
        updates: The updates of the commit, from :func:`fitted`.
        current: The metadata of the table, None for a new one.
    """
    added = {update.spec.spec_id for update in updates if isinstance(update, AddPartitionSpecUpdate)}
    return added if current is None else added | current.specs().keys()


def check_snapshot_dependencies(updates: Sequence[TableUpdate], current: TableMetadata | None) -> None:
    """Raise InvalidDefinitionError for updates that remove a schema or partition spec that readers of a snapshot need.

    Which snapshots use a partition spec is in their manifest lists only. So all specs of a table with snapshots stay.

    Args:
        updates: The updates of a commit.
        current: The metadata of the table, None for a new one.
    """
    snapshots = [] if current is None else current.snapshots
    schema_ids = {snapshot.schema_id for snapshot in snapshots}
    for update in updates:
        if isinstance(update, RemoveSchemasUpdate) and schema_ids.intersection(update.schema_ids):
            raise InvalidDefinitionError(
                "schemas are not removed: a snapshot of the table was written with one of them; leave them"
            )
        if isinstance(update, RemovePartitionSpecsUpdate) and snapshots:
            raise InvalidDefinitionError(
                "partition specs are not removed: the table has snapshots whose files may need them; leave them"
            )


def named_files(updates: Sequence[TableUpdate]) -> Iterator[str]:
    """Yield the locations of files that updates name by themselves."""
    yield from (update.snapshot.manifest_list for update in updates if isinstance(update, AddSnapshotUpdate))
    yield from named_statistics(updates)


def named_statistics(updates: Sequence[TableUpdate]) -> Iterator[str]:
    """Yield the locations of statistics files, of tables and of partitions, that updates name."""
    for update in updates:
        if isinstance(update, SetStatisticsUpdate):
            yield update.statistics.statistics_path
        elif isinstance(update, SetPartitionStatisticsUpdate):
            yield update.partition_statistics.statistics_path


@contextmanager
def as_invalid_input() -> Iterator[None]:
    """Take what pyiceberg raises for content that makes no sense as InvalidInputError. No commit ends in it.

    A snapshot that is too old for the table is a CommitFailedException.
    """
    try:
        yield
    except (TrinityLakeError, CommitFailedException, PydanticError):
        raise
    except _WRONG as error:
        if "sequence number" in str(error):
            raise CommitFailedException(f"the table has changed: {error}") from error
        raise InvalidInputError(f"this fits no table: {str(error) or type(error).__name__}") from error


class _Fitting:
    """What the updates so far leave of a table's schemas, specs, orders and properties."""

    def __init__(self, current: TableMetadata | None):
        self._current = current
        self._present = current.properties if current is not None else {}
        self._properties: dict[str, str] = {}
        self._removed: dict[str, None] = {}
        self._next_schema_id = max((one.schema_id for one in current.schemas), default=-1) + 1 if current else 0
        self._next_spec_id = max((one.spec_id for one in current.partition_specs), default=-1) + 1 if current else 0
        self._next_order_id = max((one.order_id for one in current.sort_orders), default=0) + 1 if current else 1
        self._schema_ids: dict[int, int] = {}
        self._spec_ids: dict[int, int] = {}
        self._order_ids: dict[int, int] = {}

    def fit(self, update: TableUpdate) -> list[TableUpdate]:
        """Return what to apply for an update, nothing for one without an effect."""
        match update:
            case AddSchemaUpdate():
                return self._add_schema(update)
            case AddPartitionSpecUpdate():
                return self._add_spec(update)
            case AddSortOrderUpdate():
                return self._add_order(update)
            case SetCurrentSchemaUpdate():
                return [update.model_copy(update={"schema_id": _known(self._schema_ids, update.schema_id, "schema")})]
            case SetDefaultSpecUpdate():
                return [update.model_copy(update={"spec_id": _known(self._spec_ids, update.spec_id, "spec")})]
            case SetDefaultSortOrderUpdate():
                order_id = _known(self._order_ids, update.sort_order_id, "sort order")
                return [update.model_copy(update={"sort_order_id": order_id})]
            case AddSnapshotUpdate():
                return [self._add_snapshot(update)]
        return self._fit_settings(update)

    def _fit_settings(self, update: TableUpdate) -> list[TableUpdate]:
        match update:
            case SetPropertiesUpdate():
                self._set_properties(update.updates)
                return []
            case RemovePropertiesUpdate():
                self._remove_properties(update.removals)
                return []
            case SetLocationUpdate():
                return [update] if self._current is None else []
            case AssignUUIDUpdate() if self._current is not None and update.uuid != self._current.table_uuid:
                raise InvalidDefinitionError("Cannot reassign uuid: the table has another one")
            case UpgradeFormatVersionUpdate() if update.format_version > LATEST_WRITTEN_VERSION:
                check_format({_FORMAT_VERSION: str(update.format_version)})
        return [update]

    # Updates are looked up by their content, as comparing each with all the others takes quadratic time.
    @cached_attribute
    def _schemas(self) -> dict[str, int]:
        return {_schema_key(one): one.schema_id for one in reversed(self._current.schemas)} if self._current else {}

    @cached_attribute
    def _specs(self) -> dict[Hashable, int]:
        return {_spec_key(one): one.spec_id for one in reversed(self._current.partition_specs)} if self._current else {}

    @cached_attribute
    def _orders(self) -> dict[str, int]:
        return {_order_key(one): one.order_id for one in reversed(self._current.sort_orders)} if self._current else {}

    def _add_schema(self, update: AddSchemaUpdate) -> list[TableUpdate]:
        schema, key = update.schema_, _schema_key(update.schema_)
        is_new = key not in self._schemas
        number = self._schemas.setdefault(key, self._next_schema_id)
        self._schema_ids[schema.schema_id] = self._schema_ids[LAST_ADDED] = number
        if not is_new:
            return []
        self._next_schema_id += 1
        return [update.model_copy(update={"schema_": schema.model_copy(update={"schema_id": number})})]

    def _add_spec(self, update: AddPartitionSpecUpdate) -> list[TableUpdate]:
        spec, key = update.spec, _spec_key(update.spec)
        is_new = key not in self._specs
        number = self._specs.setdefault(key, self._next_spec_id)
        self._spec_ids[spec.spec_id] = self._spec_ids[LAST_ADDED] = number
        if not is_new:
            return []
        self._next_spec_id += 1
        return [update.model_copy(update={"spec": spec.model_copy(update={"spec_id": number})})]

    def _add_order(self, update: AddSortOrderUpdate) -> list[TableUpdate]:
        order, key = update.sort_order, _order_key(update.sort_order)
        is_new = key not in self._orders
        number = self._orders.setdefault(key, 0 if order.is_unsorted else self._next_order_id)
        self._order_ids[order.order_id] = self._order_ids[LAST_ADDED] = number
        if not is_new:
            return []
        self._next_order_id = max(self._next_order_id, number + 1)
        return [update.model_copy(update={"sort_order": order.model_copy(update={"order_id": number})})]

    def _add_snapshot(self, update: AddSnapshotUpdate) -> TableUpdate:
        schema_id = update.snapshot.schema_id
        if schema_id is None or self._schema_ids.get(schema_id, schema_id) == schema_id:
            return update
        snapshot = update.snapshot.model_copy(update={"schema_id": self._schema_ids[schema_id]})
        return update.model_copy(update={"snapshot": snapshot})

    def property_updates(self) -> list[TableUpdate]:
        """Return at most one update that sets properties, and one that removes some."""
        removed = [name for name in self._removed if name not in self._properties]
        made: list[TableUpdate] = [SetPropertiesUpdate(updates=self._properties)] if self._properties else []
        return [*made, RemovePropertiesUpdate(removals=removed)] if removed else made

    def _set_properties(self, updates: Mapping[str, str]) -> None:
        for name in PATH_PROPERTIES:
            if name in updates:
                raise InvalidDefinitionError(
                    f"property {name!r} cannot be set: a table's files stay under its own location; leave it out"
                )
        kept = {name: value for name, value in updates.items() if name not in MANAGED_PROPERTIES}
        if self._current is None:  # engines repeat the properties of the request that staged the table
            check_format(kept)
            kept.pop(_FORMAT_VERSION, None)
        self._properties |= kept

    def _remove_properties(self, removals: Sequence[str]) -> None:
        for name in removals:
            self._properties.pop(name, None)
            if name in self._present and name not in MANAGED_PROPERTIES:
                self._removed[name] = None


def _schema_key(schema: Schema) -> str:
    return schema.model_dump_json(exclude={"schema_id"})


def _spec_key(spec: PartitionSpec) -> Hashable:
    return tuple((field.source_id, str(field.transform), field.name) for field in spec.fields)


def _order_key(order: SortOrder) -> str:
    return order.model_dump_json(exclude={"order_id"})


def _known(numbers: Mapping[int, int], asked: int, what: str) -> int:
    if asked == LAST_ADDED and LAST_ADDED not in numbers:
        raise InvalidDefinitionError(f"Cannot set the last added {what}: none was added")
    return numbers.get(asked, asked)
