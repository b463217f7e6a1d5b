"""Results and reads of search, scan, diff and walk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.tree.trees import Tree, filled_tree, keys
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import CorruptFileError, FileMissingError, LocationNotAllowedError, StorageError
from trinitylake_ops.format import keys as text_column
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.node_file import NodeFile, encode_node
from trinitylake_ops.storage import LocalStorage, MemoryStorage, drop_memory_root
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.tree.compact import compacted_tree
from trinitylake_ops.tree.diff import diff_in_parts, diff_trees
from trinitylake_ops.tree.edit import apply_messages
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import (
    Subtree,
    get,
    get_many,
    prefix_end,
    prefix_keys,
    scan,
    scan_columns,
    with_messages,
)
from trinitylake_ops.tree.shape import Violation, check_tree, walk
from trinitylake_ops.tree.store import NodeStore


@pytest.fixture(scope="module")
def tree() -> Tree:
    """A tree of order 5 with 300 keys and at least three levels below the root."""
    tree = filled_tree(5, 300)
    assert tree.height() >= 3
    return tree


def count_reads(tree: Tree, call: Callable[[NodeStore], object]) -> tuple[int, int]:
    """Return the number of reads and round trips of a call on a store with an empty cache."""
    before = tree.storage.snapshot()
    call(tree.store())
    counts = tree.storage.snapshot() - before
    assert set(counts.requests) <= {"read"}
    return counts.total, counts.rounds


def test_lookup_reads_at_most_one_node_per_level(tree: Tree) -> None:
    height = tree.height()
    n_reads_by_key = {
        count_reads(tree, lambda store, key=key: get(store, tree.root, key))[0] for key in [*tree.model, "", "zz"]
    }
    assert n_reads_by_key == set(range(height + 1)), "no read for a key in the root, one per level for a key in a leaf"


def test_scan_reads_level_by_level(tree: Tree) -> None:
    n_nodes = len(tree.nodes()) - 1
    assert count_reads(tree, lambda store: scan(store, tree.root)) == (n_nodes, tree.height())


def test_narrow_scan_reads_only_its_path(tree: Tree) -> None:
    lower, upper = keys(100, 103)
    n_reads, rounds = count_reads(tree, lambda store: scan(store, tree.root, lower, upper))
    assert rounds <= tree.height()
    assert n_reads <= 3 * tree.height()


@pytest.mark.parametrize("lower", [None, "", "k0000", "k0007", "k0150", "k0150x", "k0299", "zz"])
@pytest.mark.parametrize("upper", [None, "", "k0000", "k0007", "k0008", "k0150", "k0299", "zz"])
def test_scan_includes_lower_and_excludes_upper_bound(tree: Tree, lower: str | None, upper: str | None) -> None:
    expected = [
        entry
        for entry in sorted(tree.model.items())
        if (lower is None or entry[0] >= lower) and (upper is None or entry[0] < upper)
    ]
    assert scan(tree.store(), tree.root, lower, upper) == expected


@pytest.mark.parametrize("prefix", ["", "k", "k00", "k0123", "k01234", "x", "j"])
def test_prefix_scan_returns_matching_keys(tree: Tree, prefix: str) -> None:
    expected = [key for key in sorted(tree.model) if key.startswith(prefix)]
    assert prefix_keys(tree.store(), tree.root, prefix).to_pylist() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"k0007": "new", "k0150": "new"},
        {"k0007": None},
        {"k0150x": "new"},
        {"k0007": None, "k0150x": "new"},
        {"k9": None},
    ],
)
@pytest.mark.parametrize("prefix", ["", "k00", "k0150"])
def test_prefix_scan_includes_buffered_messages(changes: dict[str, str | None], prefix: str) -> None:
    tree = filled_tree(5, 300, buffer_target_bytes=10**6)
    tree.apply(changes)
    assert tree.root.buffer, "the messages are buffered in the root"
    expected = [key for key in sorted(tree.model) if key.startswith(prefix)]
    assert prefix_keys(tree.store(), tree.root, prefix).to_pylist() == expected
    tree.close()


def test_scan_of_keys_beyond_32_bit_offsets(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million keys of the default size exceed the limit of 2 GiB, which the test lowers instead."""
    monkeypatch.setattr(text_column, "MAX_UTF8_BYTES", 100)
    messages = {"k0007": None, "k0150": "newer", "k0150x": "new"}
    columns = scan_columns(tree.store(), tree.root)
    assert {column.type for column in columns} == {pa.large_utf8()}
    keys, locations = with_messages(*columns, messages)
    expected = {key: location for key, location in {**tree.model, **messages}.items() if location is not None}
    assert dict(zip(keys.to_pylist(), locations.to_pylist(), strict=True)) == expected
    assert keys.to_pylist() == sorted(expected)


@pytest.mark.parametrize("prefix", ["a", "a\U0010ffff", "\ud7ff", "é", "\x7f", "a\uffff"])
def test_prefix_end_is_least_upper_bound(prefix: str) -> None:
    end = prefix_end(prefix)
    assert end is not None
    assert prefix + "\U0010ffff" * 5 < end
    assert not end.startswith(prefix)
    assert prefix_end("") is None
    assert prefix_end("\U0010ffff") is None


# Diff


def changes(tree: Tree, before: NodeFile, after: NodeFile) -> dict[str, tuple[str | None, str | None]]:
    full_diff = diff_trees(tree.store(), before, after)
    assert [change for part in diff_in_parts(tree.store(), before, after) for change in part] == full_diff
    return {change.key: (change.before, change.after) for change in full_diff}


def test_diff_of_equal_trees_reads_nothing(tree: Tree) -> None:
    assert count_reads(tree, lambda store: diff_trees(store, tree.root, tree.root)) == (0, 0)
    assert changes(tree, tree.root, tree.root) == {}


def test_diff_reads_only_unshared_nodes() -> None:
    tree = filled_tree(5, 300)
    before = tree.root
    unshared = _locations(tree)
    tree.apply({"k0123": "new"})
    unshared ^= _locations(tree)
    assert len(unshared) <= 2 * tree.height()
    n_reads, rounds = count_reads(tree, lambda store: diff_trees(store, before, tree.root))
    assert n_reads == len(unshared)
    assert rounds <= 2 * tree.height()
    assert changes(tree, before, tree.root) == {"k0123": ("v", "new")}
    assert changes(tree, tree.root, before) == {"k0123": ("new", "v")}
    tree.close()


def _locations(tree: Tree) -> set[str]:
    return {visited.location for visited in walk(tree.store(), tree.root, "root")} - {"root"}


def test_diff_of_buffered_message_costs_one_lookup() -> None:
    tree = filled_tree(5, 300, buffer_target_bytes=10_000)
    before = tree.root
    tree.apply({"k0123": "new", "k0007": None, "k0001": "v"})
    n_reads, _ = count_reads(tree, lambda store: diff_trees(store, before, tree.root))
    assert n_reads <= 3 * tree.height()
    assert changes(tree, before, tree.root) == {"k0123": ("v", "new"), "k0007": ("v", None)}, (
        "an equal value is no change"
    )
    tree.close()


def test_diff_reads_old_values_level_by_level() -> None:
    tree = filled_tree(5, 300, buffer_target_bytes=10**6)
    before = tree.root
    tree.apply(dict.fromkeys(keys(*range(0, 300, 7)), "new"))
    assert tree.written == {}, "all messages are buffered in the root"
    n_reads, rounds = count_reads(tree, lambda store: diff_trees(store, before, tree.root))
    assert rounds <= tree.height()
    assert n_reads <= len(tree.nodes()) - 1
    assert changes(tree, before, tree.root) == dict.fromkeys(keys(*range(0, 300, 7)), ("v", "new"))
    tree.close()


def test_partial_diff_reads_one_child_of_root_at_a_time() -> None:
    tree, empty = filled_tree(5, 300), filled_tree(5, 0)
    for before, after in ((empty.root, tree.root), (tree.root, empty.root)):
        parts = diff_in_parts(tree.store(), before, after)
        n_reads = [count_reads(tree, lambda _store, parts=parts: next(parts))[0] for _ in tree.root.children]
        assert list(parts) == []
        assert sum(n_reads) == len(_locations(tree))
        assert max(n_reads) < sum(n_reads)
    before = tree.root
    tree.apply({"k0123": "new"})
    assert len(list(diff_in_parts(tree.store(), before, tree.root))) == 1, "all other children are shared"


def test_diff_after_root_growth_reads_few_nodes() -> None:
    tree = filled_tree(4, 0)
    number = 0
    while len(tree.root.keys) < 3 or tree.height() < 3:
        tree.apply({f"k{number:04d}": "v"})
        number += 1
    height, before, old_locations = tree.height(), tree.root, _locations(tree)
    while tree.height() == height:
        tree.apply({f"k{number:04d}": "v"})
        before, old_locations = (before, old_locations) if tree.height() > height else (tree.root, _locations(tree))
        number += 1
    unshared = len(old_locations ^ _locations(tree))
    assert unshared < len(old_locations) / 2
    n_reads, _ = count_reads(tree, lambda store: diff_trees(store, before, tree.root))
    assert n_reads <= unshared + 2 * height
    assert changes(tree, before, tree.root) == {f"k{number - 1:04d}": (None, "v")}
    tree.close()


def test_diff_of_unrelated_trees_matches_model() -> None:
    tree, other = filled_tree(4, 40), filled_tree(7, 60)
    for path in [info.path for info in other.storage.list()]:
        tree.storage.create(path, other.storage.read(path))
    other_model = dict.fromkeys(other.model, "v")
    expected = {key: (tree.model.get(key), value) for key, value in other_model.items() if tree.model.get(key) != value}
    assert changes(tree, tree.root, other.root) == expected
    assert changes(tree, NodeFile(), tree.root) == {key: (None, value) for key, value in tree.model.items()}
    tree.close()
    other.close()


# Walk, store and invariants


def test_walk_visits_every_node_once_with_its_range(tree: Tree) -> None:
    visited = list(walk(tree.store(), tree.root, "root"))
    assert len({node.location for node in visited}) == len(visited)
    assert [node.depth for node in visited] == sorted(node.depth for node in visited)
    for node in visited:
        for key in node.node.keys:
            assert node.lower is None or node.lower < key
            assert node.upper is None or key < node.upper
    assert sorted(key for node in visited for key in node.node.keys) == sorted(tree.model)
    known = tree.root.children[0]
    assert known not in {node.location for node in walk(tree.store(), tree.root, "root", skipped={known})}


def test_node_cache_is_bounded(tree: Tree) -> None:
    store = tree.store()
    scan(store, tree.root)
    before = tree.storage.snapshot().total
    scan(store, tree.root)
    assert tree.storage.snapshot().total == before
    small_store = NodeStore(tree.storage, cache_bytes=10)
    get(small_store, tree.root, "k0001")
    before = tree.storage.snapshot().total
    get(small_store, tree.root, "k0001")
    assert tree.storage.snapshot().total > before


def test_node_pointer_may_be_a_uri(tree: Tree, tmp_path: Path) -> None:
    """The node may be in another lakehouse whose root is allowed. Its pointers are relative to that root."""
    child = tree.root.children[0]
    assert tree.store().load(tree.storage.root + child) == tree.store().load(child)
    root, path = f"file://{tmp_path}/", new_node_path()
    node = NodeFile(["k"], ["v.binpb"], ["a.arrow", "b.arrow"], {"m": None}, {"created_at_millis": "1"})
    LocalStorage(root, fsync=False).create(path, encode_node(node, 4))
    with pytest.raises(LocationNotAllowedError):
        tree.store().load(root + path)
    allowing_store = NodeStore(
        tree.storage, external_storages=ExternalStorages(tree.storage.root, StorageOptions({"allowed_roots": root}))
    )
    loaded = allowing_store.load(root + path)
    assert (loaded.keys, loaded.values) == (["k"], [f"{root}v.binpb"])
    assert (loaded.children, loaded.buffer) == ([f"{root}a.arrow", f"{root}b.arrow"], {"m": None})
    with pytest.raises(FileMissingError):
        allowing_store.load(f"{root}node.arrow")
    with pytest.raises(StorageError):
        tree.store().load("gopher://elsewhere/node.arrow")
    with pytest.raises(CorruptFileError):
        tree.store().load("../node.arrow")
    with pytest.raises(FileMissingError):
        tree.store().load("missing.arrow")


def _violations(root: NodeFile, order: int = 4, **children: NodeFile) -> set[str]:
    store = NodeStore(MemoryStorage("memory://violations/"))
    store.load_many = lambda locations: [children[location] for location in locations]  # type: ignore[method-assign]
    violations: list[Violation] = check_tree(store, root, "root", TreeLimits(order, 2_000))
    return {violation.message.partition(",")[0] for violation in violations}


def leaf(*names: str, **buffer: str | None) -> NodeFile:
    return NodeFile(list(names), ["v"] * len(names), [], buffer, {"created_at_millis": "1"})


def inner(names: list[str], children: list[str], **buffer: str | None) -> NodeFile:
    return NodeFile(names, ["v"] * len(names), children, buffer, {"created_at_millis": "1"})


def test_check_tree_detects_every_violation() -> None:
    assert _violations(inner(["m"], ["a", "b"]), a=leaf("c"), b=leaf("x")) == set()
    assert _violations(leaf("a", "b", "c", "d")) == {"4 keys"}
    assert _violations(inner(["m"], ["a", "b"]), a=leaf(), b=leaf("x")) == {"0 keys"}
    assert _violations(inner([], ["a"]), a=leaf("c")) == {"the root has a child but no key"}
    assert _violations(inner(["m"], ["a"]), a=leaf("c")) == {"1 children for 1 keys"}
    assert _violations(leaf("b", "a")) == {"key 'a' does not ascend after 'b'"}
    outside = "key 'n' is outside the key range of this node"
    assert _violations(inner(["m"], ["a", "b"]), a=leaf("n"), b=leaf("x")) == {outside}
    assert _violations(inner(["m"], ["a", "b"]), a=leaf("c", n="v"), b=leaf("x")) == {outside}
    assert _violations(inner(["n"], ["a", "b"]), a=leaf("c"), b=leaf("x", n="v")) == {outside}
    uneven = {"a": inner(["c"], ["a0", "a1"]), "b": leaf("x"), "a0": leaf("b"), "a1": leaf("d")}
    assert _violations(inner(["m"], ["a", "b"]), **uneven) == {"leaf at depth 2"}
    too_large = _violations(leaf("a", **{"x" * 2_000: "v"}))
    assert {message.rpartition(" bytes ")[2] for message in too_large} == {"with buffered messages"}


def test_search_positions_match_model(tree: Tree) -> None:
    names = sorted(tree.model)
    for upper in ["", "k0000", "k0100x", "zz"]:
        assert len(scan(tree.store(), tree.root, None, upper)) == bisect_left(names, upper)


def _store_of(**nodes: NodeFile) -> NodeStore:
    storage = MemoryStorage("memory://cycles/")
    for location, node in nodes.items():
        storage.write(location, encode_node(node, 4))
    return NodeStore(storage)


CYCLES = {
    "node is its own child": {"a": inner(["c"], ["a", "b"]), "b": leaf("x")},
    "node is a child of its child": {"a": inner(["c"], ["b", "b2"]), "b": inner(["b"], ["a", "b2"]), "b2": leaf("x")},
}
READERS: dict[str, Callable[[NodeStore, NodeFile], object]] = {
    "get": lambda store, root: get(store, root, "aa"),
    "get_many": lambda store, root: get_many(store, {"aa": Subtree("a")}),
    "scan": scan,
    "prefix_keys": lambda store, root: prefix_keys(store, root, "a"),
    "diff to": lambda store, root: diff_trees(store, leaf("x"), root),
    "diff from": lambda store, root: diff_trees(store, root, leaf("x")),
    "walk": lambda store, root: list(walk(store, root, "root")),
    "small change": lambda store, root: _apply(store, root, {"aa": "v"}, TreeLimits(4, 10**6, 0)),
    "large change": lambda store, root: _apply(
        store, root, {f"a{number}": "v" for number in range(5_000)}, TreeLimits(4, 10**6)
    ),
    "compact": lambda store, root: compacted_tree(store, root, TreeLimits(4, 10**6), created_at_ms=1, root_system={}),
}


def _apply(store: NodeStore, root: NodeFile, messages: dict[str, str | None], limits: TreeLimits) -> object:
    return apply_messages(store, root, messages, limits, created_at_ms=1, root_system={})


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("cycle", CYCLES)
def test_cyclic_pointers_are_an_error_at_the_node(cycle: str, reader: str) -> None:
    store, root = _store_of(**{**CYCLES[cycle], "z": leaf("z")}), inner(["m"], ["a", "z"])
    with pytest.raises(CorruptFileError):
        READERS[reader](store, root)
    drop_memory_root("memory://cycles/")


@pytest.mark.parametrize("reader", ["scan", "walk", "compact"])
def test_shared_children_are_visited_once(reader: str) -> None:
    """If shared children were visited repeatedly, the walk would reach 4^30 leaves."""
    chain = {f"n{level}": inner(["a", "b", "c"], [f"n{level + 1}"] * 4) for level in range(30)}
    store = _store_of(**chain, n30=leaf("x"))
    with pytest.raises(CorruptFileError):
        READERS[reader](store, inner(["m"], ["n0", "n30"]))
    drop_memory_root("memory://cycles/")
