"""Checking trees: each node is read once, however many versions share it."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, StorageError
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.maintenance.verify_report import Report
from trinitylake_ops.transaction.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.tree.invariants import check_node
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.walk import VisitedNode

_BATCH = 256


class TreeVerifier:
    """Checks the tree of one version after the other."""

    def __init__(self, files: LakehouseFiles, report: Report):
        self._files = files
        self._report = report
        #: What is below each known node; None where something is broken.
        self._known: dict[str, _Subtree | None] = {}
        self._unsound: set[str] = set()
        self._is_followable = True
        self._counted: set[str] = set()
        #: Whether the tree checked last keeps all invariants.
        self.is_sound = True

    @property
    def nodes(self) -> int:
        """Files read, roots left out."""
        return len(self._counted)

    def forget_broken(self) -> None:
        """Look at broken nodes again where they are met again: what was deleted meanwhile needs not to be there."""
        self._known = {location: below for location, below in self._known.items() if below is not None}

    def check(self, snapshot: Snapshot, limits: TreeLimits) -> bool:
        """Check all nodes of a version that were not met before; whether its tree can be read.

        A node that is reached twice may be below itself: such a tree is not followed, and looked at again where a
        later version has parts of it.
        """
        self._is_followable = True
        visited: list[VisitedNode] = []
        met: set[str] = set()
        level = [VisitedNode(snapshot.location, snapshot.root, 0, None, None)]
        while level:
            for place in level:
                for violation in check_node(place, limits):
                    self._violation(violation.message, violation.location, snapshot.version)
            visited += level
            level = self._next_level(level, met, snapshot.version)
        for place in reversed(visited):
            self._known[place.location] = self._subtree(place, snapshot.version)
        tree = self._known.pop(snapshot.location)
        if not self._is_followable:
            for place in visited:
                self._known.pop(place.location, None)
        self.is_sound = self._is_followable and tree is not None and tree.is_sound
        return self._is_followable and tree is not None

    def _violation(self, message: str, location: str, version: int) -> None:
        self._report("tree-invariant", message, location, version)
        self._unsound.add(location)

    def _next_level(self, level: list[VisitedNode], met: set[str], version: int) -> list[VisitedNode]:
        places: dict[str, tuple[int, str | None, str | None]] = {}
        for parent in level:
            bounds = [parent.lower, *parent.node.keys, parent.upper]
            for position, child in enumerate(parent.node.children):
                if child in met:
                    self._violation("the node is reached twice in one tree", child, version)
                    self._is_followable = False
                met.add(child)
                if child not in self._known:
                    places[child] = (parent.depth + 1, bounds[position], bounds[position + 1])
                elif not _fits(self._known[child], bounds[position], bounds[position + 1]):
                    message = f"its child {child!r} holds keys outside the range that it gives this child"
                    self._violation(message, parent.location, version)
        found = []
        locations = list(places)
        for start in range(0, len(locations), _BATCH):
            for location, node in self._read(locations[start : start + _BATCH], version):
                found.append(VisitedNode(location, node, *places[location]))
        return found

    def _read(self, locations: list[str], version: int) -> list[tuple[str, NodeFile]]:
        nodes = []
        for location, node in zip(locations, self._files.nodes.load_available(locations), strict=True):
            self._known[location] = None
            if isinstance(node, CorruptFileError):
                self._report("node-corrupt", node.message, location, version)
            elif isinstance(node, StorageError):
                self._report("node-missing", f"a node cannot be read: {node.message}", location, version)
            else:
                nodes.append((location, node))
                self._counted.add(location)
        return nodes

    def _subtree(self, place: VisitedNode, version: int) -> _Subtree | None:
        below = [self._known.get(child) for child in place.node.children]
        known = [child for child in below if child is not None]
        if len(known) < len(below):
            return None
        if len({child.height for child in known}) > 1:
            self._violation("leaves below the node are on several levels", place.location, version)
        keys = [*place.node.keys, *place.node.buffer]
        keys += [key for child in known for key in (child.lowest, child.highest) if key is not None]
        height = 1 + max((child.height for child in known), default=0)
        is_sound = place.location not in self._unsound and all(child.is_sound for child in known)
        return _Subtree(height, min(keys, default=None), max(keys, default=None), is_sound)


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Levels of a subtree, and its lowest and highest key, messages included; None where it has no key.

    ``is_sound`` says that it keeps all invariants.
    """

    height: int
    lowest: str | None
    highest: str | None
    is_sound: bool


def _fits(subtree: _Subtree | None, lower: str | None, upper: str | None) -> bool:
    """Whether all keys of a subtree lie strictly between the bounds; a broken one was reported already."""
    if subtree is None or subtree.lowest is None or subtree.highest is None:
        return True
    return (lower is None or subtree.lowest > lower) and (upper is None or subtree.highest < upper)
