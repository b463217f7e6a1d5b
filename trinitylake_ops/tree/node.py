"""Nodes being edited: the rules that every node keeps, and how nodes are split and merged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.format.node_file import NodeFile, encode_node, encoded_size_bytes, seal_room_bytes, text_bytes

DEFAULT_BUFFER_TARGET_BYTES = 48 * 1024

_NODE_PATH_BYTES = len(new_node_path())


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of all nodes of one tree.

    ``buffer_target_bytes`` is the text that a buffer may gather before it is flushed. It is a choice of the writer.
    ``order``, ``node_file_max_size_bytes`` and the ``compression`` of new files belong to the lakehouse.
    ``seal_room_bytes`` of a file are left for its seals. All sizes are those of uncompressed files.
    """

    order: int
    node_file_max_size_bytes: int
    buffer_target_bytes: int = DEFAULT_BUFFER_TARGET_BYTES
    compression: str = ""
    seal_room_bytes: int = 0

    @classmethod
    def of(cls, definition: LakehouseDef) -> TreeLimits:
        """Return the limits in the settings of a lakehouse.

        If its files are too small for seals, no room is left for them.
        """
        has_room = definition.node_file_max_size_bytes >= smallest_node_file_limit_bytes(definition)
        return cls(
            definition.order,
            definition.node_file_max_size_bytes,
            DEFAULT_BUFFER_TARGET_BYTES,
            definition.node_compression,
            seal_room_bytes() if has_room else 0,
        )

    @property
    def rows_max_size_bytes(self) -> int:
        """The most bytes that a file may take without its seals."""
        return self.node_file_max_size_bytes - self.seal_room_bytes

    def encoded(self, node: NodeFile, path: str) -> bytes:
        """Return the file of a node that will be at ``path``. It is sealed if that leaves it within its limit.

        Raises InvalidDefinitionError for a ``compression`` that this program cannot write.
        """
        return encode_node(node, self.order, self.compression, path, self.node_file_max_size_bytes)

    @property
    def max_keys(self) -> int:
        return self.order - 1

    @property
    def min_keys(self) -> int:
        """Fewest keys of any node but the root: ceil(order / 2) - 1."""
        return (self.order + 1) // 2 - 1


@dataclass(slots=True, eq=False)
class DirtyNode:
    """A node that will be written anew. ``children`` holds locations, and DirtyNodes for children that changed too.

    The other fields are those of :class:`NodeFile`. A leaf has no children and no buffer: its
    messages are applied at once.
    """

    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    children: list[str | DirtyNode] = field(default_factory=list)
    buffer: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def copy_of(cls, node: NodeFile) -> DirtyNode:
        """Return an editable copy. A leaf's buffer, which other writers may leave, is applied."""
        copy = cls(list(node.keys), list(node.values), list(node.children), {} if node.is_leaf else dict(node.buffer))
        if node.is_leaf:
            copy.absorb(node.buffer)
        return copy

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def absorb(self, messages: Mapping[str, str | None]) -> None:
        """Take messages newer than all that this node holds.

        A leaf applies them. An inner node sets the values of its own keys and buffers the rest. The deletion of an own
        key waits in the buffer, since it restructures two subtrees.
        """
        if self.is_leaf:
            self._apply(messages)
            return
        for key, value in messages.items():
            self.buffer.pop(key, None)
            row = bisect_left(self.keys, key)
            if value is not None and row < len(self.keys) and self.keys[row] == key:
                self.values[row] = value
            else:
                self.buffer[key] = value

    def _apply(self, messages: Mapping[str, str | None]) -> None:
        entries: dict[str, str | None] = dict(zip(self.keys, self.values, strict=True))
        entries.update(messages)
        live = sorted((key, value) for key, value in entries.items() if value is not None)
        self.keys = [key for key, _ in live]
        self.values = [value for _, value in live]

    def size_bytes(self, order: int, system: dict[str, str]) -> int:
        """Return the size of this node's file with the given system rows, for any number of keys."""
        locations = [child for child in self.children if isinstance(child, str)]
        children_bytes = text_bytes(locations) + _NODE_PATH_BYTES * (len(self.children) - len(locations))
        rows = max(order, len(self.keys) + 1)
        return encoded_size_bytes(rows, self.keys, self.values, children_bytes, self.buffer, system)


def messages_bytes(messages: Mapping[str, str | None]) -> int:
    """Return the text of buffered messages, in bytes of UTF-8."""
    return text_bytes(messages) + text_bytes(messages.values())


def message_bytes(key: str, value: str | None) -> int:
    """Return the text of one buffered message, in bytes of UTF-8."""
    return text_bytes((key, value))


@dataclass(slots=True)
class Split:
    """The parts of a node, and the entries that move up between them: keys, their values, and their messages."""

    parts: list[str | DirtyNode] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    messages: dict[str, str | None] = field(default_factory=dict)


def split_evenly(node: DirtyNode, order: int) -> Split:
    """Split a node of more than ``order - 1`` keys into the fewest nodes that fit, evenly.

    For orders of at least 3 every part gets at least ceil(order / 2) - 1 keys.
    """
    n_keys = len(node.keys)
    n_parts = -(-(n_keys + 1) // order)
    smallest, larger_parts = divmod(n_keys - (n_parts - 1), n_parts)
    split = Split()
    start = 0
    for number in range(n_parts):
        end = start + smallest + (1 if number < larger_parts else 0)
        part = DirtyNode(node.keys[start:end], node.values[start:end], node.children[start : end + 1])
        lower = split.keys[-1] if split.keys else None
        upper = node.keys[end] if end < n_keys else None
        part.buffer = {
            key: value
            for key, value in node.buffer.items()
            if (lower is None or key > lower) and (upper is None or key < upper)
        }
        split.parts.append(part)
        if upper is not None:
            split.keys.append(upper)
            split.values.append(node.values[end])
        start = end + 1
    split.messages = {key: node.buffer[key] for key in split.keys if key in node.buffer}
    return split


def concatenate(left: DirtyNode, right: DirtyNode, between: tuple[str, str] | None = None) -> DirtyNode:
    """Return one node of two neighbors. It includes the entry between them, unless they are leaves being joined.

    The result may have more keys than fit; the caller splits it.
    """
    middle_keys, middle_values = ([between[0]], [between[1]]) if between else ([], [])
    return DirtyNode(
        left.keys + middle_keys + right.keys,
        left.values + middle_values + right.values,
        left.children + right.children,
        left.buffer | right.buffer,
    )
