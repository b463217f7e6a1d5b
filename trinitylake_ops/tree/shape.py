"""Visit every node of a tree to measure its shape or check the invariants of the format (FORMAT.md, "Node files")."""

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

#: The location and depth of a node, and the ancestor keys that bound its keys.
_NodePosition: TypeAlias = tuple[str, int, str | None, str | None]


@dataclass(frozen=True, slots=True)
class VisitedNode:
    """A node with its position in the tree."""

    location: str
    node: NodeFile
    #: Number of levels above the node; 0 for the root.
    depth: int
    #: The exclusive lower bound of keys in the node's subtree; None for no bound.
    lower: str | None
    #: The exclusive upper bound of keys in the node's subtree; None for no bound.
    upper: str | None


def walk(store: NodeStore, root: NodeFile, root_location: str, skipped: Collection[str] = ()) -> Iterator[VisitedNode]:
    """Yield the root and every node below it, level by level.

    Nodes are read in parallel batches. One batch of nodes and the locations of one level are in memory at a time.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        root_location: The location of the root.
        skipped: Locations of subtrees to skip.

    Raises:
        CorruptFileError: A node is damaged, or is reached twice.
        StorageError: A node cannot be read.
    """
    node_path = NodePath()
    visited = VisitedNode(root_location, root, 0, None, None)
    yield visited
    places = list(_child_places(visited))
    while places := [place for place in places if place[0] not in skipped]:
        below: list[_NodePosition] = []
        for start in range(0, len(places), _BATCH):
            batch = places[start : start + _BATCH]
            node_path.add(location for location, *_ in batch)
            nodes = store.load_many([location for location, *_ in batch])
            for (location, depth, lower, upper), node in zip(batch, nodes, strict=True):
                visited = VisitedNode(location, node, depth, lower, upper)
                yield visited
                below += _child_places(visited)
        places = below


def _child_places(visited: VisitedNode) -> Iterator[_NodePosition]:
    if visited.node.is_leaf:
        return
    bounds = [visited.lower, *visited.node.keys, visited.upper]
    for position, child in enumerate(visited.node.children):
        yield child, visited.depth + 1, bounds[position], bounds[position + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShape:
    """Metrics of one level of a tree."""

    #: Number of levels above this one; 0 for the root.
    depth: int
    #: Number of nodes.
    nodes: int
    #: Number of keys in all nodes.
    keys: int
    #: Minimum number of keys in a node.
    fewest_keys: int
    #: Maximum number of keys in a node.
    most_keys: int
    #: Number of keys relative to the maximum number that the nodes can contain.
    fill: float
    #: Number of messages in buffers.
    messages: int
    #: Size of these messages.
    message_bytes: int
    #: Size of the level's files.
    file_bytes: int

    @property
    def buffer_fill(self) -> float:
        """Size of the messages relative to the target size of all buffers of the level."""
        return self.message_bytes / (self.nodes * DEFAULT_BUFFER_TARGET_BYTES)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """All levels of a tree, the root first."""

    levels: tuple[LevelShape, ...]

    @property
    def height(self) -> int:
        """Number of levels below the root."""
        return len(self.levels) - 1

    @property
    def nodes(self) -> int:
        """Number of nodes of all levels."""
        return sum(level.nodes for level in self.levels)

    @property
    def messages(self) -> int:
        """Number of messages in all buffers."""
        return sum(level.messages for level in self.levels)

    @property
    def file_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(level.file_bytes for level in self.levels)

    @property
    def leaf_fill(self) -> float:
        """Number of keys in leaves relative to the maximum number that the leaves can contain."""
        return self.levels[-1].fill

    @property
    def buffer_fill(self) -> float:
        """Highest ``buffer_fill`` of any level."""
        return max(level.buffer_fill for level in self.levels)


def measure_tree(store: NodeStore, root: NodeFile, root_location: str, limits: TreeLimits) -> TreeShape:
    """Measure the shape of a tree. Reads all nodes in batches.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        root_location: The location of the root.
        limits: The limits of the tree.

    Raises:
        CorruptFileError: A node is damaged, or is reached twice.
        StorageError: A node cannot be read.
    """
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
    """A violated invariant, and the location of the node that violates it."""

    location: str
    message: str


def check_tree(store: NodeStore, root: NodeFile, root_location: str, limits: TreeLimits) -> list[Violation]:
    """Check all invariants of a tree, and return the violations. Reads all nodes.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        root_location: The location of the root.
        limits: The limits of the tree.

    Raises:
        CorruptFileError: A node is damaged, or is reached twice.
        StorageError: A node cannot be read.
    """
    violations: list[Violation] = []
    leaf_depth: int | None = None
    for visited in walk(store, root, root_location):
        violations += check_node(visited, limits)
        if visited.node.is_leaf:
            leaf_depth = visited.depth if leaf_depth is None else leaf_depth
            if visited.depth != leaf_depth:
                violations.append(
                    Violation(visited.location, f"leaf at depth {visited.depth}, other leaves at depth {leaf_depth}")
                )
    return violations


def check_node(visited: VisitedNode, limits: TreeLimits) -> list[Violation]:
    """Return the violations that can be detected in one node."""
    return [Violation(visited.location, message) for message in _messages(visited, limits)]


def _messages(visited: VisitedNode, limits: TreeLimits) -> Iterator[str]:
    node, is_root = visited.node, visited.depth == 0
    if len(node.keys) > limits.max_keys and not node.is_flat:
        yield f"{len(node.keys)} keys, but a node of order {limits.order} has at most {limits.max_keys}"
    if not is_root and len(node.keys) < limits.min_keys:
        yield f"{len(node.keys)} keys, but a node of order {limits.order} has at least {limits.min_keys}"
    if is_root and not node.keys and not node.is_leaf:
        yield "the root has a child but no key"
    if not node.is_leaf and len(node.children) != len(node.keys) + 1:
        yield f"{len(node.children)} children for {len(node.keys)} keys"
    for lower, upper in pairwise(node.keys):
        if lower >= upper:
            yield f"key {upper!r} does not ascend after {lower!r}"
    for key in [*node.keys, *node.buffer]:
        if (visited.lower is not None and key <= visited.lower) or (visited.upper is not None and key >= visited.upper):
            yield f"key {key!r} is outside the key range of this node"
    size_bytes = encoded_size_bytes(
        max(limits.order, len(node.keys) + 1),
        node.keys,
        node.values,
        sum(len(child.encode("utf-8")) for child in node.children),
        node.buffer,
        node.system,
    )
    if node.buffer and size_bytes > limits.node_file_max_size_bytes:
        yield (
            f"the file has {size_bytes} bytes with buffered messages, but the limit is"
            f" {limits.node_file_max_size_bytes} bytes"
        )


def is_damaged_pointer(error: object) -> bool:
    """Whether a file is missing because the pointer to it is damaged: the hash prefix does not match the name."""
    return isinstance(error, FileMissingError) and error.path is not None and is_misnamed(error.path)


def damaged_pointer_error(error: FileMissingError) -> FileMissingError:
    """Return the error for a damaged pointer, from the error for the missing file that it refers to."""
    message = (
        "the pointer to it is damaged, because its hash prefix does not match its name; run 'trinitylake verify' to"
        " find the node that contains it"
    )
    return FileMissingError(f"{error.message}; {message}", path=error.path, version=error.version)


def holder_of(store: NodeStore, root: NodeFile, root_location: str, key: str) -> str:
    """Return the location of the node that contains the value of a key.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        root_location: The location of the root.
        key: The key.

    Raises:
        CorruptFileError: A node is damaged, or pointers form a cycle.
        StorageError: A node cannot be read.
    """
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
