"""What others wrote and we read: every combination of forms gives the node that ours gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.older_forms import OlderForm, Row, all_forms, arrow_file
from tests.format.strategies import locations, node_files
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.keys import SYSTEM_KEYS, encode_schema_id, has_schema_id
from trinitylake_ops.format.node_file import NodeFile, decode_node, decode_system_rows, encode_node

PATH = "0000/0000/0000/00000000-node.ipc"
FORMS = list(all_forms())
FLAT = OlderForm("value", has_pnode=False, has_null_row=False)
LEAF = NodeFile(["B===a", "C===ab"], ["v1", "v2"], [], {}, {"created_at_millis": "5", "lakehouse_def": "def"})
known_system = st.fixed_dictionaries(
    {}, optional={"lakehouse_def": locations, "previous_root": locations, "commit_id": locations}
)


def test_all_combinations_are_there() -> None:
    assert len(FORMS) == len(set(FORMS)) == 2**7 * 3**2
    assert OlderForm() in FORMS


@settings(deadline=None)
@given(node_files(), known_system, st.lists(st.sampled_from(FORMS), min_size=20, max_size=20))
def test_any_node_is_the_same_in_every_older_form(
    node: NodeFile, roots: dict[str, str], forms: list[OlderForm]
) -> None:
    node.system.update(roots)
    assert decode_node(encode_node(node, len(node.keys) + 3), PATH) == node
    assert_the_same_node(node, forms)


def test_a_leaf_and_an_inner_node_are_the_same_in_every_combination() -> None:
    inner = replace(LEAF, children=["c0", "c1", "c2"], system={**LEAF.system, "future": "kept"})
    for node in (LEAF, replace(LEAF, buffer={"C===b": "v", "B===a": None}), NodeFile(system=LEAF.system)):
        assert assert_the_same_node(node, FORMS) == len(FORMS)
    assert assert_the_same_node(inner, FORMS) == len(FORMS) / 4


def assert_the_same_node(node: NodeFile, forms: list[OlderForm]) -> int:
    """Write the node in all forms that can hold it and read it; returns how many there are."""
    told_apart = replace(node, system={name: node.system[name] for name in node.system if name in SYSTEM_KEYS})
    able = [form for form in forms if form.can_hold(node)]
    for form in able:
        expected = node if form.has_null_row else told_apart
        data = form.encode(expected)
        decoded = decode_node(data, PATH)
        assert decoded == expected, form
        assert list(decoded.buffer.items()) == list(node.buffer.items()), form
        assert decoded.is_flat == (not form.has_null_row), form
        assert decode_system_rows(data, PATH) == {**expected.system, "n_keys": str(len(node.keys))}, form
    return len(able)


@pytest.mark.parametrize("form", [OlderForm(), FLAT, replace(FLAT, has_pnode=True)], ids=["ours", "flat", "pnode"])
def test_a_leaf_of_any_number_of_keys(form: OlderForm) -> None:
    keys = [f"C==={number:04}" for number in range(1000)]
    node = NodeFile(keys, ["v"] * 1000, [], {"C===9999": None}, {"created_at_millis": "5"})
    assert decode_node(form.encode(node), PATH) == node


# Without a row without a key, only their form tells the keys of objects from unknown system rows


SYSTEM: list[Row] = [("created_at_millis", "5", None), ("n_keys", "2", None)]
KEYS: list[Row] = [("B===a", "v1", None), ("C===ab", "v2", None)]
MESSAGES: list[Row] = [("C===b", "v3", None), ("B===a", None, None)]


def decoded(*rows: Row, columns: tuple[str, ...] = ("key", "value", "pnode")) -> NodeFile:
    return decode_node(arrow_file(list(rows), list(columns)), PATH)


def test_rows_after_the_known_system_rows_are_keys_and_then_messages() -> None:
    node = decoded(*SYSTEM, *KEYS, *MESSAGES)
    assert (node.keys, node.values, node.children) == (["B===a", "C===ab"], ["v1", "v2"], [])
    assert list(node.buffer.items()) == [("C===b", "v3"), ("B===a", None)]
    assert node.system == {"created_at_millis": "5"}


@pytest.mark.parametrize("position", range(len(SYSTEM) + len(KEYS) + 1))
@pytest.mark.parametrize("name", ["future", "A", "Zzz", "~", "members", "", "B==", "===="])
def test_an_unknown_system_row_in_a_flat_file_is_refused_and_never_read_as_an_object(name: str, position: int) -> None:
    for n_keys in ("0", "2", "3"):
        rows = [SYSTEM[0], ("n_keys", n_keys, None), *KEYS]
        rows.insert(position, (name, "x", None))
        with pytest.raises(CorruptFileError):
            decoded(*rows)


def test_an_unknown_kind_of_object_is_carried_in_a_flat_file() -> None:
    node = decoded(*SYSTEM, *KEYS, ("D===view", "v", None), ("BAB=view", "w", None))
    assert node.buffer == {"D===view": "v", "BAB=view": "w"}


@pytest.mark.parametrize("schema_id", [0, 1, 2, 4, 63, 64, 64**2, 64**3 - 1])
def test_keys_of_objects_are_known_by_their_schema_id(schema_id: int) -> None:
    assert has_schema_id(encode_schema_id(schema_id) + "name")
    for name in [*SYSTEM_KEYS, "members", "=B==x", "é===x", "BAAAx", "B=", " B===", "", "===="]:
        assert not has_schema_id(name)


MALFORMED: dict[str, list[Row]] = {
    "fewer rows than n_keys": [*SYSTEM, KEYS[0]],
    "no rows but the system's": SYSTEM,
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
    # The row without a key is not the first of the pointers: the rows before it would be system rows.
    "blank rows after the keys": [*SYSTEM, *KEYS, (None, None, None), (None, None, None)],
    "blank rows between keys and messages": [*SYSTEM, *KEYS, (None, None, None), *MESSAGES],
    "messages that look like the keys": [*SYSTEM, *KEYS, (None, None, None), *KEYS],
}


@pytest.mark.parametrize("rows", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_flat_files_are_refused_naming_the_file(rows: list[Row]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decoded(*rows)
    assert caught.value.path == PATH
    assert len(str(caught.value).splitlines()) == 1


def test_any_order_of_the_known_system_rows_is_read() -> None:
    known: list[Row] = [*SYSTEM, ("lakehouse", "def", None), ("previous_root", "_0.ipc", None)]
    for rows in permutations(known):
        node = decoded(*rows, *KEYS)
        assert node.keys == ["B===a", "C===ab"]
        assert node.system == {"created_at_millis": "5", "lakehouse_def": "def", "previous_root": "_0.ipc"}


def test_inner_nodes_need_the_column_and_the_row_of_their_children() -> None:
    inner = replace(LEAF, children=["c0", "c1", "c2"])
    rows: list[Row] = [("created_at_millis", "5", None), ("n_keys", "2", None), *zip("ab", "vw", "cd", strict=True)]
    assert not FLAT.can_hold(inner)
    with pytest.raises(CorruptFileError):
        decoded(*rows)


# Sealed roots


SEALED: list[Row] = [("created_at_millis", "5", None), ("n_keys", "0", None), ("sealed_at_millis", "9", None)]


@pytest.mark.parametrize("columns", [("key", "value"), ("key", "pvalue"), ("key", "value", "pnode")], ids=str)
def test_a_sealed_root_has_any_system_rows_in_any_form(columns: tuple[str, ...]) -> None:
    for rows in permutations([*SEALED, ("members", "[]", None)]):
        node = decoded(*rows, columns=columns)
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
def test_a_sealed_root_with_more_than_system_rows_is_refused(rows: list[Row]) -> None:
    with pytest.raises(CorruptFileError):
        decoded(*rows)


# Columns


def test_the_transaction_column_may_stand_anywhere_and_hold_anything() -> None:
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
def test_columns_that_nobody_wrote_are_refused(columns: tuple[str, ...]) -> None:
    with pytest.raises(CorruptFileError) as caught:
        decoded(*SYSTEM, *KEYS, columns=columns)
    assert caught.value.path == PATH
