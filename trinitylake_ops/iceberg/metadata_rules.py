"""Rules for new schemas, partition specs, sort orders and snapshots of a table.

Spark resolves column names case-insensitively, so it cannot read tables with columns that differ only by case. Initial
and write defaults require format version 3: Iceberg's Java library fails on tables with defaults in older format
versions. If two columns share an id, readers return the values of one column for both. In a reader's batches, a column
of type fixed occupies its full size in each row, even for nulls. No engine can apply an unknown transform, or one that
does not support the column's type.

The rules apply only to new schemas, partition specs and sort orders, so that existing tables can still be altered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyiceberg.exceptions import ResolveError
from pyiceberg.partitioning import PartitionField
from pyiceberg.schema import Schema, index_by_id, promote
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import SortField
from pyiceberg.transforms import Transform, UnknownTransform
from pyiceberg.types import (
    DecimalType,
    FixedType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    PrimitiveType,
    StructType,
)

from trinitylake_ops.errors import InvalidDefinitionError

#: Table property that, if ``true``, allows columns whose names differ only by case.
CASE_SENSITIVE = "trinitylake.case-sensitive-columns"
_FIRST_WITH_DEFAULTS = 3
#: Maximum size of values of type fixed (decision 12).
MAX_FIXED_BYTES = 4_096
#: First column id that is reserved for metadata columns (Iceberg specification, "Reserved Field IDs").
FIRST_RESERVED_ID = 2**31 - 1 - 200
_MAX_WIDTH = 2**31 - 1
_Clashes = Mapping[frozenset[int], tuple[str, str]]


def check_new_schemas(metadata: TableMetadata, accepted_schemas: Iterable[Schema] = ()) -> None:
    """Check new schemas of a table.

    Args:
        metadata: The metadata of the table with its new schemas.
        accepted_schemas: The existing schemas of the table. Violations in them are accepted.

    Raises:
        InvalidDefinitionError: Two columns of a struct differ only by case without :data:`CASE_SENSITIVE`, a column has
            a default value before format version 3, two columns share an id, an id is reserved, or values of a column
            have more than :data:`MAX_FIXED_BYTES`.
    """
    accepted_schemas = list(accepted_schemas)
    new_schemas = [schema for schema in metadata.schemas if schema not in accepted_schemas]
    check_columns(new_schemas, accepted_schemas)
    check_case(new_schemas, metadata.properties, accepted_schemas)
    check_defaults(new_schemas, metadata.format_version, accepted_schemas)


def check_types_kept(metadata: TableMetadata, current: TableMetadata) -> None:
    """Check that the stored values of columns can be read with the types in the current schema.

    Args:
        metadata: The metadata of the table after a change.
        current: The metadata before the change.

    Raises:
        InvalidDefinitionError: A type changes to a type to which Iceberg cannot promote it. Data files keep the old
            type.
    """
    if metadata.current_schema_id == current.current_schema_id or metadata.schema() in current.schemas:
        return
    before = {column.field_id: column for column in _columns(current.schema())}
    for column in _columns(metadata.schema()):
        old_column = before.get(column.field_id)
        if old_column is not None and not _is_promotion(old_column.field_type, column.field_type):
            raise InvalidDefinitionError(
                f"cannot change column {column.name[:100]!r} with id {column.field_id} from {old_column.field_type} to"
                f" {column.field_type}: that type cannot read its values; add a column with a new id"
            )


def _is_promotion(old: IcebergType, new: IcebergType) -> bool:
    if not (isinstance(old, PrimitiveType) and isinstance(new, PrimitiveType)):
        return type(old) is type(new)
    if isinstance(old, DecimalType) and isinstance(new, DecimalType) and old.scale != new.scale:
        return False  # PyIceberg compares the scale with itself
    try:
        return old == new or promote(old, new) == new
    except ResolveError:
        return False


def check_new_layouts(metadata: TableMetadata, current: TableMetadata | None = None) -> None:
    """Check new partition specs and sort orders of a table.

    Args:
        metadata: The metadata of the table with its new specs and orders.
        current: The metadata before the change; None for a new table. The specs and orders in it are accepted.

    Raises:
        InvalidDefinitionError: A transform is unknown, has a width that is not between 1 and 2^31 - 1, or cannot be
            applied to the type of its column; or a partition field has an empty name.
    """
    specs = {} if current is None else {spec.spec_id: spec.fields for spec in current.partition_specs}
    orders = {} if current is None else {order.order_id: order.fields for order in current.sort_orders}
    new_fields: list[PartitionField | SortField] = []
    for spec in metadata.partition_specs:
        new_fields += () if specs.get(spec.spec_id) == spec.fields else spec.fields
    for order in metadata.sort_orders:
        new_fields += () if orders.get(order.order_id) == order.fields else order.fields
    if not new_fields:
        return
    types = {column.field_id: column.field_type for schema in metadata.schemas for column in _columns(schema)}
    types |= {column.field_id: column.field_type for column in _columns(metadata.schema())}
    for field in new_fields:
        if isinstance(field, PartitionField) and not field.name:
            raise InvalidDefinitionError("a partition field has an empty name; give it a name")
        _check_transform(field.transform, types.get(field.source_id))


def _check_transform(transform: Transform[Any, Any], source: IcebergType | None) -> None:
    """Raise InvalidDefinitionError for a transform that no engine can apply. ``source`` is None if it is unknown."""
    if isinstance(transform, UnknownTransform):
        raise InvalidDefinitionError(
            "a partition field or sort field has an unknown transform; use identity, year, month, day, hour, bucket[N],"
            " truncate[N] or void"
        )
    width = getattr(transform, "num_buckets", getattr(transform, "width", 1))
    if not 1 <= width <= _MAX_WIDTH:
        raise InvalidDefinitionError(f"transform {transform} has an invalid width; use a number from 1 to {_MAX_WIDTH}")
    if source is not None and not transform.can_transform(source):
        raise InvalidDefinitionError(f"transform {transform} cannot be applied to a column of type {source}"[:300])


def check_columns(schemas: Iterable[Schema], accepted_schemas: Iterable[Schema] = ()) -> None:
    """Check the ids and sizes of columns.

    Args:
        schemas: The schemas to check.
        accepted_schemas: Schemas whose columns are accepted.

    Raises:
        InvalidDefinitionError: Two columns share an id, an id is reserved, or values of a column have more than
            :data:`MAX_FIXED_BYTES`.
    """
    accepted = {fault for schema in accepted_schemas for fault in _column_faults(schema)}
    for schema in schemas:
        for fault, message in _column_faults(schema).items():
            if fault not in accepted:
                raise InvalidDefinitionError(message)


def check_defaults(schemas: Iterable[Schema], format_version: int, accepted_schemas: Iterable[Schema] = ()) -> None:
    """Check that columns have no default values before format version 3.

    Args:
        schemas: The schemas to check.
        format_version: The format version of the table.
        accepted_schemas: Schemas whose columns are accepted.

    Raises:
        InvalidDefinitionError: A column has a default value.
    """
    if format_version >= _FIRST_WITH_DEFAULTS:
        return
    accepted = {column for schema in accepted_schemas for column in _defaults(schema)}
    for schema in schemas:
        for column, name in _defaults(schema).items():
            if column not in accepted:
                raise InvalidDefinitionError(
                    f"column {name[:100]!r} has a default value, which requires format version {_FIRST_WITH_DEFAULTS}:"
                    f" the table has version {format_version}; leave it out"
                )


def check_case(
    schemas: Iterable[Schema], properties: Mapping[str, str], accepted_schemas: Iterable[Schema] = ()
) -> None:
    """Check that the names of a struct's columns do not differ only by case.

    Args:
        schemas: The schemas to check.
        properties: The properties of the table. :data:`CASE_SENSITIVE` allows such columns.
        accepted_schemas: Schemas whose columns are accepted.

    Raises:
        InvalidDefinitionError: Two columns differ only by case, and the table does not allow it.
    """
    if properties.get(CASE_SENSITIVE, "").lower() == "true":
        return
    accepted = {columns for schema in accepted_schemas for columns in _clashes(schema)}
    for schema in schemas:
        for columns, (name, other) in _clashes(schema).items():
            if columns not in accepted:
                raise InvalidDefinitionError(
                    f"columns {name[:100]!r} and {other[:100]!r} differ only by case: Spark and other engines cannot"
                    f" distinguish them; choose another name, or set the table property {CASE_SENSITIVE!r} to 'true'"
                )


def _column_faults(schema: Schema) -> Mapping[tuple[str, int], str]:
    """Return an error message for each column with an invalid id or size."""
    columns = list(_columns(schema))
    shared = Counter(column.field_id for column in columns)
    faults: dict[tuple[str, int], str] = {}
    for column in columns:
        name, number = repr(column.name[:100]), column.field_id
        if shared[number] > 1:
            faults["shared", number] = (
                f"column {name} has id {number}, which another column has; give each column a unique id"
            )
        if number >= FIRST_RESERVED_ID:
            faults["reserved", number] = (
                f"column {name} has id {number}: ids from {FIRST_RESERVED_ID} are reserved; use a smaller one"
            )
        if isinstance(column.field_type, FixedType) and column.field_type.root > MAX_FIXED_BYTES:
            faults["fixed", number] = (
                f"column {name} has the type {column.field_type}, larger than the maximum of {MAX_FIXED_BYTES} bytes:"
                " readers allocate the whole size for each row; use the type binary"
            )
    return faults


def _columns(schema: Schema) -> Iterator[NestedField]:
    """Yield the columns of a schema at all levels of nesting, including duplicates."""
    rest = list(schema.fields)
    while rest:
        column = rest.pop()
        yield column
        match column.field_type:
            case StructType(fields=fields):
                rest += fields
            case ListType(element_field=element):
                rest.append(element)
            case MapType(key_field=key, value_field=value):
                rest += (key, value)


def _clashes(schema: Schema) -> _Clashes:
    """Return the columns of a struct whose names differ only by case, by their ids."""
    nested = (field.field_type for field in index_by_id(schema).values())
    clashes: dict[frozenset[int], tuple[str, str]] = {}
    for struct in (schema.as_struct(), *(kind for kind in nested if isinstance(kind, StructType))):
        by_name: dict[str, NestedField] = {}
        for field in struct.fields:
            first = by_name.setdefault(field.name.lower(), field)
            if first is not field:
                clashes[frozenset((first.field_id, field.field_id))] = (first.name, field.name)
    return clashes


def _defaults(schema: Schema) -> Mapping[int, str]:
    """Return the names of the columns with an initial or write default, by their ids."""
    return {
        number: field.name
        for number, field in index_by_id(schema).items()
        if field.initial_default is not None or field.write_default is not None
    }


def check_new_snapshots(name: str, metadata: TableMetadata, current: TableMetadata | None) -> None:
    """Check new snapshots and the main branch of a table.

    Args:
        name: Name of the table, for errors.
        metadata: The metadata of the table with its new snapshots.
        current: The metadata before the change; None for a new table. The snapshots in it are accepted.

    Raises:
        InvalidDefinitionError: The id of a snapshot is not positive (PyIceberg interprets -1 as no snapshot), the table
            does not have its schema, or its parents form a cycle; or ``main`` is a tag, to which no engine can append.
    """
    existing_ids = set() if current is None else {snapshot.snapshot_id for snapshot in current.snapshots}
    new_snapshots = [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id not in existing_ids]
    parents = {snapshot.snapshot_id: snapshot.parent_snapshot_id for snapshot in new_snapshots}
    schema_ids = {schema.schema_id for schema in metadata.schemas}
    for snapshot in new_snapshots:
        fault = _fault(snapshot, schema_ids) or _cycle(snapshot.snapshot_id, parents)
        if fault is not None:
            raise InvalidDefinitionError(f"snapshot {snapshot.snapshot_id} of table {name} {fault}")
    main = metadata.refs.get(MAIN_BRANCH)
    if main is not None and main.snapshot_ref_type is not SnapshotRefType.BRANCH:
        raise InvalidDefinitionError(f"{MAIN_BRANCH!r} of table {name} must be a branch, not a tag; use another name")


def _fault(snapshot: Snapshot, schema_ids: set[int]) -> str | None:
    if snapshot.snapshot_id <= 0:
        return "has an id that is not positive; use a positive id"
    if snapshot.schema_id is not None and snapshot.schema_id not in schema_ids:
        return f"has the schema {snapshot.schema_id}, which the table does not have; add the schema first"
    return None


def _cycle(snapshot_id: int, parents: dict[int, int | None]) -> str | None:
    """Return an error text if a new snapshot is its own ancestor. Only new snapshots can form a cycle."""
    ancestor = parents[snapshot_id]
    for _ in parents:
        if ancestor is None or ancestor not in parents:
            return None
        if ancestor == snapshot_id:
            break
        ancestor = parents[ancestor]
    return "is its own ancestor; set its parent to the snapshot that it follows"
