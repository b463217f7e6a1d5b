"""Compaction: the same keys in fewer nodes, empty buffers and no unnecessary writes."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tree.trees import SYSTEM, Tree, filled_tree, keys
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.shape import TreeShape, measure_tree, walk


def shape(tree: Tree) -> TreeShape:
    return measure_tree(tree.store(), tree.root, "root", tree.limits)


def locations(tree: Tree) -> set[str]:
    return {visited.location for visited in walk(tree.store(), tree.root, "root")}


@pytest.mark.parametrize("order", [3, 4, 5, 16, 128])
def test_compaction_merges_nodes_and_empties_buffers(order: int) -> None:
    tree = filled_tree(order, 40 * order)
    tree.limits = type(tree.limits)(order, 10**6, 4000)
    generator = random.Random(order)
    for _ in range(3):
        tree.apply(dict.fromkeys(keys(*generator.sample(range(40 * order), 12 * order))))
        tree.apply(dict.fromkeys(keys(*generator.sample(range(40 * order), order)), "new"))
    before = shape(tree)
    assert before.messages
    assert tree.compact()
    after = shape(tree)
    assert after.messages == 0
    assert after.nodes < before.nodes
    assert not tree.compact(), "a compact tree is unchanged"


def test_compact_tree_is_unchanged() -> None:
    for tree in (filled_tree(5, 0), filled_tree(5, 3), filled_tree(128, 5_000)):
        tree.compact()
        assert not tree.compact()


def test_compact_subtrees_keep_their_files() -> None:
    tree = filled_tree(8, 2_000)
    tree.compact()
    before = locations(tree)
    tree.apply(dict.fromkeys(keys(*range(0, 300, 2))))
    assert tree.compact()
    unchanged = before & locations(tree)
    assert len(unchanged) > 0.7 * len(before)


@pytest.mark.parametrize("n_keys", [3, 7, 30])
@pytest.mark.parametrize("n_messages", [0, 1, 10])
def test_root_leaf_of_other_program_is_compacted(n_keys: int, n_messages: int) -> None:
    tree = Tree(8)
    names, added = keys(*range(n_keys)), keys(*range(100, 100 + n_messages))
    tree.root = NodeFile(names, ["v"] * n_keys, [], dict.fromkeys(added, "m"), dict(SYSTEM))
    tree.model = dict.fromkeys(names, "v") | dict.fromkeys(added, "m")
    assert tree.compact() == (n_messages > 0 or n_keys > 7)
    assert not tree.compact()
    tree.close()


def test_shape_counts_nodes_keys_and_messages() -> None:
    tree = filled_tree(8, 500)
    measured = shape(tree)
    assert measured.height == tree.height()
    assert measured.nodes == len(tree.nodes())
    assert sum(level.keys for level in measured.levels) == 500
    assert measured.file_bytes == sum(len(tree.storage.read(location)) for location in locations(tree) - {"root"})
    for level in measured.levels:
        assert level.fewest_keys <= level.keys / level.nodes <= level.most_keys
        assert level.fill == level.keys / (level.nodes * 7)


@settings(max_examples=30)
@given(st.integers(3, 9), st.integers(0, 1000), st.integers(0, 400), st.integers(0, 3000))
@example(5, 0, 120, 12)  # a visited node is merged with its neighbor, so that it is visited again
def test_compaction_of_any_tree_matches_model(order: int, seed: int, n_keys: int, buffer_target_bytes: int) -> None:
    generator = random.Random(seed)
    tree = filled_tree(order, n_keys, buffer_target_bytes=buffer_target_bytes)
    for _ in range(4):
        names = keys(*(generator.randrange(500) for _ in range(60)))
        tree.apply({name: generator.choice([None, None, "v1", "v2"]) for name in names})
    tree.compact()
    assert shape(tree).messages == 0
    assert not tree.compact()
