"""Checks trees: each node is read once, however many versions share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trinitylake_ops.errors import CorruptFileError, StorageError
from trinitylake_ops.maintenance.verification.report import Report
from trinitylake_ops.tree.invariants import check_node
from trinitylake_ops.tree.nodes.node import TreeLimits
from trinitylake_ops.tree.pointers import is_damaged_pointer
from trinitylake_ops.tree.walk import VisitedNode
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

_BATCH = 256

#: A node's depth, and the bounds of the keys below it.
_Place: TypeAlias = tuple[int, str | None, str | None]


class TreeVerifier:
    """Checks the tree of one version after the other."""

    def __init__(self, files: LakehouseFiles, report: Report):
        self._files = files
        self._report = report
        #: The subtree below each known node, None where something is broken.
        self._known: dict[str, _Subtree | None] = {}
        self._unsound: set[str] = set()
        self._parents: dict[str, str] = {}
        self._is_followable = True
        self._counted: set[str] = set()
        #: Whether the tree checked last keeps all invariants.
        self.is_sound = True

    @property
    def nodes(self) -> int:
        """Files read, roots left out."""
        return len(self._counted)

    def forget_broken(self) -> None:
        """Check broken nodes again when they are met again: nodes deleted meanwhile need not exist."""
        self._known = {location: below for location, below in self._known.items() if below is not None}

    def check(self, snapshot: Snapshot, limits: TreeLimits) -> bool:
        """Check all nodes of a version that were not met before. Returns whether its tree can be read.

        A node that is reached twice may be below itself. Such a tree is not followed, and is checked again if a later
        version has parts of it.
        """
        self._is_followable = True
        self._parents = {}
        checked: list[_CheckedNode] = []
        met: set[str] = set()
        level: Iterable[VisitedNode] = [VisitedNode(snapshot.location, snapshot.root, 0, None, None)]
        while level:
            places: dict[str, _Place] = {}
            for visited in level:
                for violation in check_node(visited, limits):
                    self._violation(violation.message, violation.location, snapshot.version)
                places |= self._unknown_below(visited, met, snapshot.version)
                checked.append(_CheckedNode.of(visited))
            level = self._read_level(places, snapshot.version) if places else ()
        for node in reversed(checked):
            self._known[node.location] = self._subtree(node, snapshot.version)
        tree = self._known.pop(snapshot.location)
        if not self._is_followable:
            for node in checked:
                self._known.pop(node.location, None)
        self.is_sound = self._is_followable and tree is not None and tree.is_sound
        return self._is_followable and tree is not None

    def _violation(self, message: str, location: str, version: int) -> None:
        self._report("tree-invariant", message, location, version)
        self._unsound.add(location)

    def _unknown_below(self, parent: VisitedNode, met: set[str], version: int) -> dict[str, _Place]:
        """Return the places of the children of a node that were not met in any version."""
        places: dict[str, _Place] = {}
        bounds = [parent.lower, *parent.node.keys, parent.upper]
        for position, child in enumerate(parent.node.children):
            if child in met:
                self._violation("the node is reached twice in one tree", child, version)
                self._is_followable = False
            met.add(child)
            if child not in self._known:
                self._parents[child] = parent.location
                places[child] = (parent.depth + 1, bounds[position], bounds[position + 1])
            elif not _fits(self._known[child], bounds[position], bounds[position + 1]):
                message = f"its child {child!r} holds keys outside the range that it gives this child"
                self._violation(message, parent.location, version)
        return places

    def _read_level(self, places: Mapping[str, _Place], version: int) -> Iterator[VisitedNode]:
        """Yield the nodes of a level that can be read, holding a batch of them at a time."""
        self._known.update(dict.fromkeys(places))
        locations = list(places)
        for start in range(0, len(locations), _BATCH):
            batch = locations[start : start + _BATCH]
            for location, node in zip(batch, self._files.nodes.load_available(batch), strict=True):
                if isinstance(node, CorruptFileError):
                    self._report("node-corrupt", node.message, location, version)
                elif isinstance(node, StorageError) and is_damaged_pointer(node):
                    message = f"its pointer to {location!r} is damaged: the prefix is not that of the name"
                    self._report("pointer-damaged", message, self._parents[location], version)
                elif isinstance(node, StorageError):
                    self._report("node-missing", f"a node cannot be read: {node.message}", location, version)
                else:
                    self._counted.add(location)
                    yield VisitedNode(location, node, *places[location])

    def _subtree(self, node: _CheckedNode, version: int) -> _Subtree | None:
        below = [self._known.get(child) for child in node.children]
        known = [child for child in below if child is not None]
        if len(known) < len(below):
            return None
        if len({child.height for child in known}) > 1:
            self._violation("leaves below the node are on several levels", node.location, version)
        keys = [node.lowest, node.highest, *(key for child in known for key in (child.lowest, child.highest))]
        own = [key for key in keys if key is not None]
        height = 1 + max((child.height for child in known), default=0)
        is_sound = node.location not in self._unsound and all(child.is_sound for child in known)
        return _Subtree(height, min(own, default=None), max(own, default=None), is_sound)


@dataclass(frozen=True, slots=True)
class _CheckedNode:
    """The part of a node that is kept until those below it are checked: its children and its outermost keys."""

    location: str
    children: tuple[str, ...]
    lowest: str | None
    highest: str | None

    @classmethod
    def of(cls, visited: VisitedNode) -> _CheckedNode:
        keys = [*visited.node.keys, *visited.node.buffer]
        return cls(visited.location, tuple(visited.node.children), min(keys, default=None), max(keys, default=None))


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Levels of a subtree, and its lowest and highest key, messages included. None if it has no key.

    ``is_sound`` says that it keeps all invariants.
    """

    height: int
    lowest: str | None
    highest: str | None
    is_sound: bool


def _fits(subtree: _Subtree | None, lower: str | None, upper: str | None) -> bool:
    """Whether all keys of a subtree lie strictly between the bounds. A broken subtree was reported already."""
    if subtree is None or subtree.lowest is None or subtree.highest is None:
        return True
    return (lower is None or subtree.lowest > lower) and (upper is None or subtree.highest < upper)
