"""Adapt the updates in a client's commit to PyIceberg and to the rules of a lakehouse.

PyIceberg applies updates unchanged. Iceberg's reference server assigns ids to schemas, partition specs and sort orders
and reuses equal existing ones, which clients rely on. A lakehouse also keeps some properties and the location of a
table unchanged.
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

_INVALID_UPDATE_ERRORS = (
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


def adapt_updates(updates: Sequence[TableUpdate], current: TableMetadata | None) -> list[TableUpdate]:
    """Adapt updates so that PyIceberg can apply them to a managed table.

    Location changes of an existing table are ignored without an error because engines send the location in each commit.
    All property changes become at most two updates at the end, because PyIceberg copies all properties for each update.
    No other update depends on properties.

    Args:
        updates: The updates of a client.
        current: The metadata of the table; None for a new table.

    Raises:
        InvalidDefinitionError: An update is not supported by a lakehouse.
    """
    adapter = _UpdateAdapter(current)
    adapted_updates = [result for update in updates for result in adapter.fit(update)]
    adapted_updates += adapter.property_updates()
    if current is None:
        adapted_updates.append(SetPropertiesUpdate(updates=dict(MANAGED_PROPERTIES)))
    return adapted_updates


def check_format(properties: Mapping[str, str]) -> None:
    """Raise InvalidDefinitionError if the properties of a new table request an unsupported format version."""
    version = properties.get(_FORMAT_VERSION, "2")
    if not (version.isascii() and version.isdecimal()) or not 1 <= int(version[:9]) <= LATEST_WRITTEN_VERSION:
        raise InvalidDefinitionError(
            f"format-version {version[:20]!r} cannot be written; use {LATEST_WRITTEN_VERSION}, or register tables of"
            " later versions for reading"
        )


def location_in(updates: Sequence[TableUpdate]) -> str:
    """Return the location that updates set for a new table, or an empty string if they set none."""
    locations = [update.location for update in updates if isinstance(update, SetLocationUpdate)]
    return locations[-1].rstrip("/") if locations else ""


def spec_ids_after(updates: Sequence[TableUpdate], current: TableMetadata | None) -> set[int]:
    """Return the ids of the partition specs of a table after a commit.

    Args:
        updates: The updates of the commit, from :func:`adapt_updates`.
        current: The metadata of the table; None for a new table.
    """
    added = {update.spec.spec_id for update in updates if isinstance(update, AddPartitionSpecUpdate)}
    return added if current is None else added | current.specs().keys()


def check_snapshot_dependencies(updates: Sequence[TableUpdate], current: TableMetadata | None) -> None:
    """Check that updates do not remove a schema or partition spec that readers of a snapshot need.

    Only manifest lists record which partition specs a snapshot uses, so no spec of a table with snapshots may be
    removed.

    Args:
        updates: The updates of a commit.
        current: The metadata of the table; None for a new table.

    Raises:
        InvalidDefinitionError: A snapshot may need a removed schema or spec.
    """
    snapshots = [] if current is None else current.snapshots
    schema_ids = {snapshot.schema_id for snapshot in snapshots}
    for update in updates:
        if isinstance(update, RemoveSchemasUpdate) and schema_ids.intersection(update.schema_ids):
            raise InvalidDefinitionError(
                "schemas cannot be removed: a snapshot of the table was written with one of them; keep them"
            )
        if isinstance(update, RemovePartitionSpecsUpdate) and snapshots:
            raise InvalidDefinitionError(
                "partition specs cannot be removed: the table has snapshots whose files may need them; keep them"
            )


def named_files(updates: Sequence[TableUpdate]) -> Iterator[str]:
    """Yield the locations of manifest lists and statistics files in updates."""
    yield from (update.snapshot.manifest_list for update in updates if isinstance(update, AddSnapshotUpdate))
    yield from named_statistics(updates)


def named_statistics(updates: Sequence[TableUpdate]) -> Iterator[str]:
    """Yield the locations of table and partition statistics files in updates."""
    for update in updates:
        if isinstance(update, SetStatisticsUpdate):
            yield update.statistics.statistics_path
        elif isinstance(update, SetPartitionStatisticsUpdate):
            yield update.partition_statistics.statistics_path


@contextmanager
def as_invalid_input() -> Iterator[None]:
    """Convert PyIceberg's errors for invalid updates to InvalidInputError. The block must not commit.

    A sequence number that is too old for the table becomes a CommitFailedException.
    """
    try:
        yield
    except (TrinityLakeError, CommitFailedException, PydanticError):
        raise
    except _INVALID_UPDATE_ERRORS as error:
        if "sequence number" in str(error):
            raise CommitFailedException(f"the table has changed: {error}") from error
        raise InvalidInputError(f"the updates are not valid: {str(error) or type(error).__name__}") from error


class _UpdateAdapter:
    """The schemas, specs, orders and properties of a table after the updates so far."""

    def __init__(self, current: TableMetadata | None):
        self._current = current
        self._present = current.properties if current is not None else {}
        self._properties: dict[str, str] = {}
        self._removed: dict[str, None] = {}
        self._next_schema_id = max((schema.schema_id for schema in current.schemas), default=-1) + 1 if current else 0
        self._next_spec_id = max((spec.spec_id for spec in current.partition_specs), default=-1) + 1 if current else 0
        self._next_order_id = max((order.order_id for order in current.sort_orders), default=0) + 1 if current else 1
        self._schema_ids: dict[int, int] = {}
        self._spec_ids: dict[int, int] = {}
        self._order_ids: dict[int, int] = {}

    def fit(self, update: TableUpdate) -> list[TableUpdate]:
        """Return the updates to apply for a client's update; empty if the update has no effect."""
        match update:
            case AddSchemaUpdate():
                return self._add_schema(update)
            case AddPartitionSpecUpdate():
                return self._add_spec(update)
            case AddSortOrderUpdate():
                return self._add_order(update)
            case SetCurrentSchemaUpdate():
                return [
                    update.model_copy(update={"schema_id": _resolve_id(self._schema_ids, update.schema_id, "schema")})
                ]
            case SetDefaultSpecUpdate():
                return [update.model_copy(update={"spec_id": _resolve_id(self._spec_ids, update.spec_id, "spec")})]
            case SetDefaultSortOrderUpdate():
                order_id = _resolve_id(self._order_ids, update.sort_order_id, "sort order")
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
                raise InvalidDefinitionError("Cannot reassign uuid: the table has another UUID")
            case UpgradeFormatVersionUpdate() if update.format_version > LATEST_WRITTEN_VERSION:
                check_format({_FORMAT_VERSION: str(update.format_version)})
        return [update]

    # Equal items are found by a key derived from their content, because comparing all pairs takes quadratic time.
    @cached_attribute
    def _schemas(self) -> dict[str, int]:
        return (
            {_schema_key(schema): schema.schema_id for schema in reversed(self._current.schemas)}
            if self._current
            else {}
        )

    @cached_attribute
    def _specs(self) -> dict[Hashable, int]:
        return (
            {_spec_key(spec): spec.spec_id for spec in reversed(self._current.partition_specs)} if self._current else {}
        )

    @cached_attribute
    def _orders(self) -> dict[str, int]:
        return (
            {_order_key(order): order.order_id for order in reversed(self._current.sort_orders)}
            if self._current
            else {}
        )

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
        """Return at most one update that sets properties and one that removes properties."""
        removed = [name for name in self._removed if name not in self._properties]
        updates: list[TableUpdate] = [SetPropertiesUpdate(updates=self._properties)] if self._properties else []
        return [*updates, RemovePropertiesUpdate(removals=removed)] if removed else updates

    def _set_properties(self, updates: Mapping[str, str]) -> None:
        for name in PATH_PROPERTIES:
            if name in updates:
                raise InvalidDefinitionError(
                    f"property {name!r} cannot be set: a table's files are below its location; leave it out"
                )
        kept = {name: value for name, value in updates.items() if name not in MANAGED_PROPERTIES}
        if self._current is None:  # engines repeat the properties from the staging request
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


def _resolve_id(ids: Mapping[int, int], requested_id: int, kind: str) -> int:
    if requested_id == LAST_ADDED and LAST_ADDED not in ids:
        raise InvalidDefinitionError(f"Cannot set the last added {kind}: none was added")
    return ids.get(requested_id, requested_id)
