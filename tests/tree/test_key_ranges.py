"""Key ranges, which are disjoint, cover all keys, and are read without nodes outside them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tree.trees import Tree, filled_tree
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.search import KeyRange, NodesInRange, scan, split
from trinitylake_ops.tree.shape import walk

ORDER = 5


@pytest.fixture(scope="module")
def tree() -> Tree:
    """A tree with 300 keys and at least three levels below the root."""
    tree = filled_tree(ORDER, 300)
    assert tree.height() >= 3
    return tree


bounds = st.one_of(st.none(), st.integers(-1, 301).map(lambda number: f"k{number:04}"), st.just("zz"))


@given(lower=bounds, upper=bounds)
def test_scan_of_range_returns_its_keys(tree: Tree, lower: str | None, upper: str | None) -> None:
    keys = KeyRange(lower, upper)
    expected = [(key, value) for key, value in sorted(tree.model.items()) if key in keys]
    assert scan(NodesInRange(tree.store(), keys), keys.part_of(tree.root)) == expected


@given(lower=bounds, upper=bounds, objects_per_range=st.sampled_from([1, 3, 10, 100, 10_000]))
def test_ranges_are_disjoint_and_cover_all_keys(
    tree: Tree, lower: str | None, upper: str | None, objects_per_range: int
) -> None:
    within = KeyRange(lower, upper)
    ranges = split(tree.store(), tree.root, ORDER, within, objects_per_range)
    assert (ranges[0].lower, ranges[-1].upper) == (lower, upper)
    assert all(lower_range.upper == upper_range.lower for lower_range, upper_range in pairwise(ranges))
    inner = [key_range.upper for key_range in ranges[:-1]]
    assert inner == sorted(set(inner), key=str)
    assert all(bound in tree.model for bound in inner)


def test_ranges_have_approximately_requested_size(tree: Tree) -> None:
    for objects_per_range in (10, 30, 100):
        ranges = split(tree.store(), tree.root, ORDER, KeyRange(), objects_per_range)
        sizes = [sum(key in key_range for key in tree.model) for key_range in ranges]
        assert 300 / objects_per_range / 3 <= len(sizes) <= 300 / objects_per_range * 3
        assert max(sizes) <= objects_per_range * 3
    assert split(tree.store(), tree.root, ORDER, KeyRange(), 10_000) == [KeyRange()]


def test_splitting_reads_upper_levels_only(tree: Tree) -> None:
    before = tree.storage.snapshot()
    split(tree.store(), tree.root, ORDER, KeyRange(), 1)
    requests = tree.storage.snapshot() - before
    n_inner = sum(not node.is_leaf for node in tree.nodes())
    assert requests.total == n_inner - 1 + 1, "all inner nodes except the root, and one leaf"


def test_single_key_range_is_not_split(tree: Tree) -> None:
    before = tree.storage.snapshot()
    single = KeyRange.only("k0007")
    assert split(tree.store(), tree.root, ORDER, single, 1) == [single]
    assert "k0007" in single
    assert "k0007x" not in single
    assert (tree.storage.snapshot() - before).total == 0


def test_each_node_belongs_to_one_range(tree: Tree) -> None:
    locations: list[str] = []
    for keys in split(tree.store(), tree.root, ORDER, KeyRange(), 20):
        nodes = walk(NodesInRange(tree.store(), keys), keys.part_of(tree.root), "root")
        locations += [visited.location for visited in nodes if visited.lower is not None or keys.lower is None]
    all_locations = {visited.location for visited in walk(tree.store(), tree.root, "root")}
    assert sorted(locations) == sorted(all_locations)


def test_diff_of_range_reads_only_its_nodes(tree: Tree) -> None:
    changed = filled_tree(ORDER, 300)
    changed.apply({f"k{number:04}": f"other-{number}" for number in range(0, 300, 2)})
    keys = KeyRange("k0010", "k0020")
    changed.storage.create_many({path: data for path, data in _files(tree).items() if not changed.storage.exists(path)})
    before = changed.storage.snapshot()
    nodes = NodesInRange(changed.store(), keys)
    key_changes = diff_trees(nodes, keys.part_of(tree.root), keys.part_of(changed.root))
    assert [change.key for change in key_changes] == [f"k{number:04}" for number in range(10, 20, 2)]
    assert (changed.storage.snapshot() - before).total < len(changed.nodes()) / 4


def _files(tree: Tree) -> dict[str, bytes]:
    return {info.path: tree.storage.read(info.path) for info in tree.storage.list()}
