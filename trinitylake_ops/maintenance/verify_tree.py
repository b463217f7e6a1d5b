"""Checking trees: each node is read once, however many versions share it."""

from __future__ import annotations

from collections.abc import Callable

from trinitylake_ops.errors import CorruptFileError, StorageError
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.transaction.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.tree.invariants import check_node
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.walk import VisitedNode

_BATCH = 256

#: Called with code, message, path and version of a finding.
Report = Callable[[str, str, str | None, int | None], None]


class TreeVerifier:
    """Checks the tree of one version after the other; ``nodes`` counts the files read, roots left out."""

    def __init__(self, files: LakehouseFiles, report: Report):
        self._files = files
        self._report = report
        #: Levels from each known node down to its leaves; None below which something is broken.
        self._heights: dict[str, int | None] = {}
        self.nodes = 0

    def check(self, snapshot: Snapshot, limits: TreeLimits) -> bool:
        """Check all nodes of a version that were not met before; whether all of its nodes can be read."""
        visited: list[VisitedNode] = []
        level = [VisitedNode(snapshot.location, snapshot.root, 0, None, None)]
        while level:
            for place in level:
                for violation in check_node(place, limits):
                    self._report("tree-invariant", violation.message, violation.location, snapshot.version)
            visited += level
            level = self._next_level(level, snapshot.version)
        for place in reversed(visited):
            self._heights[place.location] = self._height(place, snapshot.version)
        return self._heights.pop(snapshot.location) is not None

    def _next_level(self, level: list[VisitedNode], version: int) -> list[VisitedNode]:
        places: dict[str, tuple[int, str | None, str | None]] = {}
        for parent in level:
            bounds = [parent.lower, *parent.node.keys, parent.upper]
            for position, child in enumerate(parent.node.children):
                if child in places:
                    self._report("tree-invariant", "the node is reached twice in one tree", child, version)
                elif child not in self._heights:
                    places[child] = (parent.depth + 1, bounds[position], bounds[position + 1])
        found = []
        locations = list(places)
        for start in range(0, len(locations), _BATCH):
            for location, node in self._read(locations[start : start + _BATCH], version):
                found.append(VisitedNode(location, node, *places[location]))
        return found

    def _read(self, locations: list[str], version: int) -> list[tuple[str, NodeFile]]:
        inside = [location for location in locations if not is_uri(location)]
        nodes = []
        for location, data in zip(inside, self._files.storage.read_available(inside), strict=True):
            self._heights[location] = None
            if isinstance(data, StorageError):
                self._report("node-missing", f"a node cannot be read: {data.message}", location, version)
                continue
            try:
                nodes.append((location, decode_node(data, location)))
                self.nodes += 1
            except CorruptFileError as error:
                self._report("node-corrupt", error.message, location, version)
        return nodes

    def _height(self, place: VisitedNode, version: int) -> int | None:
        if place.node.is_leaf:
            return 1
        heights = {self._heights.get(child) for child in place.node.children}
        if None in heights:
            return None
        if len(heights) > 1:
            self._report("tree-invariant", "leaves below the node are on several levels", place.location, version)
        return 1 + max(height for height in heights if height is not None)
