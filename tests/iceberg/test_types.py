"""Conversion between columns and Iceberg types, and the errors for unsupported types."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.schema import Schema as IcebergSchema
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
    TimestampNanoType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)

from trinitylake_ops.errors import InvalidDefinitionError, UnsupportedTypeError
from trinitylake_ops.format.definitions import Column, DataType, Schema
from trinitylake_ops.iceberg.types import (
    arrow_to_iceberg_schema,
    check_arrow_schema,
    from_iceberg_schema,
    storable,
    to_iceberg_schema,
)

PRIMITIVE = [
    DataType.BOOLEAN,
    DataType.INT4,
    DataType.INT8,
    DataType.FLOAT4,
    DataType.FLOAT8,
    DataType.VARCHAR,
    DataType.DATE,
    DataType.TIME,
    DataType.TIMESTAMP,
    DataType.TIMESTAMPTZ,
    DataType.BINARY,
]
DOCS = st.one_of(st.just({}), st.text(min_size=1, max_size=5).map(lambda text: {"doc": text}))


def unnamed_column(data_type: DataType, properties: dict[str, str], nullable: bool) -> Column:
    return Column(id=0, name="", type=data_type, properties=properties, nullable=nullable)


DECIMALS = st.integers(1, 38).flatmap(
    lambda precision: st.integers(0, precision).map(lambda scale: {"precision": str(precision), "scale": str(scale)})
)
FIXED = st.one_of(
    st.integers(1, 64).map(lambda size: {"size": str(size)}), st.just({"size": "16", "iceberg.type": "uuid"})
)
LEAVES = st.one_of(
    st.builds(unnamed_column, st.sampled_from(PRIMITIVE), st.just({}), st.booleans()),
    st.builds(unnamed_column, st.just(DataType.DECIMAL), DECIMALS, st.booleans()),
    st.builds(unnamed_column, st.just(DataType.FIXED), FIXED, st.booleans()),
)


def nested(children: st.SearchStrategy[Column]) -> st.SearchStrategy[Column]:
    empty = st.just({})
    structs = st.tuples(st.booleans(), st.lists(children, min_size=1, max_size=3)).map(
        lambda drawn: replace(unnamed_column(DataType.STRUCT, {}, drawn[0]), struct_fields=tuple(drawn[1]))
    )
    lists = st.builds(unnamed_column, st.just(DataType.LIST), empty, st.booleans()).flatmap(
        lambda column: children.map(lambda element: replace(column, list_element=element))
    )
    maps = st.builds(unnamed_column, st.just(DataType.MAP), empty, st.booleans()).flatmap(
        lambda column: st.tuples(children, children).map(
            lambda drawn: replace(column, map_key=replace(drawn[0], nullable=False), map_value=drawn[1])
        )
    )
    return st.one_of(structs, lists, maps)


def numbered(column: Column, name: str, ids: itertools.count[int], doc: dict[str, str] | None = None) -> Column:
    """Give every column of a tree an id and a name. Children of maps and lists get Iceberg's names."""

    def numbered_child(inner: Column | None, child_name: str) -> Column | None:
        return None if inner is None else numbered(inner, child_name, ids)

    return replace(
        column,
        id=next(ids),
        name=name,
        properties={**column.properties, **(doc or {})},
        struct_fields=tuple(numbered(field, f"f{index}", ids) for index, field in enumerate(column.struct_fields)),
        map_key=numbered_child(column.map_key, "key"),
        map_value=numbered_child(column.map_value, "value"),
        list_element=numbered_child(column.list_element, "element"),
    )


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    ids = itertools.count(draw(st.integers(1, 50)))
    trees = draw(st.lists(st.recursive(LEAVES, nested, max_leaves=6), min_size=1, max_size=4))
    return Schema(columns=tuple(numbered(tree, f"c{index}", ids, draw(DOCS)) for index, tree in enumerate(trees)))


@given(schemas())
def test_columns_round_trip_through_iceberg_types(schema: Schema) -> None:
    converted = to_iceberg_schema(schema)
    assert from_iceberg_schema(converted) == schema
    assert IcebergSchema.model_validate_json(converted.model_dump_json()) == converted


def test_conversion_preserves_ids_names_and_nullability() -> None:
    point = StructType(NestedField(5, "x", LongType(), required=True), NestedField(6, "y", DecimalType(9, 2)))
    schema = IcebergSchema(
        NestedField(3, "id", UUIDType(), required=True, doc="key"),
        NestedField(4, "points", MapType(7, StringType(), 8, ListType(9, point, True), False)),
        NestedField(10, "hash", FixedType(32)),
    )
    columns = from_iceberg_schema(schema).columns
    assert columns[0] == Column(
        id=3,
        name="id",
        type=DataType.FIXED,
        nullable=False,
        properties={"size": "16", "iceberg.type": "uuid", "doc": "key"},
    )
    value = columns[1].map_value
    assert value is not None
    assert (value.id, value.nullable, value.list_element.nullable if value.list_element else None) == (8, True, False)
    assert columns[2].properties == {"size": "32"}
    assert to_iceberg_schema(Schema(columns=columns)) == schema


@pytest.mark.parametrize(
    ("data_type", "replacement"),
    [
        (DataType.INT2, "int"),
        (DataType.CHAR, "string"),
        (DataType.TIMETZ, "time in UTC"),
        (DataType(99), "a supported type"),
    ],
)
def test_unsupported_column_type_has_one_line_error(data_type: DataType, replacement: str) -> None:
    inner = Column(id=2, name="code", type=data_type)
    schema = Schema(columns=(Column(id=1, name="plane", type=DataType.STRUCT, struct_fields=(inner,)),))
    with pytest.raises(UnsupportedTypeError) as caught:
        to_iceberg_schema(schema)
    message = str(caught.value)
    assert "'plane.code'" in message
    assert data_type.name in message
    assert f"use {replacement}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "replacement"), [(TimestampNanoType(), "timestamp (microseconds)"), (UnknownType(), "a concrete type")]
)
def test_unsupported_iceberg_type_has_one_line_error(kind: IcebergType, replacement: str) -> None:
    schema = IcebergSchema(NestedField(1, "seen", ListType(2, kind)))
    with pytest.raises(UnsupportedTypeError, match=r"'seen\.element'") as caught:
        from_iceberg_schema(schema)
    assert replacement in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "column",
    [
        Column(id=1, name="c", type=DataType.DECIMAL, properties={"precision": "39", "scale": "0"}),
        Column(id=1, name="c", type=DataType.DECIMAL, properties={"precision": "5", "scale": "6"}),
        Column(id=1, name="c", type=DataType.DECIMAL),
        Column(id=1, name="c", type=DataType.FIXED, properties={"size": "-1"}),
        Column(id=1, name="c", type=DataType.LIST),
        Column(id=1, name="c", type=DataType.MAP, map_key=Column(id=2, name="key", type=DataType.INT4, nullable=False)),
        Column(
            id=1,
            name="c",
            type=DataType.MAP,
            map_key=Column(id=2, name="key", type=DataType.INT4),
            map_value=Column(id=3, name="value", type=DataType.INT4),
        ),
    ],
)
def test_invalid_column_raises_error_with_name(column: Column) -> None:
    with pytest.raises(InvalidDefinitionError, match="'c'"):
        to_iceberg_schema(Schema(columns=(column,)))


@pytest.mark.parametrize(
    ("kind", "replacement"),
    [
        (pa.uint32(), "int64"),
        (pa.uint64(), "decimal128(20, 0)"),
        (pa.time32("s"), "time64('us')"),
        (pa.time64("ns"), "time64('us')"),
        (pa.date64(), "date32"),
        (pa.timestamp("ns"), "microseconds"),
        (pa.timestamp("us", tz="Europe/Berlin"), "tz='UTC'"),
        (pa.duration("s"), "int64"),
        (pa.month_day_nano_interval(), "int32"),
        (pa.decimal256(50, 2), "decimal128"),
        (pa.null(), "a concrete type"),
        (pa.list_view(pa.int64()), "list"),
        (pa.float16(), "float32"),
        (pa.decimal128(5, -2), "decimal128"),
        (pa.dense_union([pa.field("a", pa.int64())]), "a struct"),
        (pa.run_end_encoded(pa.int32(), pa.int64()), "the type of its values"),
        (pa.bool8(), "its storage"),
    ],
)
@pytest.mark.parametrize("level", ["top", "nested"])
def test_unsupported_arrow_type_has_one_line_error(kind: pa.DataType, replacement: str, level: str) -> None:
    nested_type = pa.map_(pa.string(), pa.list_(pa.struct([("v", kind)])))
    schema = pa.schema([("ok", pa.int64()), ("c", kind if level == "top" else nested_type)])
    path = "'c'" if level == "top" else "'c.value.element.v'"
    with pytest.raises(UnsupportedTypeError) as caught:
        check_arrow_schema(schema)
    assert str(caught.value).startswith(f"column {path}: Iceberg has no type for Arrow's ")
    assert replacement in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.struct([]), pa.struct([("a", pa.int64()), ("a", pa.string())])])
def test_unsupported_struct_is_rejected(kind: pa.DataType) -> None:
    for schema in (pa.schema([("c", kind)]), pa.schema([("c", pa.list_(kind))])):
        with pytest.raises(UnsupportedTypeError):
            arrow_to_iceberg_schema(storable(schema))


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (pa.timestamp("ns"), "timestamp"),
        (pa.timestamp("s", "Europe/Berlin"), "timestamptz"),
        (pa.time32("ms"), "time"),
        (pa.time64("ns"), "time"),
        (pa.date64(), "date"),
        (pa.uint32(), "long"),
        (pa.float16(), "float"),
        (pa.decimal32(5, 2), "decimal(5, 2)"),
        (pa.decimal256(38, 2), "decimal(38, 2)"),
        (pa.dictionary(pa.int8(), pa.timestamp("ns")), "timestamp"),
        (pa.string_view(), "string"),
        (pa.large_binary(), "binary"),
    ],
)
def test_storable_types_are_converted_at_any_depth(kind: pa.DataType, stored: str) -> None:
    nested_types = [
        pa.struct([("v", kind)]),
        pa.list_(kind),
        pa.large_list(kind),
        pa.list_(kind, 2),
        pa.map_(pa.string(), kind),
    ]
    schema = arrow_to_iceberg_schema(
        storable(pa.schema([(str(index), column_type) for index, column_type in enumerate([kind, *nested_types])]))
    )
    columns = from_iceberg_schema(schema).columns
    assert [column.type_name for column in columns] == [
        stored,
        f"struct<v: {stored}>",
        *[f"list<{stored}>"] * 3,
        f"map<string, {stored}>",
    ]


def test_type_names_match_pyiceberg() -> None:
    """The names are those of PyIceberg, without field ids."""
    kinds: list[IcebergType] = [
        BooleanType(),
        IntegerType(),
        LongType(),
        FloatType(),
        DoubleType(),
        StringType(),
        DateType(),
        TimeType(),
        TimestampType(),
        TimestamptzType(),
        BinaryType(),
        UUIDType(),
        FixedType(16),
        DecimalType(10, 2),
    ]
    fields = [NestedField(index, f"c{index}", kind) for index, kind in enumerate(kinds, start=1)]
    assert [column.type_name for column in from_iceberg_schema(IcebergSchema(*fields)).columns] == [
        str(kind) for kind in kinds
    ]


def test_arrow_schema_gets_fresh_ids() -> None:
    schema = arrow_to_iceberg_schema(
        pa.schema(
            [
                pa.field("small", pa.int8(), nullable=False),
                ("name", pa.dictionary(pa.int32(), pa.string())),
                ("tags", pa.large_list(pa.string_view())),
                ("at", pa.timestamp("ms", tz="UTC")),
                ("key", pa.uuid()),
            ]
        )
    )
    assert [(field.field_id, field.name, str(field.field_type), field.required) for field in schema.fields] == [
        (1, "small", "int", True),
        (2, "name", "string", False),
        (3, "tags", "list<string>", False),
        (4, "at", "timestamptz", False),
        (5, "key", "uuid", False),
    ]
