"""Encoding and decoding of node files."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.decoding import corruption_error
from tests.format.strategies import node_files
from trinitylake_ops.errors import CorruptFileError, InvalidInputError
from trinitylake_ops.format.arrow_ipc import SCHEMA, read_own_batch, write_file
from trinitylake_ops.format.keys import MAX_COMMIT_INFO_BYTES, decode_commit_info, encode_commit_info
from trinitylake_ops.format.node_file import (
    NodeFile,
    decode_node,
    decode_nodes,
    decode_system_rows,
    encode_node,
    encoded_size_bytes,
)

PATH = "0000/0000/0000/00000000-node.arrow"
SYSTEM = [("created_at_millis", "5", None), ("n_keys", "2", None)]
POINTERS = [(None, None, "c0"), ("k1", "v1", "c1"), ("k2", "v2", "c2"), (None, None, None)]
LEAF_POINTERS = [(key, value, None) for key, value, _ in POINTERS]
BUFFER = [("k3", "v3", None), ("k1", None, None)]
NODE = NodeFile(["k1", "k2"], ["v1", "v2"], ["c0", "c1", "c2"], {"k3": "v3", "k1": None}, {"created_at_millis": "5"})

Row = tuple[str | None, str | None, str | None]


def _columns(rows: list[Row]) -> list[list[str | None]]:
    return [[row[position] for row in rows] for position in range(3)]


def arrow_file(
    rows: list[Row], kind: Any = None, n_batches: int = 1, names: tuple[str, ...] = ("key", "pvalue", "pnode")
) -> bytes:
    kind = kind or pa.utf8()
    table = pa.table([pa.array(column, kind) for column in _columns(rows)], list(names))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(1, -(-len(rows) // n_batches)))
    return bytes(sink.getvalue())


@given(node_files(), st.integers(0, 5))
def test_node_round_trips_and_its_size_is_predicted(node: NodeFile, n_spare: int) -> None:
    order = len(node.keys) + 1 + n_spare
    data = encode_node(node, order)
    decoded = decode_node(data, PATH)
    assert decoded == node
    assert list(decoded.buffer.items()) == list(node.buffer.items()), "messages keep their order of arrival"
    assert decode_system_rows(data, PATH) == {**node.system, "n_keys": str(len(node.keys))}
    children_bytes = sum(len(child.encode()) for child in node.children)
    assert encoded_size_bytes(order, node.keys, node.values, children_bytes, node.buffer, node.system) == len(data)


@pytest.mark.parametrize("n_keys", [7, 8, 63, 64, 255])
def test_predicted_size_is_exact_at_padding_boundaries(n_keys: int) -> None:
    keys = [f"k{number:03d}" for number in range(n_keys)]
    node = NodeFile(keys, ["v"] * n_keys, ["é"] * (n_keys + 1), {}, {"created_at_millis": "1"})
    for n_messages in range(10):
        node.buffer[f"m{n_messages}"] = None
        for order in range(n_keys + 1, n_keys + 10):
            size_bytes = encoded_size_bytes(
                order, node.keys, node.values, 2 * len(node.children), node.buffer, node.system
            )
            assert size_bytes == len(encode_node(node, order))


def test_file_is_one_uncompressed_batch_of_three_nullable_strings() -> None:
    reader = pa.ipc.open_file(encode_node(NODE, 4))
    assert reader.num_record_batches == 1
    assert reader.schema == pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])
    rows = [tuple(row.values()) for row in reader.read_all().to_pylist()]
    assert rows == [*SYSTEM, *POINTERS, *BUFFER]
    assert b"k1k2k3k1" in encode_node(NODE, 4), "strings are stored uncompressed"


def test_leaf_has_no_children_and_order_pointer_rows() -> None:
    leaf = NodeFile(["k1"], ["v1"], [], {}, {"created_at_millis": "5"})
    rows = pa.ipc.open_file(encode_node(leaf, 7)).read_all().to_pylist()
    assert len(rows) == 2 + 7
    assert all(row["pnode"] is None for row in rows)
    assert decode_node(encode_node(leaf, 7), PATH).is_leaf


def test_too_many_keys_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="2 keys do not fit into a node of order 2"):
        encode_node(NODE, 2)


# Files of other programs


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8()], ids=str)
@pytest.mark.parametrize("n_batches", [1, 2, 8])
def test_large_strings_and_several_batches_are_decoded(kind: pa.DataType, n_batches: int) -> None:
    assert decode_node(arrow_file([*SYSTEM, *POINTERS, *BUFFER], kind, n_batches), PATH) == NODE


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_bodies_are_decoded(codec: str) -> None:
    batch = pa.ipc.open_file(encode_node(NODE, 4)).get_batch(0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    assert decode_node(bytes(sink.getvalue()), PATH) == NODE


@pytest.mark.parametrize("n_blank", [0, 1])
def test_fewer_pointer_rows_than_order_are_decoded(n_blank: int) -> None:
    assert decode_node(arrow_file([*SYSTEM, *POINTERS[: 3 + n_blank], *BUFFER]), PATH) == NODE


def test_unknown_system_keys_are_preserved_and_lakehouse_alias_is_accepted() -> None:
    rows: list[Row] = [("future", "x", None), ("lakehouse", "def", None), ("", "empty", None), *SYSTEM]
    node = decode_node(arrow_file([*rows, *POINTERS]), PATH)
    assert node.system == {"future": "x", "lakehouse_def": "def", "": "empty", "created_at_millis": "5"}
    assert decode_node(encode_node(node, 4), PATH) == node


def test_newest_message_of_key_applies() -> None:
    rows: list[Row] = [("a", "1", None), ("b", "1", None), ("a", None, None), ("b", "2", None), ("a", "3", None)]
    node = decode_node(arrow_file([*SYSTEM, *POINTERS, *rows]), PATH)
    assert list(node.buffer.items()) == [("b", "2"), ("a", "3")]


def test_keys_of_unknown_object_type_are_preserved() -> None:
    rows: list[Row] = [("D===view", "v", None)]
    assert decode_node(arrow_file([*SYSTEM, *POINTERS, *rows]), PATH).buffer == {"D===view": "v"}


def test_blank_rows_are_skipped() -> None:
    blank: Row = (None, None, None)
    assert decode_node(arrow_file([*SYSTEM, *POINTERS, *[blank] * 100, *BUFFER]), PATH) == NODE


def test_sealed_root_is_decoded() -> None:
    rows: list[Row] = [
        ("created_at_millis", "5", None),
        ("n_keys", "0", None),
        ("sealed_at_millis", "9", None),
        ("previous_root", "p", None),
        ("commit_id", "c", None),
    ]
    node = decode_node(arrow_file(rows), PATH)
    assert node.is_sealed
    assert node.created_at_ms == 5
    assert (node.keys, node.children, node.buffer) == ([], [], {})
    assert decode_system_rows(arrow_file(rows), PATH)["commit_id"] == "c"


@given(st.lists(st.tuples(*[st.none() | st.text(max_size=3)] * 3), min_size=1), st.sampled_from([PATH, ""]))
def test_validity_matches_arrow(rows: list[Row], path: str) -> None:
    batch = pa.record_batch([pa.array(column, pa.utf8()) for column in _columns(rows)], schema=SCHEMA)
    batch_and_validity = read_own_batch(write_file(batch, "", path), PATH)
    assert batch_and_validity is not None
    assert batch_and_validity[0].equals(batch)
    assert batch_and_validity[1] == tuple(
        sum(1 << row for row, text in enumerate(column) if text is not None) for column in _columns(rows)
    )


@given(st.lists(node_files(), max_size=4))
def test_batch_decoding_equals_single_decoding(nodes: list[NodeFile]) -> None:
    files = [(encode_node(node, len(node.keys) + 1, "", PATH), PATH) for node in nodes]
    assert decode_nodes(files) == nodes


# Rejected files


def _system_without(name: str) -> list[Row]:
    return [row for row in SYSTEM if row[0] != name]


def _system_with(name: str, value: str | None) -> list[Row]:
    return [(key, value if key == name else default, None) for key, default, _ in SYSTEM]


MALFORMED: dict[str, list[Row]] = {
    "no rows": [],
    "no pointer rows": [*SYSTEM],
    "no system rows": [*POINTERS],
    "no time": [*_system_without("created_at_millis"), *POINTERS],
    "time is not a number": [*_system_with("created_at_millis", "now"), *POINTERS],
    "time is negative": [*_system_with("created_at_millis", "-5"), *POINTERS],
    "time has non-ASCII digits": [*_system_with("created_at_millis", "٥"), *POINTERS],
    "time is out of range": [*_system_with("created_at_millis", "9" * 20), *POINTERS],
    "time has too many digits": [*_system_with("created_at_millis", "9" * 5000), *POINTERS],
    "no n_keys": [*_system_without("n_keys"), *POINTERS],
    "n_keys is not a number": [*_system_with("n_keys", "2.0"), *POINTERS],
    "n_keys has too many digits": [*_system_with("n_keys", "9" * 5000), *POINTERS],
    "n_keys too small": [*_system_with("n_keys", "1"), *POINTERS],
    "n_keys too small in a leaf": [*_system_with("n_keys", "1"), *LEAF_POINTERS],
    "n_keys too large": [*_system_with("n_keys", "3"), *POINTERS],
    "n_keys beyond the file": [*_system_with("n_keys", "99"), *POINTERS],
    "system row without value": [*SYSTEM, ("x", None, None), *POINTERS],
    "system row with child": [*SYSTEM, ("x", "y", "z"), *POINTERS],
    "no row without a key": [*SYSTEM, *POINTERS[1:3]],
    "object among the system rows": [*SYSTEM, ("B===a", "v", None), *POINTERS],
    "first pointer row has a value": [*SYSTEM, (None, "v", "c0"), *POINTERS[1:]],
    "pointer row without value": [*SYSTEM, POINTERS[0], ("k1", None, "c1"), POINTERS[2]],
    "pointer row without key": [*SYSTEM, POINTERS[0], (None, "v1", "c1"), POINTERS[2]],
    "keys not ascending": [*SYSTEM, POINTERS[0], POINTERS[2], POINTERS[1]],
    "keys not distinct": [*SYSTEM, POINTERS[0], POINTERS[1], POINTERS[1]],
    "first child missing": [*SYSTEM, (None, None, None), *POINTERS[1:]],
    "last child missing": [*SYSTEM, *POINTERS[:2], ("k2", "v2", None)],
    "children of a leaf": [*SYSTEM, *LEAF_POINTERS[:2], ("k2", "v2", "c2")],
    "key starts with a space": [*SYSTEM, POINTERS[0], (" k", "v1", "c1"), POINTERS[2]],
    "message key starts with a space": [*SYSTEM, *POINTERS, (" k", "v", None)],
    "message with child": [*SYSTEM, *POINTERS, ("k", "v", "c")],
    "message without key": [*SYSTEM, *POINTERS, (None, "v", None)],
    "blank row between messages": [*SYSTEM, *POINTERS, BUFFER[0], (None, None, None), BUFFER[1]],
    "child in a blank row": [*SYSTEM, *POINTERS[:3], (None, None, "c9")],
    "sealed with pointer rows": [*SYSTEM, ("sealed_at_millis", "9", None), *POINTERS],
    "sealed with keys": [*SYSTEM, ("sealed_at_millis", "9", None)],
    **{
        f"message for {name}": [*SYSTEM, *POINTERS, (name, "v", None)]
        for name in [
            "created_at_millis",
            "n_keys",
            "lakehouse_def",
            "lakehouse",
            "previous_root",
            "rollback_from_root",
            "commit_id",
            "commit_info",
            "sealed_at_millis",
        ]
    },
}


@pytest.mark.parametrize("rows", MALFORMED.values(), ids=MALFORMED.keys())
def test_error_of_malformed_rows_names_file(rows: list[Row]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decode_node(arrow_file(rows), PATH)
    assert caught.value.path == PATH
    assert PATH in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("rows", MALFORMED.values(), ids=MALFORMED.keys())
def test_only_malformed_node_in_batch_is_rejected(rows: list[Row]) -> None:
    malformed_path = "0000/0000/0000/00000001-bad.arrow"
    valid_file = (encode_node(NODE, 4), PATH)
    with pytest.raises(CorruptFileError) as caught:
        decode_node(arrow_file(rows), malformed_path)
    first, error, last = decode_nodes([valid_file, (arrow_file(rows), malformed_path), valid_file])
    assert first == last == NODE
    assert isinstance(error, CorruptFileError)
    assert (error.path, str(error)) == (malformed_path, str(caught.value))


SYSTEM_FAULTS = [
    "no pointer rows",
    "no time",
    "time is not a number",
    "time has too many digits",
    "system row with child",
]


@pytest.mark.parametrize("fault", SYSTEM_FAULTS)
def test_system_rows_are_validated_separately(fault: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decode_system_rows(arrow_file(MALFORMED[fault]), PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize(
    "data",
    [
        arrow_file([(None, None, None)], names=("key", "values", "pnode")),
        arrow_file([(None, None, None)], names=("pvalue", "key", "pnode")),
        arrow_file([(None, None, None)], names=("key", "key", "key")),
        arrow_file([(1, 2, 3)], pa.int64()),  # type: ignore[list-item]
        arrow_file([(b"a", b"b", b"c")], pa.binary()),  # type: ignore[list-item]
    ],
)
def test_other_columns_are_rejected(data: bytes) -> None:
    with pytest.raises(CorruptFileError):
        decode_node(data, PATH)


def test_invalid_utf8_is_rejected() -> None:
    data = encode_node(NODE, 4)
    assert data.count(b"k1k2k3k1") == 1
    with pytest.raises(CorruptFileError):
        decode_node(data.replace(b"k1k2k3k1", b"k1k2k\xffk1"), PATH)


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"not arrow at all", b"PAR1" * 100, b"\x00" * 1000])
def test_invalid_arrow_file_is_corrupt(data: bytes) -> None:
    for decode in (decode_node, decode_system_rows):
        with pytest.raises(CorruptFileError) as caught:
            decode(data, PATH)
        assert caught.value.path == PATH


def test_truncated_file_is_corrupt() -> None:
    data = encode_node(NODE, 4)
    for size_bytes in range(len(data)):
        for decode in (decode_node, decode_system_rows):
            with pytest.raises(CorruptFileError):
                decode(data[:size_bytes], PATH)


def test_flipped_bit_gives_different_node_or_corrupt_file_error() -> None:
    data = encode_node(NODE, 4)
    rng = random.Random(7)
    n_rejected = 0
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << rng.randrange(8)
        for decode in (decode_node, decode_system_rows):
            error = corruption_error(decode, bytes(damaged), PATH)
            assert error is None or error.path == PATH
            n_rejected += error is not None
    assert n_rejected > len(data) / 2


@pytest.mark.parametrize("kind", [0, 3, 8, 255])
def test_first_message_must_be_a_schema(kind: int) -> None:
    """Arrow interprets the first message as a schema without a check, and most other messages crash the process."""
    data = encode_node(NODE, 4)
    end = 16 + int.from_bytes(data[12:16], "little")
    offsets = [index for index in range(16, end) if kind_of_first_message(data, index, kind) != "schema"]
    assert offsets
    for offset, index in itertools.product(offsets, range(16, end)):
        for value in (1, 128):
            damaged = bytearray(data)
            damaged[offset], damaged[index] = kind, value
            error = corruption_error(decode_node, bytes(damaged), PATH)
            assert error is None or error.path == PATH


def kind_of_first_message(data: bytes, index: int, value: int) -> str:
    """Return the type of a node's first message after one byte was changed, or schema if it cannot be parsed."""
    changed = data[:index] + bytes([value]) + data[index + 1 :]
    try:
        return str(pa.ipc.read_message(pa.py_buffer(changed)[8:]).type)
    except (pa.ArrowException, OSError):
        return "schema"


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_raise_only_corrupt_file_error(data: st.DataObject) -> None:
    damaged = bytearray(encode_node(NODE, 4))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    error = corruption_error(decode_node, bytes(damaged), PATH)
    assert error is None or error.path == PATH


# commit_info


def test_commit_info_round_trips_up_to_inclusive_limit() -> None:
    info = {"message": "", "n": 1}
    remaining_bytes = MAX_COMMIT_INFO_BYTES - len(encode_commit_info(info).encode())
    info["message"] = "x" * remaining_bytes
    assert len(encode_commit_info(info)) == MAX_COMMIT_INFO_BYTES
    assert decode_commit_info({"commit_info": encode_commit_info(info)}) == info
    info["message"] += "x"
    with pytest.raises(InvalidInputError, match=rf"{MAX_COMMIT_INFO_BYTES + 1} bytes, more than the limit"):
        encode_commit_info(info)


def test_commit_info_limit_is_in_utf8_bytes() -> None:
    with pytest.raises(InvalidInputError, match="4096"):
        encode_commit_info({"message": "é" * 2100})


@pytest.mark.parametrize("value", ["\ud800", object(), {1: 2, "a": 3}], ids=["surrogate", "object", "mixed keys"])
def test_commit_info_that_is_not_json_is_rejected(value: object) -> None:
    with pytest.raises(InvalidInputError):
        encode_commit_info({"properties": value})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"x"', "\x00"])
def test_invalid_commit_info_of_other_programs_is_ignored(text: str) -> None:
    assert decode_commit_info({"commit_info": text}) == {}
    assert decode_commit_info({}) == {}
