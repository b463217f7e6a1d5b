"""Node files in all variants that other programs write: they decode to the same nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.node_file_variants import NodeFileVariant, Row, all_variants, arrow_file
from tests.format.strategies import locations, node_files
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.keys import SYSTEM_KEYS, encode_schema_id, has_schema_id
from trinitylake_ops.format.node_file import NodeFile, decode_node, decode_system_rows, encode_node

PATH = "0000/0000/0000/00000000-node.ipc"
VARIANTS = list(all_variants())
FLAT = NodeFileVariant("value", has_pnode=False, has_null_row=False)
LEAF = NodeFile(["B===a", "C===ab"], ["v1", "v2"], [], {}, {"created_at_millis": "5", "lakehouse_def": "def"})
known_system = st.fixed_dictionaries(
    {}, optional={"lakehouse_def": locations, "previous_root": locations, "commit_id": locations}
)


def test_variants_include_all_combinations() -> None:
    assert len(VARIANTS) == len(set(VARIANTS)) == 2**7 * 3**2
    assert NodeFileVariant() in VARIANTS


@settings(deadline=None)
@given(node_files(), known_system, st.lists(st.sampled_from(VARIANTS), min_size=20, max_size=20))
def test_random_node_decodes_equally_in_every_variant(
    node: NodeFile, roots: dict[str, str], variants: list[NodeFileVariant]
) -> None:
    node.system.update(roots)
    assert decode_node(encode_node(node, len(node.keys) + 3), PATH) == node
    check_variants(node, variants)


def test_leaf_and_inner_node_decode_equally_in_every_variant() -> None:
    inner = replace(LEAF, children=["c0", "c1", "c2"], system={**LEAF.system, "future": "kept"})
    for node in (LEAF, replace(LEAF, buffer={"C===b": "v", "B===a": None}), NodeFile(system=LEAF.system)):
        assert check_variants(node, VARIANTS) == len(VARIANTS)
    assert check_variants(inner, VARIANTS) == len(VARIANTS) / 4


def check_variants(node: NodeFile, variants: list[NodeFileVariant]) -> int:
    """Encode and decode a node in all variants that support it, and return the number of variants."""
    without_unknown_rows = replace(
        node, system={name: node.system[name] for name in node.system if name in SYSTEM_KEYS}
    )
    supporting = [variant for variant in variants if variant.supports(node)]
    for variant in supporting:
        expected = node if variant.has_null_row else without_unknown_rows
        data = variant.encode(expected)
        decoded = decode_node(data, PATH)
        assert decoded == expected, variant
        assert list(decoded.buffer.items()) == list(node.buffer.items()), variant
        assert decoded.is_flat == (not variant.has_null_row), variant
        assert decode_system_rows(data, PATH) == {**expected.system, "n_keys": str(len(node.keys))}, variant
    return len(supporting)


EXAMPLE_VARIANTS = [NodeFileVariant(), FLAT, replace(FLAT, has_pnode=True)]


@pytest.mark.parametrize("variant", EXAMPLE_VARIANTS, ids=["current", "flat", "pnode"])
def test_leaf_with_any_number_of_keys_decodes(variant: NodeFileVariant) -> None:
    keys = [f"C==={number:04}" for number in range(1000)]
    node = NodeFile(keys, ["v"] * 1000, [], {"C===9999": None}, {"created_at_millis": "5"})
    assert decode_node(variant.encode(node), PATH) == node


# Flat files have no row without a key. There, only their form distinguishes object keys from unknown system rows.


SYSTEM: list[Row] = [("created_at_millis", "5", None), ("n_keys", "2", None)]
KEYS: list[Row] = [("B===a", "v1", None), ("C===ab", "v2", None)]
MESSAGES: list[Row] = [("C===b", "v3", None), ("B===a", None, None)]


def decode(*rows: Row, columns: tuple[str, ...] = ("key", "value", "pnode")) -> NodeFile:
    return decode_node(arrow_file(list(rows), list(columns)), PATH)


def test_rows_after_known_system_rows_are_keys_and_messages() -> None:
    node = decode(*SYSTEM, *KEYS, *MESSAGES)
    assert (node.keys, node.values, node.children) == (["B===a", "C===ab"], ["v1", "v2"], [])
    assert list(node.buffer.items()) == [("C===b", "v3"), ("B===a", None)]
    assert node.system == {"created_at_millis": "5"}


@pytest.mark.parametrize("position", range(len(SYSTEM) + len(KEYS) + 1))
@pytest.mark.parametrize("name", ["future", "A", "Zzz", "~", "members", "", "B==", "===="])
def test_unknown_system_row_in_flat_file_is_rejected(name: str, position: int) -> None:
    for n_keys in ("0", "2", "3"):
        rows = [SYSTEM[0], ("n_keys", n_keys, None), *KEYS]
        rows.insert(position, (name, "x", None))
        with pytest.raises(CorruptFileError):
            decode(*rows)


def test_unknown_object_type_in_flat_file_is_preserved() -> None:
    node = decode(*SYSTEM, *KEYS, ("D===view", "v", None), ("BAB=view", "w", None))
    assert node.buffer == {"D===view": "v", "BAB=view": "w"}


@pytest.mark.parametrize("schema_id", [0, 1, 2, 4, 63, 64, 64**2, 64**3 - 1])
def test_object_keys_are_recognized_by_schema_id(schema_id: int) -> None:
    assert has_schema_id(encode_schema_id(schema_id) + "name")
    for name in [*SYSTEM_KEYS, "members", "=B==x", "é===x", "BAAAx", "B=", " B===", "", "===="]:
        assert not has_schema_id(name)


MALFORMED: dict[str, list[Row]] = {
    "fewer rows than n_keys": [*SYSTEM, KEYS[0]],
    "system rows only": SYSTEM,
    "keys do not ascend": [*SYSTEM, *KEYS[::-1]],
    "key without value": [*SYSTEM, KEYS[0], ("C===ab", None, None)],
    "child of a key": [*SYSTEM, KEYS[0], ("C===ab", "v2", "child")],
    "child of a message": [*SYSTEM, *KEYS, ("C===b", "v3", "child")],
    "child of a system row": [("created_at_millis", "5", "child"), SYSTEM[1], *KEYS],
    "system row without value": [*SYSTEM, ("commit_id", None, None), *KEYS],
    "system row among the keys": [*SYSTEM, KEYS[0], ("commit_id", "x", None)],
    "system row after the keys": [*SYSTEM, *KEYS, ("commit_id", "x", None)],
    "n_keys after the keys": [SYSTEM[0], *KEYS, SYSTEM[1]],
    "no n_keys": [SYSTEM[0], *KEYS],
    "no time": [SYSTEM[1], *KEYS],
    "no rows": [],
    "key that starts with a space": [*SYSTEM, (" B===a", "v1", None), KEYS[1]],
    "message that starts with a space": [*SYSTEM, *KEYS, (" B===a", "v1", None)],
    # If the row without a key is not the first pointer row, the rows before it are system rows.
    "blank rows after the keys": [*SYSTEM, *KEYS, (None, None, None), (None, None, None)],
    "blank rows between keys and messages": [*SYSTEM, *KEYS, (None, None, None), *MESSAGES],
    "messages that look like the keys": [*SYSTEM, *KEYS, (None, None, None), *KEYS],
}


@pytest.mark.parametrize("rows", MALFORMED.values(), ids=MALFORMED.keys())
def test_error_of_malformed_flat_file_names_it(rows: list[Row]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decode(*rows)
    assert caught.value.path == PATH
    assert len(str(caught.value).splitlines()) == 1


def test_system_rows_in_any_order_are_decoded() -> None:
    known: list[Row] = [*SYSTEM, ("lakehouse", "def", None), ("previous_root", "_0.ipc", None)]
    for rows in permutations(known):
        node = decode(*rows, *KEYS)
        assert node.keys == ["B===a", "C===ab"]
        assert node.system == {"created_at_millis": "5", "lakehouse_def": "def", "previous_root": "_0.ipc"}


def test_inner_node_requires_child_column_and_row() -> None:
    inner = replace(LEAF, children=["c0", "c1", "c2"])
    rows: list[Row] = [("created_at_millis", "5", None), ("n_keys", "2", None), *zip("ab", "vw", "cd", strict=True)]
    assert not FLAT.supports(inner)
    with pytest.raises(CorruptFileError):
        decode(*rows)


# Sealed roots


SEALED: list[Row] = [("created_at_millis", "5", None), ("n_keys", "0", None), ("sealed_at_millis", "9", None)]


@pytest.mark.parametrize("columns", [("key", "value"), ("key", "pvalue"), ("key", "value", "pnode")], ids=str)
def test_sealed_root_with_any_system_rows_decodes_in_every_variant(columns: tuple[str, ...]) -> None:
    for rows in permutations([*SEALED, ("members", "[]", None)]):
        node = decode(*rows, columns=columns)
        assert node.is_sealed
        assert not node.is_flat
        assert node.system == {"created_at_millis": "5", "sealed_at_millis": "9", "members": "[]"}


@pytest.mark.parametrize(
    "rows",
    [
        [*SEALED, (None, None, None)],
        [*SEALED, *KEYS],
        [SEALED[0], SYSTEM[1], SEALED[2], *KEYS],
        [SEALED[0], SYSTEM[1], *KEYS, SEALED[2]],
        [*SEALED[:2], *KEYS, SEALED[2]],
        [*SEALED, ("C===message", None, None)],
        [SEALED[0], ("n_keys", "1", None), SEALED[2]],
    ],
)
def test_sealed_root_with_other_rows_is_rejected(rows: list[Row]) -> None:
    with pytest.raises(CorruptFileError):
        decode(*rows)


# Columns


def test_transaction_column_is_ignored_at_any_position() -> None:
    ours = pa.ipc.open_file(encode_node(LEAF, 4)).read_all()
    for position in range(4):
        for ids in (pa.nulls(len(ours)), pa.array(range(len(ours))), pa.array(["t"] * len(ours))):
            table = ours.add_column(position, "txn", ids)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            assert decode_node(bytes(sink.getvalue()), PATH) == LEAF


@pytest.mark.parametrize(
    "columns",
    [
        ("key",),
        ("value",),
        ("key", "pnode"),
        ("value", "key"),
        ("key", "pnode", "value"),
        ("key", "value", "pvalue"),
        ("key", "pvalue", "value"),
        ("key", "value", "value"),
        ("key", "values"),
        ("Key", "value"),
        ("key", "value", "extra"),
        ("txn", "key", "extra"),
    ],
    ids=str,
)
def test_unknown_columns_are_rejected(columns: tuple[str, ...]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decode(*SYSTEM, *KEYS, columns=columns)
    assert caught.value.path == PATH
