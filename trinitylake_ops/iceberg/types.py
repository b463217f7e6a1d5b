"""Convert columns of a lakehouse to Apache Iceberg types and back (FORMAT.md, "Object definitions").

==============  =========================  =============================================
column type     Iceberg type               properties of the column
==============  =========================  =============================================
BOOLEAN         boolean
INT4, INT8      int, long
DECIMAL         decimal(precision, scale)  ``precision`` 1-38, ``scale`` 0-precision
FLOAT4, FLOAT8  float, double
VARCHAR         string
DATE, TIME      date, time
TIMESTAMP       timestamp
TIMESTAMPTZ     timestamptz
FIXED           fixed(size)                ``size`` in bytes
FIXED           uuid                       ``size`` = 16 and ``iceberg.type`` = ``uuid``
BINARY          binary
STRUCT, MAP,    struct, map, list
LIST
==============  =========================  =============================================

The property ``doc`` contains the field's documentation. Field ids and nullability are preserved. Default values of
fields exist only in the Iceberg metadata.

Iceberg does not have INT2, CHAR and TIMETZ. Lakehouse columns do not support nanosecond timestamps, unknown, geometry
and geography. These types raise UnsupportedTypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pyarrow as pa
from pydantic import PrivateAttr
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.schema import assign_fresh_schema_ids, index_by_id
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)

from trinitylake_ops.errors import InvalidDefinitionError, UnsupportedTypeError
from trinitylake_ops.format.definitions import Column, DataType, Schema

ICEBERG_TYPE = "iceberg.type"
DOC = "doc"
PRECISION = "precision"
SCALE = "scale"
SIZE = "size"

_MAX_PRECISION = 38
_UUID_SIZE_BYTES = 16

_PRIMITIVES: Mapping[DataType, type[IcebergType]] = {
    DataType.BOOLEAN: BooleanType,
    DataType.INT4: IntegerType,
    DataType.INT8: LongType,
    DataType.FLOAT4: FloatType,
    DataType.FLOAT8: DoubleType,
    DataType.VARCHAR: StringType,
    DataType.DATE: DateType,
    DataType.TIME: TimeType,
    DataType.TIMESTAMP: TimestampType,
    DataType.TIMESTAMPTZ: TimestamptzType,
    DataType.BINARY: BinaryType,
}
_DATA_TYPES: Mapping[type[IcebergType], DataType] = {iceberg: ours for ours, iceberg in _PRIMITIVES.items()}

_COLUMN_TYPE_REPLACEMENTS: Mapping[DataType, str] = {
    DataType.INT2: "int",
    DataType.CHAR: "string",
    DataType.TIMETZ: "time in UTC, or timestamptz",
}
_ICEBERG_TYPE_REPLACEMENTS: Mapping[str, str] = {
    "timestamp_ns": "timestamp (microseconds)",
    "timestamptz_ns": "timestamptz (microseconds)",
    "unknown": "a concrete type such as string",
    "geometry": "binary (WKB)",
    "geography": "binary (WKB)",
}


def to_iceberg_schema(
    schema: Schema, *, schema_id: int = 0, identifier_field_ids: Collection[int] = ()
) -> IcebergSchema:
    """Convert lakehouse columns to an Iceberg schema with the same field ids.

    Args:
        schema: The columns.
        schema_id: Id of the Iceberg schema.
        identifier_field_ids: Ids of the primary key columns.

    Raises:
        UnsupportedTypeError: Iceberg does not have a type.
        InvalidDefinitionError: A part or property of a column is missing or invalid.
    """
    fields = [_to_field(column, column.name) for column in schema.columns]
    return IcebergSchema(*fields, schema_id=schema_id, identifier_field_ids=list(identifier_field_ids))


def from_iceberg_schema(schema: IcebergSchema) -> Schema:
    """Convert an Iceberg schema to lakehouse columns with the same ids. Raises UnsupportedTypeError."""
    return Schema(columns=tuple(_to_column(field, field.name) for field in schema.fields))


def arrow_to_iceberg_schema(schema: pa.Schema) -> IcebergSchema:
    """Convert an Arrow schema to an Iceberg schema with fresh field ids, starting with 1.

    Raises UnsupportedTypeError for a type that cannot be stored unchanged.
    """
    check_arrow_schema(schema)
    try:
        return assign_fresh_schema_ids(MetastoreCatalog._convert_schema_if_needed(schema))
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedTypeError(
            f"the columns {', '.join(schema.names)} cannot be stored: {reason}; change their types"
        ) from error


def storable(schema: pa.Schema) -> pa.Schema:
    """Replace types of an Arrow schema that Iceberg lacks with types that can store the same values, at any depth.

    Times become microseconds, and timestamps with a time zone are converted to UTC, because Iceberg stores the instant
    without a zone. Values with nanoseconds do not fit. Unsigned 32-bit integers become int64, half floats become
    float32, date64 becomes date32, other decimals become decimal128, and dictionaries become the type of their values.
    """
    return pa.schema([field.with_type(_storable_type(field.type)) for field in schema])


def _storable_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_storable_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_storable_type(kind.key_type), kind.item_field.with_type(_storable_type(kind.item_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_storable_type(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        list_of = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return list_of(kind.value_field.with_type(_storable_type(kind.value_type)))
    if pa.types.is_dictionary(kind):
        return _storable_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_decimal(kind) and kind.precision <= _MAX_PRECISION:
        return pa.decimal128(kind.precision, kind.scale)
    return next((stored for is_kind, stored in _STORABLE_REPLACEMENTS if is_kind(kind)), kind)


_STORABLE_REPLACEMENTS: tuple[tuple[Callable[[pa.DataType], bool], pa.DataType], ...] = (
    (pa.types.is_date64, pa.date32()),
    (pa.types.is_uint32, pa.int64()),
    (pa.types.is_float16, pa.float32()),
)


def check_arrow_schema(schema: pa.Schema) -> None:
    """Raise UnsupportedTypeError, with the column and a replacement, for types that Iceberg cannot store."""
    for field in schema:
        _check_arrow_type(field.type, field.name)


def _to_field(column: Column, path: str) -> NestedField:
    return NestedField(
        field_id=column.id,
        name=column.name,
        field_type=_to_iceberg_type(column, path),
        required=not column.nullable,
        doc=column.properties.get(DOC),
    )


def _to_iceberg_type(column: Column, path: str) -> IcebergType:
    primitive = _PRIMITIVES.get(column.type)
    if primitive is not None:
        return primitive()
    if column.type is DataType.DECIMAL:
        precision = _int_property(column, path, PRECISION, 1, _MAX_PRECISION)
        return DecimalType(precision, _int_property(column, path, SCALE, 0, precision))
    if column.type is DataType.FIXED:
        size_bytes = _int_property(column, path, SIZE, 1, 2**31 - 1)
        is_uuid = column.properties.get(ICEBERG_TYPE) == "uuid" and size_bytes == _UUID_SIZE_BYTES
        return UUIDType() if is_uuid else FixedType(size_bytes)
    if column.type is DataType.STRUCT:
        return StructType(*(_to_field(field, f"{path}.{field.name}") for field in column.struct_fields))
    if column.type is DataType.LIST:
        element = _part(column.list_element, path, "list_element")
        return ListType(element.id, _to_iceberg_type(element, f"{path}.element"), not element.nullable)
    if column.type is DataType.MAP:
        key = _part(column.map_key, path, "map_key")
        value = _part(column.map_value, path, "map_value")
        if key.nullable:
            raise InvalidDefinitionError(f"column {path!r}: the key of a MAP cannot be null; set nullable to false")
        return MapType(
            key.id,
            _to_iceberg_type(key, f"{path}.key"),
            value.id,
            _to_iceberg_type(value, f"{path}.value"),
            not value.nullable,
        )
    instead = _COLUMN_TYPE_REPLACEMENTS.get(column.type, "a supported type")
    raise UnsupportedTypeError(f"column {path!r}: Iceberg has no type for {column.type.name}; use {instead}")


def _part(part: Column | None, path: str, name: str) -> Column:
    if part is None:
        raise InvalidDefinitionError(f"column {path!r} has no {name}; set it")
    return part


def _int_property(column: Column, path: str, name: str, lowest: int, highest: int) -> int:
    text = column.properties.get(name, "")
    if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
        raise InvalidDefinitionError(
            f"column {path!r}: property {name!r} of {column.type.name} is {text!r}; use a number from {lowest}"
            f" to {highest}"
        )
    return int(text)


def _to_column(field: NestedField, path: str) -> Column:
    column = _typed_column(field.field_id, field.name, field.field_type, nullable=field.optional, path=path)
    if field.doc is None:
        return column
    return replace(column, properties={**column.properties, DOC: field.doc})


def _typed_column(field_id: int, name: str, kind: IcebergType, *, nullable: bool, path: str) -> Column:
    def column(data_type: DataType, properties: Mapping[str, str] | None = None) -> Column:
        return Column(id=field_id, name=name, type=data_type, nullable=nullable, properties=dict(properties or {}))

    primitive = _DATA_TYPES.get(type(kind))
    if primitive is not None:
        return column(primitive)
    if isinstance(kind, DecimalType):
        return column(DataType.DECIMAL, {PRECISION: str(kind.precision), SCALE: str(kind.scale)})
    if isinstance(kind, FixedType):
        return column(DataType.FIXED, {SIZE: str(len(kind))})
    if isinstance(kind, UUIDType):
        return column(DataType.FIXED, {SIZE: str(_UUID_SIZE_BYTES), ICEBERG_TYPE: "uuid"})
    if isinstance(kind, StructType):
        fields = tuple(_to_column(field, f"{path}.{field.name}") for field in kind.fields)
        return replace(column(DataType.STRUCT), struct_fields=fields)
    if isinstance(kind, ListType):
        return replace(column(DataType.LIST), list_element=_to_column(kind.element_field, f"{path}.element"))
    if isinstance(kind, MapType):
        key, value = _to_column(kind.key_field, f"{path}.key"), _to_column(kind.value_field, f"{path}.value")
        return replace(column(DataType.MAP), map_key=key, map_value=value)
    type_name = str(kind).partition("(")[0]
    instead = _ICEBERG_TYPE_REPLACEMENTS.get(type_name, "a supported type")
    raise UnsupportedTypeError(f"column {path!r}: lakehouse columns do not support Iceberg's {kind}; use {instead}")


# Replacements for Arrow types, in order of precedence. Types that PyIceberg would accept and silently change, such as
# unsigned integers that do not fit, are also rejected.
_ARROW_REPLACEMENTS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_uint32, "int64"),
    (pa.types.is_uint64, "int64, or decimal128(20, 0)"),
    (pa.types.is_date64, "date32"),
    (pa.types.is_time, "time64('us')"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.unit == "ns", "a timestamp in microseconds"),
    (pa.types.is_timestamp, "timestamp('us', tz='UTC')"),
    (pa.types.is_duration, "int64 of microseconds"),
    (pa.types.is_interval, "int32 columns of its parts"),
    (pa.types.is_decimal, "decimal128 with at most 38 digits and a scale from 0 to as many"),
    (pa.types.is_float16, "float32"),
    (
        pa.types.is_null,
        'a concrete type: astype("string") in pandas, cast(pl.String) in polars, cast(pa.string()) in pyarrow',
    ),
    (pa.types.is_union, "a struct with one nullable field for each alternative"),
    (pa.types.is_run_end_encoded, "the type of its values"),
    (lambda kind: pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind), "list"),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), "columns of its parts, such as its storage"),
)


def _check_arrow_type(kind: pa.DataType, path: str) -> None:
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < max(len(names), 1):
            problem = "has duplicate field names" if names else "is a struct without fields, which Parquet cannot store"
            raise UnsupportedTypeError(f"column {path!r} {problem}; change it or drop it")
        for field in kind:
            _check_arrow_type(field.type, f"{path}.{field.name}")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _check_arrow_type(kind.value_type, f"{path}.element")
    elif pa.types.is_map(kind):
        _check_arrow_type(kind.key_type, f"{path}.key")
        _check_arrow_type(kind.item_type, f"{path}.value")
    elif pa.types.is_dictionary(kind):
        _check_arrow_type(kind.value_type, path)
    elif not _is_arrow_primitive_of_iceberg(kind):
        instead = next((use for matches, use in _ARROW_REPLACEMENTS if matches(kind)), "a type that Iceberg supports")
        raise UnsupportedTypeError(f"column {path!r}: Iceberg has no type for Arrow's {kind}; use {instead}")


_SUPPORTED_ARROW_TYPES: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_uint8,
    pa.types.is_uint16,
    pa.types.is_float32,
    pa.types.is_float64,
    lambda kind: pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
    pa.types.is_date32,
    lambda kind: isinstance(kind, pa.UuidType),
    lambda kind: pa.types.is_time64(kind) and kind.unit == "us",
    lambda kind: pa.types.is_timestamp(kind) and kind.unit != "ns" and (kind.tz is None or _is_utc(kind.tz)),
)


def _is_utc(zone: str) -> bool:
    from pyiceberg.io.pyarrow import UTC_ALIASES  # importing it loads pandas

    return zone in UTC_ALIASES


def _is_arrow_primitive_of_iceberg(kind: pa.DataType) -> bool:
    return any(keeps(kind) for keeps in _SUPPORTED_ARROW_TYPES)


class TypedPartitionSpec(PartitionSpec):
    """A partition spec that stores the types of its source columns, for schemas that lack a source column."""

    _source_types: dict[int, IcebergType] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, spec: PartitionSpec, source_types: dict[int, IcebergType]) -> TypedPartitionSpec:
        """Return a copy of ``spec`` with source types.

        Args:
            spec: The spec, which is not changed.
            source_types: Type of each source column in any schema of the table, by column id.
        """
        typed = cls.model_construct(spec.model_fields_set, **dict(spec))
        typed._source_types = source_types
        return typed

    def partition_type(self, schema: IcebergSchema) -> StructType:
        """Return the struct type of partition values. Prefers the types in ``schema`` to the stored source types."""
        fields = super().partition_type(schema).fields
        return StructType(
            *(
                NestedField(field.field_id, field.name, self._result_type(index), required=False)
                if isinstance(field.field_type, UnknownType)
                else field
                for index, field in enumerate(fields)
            )
        )

    def _result_type(self, index: int) -> IcebergType:
        field = self.fields[index]
        return field.transform.result_type(self._source_types.get(field.source_id, UnknownType()))


def with_typed_specs(metadata: TableMetadata) -> TableMetadata:
    """Return metadata whose partition specs store the types of their source columns, from all schemas of the table.

    The latest schema with a column determines its type because types only widen.
    """
    if all(spec.is_unpartitioned() for spec in metadata.partition_specs):
        return metadata
    sources = {field.source_id for spec in metadata.partition_specs for field in spec.fields}
    types = {
        column_id: column.field_type
        for schema in sorted(metadata.schemas, key=lambda schema: schema.schema_id)
        for column_id, column in index_by_id(schema).items()
        if column_id in sources
    }
    specs = [
        spec if spec.is_unpartitioned() else TypedPartitionSpec.of(spec, types) for spec in metadata.partition_specs
    ]
    return metadata.model_copy(update={"partition_specs": specs})


def check_keeps_source_types(before: TableMetadata, after: TableMetadata) -> None:
    """Check that an update does not remove the last schema that contains the source column of a partition spec.

    Args:
        before: The metadata of the table.
        after: The metadata after the update.

    Raises:
        InvalidDefinitionError: Partition values of a spec could no longer be written.
    """
    columns_before, columns_after = (
        {column for schema in metadata.schemas for column in index_by_id(schema)} for metadata in (before, after)
    )
    for spec in after.partition_specs:
        for field in spec.fields:
            if field.source_id in columns_before - columns_after:
                raise InvalidDefinitionError(
                    f"the schemas cannot be removed: partition spec {spec.spec_id} needs the type of its source column"
                    f" {field.source_id}; keep a schema with that column, or remove the spec first"
                )
