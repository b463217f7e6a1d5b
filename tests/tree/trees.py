"""Trees in memory, each with a dict as a model of its expected content."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from trinitylake_ops.format.node_file import NodeFile, encode_node
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.tree.compact import compacted_tree
from trinitylake_ops.tree.edit import apply_messages
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import scan
from trinitylake_ops.tree.shape import check_tree, walk
from trinitylake_ops.tree.store import NodeStore

_numbers = itertools.count()
SYSTEM = {"created_at_millis": "1"}
LARGE_FILE_BYTES = 10**6


class Tree:
    """A tree whose node files are in a metered memory storage. ``model`` is its expected content."""

    def __init__(self, order: int, *, node_file_max_size_bytes: int = LARGE_FILE_BYTES, buffer_target_bytes: int = 0):
        self.limits = TreeLimits(order, node_file_max_size_bytes, buffer_target_bytes)
        self.storage = MeteredStorage(MemoryStorage(f"memory://tree-{next(_numbers)}/"))
        self.root = NodeFile(system=dict(SYSTEM))
        self.model: dict[str, str] = {}
        self.written: dict[str, bytes] = {}

    def close(self) -> None:
        drop_memory_root(self.storage.root)

    def store(self) -> NodeStore:
        """Return a node store with an empty cache."""
        return NodeStore(self.storage)

    def apply(self, messages: Mapping[str, str | None]) -> None:
        """Apply messages to the tree and to the model, and check both."""
        edited = apply_messages(self.store(), self.root, messages, self.limits, created_at_ms=7, root_system=SYSTEM)
        self.storage.create_many(edited.node_files)
        self.written = edited.node_files
        self.root = edited.root
        self.root.system = dict(SYSTEM)
        for key, value in messages.items():
            if value is None:
                self.model.pop(key, None)
            else:
                self.model[key] = value
        self.check()

    def compact(self) -> bool:
        """Compact the tree and check it. Return whether it changed."""
        edited = compacted_tree(self.store(), self.root, self.limits, created_at_ms=7, root_system=SYSTEM)
        if edited is None:
            return False
        self.storage.create_many(edited.node_files)
        self.written = edited.node_files
        self.root = edited.root
        self.root.system = dict(SYSTEM)
        self.check()
        return True

    def check(self) -> None:
        assert check_tree(self.store(), self.root, "root", self.limits) == []
        assert scan(self.store(), self.root) == sorted(self.model.items())
        limit_bytes = self.limits.node_file_max_size_bytes
        assert len(encode_node(self.root, self.limits.order)) <= limit_bytes
        assert max(map(len, self.written.values()), default=0) <= limit_bytes

    def nodes(self) -> list[NodeFile]:
        return [visited.node for visited in walk(self.store(), self.root, "root")]

    def height(self) -> int:
        """Return the number of levels below the root."""
        return max(visited.depth for visited in walk(self.store(), self.root, "root"))


def keys(*numbers: int) -> list[str]:
    return [f"k{number:04d}" for number in numbers]


def filled_tree(order: int, n_keys: int, *, buffer_target_bytes: int = 0) -> Tree:
    """Return a tree with ``n_keys`` keys and without buffered messages."""
    tree = Tree(order)
    tree.apply(dict.fromkeys(keys(*range(n_keys)), "v"))
    tree.limits = TreeLimits(order, LARGE_FILE_BYTES, buffer_target_bytes)
    return tree
