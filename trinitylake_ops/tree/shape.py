"""Visit every node of a tree once: its shape, and the invariants of the format (FORMAT.md, "Node files")."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.file_names import is_misnamed
from trinitylake_ops.format.node_file import NodeFile, encoded_size_bytes
from trinitylake_ops.tree.node import DEFAULT_BUFFER_TARGET_BYTES, TreeLimits, messages_bytes
from trinitylake_ops.tree.store import NodePath, NodeStore, check_depth

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
    node_path = NodePath()
    visited = VisitedNode(root_location, root, 0, None, None)
    yield visited
    places = list(_child_places(visited))
    while places := [place for place in places if place[0] not in known]:
        below: list[_Place] = []
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            node_path.add(location for location, *_ in batch)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShape:
    """One level of a tree; the root is at depth 0. ``fill`` is the part of its places for keys that are taken.

    ``fewest_keys`` and ``most_keys`` are the extremes of one node. ``messages`` wait in buffers, and ``message_bytes``
    is their text. ``file_bytes`` is the size of the level's files.
    """

    depth: int
    nodes: int
    keys: int
    fewest_keys: int
    most_keys: int
    fill: float
    messages: int
    message_bytes: int
    file_bytes: int

    @property
    def buffer_fill(self) -> float:
        """The bytes in the level's buffers, as a part of what we let buffers gather before a flush."""
        return self.message_bytes / (self.nodes * DEFAULT_BUFFER_TARGET_BYTES)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """All levels of a tree, the root first."""

    levels: tuple[LevelShape, ...]

    @property
    def height(self) -> int:
        """Levels below the root."""
        return len(self.levels) - 1

    @property
    def nodes(self) -> int:
        """Nodes of all levels."""
        return sum(level.nodes for level in self.levels)

    @property
    def messages(self) -> int:
        """Messages in all buffers."""
        return sum(level.messages for level in self.levels)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(level.file_bytes for level in self.levels)

    @property
    def leaf_fill(self) -> float:
        """The part of the leaves' places for keys that is taken."""
        return self.levels[-1].fill

    @property
    def buffer_fill(self) -> float:
        """The fill of the buffers of the level where it is highest."""
        return max(level.buffer_fill for level in self.levels)


def measure_tree(store: NodeStore, root: NodeFile, root_location: str, limits: TreeLimits) -> TreeShape:
    """Return the shape of a tree. Reads all its nodes, a batch at a time. Raises what reading raises."""
    levels: list[_LevelSums] = []
    for visited in walk(store, root, root_location):
        if visited.depth == len(levels):
            levels.append(_LevelSums())
        levels[visited.depth].add(visited.node)
    return TreeShape(tuple(sums.shape(depth, limits) for depth, sums in enumerate(levels)))


class _LevelSums:
    def __init__(self) -> None:
        self.nodes = self.keys = self.messages = self.message_bytes = self.file_bytes = self.most_keys = 0
        self.fewest_keys: int | None = None

    def add(self, node: NodeFile) -> None:
        n_keys = len(node.keys)
        self.nodes += 1
        self.keys += n_keys
        self.most_keys = max(self.most_keys, n_keys)
        self.fewest_keys = n_keys if self.fewest_keys is None else min(self.fewest_keys, n_keys)
        self.messages += len(node.buffer)
        self.message_bytes += messages_bytes(node.buffer)
        self.file_bytes += node.file_size_bytes

    def shape(self, depth: int, limits: TreeLimits) -> LevelShape:
        return LevelShape(
            depth=depth,
            nodes=self.nodes,
            keys=self.keys,
            fewest_keys=self.fewest_keys or 0,
            most_keys=self.most_keys,
            fill=self.keys / (self.nodes * limits.max_keys),
            messages=self.messages,
            message_bytes=self.message_bytes,
            file_bytes=self.file_bytes,
        )


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, at the location of the node that breaks it."""

    location: str
    message: str


def check_tree(store: NodeStore, root: NodeFile, root_location: str, limits: TreeLimits) -> list[Violation]:
    """Return all violations of one tree.

    Raises CorruptFileError for a node that is reached twice, and what reading its nodes raises.
    """
    violations: list[Violation] = []
    leaf_depth: int | None = None
    for visited in walk(store, root, root_location):
        violations += check_node(visited, limits)
        if visited.node.is_leaf:
            leaf_depth = visited.depth if leaf_depth is None else leaf_depth
            if visited.depth != leaf_depth:
                violations.append(
                    Violation(visited.location, f"leaf on level {visited.depth}, others on level {leaf_depth}")
                )
    return violations


def check_node(visited: VisitedNode, limits: TreeLimits) -> list[Violation]:
    """Return the violations that one node shows by itself."""
    return [Violation(visited.location, message) for message in _messages(visited, limits)]


def _messages(visited: VisitedNode, limits: TreeLimits) -> Iterator[str]:
    node, is_root = visited.node, visited.depth == 0
    if len(node.keys) > limits.max_keys and not node.is_flat:
        yield f"{len(node.keys)} keys, at most {limits.max_keys} fit order {limits.order}"
    if not is_root and len(node.keys) < limits.min_keys:
        yield f"{len(node.keys)} keys, a node of order {limits.order} has at least {limits.min_keys}"
    if is_root and not node.keys and not node.is_leaf:
        yield "the root has a child but no key"
    if not node.is_leaf and len(node.children) != len(node.keys) + 1:
        yield f"{len(node.children)} children for {len(node.keys)} keys"
    for lower, upper in pairwise(node.keys):
        if lower >= upper:
            yield f"key {upper!r} does not ascend after {lower!r}"
    for key in [*node.keys, *node.buffer]:
        if (visited.lower is not None and key <= visited.lower) or (visited.upper is not None and key >= visited.upper):
            yield f"key {key!r} is outside the range that the parent gives this node"
    size_bytes = encoded_size_bytes(
        max(limits.order, len(node.keys) + 1),
        node.keys,
        node.values,
        sum(len(child.encode("utf-8")) for child in node.children),
        node.buffer,
        node.system,
    )
    if node.buffer and size_bytes > limits.node_file_max_size_bytes:
        yield f"buffered messages make a file of {size_bytes} bytes, more than {limits.node_file_max_size_bytes}"


def is_damaged_pointer(error: object) -> bool:
    """Whether a file is missing because the pointer to it is damaged: its prefix is not that of its name."""
    return isinstance(error, FileMissingError) and error.path is not None and is_misnamed(error.path)


def damaged_pointer_error(error: FileMissingError) -> FileMissingError:
    """Return the error of a file that a damaged pointer leads to."""
    message = "the pointer to it is damaged, as its prefix is not that of its name: verify says which node holds it"
    return FileMissingError(f"{error.message}; {message}", path=error.path, version=error.version)


def holder_of(store: NodeStore, root: NodeFile, root_location: str, key: str) -> str:
    """Return the location of the node that holds the value of a key. Raises what reading raises."""
    node, location, depth = root, root_location, 0
    while key not in node.buffer and not node.is_leaf:
        row = bisect_left(node.keys, key)
        if row < len(node.keys) and node.keys[row] == key:
            break
        location = node.children[row]
        depth += 1
        check_depth(depth, location)
        node = store.load(location)
    return location
