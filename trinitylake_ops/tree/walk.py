"""Visiting every node of a tree once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.tree.nodes.descent import MetNodes
from trinitylake_ops.tree.nodes.node_store import NodeStore

_BATCH = 256

#: A node's location and depth, and the keys next to it.
_Place: TypeAlias = tuple[str, int, str | None, str | None]


@dataclass(frozen=True, slots=True)
class VisitedNode:
    """A node with its place in the tree.

    Keys strictly between ``lower`` and ``upper`` belong below it; the root has depth 0.
    """

    location: str
    node: NodeFile
    depth: int
    lower: str | None
    upper: str | None


def walk(store: NodeStore, root: NodeFile, root_location: str, known: Collection[str] = ()) -> Iterator[VisitedNode]:
    """Yield the root and every node below it, level by level, reading in parallel batches.

    Subtrees whose location is in ``known`` are passed over. A batch of nodes is held at a time, and
    the locations of the level below. Raises CorruptFileError for a node that is reached twice, and
    what reading raises.
    """
    met = MetNodes()
    visited = VisitedNode(root_location, root, 0, None, None)
    yield visited
    places = list(_child_places(visited))
    while places := [place for place in places if place[0] not in known]:
        below: list[_Place] = []
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            met.add(location for location, *_ in batch)
            nodes = store.load_many([location for location, *_ in batch])
            for (location, depth, lower, upper), node in zip(batch, nodes, strict=True):
                visited = VisitedNode(location, node, depth, lower, upper)
                yield visited
                below += _child_places(visited)
        places = below


def _child_places(visited: VisitedNode) -> Iterator[_Place]:
    if visited.node.is_leaf:
        return
    bounds = [visited.lower, *visited.node.keys, visited.upper]
    for position, child in enumerate(visited.node.children):
        yield child, visited.depth + 1, bounds[position], bounds[position + 1]
