"""Compact a tree: empty its buffers and merge its nodes into as few nodes as its keys need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.bulk import n_filled_keys
from trinitylake_ops.tree.edit import EditedTree, TreeEditor, frozen_root
from trinitylake_ops.tree.node import DirtyNode, TreeLimits, concatenate, split_evenly
from trinitylake_ops.tree.store import NodePath, NodeStore

#: Neighboring nodes are rewritten only if this reduces their number by at least this fraction.
MIN_SAVING = 0.1


def compacted_tree(
    store: NodeStore,
    root: NodeFile,
    limits: TreeLimits,
    *,
    created_at_ms: int,
    root_system: Mapping[str, str],
) -> EditedTree | None:
    """Build a tree with the same content, but without buffered messages and underfilled nodes.

    Subtrees that are already compact keep their files. All nodes are read.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        limits: The limits of the tree.
        created_at_ms: The creation time of new nodes, in milliseconds since the epoch.
        root_system: The system rows of the new root, whose size counts against its limit.

    Returns:
        The compacted tree, or None if the tree is already compact.

    Raises:
        StorageError: A node cannot be read, for example because it is damaged (CorruptFileError).
    """
    compaction = _Compaction(store, replace(limits, buffer_target_bytes=0), dict(root_system))
    new_root = DirtyNode.copy_of(root)
    has_changed = (root.is_leaf and bool(root.buffer)) or len(root.keys) > limits.max_keys
    if has_changed:  # other programs may leave messages in a leaf, or too many keys
        new_root = compaction.restored_root(new_root)
    while compaction.compact_all(new_root):  # packing a level may leave the level above underfilled
        new_root = compaction.restored_root(new_root)
        has_changed = True
    if not has_changed:
        return None
    node_files: dict[str, bytes] = {}
    return EditedTree(frozen_root(new_root, limits, created_at_ms, node_files), node_files)


class _Compaction(TreeEditor):
    def __init__(self, store: NodeStore, limits: TreeLimits, root_system: dict[str, str]):
        super().__init__(store, limits, root_system)
        self._pointed_at = NodePath()
        self._entered: set[str] = set()

    def compact_all(self, root: DirtyNode) -> bool:
        """Empty all buffers of a tree and pack its nodes. Return whether anything changed."""
        self._pointed_at, self._entered = NodePath(), set()
        self._pointed_at.add(child for child in root.children if isinstance(child, str))
        return self.compact(root)

    def _enter(self, location: str) -> NodeFile:
        """Read a node and record its children, but only once: after a merge, another parent enters the node again."""
        stored = self.store.load(location)
        if location not in self._entered:
            self._entered.add(location)
            self._pointed_at.add(stored.children)
        return stored

    def compact(self, node: DirtyNode) -> bool:
        """Empty all buffers of a subtree and pack its nodes. Return whether anything changed."""
        if node.is_leaf:
            return False
        changed = bool(node.buffer)
        self.flush_over_target(node, {}, None)
        self._children(node)  # read all children in parallel; the loop below reads them from the cache
        for position in reversed(range(len(node.children))):
            if position < len(node.children):  # the child may have been merged with its left neighbor
                changed |= self._compact_child(node, position)
        return self._pack(node) or changed

    def _compact_child(self, node: DirtyNode, position: int) -> bool:
        child = node.children[position]
        if isinstance(child, str):
            stored = self._enter(child)
            if stored.is_leaf and not stored.buffer:
                return False
            copy = DirtyNode.copy_of(stored)
            if not self.compact(copy) and not stored.is_leaf:
                return False
            node.children[position] = copy
        elif not self.compact(child):
            return False
        self.restore_child(node, position)
        return True

    def _pack(self, node: DirtyNode) -> bool:
        """Distribute the keys of a node's children over as few nodes as possible, if this saves enough nodes."""
        n_keys = len(node.keys) + sum(len(child.keys) for child in self._children(node))
        capacity = n_filled_keys(self.limits) + 1
        n_parts = -(-(n_keys + 1) // capacity)
        if n_parts > (1 - MIN_SAVING) * len(node.children):
            return False
        if n_keys - (n_parts - 1) < n_parts * self.limits.min_keys:
            capacity = self.limits.order  # otherwise the parts would have too few keys; full nodes never have too few
        first, *others = (
            child if isinstance(child, DirtyNode) else DirtyNode.copy_of(child) for child in self._children(node)
        )
        merged = first
        for key, value, child in zip(node.keys, node.values, others, strict=True):
            merged = concatenate(merged, child, (key, value))
        split = split_evenly(merged, capacity)
        node.children, node.keys, node.values = split.parts, split.keys, split.values
        return True

    def _children(self, node: DirtyNode) -> list[DirtyNode | NodeFile]:
        stored = iter(self.store.load_many([child for child in node.children if isinstance(child, str)]))
        return [child if isinstance(child, DirtyNode) else next(stored) for child in node.children]
