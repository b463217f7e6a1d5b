"""Limits of lakehouse settings, and the validation of schemas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.format.definitions import MAJOR_VERSION, Column, DataType, LakehouseDef, Schema, TableDef
from trinitylake_ops.format.file_names import min_path_limit_bytes
from trinitylake_ops.format.limits import (
    MAX_ORDER,
    smallest_node_file_limit_bytes,
    validate_changed_settings,
    validate_lakehouse_def,
    validate_table_def,
)

DEFAULT = LakehouseDef(id="x")


def test_default_limits_are_consistent() -> None:
    assert validate_lakehouse_def(DEFAULT) is DEFAULT
    assert 51_840 < smallest_node_file_limit_bytes(DEFAULT) < 70_000, "the formula of the specification gives 51,840"


@pytest.mark.parametrize(
    ("name", "value", "minimum"),
    [
        ("order", 2, 3),
        ("namespace_name_max_size_bytes", 0, 1),
        ("table_name_max_size_bytes", 0, 1),
        ("file_path_max_size_bytes", min_path_limit_bytes() - 1, min_path_limit_bytes()),
        ("node_file_max_size_bytes", 60_000, smallest_node_file_limit_bytes(DEFAULT)),
        ("minimum_versions_to_keep", 0, 1),
        ("txn_ttl_millis", 0, 1),
    ],
)
def test_error_of_too_small_setting_names_minimum(name: str, value: int, minimum: int) -> None:
    with pytest.raises(InvalidDefinitionError, match=rf"^{name} is {value}; it must be at least {minimum}$"):
        validate_lakehouse_def(replace(DEFAULT, **{name: value}))
    accepted = replace(DEFAULT, **{name: minimum})
    assert validate_lakehouse_def(accepted) == accepted


def test_too_large_order_or_newer_format_is_rejected() -> None:
    huge = 2**40
    with pytest.raises(InvalidDefinitionError, match="node_file_max_size_bytes"):
        validate_lakehouse_def(replace(DEFAULT, node_file_max_size_bytes=67_674, file_path_max_size_bytes=huge))
    with pytest.raises(
        InvalidDefinitionError, match=rf"^node_file_max_size_bytes is {huge}; it must be at most 2147483647$"
    ):
        validate_lakehouse_def(replace(DEFAULT, node_file_max_size_bytes=huge))
    with pytest.raises(InvalidDefinitionError, match=rf"at most {MAX_ORDER}"):
        validate_lakehouse_def(replace(DEFAULT, order=MAX_ORDER + 1, node_file_max_size_bytes=2**40))
    with pytest.raises(InvalidDefinitionError, match=f"major_version is 1, .* writes {MAJOR_VERSION}"):
        validate_lakehouse_def(replace(DEFAULT, major_version=1))


@pytest.mark.parametrize(
    "name",
    [
        "id",
        "major_version",
        "order",
        "namespace_name_max_size_bytes",
        "table_name_max_size_bytes",
        "file_path_max_size_bytes",
        "node_file_max_size_bytes",
    ],
)
def test_settings_that_affect_keys_and_nodes_cannot_change(name: str) -> None:
    changed = replace(DEFAULT, **{name: "y" if name == "id" else getattr(DEFAULT, name) + 1})
    with pytest.raises(InvalidDefinitionError, match=rf"^{name} is fixed"):
        validate_changed_settings(DEFAULT, changed)


def test_other_settings_can_change_within_limits() -> None:
    changed = replace(DEFAULT, txn_ttl_millis=5, properties={"a": "b"})
    assert validate_changed_settings(DEFAULT, changed) is changed
    with pytest.raises(InvalidDefinitionError):
        validate_changed_settings(DEFAULT, replace(DEFAULT, minimum_versions_to_keep=0))


@pytest.mark.parametrize("name", ["", "lz4", "zstd"])
def test_supported_node_compression_is_accepted(name: str) -> None:
    changed = replace(DEFAULT, node_compression=name)
    assert validate_lakehouse_def(changed) is changed
    assert validate_changed_settings(replace(DEFAULT, node_compression="of-another-program"), changed) is changed


@pytest.mark.parametrize("name", ["none", "LZ4", "gzip", " "])
def test_error_of_unsupported_node_compression_names_supported_codecs(name: str) -> None:
    changed = replace(DEFAULT, node_compression=name)
    for validate in (validate_lakehouse_def, lambda after: validate_changed_settings(DEFAULT, after)):
        with pytest.raises(InvalidDefinitionError, match=f"^node_compression is '{name}', .*'lz4' or 'zstd'"):
            validate(changed)


def _table(*columns: Column, **keys: tuple[int, ...]) -> TableDef:
    return TableDef(schema=Schema(columns=columns), **keys)  # type: ignore[arg-type]


def _struct(*names: str) -> Column:
    fields = tuple(Column(id=10 + number, name=name, type=DataType.INT4) for number, name in enumerate(names))
    return Column(id=9, name="", type=DataType.STRUCT, struct_fields=fields)


A, B = Column(id=1, name="a", type=DataType.INT4), Column(id=2, name="b", type=DataType.INT8)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (_table(replace(A, id=0)), "column ids start at 1"),
        (_table(A, replace(B, id=1)), "column id 1 is used more than once"),
        (_table(replace(A, struct_fields=(replace(B, id=1),))), "column id 1 is used more than once"),
        (_table(A, replace(B, name="a")), "two columns are named 'a'"),
        (_table(replace(A, name="")), "has no name"),
        (_table(replace(A, struct_fields=(B, replace(B, id=3)))), "two columns.* are named 'b'"),
        (_table(replace(A, list_element=replace(B, map_value=_struct("z", "z")))), "two columns of 'a' are named 'z'"),
        (_table(A, primary_keys=(2,)), "primary_keys refers to column id 2"),
        (_table(A, distribution_keys=(1, 9)), "distribution_keys refers to column id 9"),
        (_table(A, sort_keys=(5,)), "sort_keys refers to column id 5"),
        (_table(A, unique_columns=(5,)), "unique_columns refers to column id 5"),
        (_table(replace(A, struct_fields=(B,)), primary_keys=(2,)), "primary_keys refers to column id 2"),
    ],
)
def test_inconsistent_schema_is_rejected(definition: TableDef, message: str) -> None:
    with pytest.raises(InvalidDefinitionError, match=message):
        validate_table_def(definition)


def test_valid_schema_is_returned_unchanged() -> None:
    nested = replace(B, struct_fields=(replace(A, id=3), replace(B, id=4)))
    definition = _table(A, nested, primary_keys=(1,), sort_keys=(2, 1), unique_columns=(1,), distribution_keys=(2,))
    assert validate_table_def(definition) is definition
