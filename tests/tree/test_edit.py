"""Tree edits: splits, merges, buffered messages and size limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.tree.trees import LARGE_FILE_BYTES, Tree, filled_tree, keys
from trinitylake_ops.format.node_file import NodeFile, encode_node, text_bytes
from trinitylake_ops.tree.edit import apply_messages
from trinitylake_ops.tree.node import DirtyNode, TreeLimits, split_evenly
from trinitylake_ops.tree.search import get

ORDERS = [3, 4, 5, 16]
Fill = Callable[..., Tree]


@pytest.fixture
def fill() -> Iterator[Fill]:
    """The function ``filled_tree``. After the test, its trees are checked again and closed."""
    trees: list[Tree] = []

    def make(order: int, n_keys: int, *, buffer_target_bytes: int = 0) -> Tree:
        trees.append(filled_tree(order, n_keys, buffer_target_bytes=buffer_target_bytes))
        return trees[-1]

    yield make
    for tree in trees:
        tree.check()
        tree.close()


@pytest.mark.parametrize("order", ORDERS)
def test_tree_grows_and_shrinks_key_by_key(fill: Fill, order: int) -> None:
    tree = fill(order, 0)
    names = keys(*range(60))
    random.Random(order).shuffle(names)
    heights = []
    for name in names:
        tree.apply({name: "v"})
        heights.append(tree.height())
    assert heights == sorted(heights), "adding keys never reduces the height"
    assert heights[-1] >= 1
    for name in names:
        tree.apply({name: None})
    assert (tree.root.keys, tree.root.children, tree.root.buffer) == ([], [], {})


@pytest.mark.parametrize("order", ORDERS)
def test_each_inner_key_can_be_deleted(fill: Fill, order: int) -> None:
    tree = fill(order, 120)
    while tree.root.children:
        key = tree.root.keys[len(tree.root.keys) // 2]
        tree.apply({key: None})
        assert get(tree.store(), tree.root, key) is None
    assert len(tree.model) < order, "the remaining keys fit into the root"


@pytest.mark.parametrize("order", ORDERS)
def test_all_inner_keys_can_be_deleted_at_once(fill: Fill, order: int) -> None:
    tree = fill(order, 150)
    inner = [key for node in tree.nodes() if not node.is_leaf for key in node.keys]
    tree.apply(dict.fromkeys(inner))
    assert tree.model.keys() == set(keys(*range(150))) - set(inner)


@pytest.mark.parametrize("order", ORDERS)
def test_deleting_all_keys_leaves_empty_leaf(fill: Fill, order: int) -> None:
    tree = fill(order, 200)
    assert tree.height() >= 1
    tree.apply(dict.fromkeys(keys(*range(200))))
    assert (tree.root.keys, tree.root.children, tree.root.buffer) == ([], [], {})


def test_root_without_keys_is_replaced_by_its_child(fill: Fill) -> None:
    tree = fill(4, 5)
    assert (tree.height(), len(tree.root.keys)) == (1, 1)
    tree.apply({tree.root.keys[0]: None, **dict.fromkeys(keys(0))})
    assert tree.height() == 0
    assert tree.root.is_leaf


@pytest.mark.parametrize("order", ORDERS)
def test_node_splits_into_many_nodes(fill: Fill, order: int) -> None:
    tree = fill(order, 1)
    tree.apply(dict.fromkeys(keys(*range(500)), "v"))
    assert len(tree.nodes()) > 500 / order
    tree.apply(dict.fromkeys([f"k0250-{number:03d}" for number in range(300)], "v"))


@pytest.mark.parametrize("order", [3, 4, 5, 8, 17, 128])
def test_split_creates_fewest_parts_of_similar_size(order: int) -> None:
    for n_keys in range(order, 5 * order + 3):
        names = keys(*range(n_keys))
        node = DirtyNode(names, names, [f"c{number}" for number in range(n_keys + 1)])
        split = split_evenly(node, order)
        parts, middle, values = split.parts, split.keys, split.values
        assert len(parts) == -(-(n_keys + 1) // order)
        assert middle == values
        sizes = [len(part.keys) for part in parts if isinstance(part, DirtyNode)]
        assert len(sizes) == len(parts)
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= order - 1
        assert min(sizes) >= (order + 1) // 2 - 1
        rebuilt: list[str] = []
        children: list[str | DirtyNode] = []
        for part, after in zip(parts, [*middle, None], strict=True):
            assert isinstance(part, DirtyNode)
            assert len(part.children) == len(part.keys) + 1
            rebuilt += part.keys + ([after] if after else [])
            children += part.children
        assert rebuilt == names
        assert children == node.children


def test_split_assigns_messages_to_their_parts() -> None:
    names = keys(*range(0, 70, 10))
    buffer = dict.fromkeys(keys(*(number for number in range(70) if number % 10)))
    deletions = {names[1]: None, names[4]: None}
    split = split_evenly(DirtyNode(names, names, ["c"] * 8, buffer | deletions), 4)
    parts, middle = split.parts, split.keys
    assert split.messages == {key: None for key in deletions if key in middle}
    bounds = ["", *middle, "z"]
    for part, lower, upper in zip(parts, bounds, bounds[1:], strict=False):
        assert isinstance(part, DirtyNode)
        assert list(part.buffer) == [key for key in buffer | deletions if lower < key < upper]


# Messages


def test_messages_in_root_buffer_override_lower_levels(fill: Fill) -> None:
    tree = fill(4, 60, buffer_target_bytes=10_000)
    inner, leaf = tree.root.keys[0], keys(0)[0]
    tree.apply({leaf: "new", keys(1)[0]: None, inner: "changed", "k9999": "added"})
    assert tree.written == {}, "no other node is rewritten"
    assert set(tree.root.buffer) == {leaf, keys(1)[0], "k9999"}, "the value of a key of the root is changed in its row"
    assert tree.root.values[0] == "changed"
    tree.apply({leaf: None, keys(1)[0]: "back", inner: None})
    assert tree.written == {}
    assert list(tree.root.buffer) == ["k9999", leaf, keys(1)[0], inner], "the newest message comes last"
    assert get(tree.store(), tree.root, inner) is None, "the deletion of a key of the root shadows its row"
    tree.apply({inner: "again"})
    assert inner not in tree.root.buffer
    assert get(tree.store(), tree.root, inner) == "again"


@pytest.mark.parametrize(("order", "target_bytes"), [(4, 400), (8, 100)])
def test_single_key_change_rewrites_one_path(fill: Fill, order: int, target_bytes: int) -> None:
    tree = fill(order, 200, buffer_target_bytes=target_bytes)
    height = tree.height()
    assert height >= 2
    rng = random.Random(order)
    written, inner_bytes = [], []
    tree.apply({keys(rng.randrange(200))[0]: "x" * 20 for _ in range(60)})
    for step in range(100):
        tree.apply({keys(rng.randrange(200))[0]: f"{step:020}"})
        written.append(len(tree.written))
        inner_bytes += [text_bytes(node.buffer) + text_bytes(node.buffer.values()) for node in tree.nodes()[1:]]
    assert 0 < max(written) <= height, "at most one node per level below the root"
    assert 0 in written
    message_bytes = 25
    assert 0 < max(inner_bytes) <= 2 * target_bytes + message_bytes, "buffers below the root are bounded"


def test_deletions_of_inner_keys_stay_buffered_on_split(fill: Fill) -> None:
    tree = fill(8, 400, buffer_target_bytes=10**6)
    root_keys = list(tree.root.keys)
    assert len(root_keys) >= 5
    for key in root_keys:
        tree.apply({key: None})
        assert tree.written == {}
    height, number, max_written = tree.height(), 0, 0
    tree.limits = TreeLimits(8, LARGE_FILE_BYTES, 150)
    while tree.height() == height:
        tree.apply({f"k0001-{number:05}": "v"})
        max_written = max(max_written, len(tree.written))
        number += 1
    assert max_written <= 4 * height, "a path, split nodes next to it, and the merged nodes of one inner key"


def test_overfull_buffer_of_other_program_accepts_message(fill: Fill) -> None:
    tree = fill(4, 120, buffer_target_bytes=10**6)
    tree.apply(dict.fromkeys(keys(*range(0, 120, 2)), "w" * 30))
    tree.limits = TreeLimits(4, LARGE_FILE_BYTES, 10**3)
    for number in range(1, 120, 4):
        n_buffered = len(tree.root.buffer)
        tree.apply({keys(number)[0]: "u"})
        assert tree.written == {} or len(tree.root.buffer) <= n_buffered


def test_upper_messages_override_lower_messages(fill: Fill) -> None:
    tree = fill(4, 100, buffer_target_bytes=100)
    rng = random.Random(5)
    has_inner_message = False
    for step in range(120):
        name = keys(rng.randrange(100))[0]
        tree.apply({name: None if step % 3 == 0 else f"v{step}"})
        has_inner_message |= any(node.buffer for node in tree.nodes()[1:])
        assert get(tree.store(), tree.root, name) == tree.model.get(name)
    assert has_inner_message


def test_deleting_missing_key_changes_nothing(fill: Fill) -> None:
    tree = fill(4, 20)
    before = dict(tree.model)
    tree.apply({"nothing": None, "k0000x": None})
    assert tree.model == before
    empty = fill(3, 0)
    empty.apply({"nothing": None})
    assert empty.root.buffer == {}


def test_keys_sort_by_bytes(fill: Fill) -> None:
    tree = fill(3, 0)
    names = ["B===é", "B===z", "C===航", "C===🦆", "D===view", "C===\uffff", "B===\x80"]
    tree.apply(dict.fromkeys(names, "v"))
    assert [key for key, _ in sorted(tree.model.items())] == sorted(names, key=str.encode)


@pytest.mark.parametrize("order", [3, 8])
def test_size_limit_applies_with_larger_buffer_target(order: int) -> None:
    tree = Tree(order, node_file_max_size_bytes=2_600, buffer_target_bytes=10**6)
    rng = random.Random(order)
    for step in range(60):
        names = keys(*(rng.randrange(300) for _ in range(rng.choice([1, 5, 40]))))
        tree.apply({name: None if rng.random() < 0.3 else "é" * rng.randrange(1, 30) + str(step) for name in names})
    assert tree.height() >= 1
    tree.close()


def test_size_limit_includes_system_rows_of_root() -> None:
    tree = Tree(3, node_file_max_size_bytes=6_000, buffer_target_bytes=10**6)
    tree.apply(dict.fromkeys(keys(*range(30)), "v"))
    system = {"created_at_millis": "1", "commit_info": "x" * 4_000}
    edited = apply_messages(
        tree.store(),
        tree.root,
        dict.fromkeys(keys(*range(100, 140)), "w" * 40),
        tree.limits,
        created_at_ms=1,
        root_system=system,
    )
    edited.root.system = system
    assert len(encode_node(edited.root, 3)) <= 6_000
    assert edited.node_files
    tree.close()


def test_messages_in_leaf_of_other_program_are_applied() -> None:
    leaf = NodeFile(["a", "b", "c"], ["1", "2", "3"], [], {"b": None, "d": "4"}, {"created_at_millis": "1"})
    tree = Tree(5)
    tree.root, tree.model = leaf, {"a": "1", "c": "3", "d": "4"}
    tree.check()
    tree.apply({"e": "5"})
    assert tree.root.keys == ["a", "c", "d", "e"]
    assert tree.root.buffer == {}
    tree.close()


def test_minimum_number_of_keys_per_node() -> None:
    min_keys_by_order = {order: TreeLimits(order, LARGE_FILE_BYTES).min_keys for order in (3, 4, 5, 6, 7, 128)}
    assert min_keys_by_order == {3: 1, 4: 1, 5: 2, 6: 2, 7: 3, 128: 63}


def test_size_limit_applies_to_merged_nodes_with_full_buffers() -> None:
    """In this sequence, which was found by a search, the messages of two neighbors do not fit into one file."""
    rng = random.Random(72)
    tree = Tree(3, node_file_max_size_bytes=2_300, buffer_target_bytes=10**6)
    tree.apply(dict.fromkeys(keys(*range(40)), "v"))
    for _ in range(6):
        messages: dict[str, str | None] = {f"k{rng.randrange(40):04d}-{rng.randrange(99)}": "w" * 60 for _ in range(12)}
        lowest = rng.randrange(40)
        tree.apply(messages | dict.fromkeys(keys(*range(lowest, lowest + rng.randrange(0, 12)))))
    tree.close()
