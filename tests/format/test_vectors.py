"""The test vectors of the format."""

from __future__ import annotations

import json

import pytest

from tests.lakes import DATA
from trinitylake_ops.errors import InvalidLocationError, InvalidNameError
from trinitylake_ops.format.file_names import optimize_path, parse_root_path, root_path
from trinitylake_ops.format.keys import KeyCodec, ObjectName, encode_schema_id, validate_name
from trinitylake_ops.format.locations import normalize_root_uri, validate_location

VECTORS = json.loads((DATA / "format.json").read_text())


def test_all_vector_groups_are_used() -> None:
    assert set(VECTORS) == {
        "optimized_paths",
        "root_paths",
        "object_keys",
        "schema_ids",
        "invalid_names_at_max_8_bytes",
        "invalid_locations",
        "root_uris",
    }


@pytest.mark.parametrize(("original", "optimized"), VECTORS["optimized_paths"].items())
def test_optimized_path_vector(original: str, optimized: str) -> None:
    assert optimize_path(original) == optimized


@pytest.mark.parametrize(("version", "path"), VECTORS["root_paths"].items())
def test_root_path_vector(version: str, path: str) -> None:
    assert root_path(int(version)) == path
    assert parse_root_path(path) == int(version)


@pytest.mark.parametrize("vector", VECTORS["object_keys"], ids=lambda vector: vector["key"].replace(" ", "."))
def test_object_key_vector(vector: dict) -> None:
    codec = KeyCodec(vector["namespace_name_max_size_bytes"], vector["table_name_max_size_bytes"])
    namespace, table = vector["namespace"], vector["table"]
    key = codec.namespace_key(namespace) if table is None else codec.table_key(namespace, table)
    assert key == vector["key"]
    assert codec.decode(key) == ObjectName(namespace, table)


@pytest.mark.parametrize(("schema_id", "encoded"), VECTORS["schema_ids"].items())
def test_schema_id_vector(schema_id: str, encoded: str) -> None:
    assert encode_schema_id(int(schema_id)) == encoded


@pytest.mark.parametrize("name", VECTORS["invalid_names_at_max_8_bytes"], ids=ascii)
def test_invalid_name_vector(name: str) -> None:
    with pytest.raises(InvalidNameError):
        validate_name(name, 8, "table")
    with pytest.raises(InvalidNameError):
        KeyCodec(8, 8).namespace_key(name)
    with pytest.raises(InvalidNameError):
        KeyCodec(8, 8).table_key("default", name)


@pytest.mark.parametrize("location", VECTORS["invalid_locations"])
def test_invalid_location_vector(location: str) -> None:
    with pytest.raises(InvalidLocationError) as caught:
        validate_location(location)
    assert repr(location) in str(caught.value)


@pytest.mark.parametrize(("root", "normalized"), VECTORS["root_uris"].items())
def test_root_uri_vector(root: str, normalized: str) -> None:
    assert normalize_root_uri(root) == normalized
    assert normalize_root_uri(normalized) == normalized
