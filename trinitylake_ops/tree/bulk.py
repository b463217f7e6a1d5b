"""Builds a tree from its sorted entries, bottom-up: every node is written once, and none is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.keys import CREATED_AT_MILLIS
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.node import TreeLimits

#: The part of a node's keys that a load fills. Full nodes would split at the next entry.
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
    """Return the root, without system rows, of a tree of (key, location) entries, whose keys ascend strictly.

    Takes the entries as a stream: a few nodes of each level are held at a time. ``write`` gets the files of all other
    nodes by path, in batches. The files of a subtree come before its parent's. Nodes are filled to ``FILL``, except the
    last two of a level. All keep the limits on their number of keys. ``new_path`` names the nodes. Raises ValueError
    for keys that do not ascend, and what ``write`` raises.
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
    """Return how many keys a load puts into a node."""
    return max(1, int(limits.max_keys * FILL))


class _NodeWriter:
    """Encodes nodes and hands their files on in batches."""

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
        """Return the path of a node that is written with the next batch."""
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
    """The nodes of one level from left to right: full ones are written, and the rest waits in lists.

    In a level of inner nodes ``children`` has an entry for each key and, once the level below has
    ended, one more.
    """

    nodes: _NodeWriter
    height: int
    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    parent: _Level | None = None

    @property
    def is_root(self) -> bool:
        """Whether the waiting entries are the whole level, and fit one node."""
        return self.parent is None and len(self.keys) <= self.nodes.limits.max_keys

    def extend(self, keys: Sequence[str], values: Sequence[str], children: Sequence[str] = ()) -> None:
        """Add the next keys, and the children that precede each."""
        self.keys += keys
        self.values += values
        self.children += children
        n_filled = n_filled_keys(self.nodes.limits)
        # Enough entries must stay for two nodes, as no more may follow.
        while len(self.keys) > n_filled + 1 + self.nodes.limits.max_keys:
            self._write_first(n_filled)

    def finished(self) -> _Level:
        """Write the waiting entries as two nodes of nearly the same size. Returns the level above."""
        self._write_first((len(self.keys) - 1) // 2)
        last = self.nodes.add(NodeFile(self.keys, self.values, self.children))
        assert self.parent is not None
        self.parent.children.append(last)
        return self.parent

    def _write_first(self, n_keys: int) -> None:
        """Write a node of the first keys; the key after them moves up."""
        n_children = n_keys + 1 if self.height else 0
        node = NodeFile(self.keys[:n_keys], self.values[:n_keys], self.children[:n_children])
        if self.parent is None:
            self.parent = _Level(self.nodes, self.height + 1)
        self.parent.extend([self.keys[n_keys]], [self.values[n_keys]], [self.nodes.add(node)])
        del self.keys[: n_keys + 1], self.values[: n_keys + 1], self.children[:n_children]
