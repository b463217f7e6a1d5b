"""Parts of a tree by their keys: tasks share a tree by them, and a filter reads only some of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.tree.nodes.descent import check_depth
from trinitylake_ops.tree.nodes.node_store import NodeStore
from trinitylake_ops.tree.search import prefix_end

_MOST_RANGES = 4_096
_TYPICAL_FILL = 0.8  # between the fill of nodes that were split and the fill of a tree built at once


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys from ``lower`` on and before ``upper``; None is no bound."""

    lower: str | None = None
    upper: str | None = None

    @classmethod
    def prefixed(cls, prefix: str) -> KeyRange:
        """Return the range of all keys that start with a prefix."""
        return cls(prefix, prefix_end(prefix))

    @classmethod
    def only(cls, key: str) -> KeyRange:
        """Return the range of one key."""
        return cls(key, key + "\0")

    @property
    def is_single(self) -> bool:
        """Whether this is the range of one key."""
        return self.lower is not None and self.upper == self.lower + "\0"

    def __contains__(self, key: str) -> bool:
        return (self.lower is None or self.lower <= key) and (self.upper is None or key < self.upper)

    def part_of(self, node: NodeFile) -> NodeFile:
        """Return a node with the keys of this range and the children that may hold others of it."""
        first = 0 if self.lower is None else bisect_left(node.keys, self.lower)
        end = len(node.keys) if self.upper is None else max(first, bisect_left(node.keys, self.upper))
        buffer = {key: location for key, location in node.buffer.items() if key in self}
        if end - first == len(node.keys):
            return node if len(buffer) == len(node.buffer) else replace(node, buffer=buffer)
        children = node.children[first : end + 1] if node.children else node.children
        return replace(node, keys=node.keys[first:end], values=node.values[first:end], children=children, buffer=buffer)


class NodesInRange(NodeStore):
    """The nodes of another store, as if their trees held the keys of one range only. No other keys are ever read."""

    def __init__(self, nodes: NodeStore, keys: KeyRange):
        self._nodes = nodes
        self._keys = keys

    def load(self, location: str) -> NodeFile:
        return self._keys.part_of(self._nodes.load(location))

    def load_many(self, locations: Sequence[str]) -> list[NodeFile]:
        return [self._keys.part_of(node) for node in self._nodes.load_many(locations)]


def split(nodes: NodeStore, root: NodeFile, order: int, within: KeyRange, objects_per_range: int) -> list[KeyRange]:
    """Return ranges that make up ``within``, each of about so many objects; ``order`` is that of the tree.

    Bounds are keys of the upper levels, and only the nodes are read that are needed for them. Leaves are not read,
    except for one that tells how deep the tree is.
    """
    if within.is_single:
        return [within]
    limited = NodesInRange(nodes, within)
    level = [within.part_of(root)]
    levels_below = _height(limited, level[0])
    bounds: set[str] = set()
    while True:
        bounds.update(key for node in level for key in node.keys if key != within.lower)
        children = [child for node in level for child in node.children]
        n_objects = len(children) * (1 + (order - 1) * _TYPICAL_FILL) ** levels_below
        wanted = min(max(1, round(n_objects / objects_per_range)), _MOST_RANGES)
        if len(bounds) + 1 >= wanted or levels_below <= 1:
            break
        level = limited.load_many(children)
        levels_below -= 1
    ordered = sorted(bounds)
    n_ranges = min(wanted, len(ordered) + 1)
    inner = [ordered[len(ordered) * number // n_ranges] for number in range(1, n_ranges)]
    edges = [within.lower, *inner, within.upper]
    return [KeyRange(lower, upper) for lower, upper in pairwise(edges)]


def _height(nodes: NodeStore, node: NodeFile) -> int:
    """Return how many levels are below a node."""
    height = 0
    while node.children:
        height += 1
        check_depth(height, node.children[0])
        node = nodes.load(node.children[0])
    return height
