"""Version ranges, which behave like sets, and the encoding of sealed roots."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lakes import Lakes, lakes
from tests.operations.changes import create
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, VersionExpiredError
from trinitylake_ops.format.definitions import ExpirationBatch, LakehouseDef
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.node_file import decode_node, encode_sealed_root
from trinitylake_ops.format.version_ranges import VersionRanges

__all__ = ["lakes"]

version_sets = st.sets(st.integers(0, 30) | st.integers(MAX_VERSION - 3, MAX_VERSION))
CANONICAL = re.compile(r"(\d+(-\d+)?(,\d+(-\d+)?)*)?")


@given(version_sets)
def test_version_ranges_round_trip(versions: set[int]) -> None:
    ranges = VersionRanges.of(versions)
    text = str(ranges)
    assert CANONICAL.fullmatch(text)
    assert VersionRanges.parse(text) == ranges
    assert list(ranges) == sorted(versions)
    assert (len(ranges), bool(ranges)) == (len(versions), bool(versions))
    for version in {*range(32), MAX_VERSION, *versions}:
        assert (version in ranges) == (version in versions)
    ends = [end for bounds in ranges.ranges for end in bounds]
    assert all(second[0] > first[1] + 1 for first, second in zip(ranges.ranges, ranges.ranges[1:], strict=False))
    assert ends == sorted(ends)


@given(version_sets, version_sets)
def test_union_and_difference_match_sets(left: set[int], right: set[int]) -> None:
    assert VersionRanges.of(left) | VersionRanges.of(right) == VersionRanges.of(left | right)
    assert VersionRanges.of(left) - VersionRanges.of(right) == VersionRanges.of(left - right)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=8))
def test_unordered_and_overlapping_ranges_are_normalized(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + n_more}" for first, n_more in parts)
    expected = {version for first, n_more in parts for version in range(first, first + n_more + 1)}
    assert set(VersionRanges.parse(text)) == expected


def test_wide_ranges_are_not_expanded() -> None:
    all_versions = VersionRanges.parse(f"0-{MAX_VERSION}")
    assert len(all_versions) == MAX_VERSION + 1
    assert str(all_versions - VersionRanges.of([7])) == f"0-6,8-{MAX_VERSION}"


@pytest.mark.parametrize(
    "text", ["x", "-1", "3-", "-", "5-3", "1 ,2", "1,2 ", "1.5", "٣", str(MAX_VERSION + 1), "1-2-3", "99999999999"]
)
def test_invalid_ranges_are_rejected(text: str) -> None:
    with pytest.raises(InvalidInputError, match="90,95"):
        VersionRanges.parse(text)
    with pytest.raises(CorruptFileError, match="'b'"):
        ExpirationBatch(id="b", versions=text).contains(1)


def test_sealed_root_has_specified_bytes() -> None:
    system = {
        "created_at_millis": "1700000000000",
        "n_keys": "3",
        "lakehouse_def": "_lakehouse_def_00000000-0000-4000-8000-000000000000.binpb",
        "previous_root": "_10000000000000000000000000000000.arrow",
        "rollback_from_root": "_10000000000000000000000000000000.arrow",
        "commit_id": "11111111-1111-4111-8111-111111111111",
        "commit_info": json.dumps({"operation": "write", "message": "secret", "members": ["m1", "m2"], "user": "u"}),
        "of-another-program": "x",
    }
    data = encode_sealed_root(system, 1700000001000)
    table = pa.ipc.open_file(data).read_all()
    assert table.schema == pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])
    rows = table.to_pydict()
    assert rows["pnode"] == [None] * 6, "system rows only"
    assert dict(zip(rows["key"], rows["pvalue"], strict=True)) == {
        "created_at_millis": "1700000000000",
        "previous_root": "_10000000000000000000000000000000.arrow",
        "commit_id": "11111111-1111-4111-8111-111111111111",
        "commit_info": '{"operation":"write","members":["m1","m2"]}',
        "n_keys": "0",
        "sealed_at_millis": "1700000001000",
    }
    node = decode_node(data, "_root")
    assert (node.is_sealed, node.keys, node.children, dict(node.buffer)) == (True, [], [], {})
    assert encode_sealed_root(node.system, 5) != data
    assert {**decode_node(encode_sealed_root(node.system, 5), "_root").system, "sealed_at_millis": ""} == {
        **node.system,
        "sealed_at_millis": "",
    }, "sealing again changes only the time"


def test_first_root_of_other_program_is_sealed_without_info() -> None:
    node = decode_node(encode_sealed_root({"created_at_millis": "5", "n_keys": "0", "lakehouse_def": "d"}, 6), "_root")
    assert node.system == {"created_at_millis": "5", "sealed_at_millis": "6"}


def test_version_with_sealed_root_is_expired(lakes: Lakes) -> None:
    lake = lakes.memory()
    version = create(lake, "ns")
    create(lake, "other")
    path = lake.files.roots.path(version)
    lake.storage.write(path, encode_sealed_root(decode_node(lake.storage.read(path), path).system, 1))
    with pytest.raises(VersionExpiredError):
        lake.snapshot(version)
    location = lake.snapshot().definition_location
    assert LakehouseDef.from_bytes(lake.storage.read(location), location).expirations == ()
