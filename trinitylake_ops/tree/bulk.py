"""Build a tree bottom-up from sorted entries: every node is written once, and no node is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.keys import CREATED_AT_MILLIS
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.node import TreeLimits

#: Fraction of a node's maximum number of keys that a bulk load fills. Full nodes would split at the next insertion.
FILL = 7 / 8

_NODES_PER_WRITE = 256
_ENTRIES_PER_BATCH = 1024


def bulk_load(
    entries: Iterable[tuple[str, str]],
    limits: TreeLimits,
    *,
    created_at_ms: int,
    write: Callable[[Mapping[str, bytes]], None],
    new_path: Callable[[], str] = new_node_path,
) -> NodeFile:
    """Build a tree from a stream of sorted entries.

    Only a few nodes of each level are in memory at a time. Nodes are filled to ``FILL``, except the last two nodes of a
    level. All nodes satisfy the key count limits. Errors of ``write`` are raised unchanged.

    Args:
        entries: (key, location) pairs in strictly ascending order of keys.
        limits: The limits of the tree.
        created_at_ms: The creation time of the nodes, in milliseconds since the epoch.
        write: Writes a batch of node files by path. It is called for a subtree before its parent.
        new_path: Returns the path of a new node.

    Returns:
        The root, without system rows. The caller writes it.

    Raises:
        ValueError: The keys do not ascend.
    """
    nodes = _NodeWriter(limits, created_at_ms, write, new_path)
    level = _Level(nodes, 0)
    last_keys: list[str] = []
    rest = iter(entries)
    while batch := list(islice(rest, _ENTRIES_PER_BATCH)):
        keys, locations = zip(*batch, strict=True)
        for lower, upper in pairwise([*last_keys, *keys]):
            if lower >= upper:
                raise ValueError(f"key {upper!r} does not ascend after {lower!r}")
        last_keys = [keys[-1]]
        level.extend(keys, locations)
    while not level.is_root:
        level = level.finished()
    nodes.write_pending()
    return NodeFile(level.keys, level.values, level.children)


def n_filled_keys(limits: TreeLimits) -> int:
    """Return the number of keys that a bulk load puts into a node."""
    return max(1, int(limits.max_keys * FILL))


class _NodeWriter:
    """Encodes nodes and passes their files to a writer in batches."""

    def __init__(
        self,
        limits: TreeLimits,
        created_at_ms: int,
        write: Callable[[Mapping[str, bytes]], None],
        new_path: Callable[[], str],
    ):
        self.limits = limits
        self._new_path = new_path
        self._system = {CREATED_AT_MILLIS: str(created_at_ms)}
        self._write = write
        self._pending: dict[str, bytes] = {}

    def add(self, node: NodeFile) -> str:
        """Add a node to the next batch and return its path."""
        node.system.update(self._system)
        path = self._new_path()
        self._pending[path] = self.limits.encoded(node, path)
        if len(self._pending) >= _NODES_PER_WRITE:
            self.write_pending()
        return path

    def write_pending(self) -> None:
        if self._pending:
            files, self._pending = self._pending, {}
            self._write(files)


@dataclass
class _Level:
    """One level of the tree, from left to right. Complete nodes are written; pending entries are kept in lists.

    In a level of inner nodes, ``children`` has one entry for each key, and one additional entry once the level below is
    complete.
    """

    nodes: _NodeWriter
    height: int
    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    parent: _Level | None = None

    @property
    def is_root(self) -> bool:
        """Whether the pending entries are the whole level and fit into one node."""
        return self.parent is None and len(self.keys) <= self.nodes.limits.max_keys

    def extend(self, keys: Sequence[str], values: Sequence[str], children: Sequence[str] = ()) -> None:
        """Add the next keys, and the child that precedes each key."""
        self.keys += keys
        self.values += values
        self.children += children
        n_filled = n_filled_keys(self.nodes.limits)
        # Keep enough entries for two nodes, because these may be the last entries.
        while len(self.keys) > n_filled + 1 + self.nodes.limits.max_keys:
            self._write_first(n_filled)

    def finished(self) -> _Level:
        """Write the pending entries as two nodes of nearly equal size. Return the level above."""
        self._write_first((len(self.keys) - 1) // 2)
        last = self.nodes.add(NodeFile(self.keys, self.values, self.children))
        assert self.parent is not None
        self.parent.children.append(last)
        return self.parent

    def _write_first(self, n_keys: int) -> None:
        """Write a node with the first keys. The key after them moves up to the parent level."""
        n_children = n_keys + 1 if self.height else 0
        node = NodeFile(self.keys[:n_keys], self.values[:n_keys], self.children[:n_children])
        if self.parent is None:
            self.parent = _Level(self.nodes, self.height + 1)
        self.parent.extend([self.keys[n_keys]], [self.values[n_keys]], [self.nodes.add(node)])
        del self.keys[: n_keys + 1], self.values[: n_keys + 1], self.children[:n_children]
