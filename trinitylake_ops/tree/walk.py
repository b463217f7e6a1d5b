"""Visiting every node of a tree once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.node_store import NodeStore

_BATCH = 256


@dataclass(frozen=True, slots=True)
class VisitedNode:
    """A node with its place: keys strictly between ``lower`` and ``upper`` belong below it; the root has depth 0."""

    location: str
    node: NodeFile
    depth: int
    lower: str | None
    upper: str | None


def walk(store: NodeStore, root: NodeFile, root_location: str, known: Collection[str] = ()) -> Iterator[VisitedNode]:
    """Yield the root and every node below it, level by level, reading in parallel batches.

    Subtrees whose location is in ``known`` are passed over. Raises what reading raises.
    """
    level = [VisitedNode(root_location, root, 0, None, None)]
    while level:
        yield from level
        places = [place for visited in level for place in _child_places(visited) if place[0] not in known]
        level = []
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            nodes = store.load_many([location for location, *_ in batch])
            level += [
                VisitedNode(location, node, depth, lower, upper)
                for (location, depth, lower, upper), node in zip(batch, nodes, strict=True)
            ]


def _child_places(visited: VisitedNode) -> Iterator[tuple[str, int, str | None, str | None]]:
    bounds = [visited.lower, *visited.node.keys, visited.upper]
    for position, child in enumerate(visited.node.children):
        yield child, visited.depth + 1, bounds[position], bounds[position + 1]
