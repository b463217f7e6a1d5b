"""Editable nodes, their limits, and functions that split and merge them."""

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
    """Limits of all nodes of one tree. All sizes refer to uncompressed files."""

    #: Maximum number of children of a node (a lakehouse setting).
    order: int
    #: Maximum size of a node file (a lakehouse setting).
    node_file_max_size_bytes: int
    #: A buffer is flushed when its text exceeds this size (chosen by the writer).
    buffer_target_bytes: int = DEFAULT_BUFFER_TARGET_BYTES
    #: The compression of new files, one of ``NODE_COMPRESSIONS`` (a lakehouse setting).
    compression: str = ""
    #: Number of bytes that are reserved for the seals of a file.
    seal_room_bytes: int = 0

    @classmethod
    def of(cls, definition: LakehouseDef) -> TreeLimits:
        """Return the limits from the settings of a lakehouse.

        If the lakehouse's maximum file size is too small for seals, no room is reserved for them.
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
        """Maximum size of a file without its seals."""
        return self.node_file_max_size_bytes - self.seal_room_bytes

    def encoded(self, node: NodeFile, path: str) -> bytes:
        """Encode a node as a file. The file is sealed if it does not exceed its limit with seals.

        Args:
            node: The node.
            path: The path where the file will be written.

        Raises:
            InvalidDefinitionError: This program cannot write the ``compression``.
        """
        return encode_node(node, self.order, self.compression, path, self.node_file_max_size_bytes)

    @property
    def max_keys(self) -> int:
        return self.order - 1

    @property
    def min_keys(self) -> int:
        """Minimum number of keys of a non-root node: ceil(order / 2) - 1."""
        return (self.order + 1) // 2 - 1


@dataclass(slots=True, eq=False)
class DirtyNode:
    """A changed node that will be rewritten. The fields are those of :class:`NodeFile`, unless documented here.

    A leaf has no children and no buffer, because messages are applied to it immediately.
    """

    keys: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    #: Locations of unchanged children, and DirtyNodes for changed children.
    children: list[str | DirtyNode] = field(default_factory=list)
    buffer: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def copy_of(cls, node: NodeFile) -> DirtyNode:
        """Return an editable copy. If another program left messages in a leaf, they are applied."""
        copy = cls(list(node.keys), list(node.values), list(node.children), {} if node.is_leaf else dict(node.buffer))
        if node.is_leaf:
            copy.absorb(node.buffer)
        return copy

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def absorb(self, messages: Mapping[str, str | None]) -> None:
        """Add messages that are newer than all content of this node.

        A leaf applies the messages. An inner node sets the values of its keys and buffers the rest. The deletion of one
        of the node's own keys remains in the buffer, because applying it restructures two subtrees.
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
        remaining = sorted((key, value) for key, value in entries.items() if value is not None)
        self.keys = [key for key, _ in remaining]
        self.values = [value for _, value in remaining]

    def size_bytes(self, order: int, system: dict[str, str]) -> int:
        """Return the size of this node's uncompressed file without seals.

        Args:
            order: The order of the tree. The node may have more children.
            system: The system rows of the node.
        """
        locations = [child for child in self.children if isinstance(child, str)]
        children_bytes = text_bytes(locations) + _NODE_PATH_BYTES * (len(self.children) - len(locations))
        rows = max(order, len(self.keys) + 1)
        return encoded_size_bytes(rows, self.keys, self.values, children_bytes, self.buffer, system)


def messages_bytes(messages: Mapping[str, str | None]) -> int:
    """Return the size of buffered messages, in bytes of UTF-8."""
    return text_bytes(messages) + text_bytes(messages.values())


def message_bytes(key: str, value: str | None) -> int:
    """Return the size of one buffered message, in bytes of UTF-8."""
    return text_bytes((key, value))


@dataclass(slots=True)
class Split:
    """The result of splitting a node."""

    #: The parts of the node, from left to right.
    parts: list[str | DirtyNode] = field(default_factory=list)
    #: The keys between the parts, which move up to the parent.
    keys: list[str] = field(default_factory=list)
    #: The values of these keys.
    values: list[str] = field(default_factory=list)
    #: The buffered messages for these keys.
    messages: dict[str, str | None] = field(default_factory=dict)


def split_evenly(node: DirtyNode, order: int) -> Split:
    """Split a node of more than ``order - 1`` keys evenly into as few nodes as possible.

    For orders of at least 3, every part has at least ceil(order / 2) - 1 keys.

    Args:
        node: The node to split.
        order: Maximum number of children of a part.
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
    """Concatenate two neighbors into one node, which may have too many keys; the caller splits it.

    Args:
        left: The left node.
        right: The right node.
        between: The key and value between the nodes; None only for two leaves whose separating key was deleted.
    """
    middle_keys, middle_values = ([between[0]], [between[1]]) if between else ([], [])
    return DirtyNode(
        left.keys + middle_keys + right.keys,
        left.values + middle_values + right.values,
        left.children + right.children,
        left.buffer | right.buffer,
    )
