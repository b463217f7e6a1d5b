"""The shape of a tree: nodes, fill, buffers and bytes of each level."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.tree.nodes.node import DEFAULT_BUFFER_TARGET_BYTES, TreeLimits, messages_bytes
from trinitylake_ops.tree.nodes.node_store import NodeStore
from trinitylake_ops.tree.walk import walk


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
