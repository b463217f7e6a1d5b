"""Paths of definitions, nodes, roots and records."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.format.strategies import names
from trinitylake_ops.errors import InvalidDefinitionError, VersionNotFoundError
from trinitylake_ops.format.file_names import (
    MAX_SEGMENT_BYTES,
    MAX_VERSION,
    ROOT_NAMING,
    ROOT_NAMINGS,
    RootNaming,
    is_operation_path,
    is_table_definition_path,
    is_verified_path,
    min_path_limit_bytes,
    new_export_root_path,
    new_lakehouse_def_path,
    new_manifest_path,
    new_namespace_path,
    new_node_path,
    new_table_path,
    new_verified_path,
    optimize_path,
    parse_hint,
    parse_root_path,
    root_naming,
    root_path,
    table_prefix,
)
from trinitylake_ops.format.locations import validate_path

UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
HASH = r"[01]{4}/[01]{4}/[01]{4}/[01]{8}-"


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300),
    st.integers(min_path_limit_bytes(), 600),
)
@example("a" * 100, "b" * 100, 200)
@example("🦆" * 100, "é" * 100, 600)
@example("..", "..", min_path_limit_bytes())
@example("/" * 50, "a/../b", 200)
def test_definition_path_length_is_bounded(namespace: str, table: str, limit_bytes: int) -> None:
    for path in (new_table_path(namespace, table, limit_bytes), new_namespace_path(namespace, limit_bytes)):
        assert len(path.encode()) <= limit_bytes
        segments = validate_path(path).split("/")
        assert len(segments[-1].encode()) <= MAX_SEGMENT_BYTES
        assert [len(segment) for segment in segments[:-1]] == [4, 4, 4]
        assert re.fullmatch(rf"{HASH}(table|namespace)-.*-{UUID4}\.binpb", path, re.DOTALL)
        original = segments[-1].partition("-")[2]
        assert optimize_path(original) == path, "the original path contains no '/', so that it can be hashed again"


@given(names)
def test_path_has_only_safe_characters(name: str) -> None:
    path = new_namespace_path(name, 400)
    match = re.fullmatch(rf"{HASH}namespace-(.*)-{UUID4}\.binpb", path, re.DOTALL)
    assert match is not None
    assert len(match[1]) == len(name), "a name that fits is not truncated"
    for char, replaced in zip(name, match[1], strict=True):
        is_safe = char.isascii() and (char.isalnum() or char in "._~=-")
        assert replaced == char if is_safe else replaced in "_-"


def test_readable_part_replaces_special_characters() -> None:
    path = new_table_path("na/me", "a b%20#?*[]:\\\"'é航9²~=._-", 400)
    assert "-table-a_b_20___________9_~=._--na-me-" in path


def test_long_name_is_truncated() -> None:
    assert len(new_namespace_path("é" * 200, 101)) == 101


@pytest.mark.parametrize(
    ("table", "old_name"), [("größe", "größe"), ("航班 1", "航班_1"), ("a/b²", "a-b²"), ("plain", "plain")]
)
def test_definition_path_under_earlier_name_belongs_to_table(table: str, old_name: str) -> None:
    path = optimize_path(f"table-{old_name}-ns-{uuid.UUID(int=5)}.binpb")
    assert is_table_definition_path(path, "ns", table, 200)
    assert is_table_definition_path(new_table_path("ns", table, 200), "ns", table, 200)
    assert not is_table_definition_path(path, "ns", "other", 200)
    assert not is_table_definition_path(path.replace("table-", "table-x"), "ns", table, 200)


def test_new_paths_are_unique_and_well_formed() -> None:
    for make, pattern in [
        (new_node_path, rf"{HASH}node-{UUID4}\.arrow"),
        (new_lakehouse_def_path, rf"_lakehouse_def_{UUID4}\.binpb"),
        (new_export_root_path, rf"_export_{UUID4}\.arrow"),
        (new_manifest_path, rf"_ops/export-{UUID4}\.json"),
    ]:
        paths = {make() for _ in range(20)}
        assert len(paths) == 20
        assert all(re.fullmatch(pattern, path) for path in paths)


def test_minimum_limit_keeps_one_character_of_name() -> None:
    limit_bytes = min_path_limit_bytes()
    for path in (new_namespace_path("xyz", limit_bytes), new_table_path("n", "xyz", limit_bytes)):
        assert "-x" in path
        assert len(path) <= limit_bytes
    assert max(len(new_node_path()), len(new_lakehouse_def_path()), len(new_export_root_path())) <= limit_bytes


@pytest.mark.parametrize("naming", ROOT_NAMINGS, ids=str)
@given(version=st.integers(0, MAX_VERSION))
def test_root_names_round_trip(naming: RootNaming, version: int) -> None:
    path = naming.path(version)
    assert parse_root_path(path) == version
    assert [other.parse(path) for other in ROOT_NAMINGS if other != naming] == [None] * 3
    assert naming.parse(path) == version
    assert root_naming(path) == naming
    assert len(path) == len("_") + naming.digits + len(naming.suffix)
    assert naming.path(version ^ 1)[1] != path[1], "the lowest digit comes first"
    assert path[1:33] == root_path(version)[1:33], "additional digits are zeros at the end"


def test_default_root_naming_is_first() -> None:
    assert len(set(ROOT_NAMINGS)) == 4
    assert ROOT_NAMINGS[0] == ROOT_NAMING == RootNaming()
    assert {ROOT_NAMING.path(version) == root_path(version) for version in (0, 7, MAX_VERSION)} == {True}


@pytest.mark.parametrize("naming", ROOT_NAMINGS, ids=str)
@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 2**64])
def test_version_out_of_range_is_rejected(naming: RootNaming, version: int) -> None:
    with pytest.raises(VersionNotFoundError, match=str(version)):
        naming.path(version)


@pytest.mark.parametrize("suffix", [".arrow", ".ipc"])
@pytest.mark.parametrize("version", [MAX_VERSION + 1, 2**63, 2**64 - 1])
def test_name_of_version_out_of_range_is_rejected(version: int, suffix: str) -> None:
    path = "_" + f"{version:064b}"[::-1] + suffix
    with pytest.raises(VersionNotFoundError, match=f"version {version}; versions beyond {MAX_VERSION}") as caught:
        parse_root_path(path)
    assert (caught.value.path, caught.value.version) == (path, version)
    with pytest.raises(VersionNotFoundError):
        RootNaming(64, suffix).parse(path)
    assert root_naming(path) == RootNaming(64, suffix)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "_latest_hint.txt",
        "_" + "0" * 31 + ".arrow",
        "_" + "0" * 33 + ".arrow",
        "_" + "0" * 48 + ".ipc",
        "_" + "0" * 65 + ".ipc",
        "_" + "0" * 32 + ".arrow\n",
        "_" + "0" * 64 + ".ipc\n",
        "_" + "0" * 32 + ".ip",
        "_" + "0" * 32,
        "x/_" + "0" * 32 + ".arrow",
        "_" + "2" * 32 + ".arrow",
        "_" + "٠" * 32 + ".arrow",
        "_export_7c52cec4-43e3-4f73-91a3-87cfd94da1f0.arrow",
    ],
)
def test_other_names_are_not_roots(path: str) -> None:
    assert parse_root_path(path) is None
    assert root_naming(path) is None


@pytest.mark.parametrize(
    ("data", "version"),
    [
        (b"0", 0),
        (b"100", 100),
        (b" 7\n", 7),
        (b"007", 7),
        (str(MAX_VERSION).encode(), MAX_VERSION),
        (str(MAX_VERSION + 1).encode(), None),
        (b"9" * 10_000, None),
        (b"-1", None),
        (b"+1", None),
        (b"1.0", None),
        (b"1_0", None),
        (b"0x10", None),
        (b"", None),
        (b" \n", None),
        (b"garbage", None),
        (b"\xff\xfe\x00", None),
        ("١٢".encode(), None),
        (b"1\x00", None),
    ],
)
def test_hint_is_parsed(data: bytes, version: int | None) -> None:
    assert parse_hint(data) == version


@given(st.binary(max_size=100))
def test_invalid_hint_is_ignored(data: bytes) -> None:
    version = parse_hint(data)
    assert version is None or 0 <= version <= MAX_VERSION


@pytest.mark.parametrize("table_id", ["", ".", "..", "a/b", "/"])
def test_table_id_cannot_escape_its_folder(table_id: str) -> None:
    with pytest.raises(InvalidDefinitionError):
        table_prefix(table_id)
    assert table_prefix("abc") == "tables/abc/"


def test_verification_records_are_recognized_by_path() -> None:
    path = new_verified_path()
    assert re.fullmatch(rf"_ops/verified-{UUID4}\.arrow", path)
    assert is_verified_path(path)
    assert is_operation_path(path)
    for other in (path.replace(".arrow", ".ipc"), f"x{path}", f"{path}x", "_ops/verified-1.arrow", new_manifest_path()):
        assert not is_verified_path(other)
