"""Comparing two trees without reading what they share."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.node_store import NodeStore
from trinitylake_ops.tree.search import get


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key whose location differs; None means absent."""

    key: str
    before: str | None
    after: str | None


def diff_trees(store: NodeStore, before: NodeFile, after: NodeFile) -> list[KeyChange]:
    """Return the keys that two trees map to different locations, ascending.

    Subtrees that both trees point to are never read, unless a message in only one tree's buffers
    concerns a key below them.
    """
    old, new = _Side(store, before), _Side(store, after)
    shared = _expand_differences(old, new)
    changes: list[KeyChange] = []
    for key in sorted(old.candidates() | new.candidates()):
        old_end, new_end = old.resolve(key, shared), new.resolve(key, shared)
        if old_end == new_end:
            continue  # the same location, or the same shared subtree
        value_before, value_after = old.value(key, old_end), new.value(key, new_end)
        if value_before != value_after:
            changes.append(KeyChange(key, value_before, value_after))
    return changes


@dataclass(frozen=True, slots=True)
class _Value:
    location: str | None


@dataclass(frozen=True, slots=True)
class _Subtree:
    location: str


class _Side:
    """The part of one tree that the other does not have: its nodes by location, and the edge below them."""

    def __init__(self, store: NodeStore, root: NodeFile):
        self.store = store
        self.root = root
        self.nodes: dict[str, NodeFile] = {}
        self.edge: set[str] = set(root.children)

    def expand(self) -> None:
        locations = sorted(self.edge)
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

    def resolve(self, key: str, shared: set[str]) -> _Value | _Subtree:
        """Return the location of a key, or the shared subtree that would tell."""
        node = self.root
        while True:
            if key in node.buffer:
                return _Value(node.buffer[key])
            row = bisect_left(node.keys, key)
            if row < len(node.keys) and node.keys[row] == key:
                return _Value(node.values[row])
            if node.is_leaf:
                return _Value(None)
            child = node.children[row]
            if child in shared:
                return _Subtree(child)
            node = self.nodes[child]

    def value(self, key: str, end: _Value | _Subtree) -> str | None:
        return end.location if isinstance(end, _Value) else get(self.store, self.store.load(end.location), key)


def _expand_differences(old: _Side, new: _Side) -> set[str]:
    """Read both trees down to the subtrees they share, the narrower edge first; returns those subtrees.

    The narrower edge first, because a tree that grew by a level has its old nodes one level lower.
    """
    shared: set[str] = set()
    while True:
        # A subtree of one side may be met after the other side was read past it.
        common = (old.edge & (new.edge | new.nodes.keys())) | (new.edge & old.nodes.keys())
        shared |= common
        old.leave_out(common)
        new.leave_out(common)
        sides = [side for side in (old, new) if side.edge]
        if not sides:
            return shared
        min(sides, key=lambda side: len(side.edge)).expand()
