"""Compare two trees without reading the subtrees that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from trinitylake_ops.format.keys import text_array
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.search import KeyRange, Lookup, NodesInRange, Subtree, find_key, get_many
from trinitylake_ops.tree.store import NodePath, NodeStore


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that two trees map to different locations."""

    key: str
    #: The location in the first tree; None if the key is absent.
    before: str | None
    #: The location in the second tree; None if the key is absent.
    after: str | None


def diff_trees(store: NodeStore, before: NodeFile, after: NodeFile) -> list[KeyChange]:
    """Return the keys that two trees map to different locations, in ascending order.

    Subtrees that both trees point to are not read, unless only one tree has a buffered message for a key in them.

    Args:
        store: Reads the nodes of both trees.
        before: The root of the first tree.
        after: The root of the second tree.

    Raises:
        CorruptFileError: A node is damaged, or pointers form a cycle.
        StorageError: A node cannot be read.
    """
    old, new = _Side(store, before), _Side(store, after)
    shared = _expand_differences(old, new)
    keys = sorted(_candidates(old, new))
    ends = {key: (old.resolve(key, shared), new.resolve(key, shared)) for key in keys}
    differing = {key: both for key, both in ends.items() if both[0] != both[1]}
    values_before = _values(store, {key: end for key, (end, _) in differing.items()})
    values_after = _values(store, {key: end for key, (_, end) in differing.items()})
    return [
        KeyChange(key, values_before[key], values_after[key])
        for key in differing
        if values_before[key] != values_after[key]
    ]


def diff_in_parts(store: NodeStore, before: NodeFile, after: NodeFile) -> Iterator[list[KeyChange]]:
    """Yield the result of :func:`diff_trees` in parts, in ascending order: one part for each child of a root.

    Only the nodes of one part are in memory at a time. A node that overlaps two parts is read twice.

    Args:
        store: Reads the nodes of both trees.
        before: The root of the first tree.
        after: The root of the second tree.

    Raises:
        CorruptFileError: A node is damaged, or pointers form a cycle.
        StorageError: A node cannot be read.
    """
    wide, narrow = (after, before) if len(after.children) >= len(before.children) else (before, after)
    shared = set(narrow.children)
    own = [row for row, child in enumerate(wide.children) if child not in shared]
    bounds = [None, *(wide.keys[row] for row in own[:-1]), None]
    for lower, upper in pairwise(bounds):
        keys = KeyRange(lower, upper)
        yield diff_trees(NodesInRange(store, keys), keys.part_of(before), keys.part_of(after))


def _values(store: NodeStore, ends: Mapping[str, Lookup | Subtree]) -> dict[str, str | None]:
    buffered = {key: end.location for key, end in ends.items() if isinstance(end, Lookup)}
    return buffered | get_many(store, {key: end for key, end in ends.items() if isinstance(end, Subtree)})


def _candidates(old: _Side, new: _Side) -> set[str]:
    """Return the keys that may differ: the keys in nodes of only one tree, and the keys of messages that differ."""
    if all(
        text_array(columns[0]).equals(text_array(columns[1]))
        for columns in (
            (old.root.keys, new.root.keys),
            (old.root.values, new.root.values),
            (old.root.children, new.root.children),
        )
    ):  # most commits only add messages to the root's buffer
        return {key for key, _ in old.root.buffer.items() ^ new.root.buffer.items()}
    return old.candidates() | new.candidates()


class _Side:
    """The part of one tree that the other does not share: its nodes by location, and the unread nodes below them."""

    def __init__(self, store: NodeStore, root: NodeFile):
        self.store = store
        self.root = root
        self.nodes: dict[str, NodeFile] = {}
        self.edge: set[str] = set(root.children)
        self._node_path = NodePath()

    def expand(self) -> None:
        locations = sorted(self.edge)
        self._node_path.add(locations)
        self.edge = set()
        for location, node in zip(locations, self.store.load_many(locations), strict=True):
            self.nodes[location] = node
            self.edge.update(node.children)

    def leave_out(self, locations: set[str]) -> None:
        """Stop reading at and below these locations."""
        while locations:
            self.edge -= locations
            locations = {child for location in locations & self.nodes.keys() for child in self.nodes[location].children}

    def candidates(self) -> set[str]:
        keys: set[str] = set()
        for node in (self.root, *self.nodes.values()):
            keys.update(node.keys, node.buffer)
        return keys

    def resolve(self, key: str, shared: set[str]) -> Lookup | Subtree:
        """Return the location of a key, or the shared subtree that determines it."""
        end = find_key(self.root, key)
        while isinstance(end, Subtree) and end.location not in shared:
            end = find_key(self.nodes[end.location], key)
        return end


def _expand_differences(old: _Side, new: _Side) -> set[str]:
    """Read both trees down to the subtrees that they share, and return these subtrees.

    The side with fewer unread nodes is read first, because a tree that grew by one level has its old nodes one level
    lower.
    """
    shared: set[str] = set()
    while True:
        # One side may reach a subtree after the other side has already read it.
        common = (old.edge & (new.edge | new.nodes.keys())) | (new.edge & old.nodes.keys())
        shared |= common
        old.leave_out(common)
        new.leave_out(common)
        sides = [side for side in (old, new) if side.edge]
        if not sides:
            return shared
        min(sides, key=lambda side: len(side.edge)).expand()
