"""Encoding and decoding of definitions."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.decoding import corruption_error
from tests.format.strategies import lakehouse_defs, namespace_defs, table_defs
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.format import definitions_pb2 as pb
from trinitylake_ops.format.definitions import (
    MAJOR_VERSION,
    Column,
    DataType,
    ExpirationBatch,
    ExportLevel,
    ExportRecord,
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    RetentionRules,
    Schema,
    TableDef,
)

PATH = "_lakehouse_def_x.binpb"
UNKNOWN = b"\xc0\xb8\x02\x07"  # field 5000, a number


@given(lakehouse_defs | namespace_defs | table_defs)
def test_definition_round_trips(definition: LakehouseDef | NamespaceDef | TableDef) -> None:
    data = definition.to_bytes()
    decoded = type(definition).from_bytes(data, PATH)
    assert decoded == definition
    assert decoded.to_bytes() == data, "encoding is deterministic"


@given(st.permutations(["a", "b", "c"]))
def test_maps_are_encoded_in_key_order(order: list[str]) -> None:
    assert NamespaceDef(id="n", properties=dict.fromkeys(order, "v")).to_bytes() == (
        NamespaceDef(id="n", properties={"a": "v", "b": "v", "c": "v"}).to_bytes()
    )


def test_missing_optional_fields_have_default_values() -> None:
    definition = LakehouseDef.from_bytes(pb.LakehouseDef(id="x").SerializeToString(), PATH)
    assert definition == LakehouseDef(id="x")
    assert {spec.name: getattr(definition, spec.name) for spec in fields(definition)} == {
        "id": "x",
        "major_version": 0,
        "order": 128,
        "namespace_name_max_size_bytes": 100,
        "table_name_max_size_bytes": 100,
        "file_path_max_size_bytes": 200,
        "node_file_max_size_bytes": 1_048_576,
        "properties": {},
        "maximum_version_age_millis": 604_800_000,
        "minimum_versions_to_keep": 3,
        "maximum_version_age_millis_overrides": {},
        "exported_snapshots": {},
        "txn_ttl_millis": 86_400_000,
        "isolation_level": IsolationLevel.SNAPSHOT,
        "exports": (),
        "expirations": (),
        "retention_rules": None,
        "table_root": "",
        "node_compression": "",
        "orphans_removed_before_millis": 0,
        "sources": (),
        "parent": None,
        "maintenance_policy": "",
        "unknown_fields": b"",
    }


def test_zero_values_are_not_treated_as_missing() -> None:
    message = pb.LakehouseDef(id="x", order=0, maximum_version_age_millis=0)
    definition = LakehouseDef.from_bytes(message.SerializeToString(), PATH)
    assert (definition.order, definition.maximum_version_age_millis) == (0, 0)
    assert ExportRecord(name="e", version=1, level=ExportLevel.FULL).retain_until_millis is None


@pytest.mark.parametrize("kind", [LakehouseDef, NamespaceDef, TableDef])
def test_empty_file_is_corrupt(kind: type[LakehouseDef | NamespaceDef | TableDef]) -> None:
    """Empty bytes are valid protobuf, and would decode to default values, for example to no exports."""
    with pytest.raises(CorruptFileError) as caught:
        kind.from_bytes(b"", PATH)
    assert caught.value.path == PATH


def test_lakehouse_without_id_is_corrupt() -> None:
    with pytest.raises(CorruptFileError):
        LakehouseDef.from_bytes(LakehouseDef(id="").to_bytes(), PATH)


def test_table_without_type_is_managed() -> None:
    assert TableDef(id="a", table_type="").is_managed
    assert not TableDef(table_type="EXTERNAL").is_managed


def test_unknown_fields_are_preserved_at_every_level() -> None:
    column = Column(id=3, name="part", type=DataType.INT4, unknown_fields=UNKNOWN)
    nested = replace(column, id=2, struct_fields=(column,), map_key=column, map_value=column, list_element=column)
    table = TableDef(
        id="t", schema=Schema(columns=(replace(nested, id=1, list_element=nested),), unknown_fields=UNKNOWN),
        unknown_fields=UNKNOWN,
    )  # fmt: skip
    decoded = TableDef.from_bytes(table.to_bytes(), PATH)
    changed = TableDef.from_bytes(replace(decoded, properties={"new": "x"}).to_bytes(), PATH)
    assert changed == replace(table, properties={"new": "x"})
    assert changed.to_bytes().count(UNKNOWN) == 2 + 4 + 5
    lakehouse = LakehouseDef(
        id="x",
        exports=(ExportRecord(name="e", version=1, level=ExportLevel.MINIMAL, unknown_fields=UNKNOWN),),
        expirations=(ExpirationBatch(id="b", versions="1-2", unknown_fields=UNKNOWN),),
        retention_rules=RetentionRules(keep_last=1, unknown_fields=UNKNOWN),
        unknown_fields=UNKNOWN,
    )
    read_lakehouse = LakehouseDef.from_bytes(lakehouse.to_bytes(), PATH)
    changed_bytes = replace(read_lakehouse, properties={"new": "x"}).to_bytes()
    assert changed_bytes.count(UNKNOWN) == 4
    assert LakehouseDef.from_bytes(changed_bytes, PATH) == replace(lakehouse, properties={"new": "x"})


@given(st.integers(0, 2**31 - 1))
def test_unknown_enum_numbers_are_preserved(number: int) -> None:
    definition = LakehouseDef(id="x", isolation_level=IsolationLevel(number))
    decoded = LakehouseDef.from_bytes(definition.to_bytes(), PATH)
    assert decoded.isolation_level == number
    assert isinstance(decoded.isolation_level, IsolationLevel)
    column = Column(id=1, name="c", type=DataType(number))
    table = TableDef(schema=Schema(columns=(column,)))
    assert TableDef.from_bytes(table.to_bytes(), PATH).schema.columns[0].type == number


def test_unknown_enum_number_has_a_name_and_can_be_pickled() -> None:
    unknown = DataType(77)
    assert unknown.name == "UNKNOWN_77"
    assert pickle.loads(pickle.dumps(unknown)) == unknown
    assert hash(DataType(77)) == hash(unknown)
    with pytest.raises(ValueError, match="nonsense"):
        DataType("nonsense")


def test_error_of_newer_major_version_names_both_versions() -> None:
    data = replace(LakehouseDef(id="x"), major_version=MAJOR_VERSION + 7).to_bytes()
    with pytest.raises(CorruptFileError, match=rf"version {MAJOR_VERSION + 7} .* up to {MAJOR_VERSION};") as caught:
        LakehouseDef.from_bytes(data, PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"not protobuf", b"\x0a\x01\xff", b"\x12\xff\xff"])
@pytest.mark.parametrize("kind", [LakehouseDef, NamespaceDef, TableDef])
def test_invalid_bytes_are_corrupt(data: bytes, kind: type[LakehouseDef] | type[NamespaceDef] | type[TableDef]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        kind.from_bytes(data, PATH)
    assert caught.value.path == PATH
    assert kind.__name__ in str(caught.value)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_only_corrupt_file_error(data: bytes) -> None:
    for kind in (LakehouseDef, NamespaceDef, TableDef):
        error = corruption_error(kind.from_bytes, data, PATH)
        assert error is None or error.path == PATH


def _nested_column(levels: int) -> Column:
    column = Column(id=1, name="c", type=DataType.INT4)
    for _ in range(levels):
        column = Column(id=1, name="c", type=DataType.LIST, list_element=column)
    return column


@pytest.mark.parametrize(
    "definition",
    [
        TableDef(properties={"a": 5}),  # type: ignore[dict-item]
        TableDef(properties={"a": "\ud800"}),
        TableDef(primary_keys=(-1,)),
        TableDef(primary_keys=("x",)),  # type: ignore[arg-type]
        TableDef(id=None, table_format=7),  # type: ignore[arg-type]
        TableDef(schema=Schema(columns=(Column(id=2**32, name="c", type=DataType.INT4),))),
        TableDef(schema=Schema(columns=(_nested_column(200),))),
        NamespaceDef(id="n", properties={"a": None}),  # type: ignore[dict-item]
        NamespaceDef(id="n", properties=[1]),  # type: ignore[arg-type]
        LakehouseDef(id="x", order="four"),  # type: ignore[arg-type]
        LakehouseDef(id="x", txn_ttl_millis=-1),
    ],
)
def test_unencodable_value_is_rejected(definition: LakehouseDef | NamespaceDef | TableDef) -> None:
    with pytest.raises(InvalidDefinitionError, match=rf"^this {type(definition).__name__} cannot be stored: "):
        definition.to_bytes()


@pytest.mark.parametrize("levels", [1, 20, 90, 94, 95, 96, 97, 98, 99, 100, 101])
def test_deepest_encodable_nesting_is_decoded(levels: int) -> None:
    definition = TableDef(schema=Schema(columns=(_nested_column(levels),)))
    try:
        data = definition.to_bytes()
    except InvalidDefinitionError:
        assert levels > 90
    else:
        assert TableDef.from_bytes(data, PATH) == definition


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [("3-90,95", [3, 4, 90, 95], [2, 91, 94, 96]), ("7", [7], [6, 8]), ("", [], [0]), ("0-1", [0, 1], [2])],
)
def test_expiration_ranges_are_inclusive(versions: str, inside: list[int], outside: list[int]) -> None:
    batch = ExpirationBatch(id="b", versions=versions)
    assert all(batch.contains(version) for version in inside)
    assert not any(batch.contains(version) for version in outside)
