"""Change a tree: messages enter at the root and are flushed down in batches.

A change appends its messages to the root's buffer. When a buffer exceeds its target, the largest group of messages for
one child (by bytes) is moved down to this child. The child's buffer may then be flushed in the same way, once. Most
changes therefore rewrite only the root, and a change of a single message rewrites at most one path. Nodes that split or
merge also rewrite neighbors. A change with about as many messages as the tree has keys rebuilds the tree instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.keys import CREATED_AT_MILLIS
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.bulk import bulk_load
from trinitylake_ops.tree.node import DirtyNode, TreeLimits, concatenate, message_bytes, messages_bytes, split_evenly
from trinitylake_ops.tree.search import scan_columns, with_messages
from trinitylake_ops.tree.store import NodePath, NodeStore, check_depth

# System rows of the maximum size of a non-root node: a timestamp of 20 digits.
_NODE_SYSTEM = {CREATED_AT_MILLIS: "9" * 20}


# Minimum number of messages of a large change, whose messages are grouped once instead of once per flush.
_BULK_MESSAGES = 1_000
# A large change rebuilds a tree that has at most this many keys per message, because nearly all leaves would change.
_REBUILT_KEYS_PER_MESSAGE = 1.1
_ENTRIES_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class EditedTree:
    """A changed tree that is not yet written."""

    #: The root, without system rows.
    root: NodeFile
    #: The files of all new non-root nodes by path.
    node_files: dict[str, bytes]


def apply_messages(
    store: NodeStore,
    root: NodeFile,
    messages: Mapping[str, str | None],
    limits: TreeLimits,
    *,
    created_at_ms: int,
    root_system: Mapping[str, str],
) -> EditedTree:
    """Set or delete keys in a tree. Reads the nodes that change and writes nothing.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        messages: The new location of each key; None to delete the key.
        limits: The limits of the tree.
        created_at_ms: The creation time of new nodes, in milliseconds since the epoch.
        root_system: The system rows of the new root, whose size counts against ``limits.node_file_max_size_bytes``.

    Raises:
        StorageError: A node cannot be read, for example because it is damaged (CorruptFileError).
    """
    node_files: dict[str, bytes] = {}
    is_large = len(messages) >= _BULK_MESSAGES
    if is_large and _estimated_keys(store, root) <= _REBUILT_KEYS_PER_MESSAGE * len(messages):
        entries = _entries_after(store, root, messages)
        new = bulk_load(entries, limits, created_at_ms=created_at_ms, write=node_files.update)
        return EditedTree(new, node_files)
    editor = TreeEditor(store, limits, dict(root_system), max_flushes=None if is_large else len(messages))
    new_root = editor.changed_root(DirtyNode.copy_of(root), dict(messages))
    return EditedTree(frozen_root(new_root, limits, created_at_ms, node_files), node_files)


def _estimated_keys(store: NodeStore, root: NodeFile) -> int:
    """Estimate the number of keys in a tree from one node of each level."""
    estimate, n_nodes = 0, 1
    node = root
    depth = 0
    while not node.is_leaf:
        estimate += n_nodes * len(node.keys)
        n_nodes *= len(node.children)
        depth += 1
        check_depth(depth, node.children[len(node.children) // 2])
        node = store.load(node.children[len(node.children) // 2])
    return estimate + n_nodes * len(node.keys)


def _entries_after(store: NodeStore, root: NodeFile, messages: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield all (key, location) entries of a tree after applying messages, in ascending order of keys.

    Only a limited number of entries are converted to Python strings at a time.
    """
    if root.is_leaf:  # then nearly all entries are messages, most of which are already in order
        entries = {**dict(zip(root.keys, root.values, strict=True)), **root.buffer, **messages}
        yield from ((key, location) for key in sorted(entries) if (location := entries[key]) is not None)
        return
    keys, locations = with_messages(*scan_columns(store, root), messages)
    for start in range(0, len(keys), _ENTRIES_AT_ONCE):
        piece = (column.slice(start, _ENTRIES_AT_ONCE).to_pylist() for column in (keys, locations))
        yield from zip(*piece, strict=True)


def carried_tree(
    store: NodeStore, root: NodeFile, limits: TreeLimits, *, created_at_ms: int, root_system: Mapping[str, str]
) -> EditedTree:
    """Return an unchanged tree for a new root with other system rows.

    Usually all nodes are reused. The tree is rewritten if another program left too many keys in the root or messages in
    a leaf, or if the buffer and the new system rows do not fit into one file. Arguments and errors are the same as for
    :func:`apply_messages`.
    """
    is_ours = len(root.keys) <= limits.max_keys and not (root.is_leaf and root.buffer)
    size_bytes = DirtyNode.copy_of(root).size_bytes(limits.order, dict(root_system))
    if is_ours and size_bytes <= limits.rows_max_size_bytes:
        return EditedTree(root, {})
    return apply_messages(store, root, {}, limits, created_at_ms=created_at_ms, root_system=root_system)


def frozen_root(node: DirtyNode, limits: TreeLimits, created_at_ms: int, node_files: dict[str, bytes]) -> NodeFile:
    """Encode an edited tree.

    Args:
        node: The edited root.
        limits: The limits of the tree.
        created_at_ms: The creation time of new nodes, in milliseconds since the epoch.
        node_files: Receives the files of all new nodes below the root, by path.

    Returns:
        The root, without system rows.
    """
    children: list[str] = []
    for child in node.children:
        if isinstance(child, str):
            children.append(child)
            continue
        path = new_node_path()
        content = frozen_root(child, limits, created_at_ms, node_files)
        content.system[CREATED_AT_MILLIS] = str(created_at_ms)
        node_files[path] = limits.encoded(content, path)
        children.append(path)
    return NodeFile(node.keys, node.values, children, node.buffer)


class TreeEditor:
    """Applies one change to one tree.

    A node that receives messages flushes at most ``max_flushes`` groups. If its buffer still exceeds the target, the
    next change that reaches the node flushes again. A change of one message therefore writes one path, regardless of
    how many buffers are full. The file size limit always applies.

    A method that changes a child calls :meth:`restore_child` on its parent afterwards, so that the children of a node
    satisfy the key count limits. The root is restored last.

    Args:
        store: Reads the nodes.
        limits: The limits of the tree.
        root_system: The system rows of the new root, whose size counts against the limit of its file.
        max_flushes: Maximum number of groups that a node flushes; None for no limit.
    """

    def __init__(
        self, store: NodeStore, limits: TreeLimits, root_system: dict[str, str], max_flushes: int | None = None
    ):
        self.store = store
        self.limits = limits
        self._root_system = root_system
        self._max_flushes = max_flushes
        self._no_more_flushes = None if max_flushes is None else 0
        self._node_path = NodePath()
        self._max_waiting_bytes = 2 * limits.buffer_target_bytes

    def changed_root(self, root: DirtyNode, messages: dict[str, str | None]) -> DirtyNode:
        """Apply messages to a root, and return the root that replaces it."""
        root.absorb(messages)
        self.flush_over_target(root, self._root_system, self._max_flushes)
        return self.restored_root(root)

    def restored_root(self, root: DirtyNode) -> DirtyNode:
        """Convert a root with any number of keys to a root that satisfies all limits."""
        while True:
            if not root.is_leaf and not root.keys:
                root = self._collapse(root)
            elif len(root.keys) > self.limits.max_keys:
                root = self._split_root(root)
            elif self._is_over(root, self._root_system, self._no_more_flushes):
                self.flush_over_target(root, self._root_system, self._no_more_flushes)
            else:
                return root

    def _collapse(self, root: DirtyNode) -> DirtyNode:
        """Replace a root without keys by its only child."""
        child = self.dirty_child(root, 0)
        child.absorb(root.buffer)
        return child

    def _split_root(self, root: DirtyNode) -> DirtyNode:
        """Split a root with too many keys, and return a new root above the parts."""
        split = split_evenly(root, self.limits.order)
        return DirtyNode(split.keys, split.values, split.parts, split.messages)

    # Flushing

    def _is_over(self, node: DirtyNode, system: dict[str, str], max_flushes: int | None) -> bool:
        if not node.buffer:
            return False
        may_flush = max_flushes is None or max_flushes > 0
        if may_flush and messages_bytes(node.buffer) > self.limits.buffer_target_bytes:
            return True
        return node.size_bytes(self.limits.order, system) > self.limits.rows_max_size_bytes

    def flush_over_target(self, node: DirtyNode, system: dict[str, str], max_flushes: int | None) -> None:
        """Flush the largest groups of messages until the buffer is within its target and the file within its limit.

        Args:
            node: The node whose buffer is flushed.
            system: The system rows of the node.
            max_flushes: After this number of flushes, only the file size limit applies; None for no limit.
        """
        while self._is_over(node, system, max_flushes):
            n_flushes = 1
            if len(node.buffer) >= _BULK_MESSAGES:
                n_flushes = self._flush_heaviest(node, max_flushes)
            else:
                self._flush(node, _heaviest_child(node.keys, node.buffer))
            if max_flushes is not None:
                max_flushes -= n_flushes

    def _flush_heaviest(self, node: DirtyNode, max_flushes: int | None) -> int:
        """Flush the largest groups of a large buffer until the rest is within the target. Return the number of flushes.

        Messages are grouped once, because a pass over the buffer for each flush would take quadratic time. At least
        one group is flushed. If a child splits or merges meanwhile, its group is divided and the first part is flushed.
        """
        groups = _groups_by_child(node.keys, node.buffer)
        weights = {child: messages_bytes({key: node.buffer[key] for key in keys}) for child, keys in groups.items()}
        excess_bytes = sum(weights.values()) - self.limits.buffer_target_bytes
        n_flushes = 0
        for child in sorted(groups, key=lambda child: (-weights[child], child)):
            if n_flushes and (excess_bytes <= 0 or n_flushes == max_flushes):
                break
            waiting = [key for key in groups[child] if key in node.buffer]
            if waiting:
                position = bisect_left(node.keys, waiting[0])
                self._flush(node, position, [key for key in waiting if bisect_left(node.keys, key) == position])
                n_flushes += 1
                excess_bytes -= weights[child]
        return n_flushes

    def _flush(self, node: DirtyNode, child: int, group: Sequence[str] | None = None) -> None:
        """Move the messages for one child down. Then apply the message for the node's key after this child, if any.

        Args:
            node: The node whose buffer holds the messages.
            child: The position of the child.
            group: The keys of the messages; by default all messages for the child.
        """
        if group is None:
            group = [key for key in node.buffer if bisect_left(node.keys, key) == child]
        separator = node.keys[child] if child < len(node.keys) and node.keys[child] in node.buffer else None
        messages = {key: node.buffer[key] for key in group if key != separator}
        if messages:
            for key in self._add_to_child(self.dirty_child(node, child), messages):
                del node.buffer[key]
            self.restore_child(node, child)
        if separator is not None:
            self._apply_own_message(node, separator)

    def _add_to_child(self, below: DirtyNode, messages: dict[str, str | None]) -> Iterable[str]:
        """Add messages to a child and flush the child. Return the messages that it accepted, at least one.

        If the number of flushes is limited, a buffer grows to at most twice its target. It then accepts the messages
        for the grandchild with the largest group, flushes this group, and accepts as many other messages as fit.
        """
        waiting = below.buffer | messages
        if below.is_leaf or self._max_flushes is None or messages_bytes(waiting) <= self._max_waiting_bytes:
            below.absorb(messages)
            self.flush_over_target(below, _NODE_SYSTEM, self._max_flushes)
            return messages
        largest_child = _heaviest_child(below.keys, waiting)
        accepted = {key: messages[key] for key in messages if bisect_left(below.keys, key) == largest_child}
        below.absorb(accepted)
        self._flush(below, largest_child)
        room_bytes = self._max_waiting_bytes - messages_bytes(below.buffer)
        for key, value in messages.items():
            if key in accepted:
                continue
            room_bytes -= message_bytes(key, value)
            if room_bytes < 0 and accepted:
                break
            accepted[key] = value
            below.absorb({key: value})
        self.flush_over_target(below, _NODE_SYSTEM, self._max_flushes - 1)
        return accepted

    def _apply_own_message(self, node: DirtyNode, key: str) -> None:
        """Apply the buffered message for one of the node's own keys."""
        row = _row_of(node, key)
        if row is None or key not in node.buffer:
            return  # restoring a child moved the key down; the next flush moves its message down
        value = node.buffer.pop(key)
        if value is not None:
            node.values[row] = value
        elif node.is_leaf:
            del node.keys[row], node.values[row]
        else:
            self._delete_inner_key(node, row)

    def _delete_inner_key(self, node: DirtyNode, row: int) -> None:
        """Delete a key of an inner node by joining the two subtrees next to it."""
        left, right = self.dirty_child(node, row), self.dirty_child(node, row + 1)
        del node.keys[row], node.values[row]
        node.children[row : row + 2] = [self._join(left, right)]
        self.restore_child(node, row)

    def _join(self, left: DirtyNode, right: DirtyNode) -> DirtyNode:
        """Join two neighbors of the same level, without a key between them, into one node with any number of keys."""
        if left.is_leaf:
            return concatenate(left, right)
        left_count = len(left.keys)
        middle = self._join(self.dirty_child(left, left_count), self.dirty_child(right, 0))
        joined = DirtyNode(
            left.keys + right.keys,
            left.values + right.values,
            [*left.children[:-1], middle, *right.children[1:]],
            left.buffer | right.buffer,
        )
        self.restore_child(joined, left_count)
        self.flush_over_target(joined, _NODE_SYSTEM, self._no_more_flushes)
        return joined

    # Restoring the number of keys

    def restore_child(self, parent: DirtyNode, position: int) -> None:
        """Split or merge a child that has too many or too few keys. This may change the parent's number of keys."""
        child = parent.children[position]
        if isinstance(child, str):
            return
        if len(child.keys) > self.limits.max_keys:
            split = split_evenly(child, self.limits.order)
            parent.keys[position:position] = split.keys
            parent.values[position:position] = split.values
            parent.children[position : position + 1] = split.parts
            parent.absorb({key: value for key, value in split.messages.items() if key not in parent.buffer})
        elif len(child.keys) < self.limits.min_keys and parent.keys:
            self._merge_child(parent, position)

    def _merge_child(self, parent: DirtyNode, position: int) -> None:
        """Merge a child with a neighbor and the key between them. An overfull result is split again."""
        left_position = self._merge_partner(parent, position)
        left, right = self.dirty_child(parent, left_position), self.dirty_child(parent, left_position + 1)
        merged = concatenate(left, right, (parent.keys.pop(left_position), parent.values.pop(left_position)))
        parent.children[left_position : left_position + 2] = [merged]
        # A node without keys may have had a child with too few keys, which could not be merged until it had neighbors.
        for below in reversed(range(len(merged.children))):
            if below < len(merged.children):
                self.restore_child(merged, below)
        self.flush_over_target(merged, _NODE_SYSTEM, self._no_more_flushes)
        self.restore_child(parent, left_position)

    @staticmethod
    def _merge_partner(parent: DirtyNode, position: int) -> int:
        """Return the position of the left node of the pair to merge. Prefer a neighbor that is rewritten anyway."""
        if position == 0:
            return 0
        if position == len(parent.children) - 1:
            return position - 1
        return position if isinstance(parent.children[position + 1], DirtyNode) else position - 1

    def dirty_child(self, parent: DirtyNode, position: int) -> DirtyNode:
        child = parent.children[position]
        if isinstance(child, str):
            self._node_path.add([child])
            child = parent.children[position] = DirtyNode.copy_of(self.store.load(child))
        return child


def _heaviest_child(keys: Sequence[str], messages: Mapping[str, str | None]) -> int:
    """Return the position of the child with the largest group of messages in bytes."""
    weights: dict[int, int] = defaultdict(int)
    for key, value in messages.items():
        weights[bisect_left(keys, key)] += message_bytes(key, value)
    return max(weights, key=lambda child: (weights[child], -child))


def _groups_by_child(keys: Sequence[str], messages: Iterable[str]) -> dict[int, list[str]]:
    """Group the keys of messages by the position of the child that they belong to."""
    groups: dict[int, list[str]] = defaultdict(list)
    for key in messages:
        groups[bisect_left(keys, key)].append(key)
    return groups


def _row_of(node: DirtyNode, key: str) -> int | None:
    row = bisect_left(node.keys, key)
    return row if row < len(node.keys) and node.keys[row] == key else None
