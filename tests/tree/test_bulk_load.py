"""Bulk load, which builds trees from sorted entries, and large changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.trees import SYSTEM, Tree, filled_tree
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage import MemoryStorage
from trinitylake_ops.tree import edit
from trinitylake_ops.tree.bulk import FILL, bulk_load
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import get, scan
from trinitylake_ops.tree.shape import check_tree, walk
from trinitylake_ops.tree.store import NodeStore

ROOT = "memory://bulk-load/"


def load(n_keys: int, order: int) -> tuple[NodeStore, NodeFile, list[tuple[str, str]], TreeLimits, list[int]]:
    """Load ``n_keys`` keys. Return the store, root, entries, limits and the number of files of each write."""
    storage = MemoryStorage(ROOT)
    limits = TreeLimits(order, 1 << 20)
    entries = [(f"k{number:07}", f"v{number}") for number in range(n_keys)]
    write_sizes: list[int] = []

    def write(files: Mapping[str, bytes]) -> None:
        write_sizes.append(len(files))
        storage.create_many(files)

    root = bulk_load(iter(entries), limits, created_at_ms=5, write=write)
    root.system.update(SYSTEM)
    return NodeStore(storage), root, entries, limits, write_sizes


@given(st.integers(0, 700), st.integers(3, 9))
def test_bulk_load_builds_valid_tree_for_any_number_of_keys(n_keys: int, order: int) -> None:
    store, root, entries, limits, _ = load(n_keys, order)
    assert check_tree(store, root, "root", limits) == []
    assert scan(store, root) == entries
    assert get(store, root, "k0000003") == (entries[3][1] if n_keys > 3 else None)


@pytest.mark.parametrize("n_keys", [127, 128, 239, 240, 20_000])
def test_bulk_load_fills_all_nodes_except_last_two_of_level(n_keys: int) -> None:
    store, root, entries, limits, write_sizes = load(n_keys, 128)
    assert check_tree(store, root, "root", limits) == []
    assert scan(store, root) == entries
    leaves = [visited.node for visited in walk(store, root, "root") if visited.node.is_leaf]
    n_filled = int(limits.max_keys * FILL)
    assert {len(leaf.keys) for leaf in leaves[:-2]} <= {n_filled}
    assert all(size <= 256 for size in write_sizes), "files are written in batches, which limits memory use"


def test_bulk_load_requires_ascending_keys() -> None:
    for keys in (["b", "a"], ["a", "a"]):
        with pytest.raises(ValueError, match="does not ascend"):
            bulk_load([(key, "v") for key in keys], TreeLimits(5, 1 << 20), created_at_ms=1, write=lambda files: None)


def test_large_change_rebuilds_tree() -> None:
    tree = filled_tree(32, 900)
    before = set(tree.root.children)
    changes: dict[str, str | None] = {f"n{number:05}": f"new{number}" for number in range(1_100)}
    changes |= dict.fromkeys(list(tree.model)[:50])
    tree.apply(changes)
    check(tree)
    assert before.isdisjoint(tree.root.children)
    assert not tree.root.buffer


def test_smaller_change_keeps_untouched_nodes() -> None:
    tree = filled_tree(8, 1_500)
    before = set(tree.root.children)
    tree.apply({f"k0000-{number:05}": "new" for number in range(1_100)})
    check(tree)
    assert before & {visited.location for visited in walk(tree.store(), tree.root, "root")}


def check(tree: Tree) -> None:
    assert check_tree(tree.store(), tree.root, "root", tree.limits) == []
    assert scan(tree.store(), tree.root) == sorted(tree.model.items())


@pytest.mark.parametrize("order", [8, 128])
@pytest.mark.parametrize("seed", range(2))
def test_large_changes_match_model(order: int, seed: int) -> None:
    """Each change drops a range of keys, replaces values, and adds and deletes keys in all parts of the tree."""
    random = Random(seed)
    tree = filled_tree(order, 3_000)
    for _ in range(2):
        names = sorted(tree.model)
        first = random.randrange(max(1, len(names) - 1_000))
        changes: dict[str, str | None] = dict.fromkeys(names[first : first + 1_000])
        changes |= {name: f"set{random.random()}" for name in random.sample(names, min(200, len(names)))}
        changes |= {f"{random.choice(names)}-{number}": "new" for number in range(300)}
        changes |= dict.fromkeys(f"absent{number}" for number in range(50))
        tree.apply(dict(random.sample(list(changes.items()), len(changes))))
        check(tree)


def test_large_change_takes_linear_time_in_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are grouped by child in a few passes, instead of one pass for each flush."""
    n_searches = 0
    bisect = edit.bisect_left

    def count_and_bisect(keys: Sequence[str], key: str) -> int:
        nonlocal n_searches
        n_searches += 1
        return bisect(keys, key)

    tree = filled_tree(32, 12_000)
    dropped = sorted(tree.model)[1_000:9_000]
    monkeypatch.setattr(edit, "bisect_left", count_and_bisect)
    tree.apply(dict.fromkeys(dropped))
    assert n_searches < 50 * len(dropped)
    check(tree)
