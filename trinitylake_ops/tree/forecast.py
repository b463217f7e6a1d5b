"""Forecast the size and write costs of a lakehouse's tree from the lakehouse's settings."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_node_path, new_table_path
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX
from trinitylake_ops.format.node_file import size_of_rows_bytes, text_bytes
from trinitylake_ops.tree.node import DEFAULT_BUFFER_TARGET_BYTES

#: Average fill of the nodes of a B-tree after random insertions: ln 2.
RANDOM_FILL = math.log(2)

_ROOT_SYSTEM = {"system rows": "x" * 700}  # approximate size of a root's system rows with a short message
_NODE_SYSTEM = {"created_at_millis": "1" * 13, "n_keys": "100"}
_NAME_CHARS = 10  # assumed length of names in file paths; keys are padded to their maximum size
_SIMULATED_MESSAGES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeForecast:
    """The forecast of a tree whose tables were created in random order and change one by one at random."""

    #: Number of tables.
    objects: int
    #: Number of levels below the root.
    height: int
    #: Number of nodes of all levels.
    nodes: int
    #: Size of the root file with a full buffer.
    root_bytes: int
    #: Size of a leaf file.
    leaf_bytes: int
    #: Number of messages in the root's buffer before a flush.
    buffer_messages: int
    #: Size of one message.
    message_bytes: int
    #: Average number of non-root nodes that a commit of one table writes.
    nodes_per_commit: float
    #: Average size of all nodes that a commit of one table writes, including the root.
    bytes_per_commit: int

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte of change."""
        return self.bytes_per_commit / self.message_bytes


def forecast_tree(
    definition: LakehouseDef,
    objects: int,
    *,
    fill: float = RANDOM_FILL,
    buffer_target_bytes: int = DEFAULT_BUFFER_TARGET_BYTES,
) -> TreeForecast:
    """Forecast the tree of a lakehouse.

    A node has ``fill * (order - 1)`` keys, and levels are added until the rest fits into one node. In the steady state,
    every message passes through every level once. A flush moves the largest group of a full buffer
    (:func:`mean_flush_messages` messages on average) and writes one node of the level below. A commit therefore writes
    the root, and for each level below it a fraction of a node: one over the number of messages per flush. A node
    flushes once for each group that it receives. If its outgoing groups are smaller than its incoming groups, its
    buffer grows to up to twice the target; after that, it accepts no larger groups. Between two flushes a buffer
    refills, so on average half a group is missing from the buffer. Keys are assumed to have their padded size, and
    locations to contain short names.

    Args:
        definition: The settings of the lakehouse.
        objects: Number of tables.
        fill: Average fill of nodes, between 0 and 1.
        buffer_target_bytes: The size above which buffers are flushed.
    """
    names_bytes = definition.namespace_name_max_size_bytes + definition.table_name_max_size_bytes
    key_bytes = len(TABLE_KEY_PREFIX) + names_bytes
    location_bytes = len(new_table_path("n" * _NAME_CHARS, "t" * _NAME_CHARS, definition.file_path_max_size_bytes))
    message_bytes = key_bytes + location_bytes
    keys_per_node = max(1, round(fill * (definition.order - 1)))
    levels = _nodes_by_level(objects, keys_per_node, definition.order)
    height = len(levels) - 1
    limit_bytes = min(buffer_target_bytes, definition.node_file_max_size_bytes)
    buffer_messages = limit_bytes // message_bytes if height else 0

    def node_bytes(n_keys: int, n_messages: int, is_leaf: bool, system: dict[str, str]) -> int:
        n_entries = n_keys + n_messages
        return size_of_rows_bytes(
            len(system) + 1 + definition.order + n_messages,
            n_entries * key_bytes + text_bytes(system),
            n_entries * location_bytes + text_bytes(system.values()),
            0 if is_leaf else len(new_node_path()) * (n_keys + 1),
        )

    leaf_bytes = node_bytes(min(keys_per_node, objects), 0, True, _NODE_SYSTEM)
    root_bytes = node_bytes(levels[1] - 1 if height else objects, buffer_messages, not height, _ROOT_SYSTEM)
    buffers = _steady_buffers(buffer_messages, [round(below / above) for above, below in pairwise(levels)])
    nodes_per_commit = bytes_per_commit = 0.0
    written = 1.0  # number of nodes of a level that are written per commit
    for depth, buffer in enumerate(buffers):
        n_messages = round(buffer.messages - buffer.flushed / 2)
        system = _NODE_SYSTEM if depth else _ROOT_SYSTEM
        bytes_per_commit += written * node_bytes(buffer.n_children - 1, n_messages, False, system)
        written = 1 / buffer.flushed
        nodes_per_commit += written
    bytes_per_commit += written * (leaf_bytes if height else root_bytes)
    return TreeForecast(
        objects=objects,
        height=height,
        nodes=sum(levels),
        root_bytes=root_bytes,
        leaf_bytes=leaf_bytes,
        buffer_messages=buffer_messages,
        message_bytes=message_bytes,
        nodes_per_commit=nodes_per_commit,
        bytes_per_commit=round(bytes_per_commit),
    )


def _nodes_by_level(objects: int, keys_per_node: int, order: int) -> list[int]:
    """Return the number of nodes of each level, the root first."""
    levels: list[int] = []
    rest = objects
    while rest > order - 1:
        n_nodes = -(-(rest + 1) // (keys_per_node + 1))
        levels.append(n_nodes)
        rest = n_nodes - 1
    return [1, *reversed(levels)]


@dataclass(slots=True)
class _Buffer:
    """The buffers of the nodes of one level in the steady state."""

    n_children: int
    #: Number of messages in a buffer when it is flushed.
    messages: int
    #: Average number of messages that a flush moves.
    flushed: float


def _steady_buffers(buffer_messages: int, fan_outs: Sequence[int]) -> list[_Buffer]:
    """Return the buffers of each level that has children, starting with the root.

    Args:
        buffer_messages: Number of messages in a buffer at its target size.
        fan_outs: Number of children of a node of each level.
    """
    buffers: list[_Buffer] = []
    incoming = pending = 0.0  # messages that a flush moves into a node, and pending messages for it above
    for depth, n_children in enumerate(fan_outs):
        messages, most = buffer_messages, 2 * buffer_messages if depth else buffer_messages
        while mean_flush_messages(messages, n_children) < incoming and messages < most:
            messages = min(most, messages + max(1, messages // 16))
        # A full node first accepts the messages for the child that it flushes next.
        incoming = mean_flush_messages(messages + round(pending if messages == most else 0), n_children)
        pending = messages / n_children
        buffers.append(_Buffer(n_children, messages, incoming))
    for above, below in reversed(list(pairwise(buffers))):
        above.flushed = min(above.flushed, below.flushed)
    return buffers


@functools.cache
def mean_flush_messages(buffer_messages: int, n_children: int) -> float:
    """Simulate how many messages a flush of the largest group moves on average.

    Messages are assigned to children at random. Whenever the buffer exceeds its size, the largest group is flushed.

    Args:
        buffer_messages: Maximum number of messages in the buffer.
        n_children: Number of children of the node.

    Returns:
        The average number of messages per flush, at least 1.
    """
    generator = random.Random(0)
    groups = [0] * n_children
    waiting = n_flushes = n_flushed = 0
    for number in range(2 * buffer_messages + _SIMULATED_MESSAGES):
        groups[generator.randrange(n_children)] += 1
        waiting += 1
        if waiting > buffer_messages:
            largest = max(range(n_children), key=groups.__getitem__)
            if number >= 2 * buffer_messages:
                n_flushes += 1
                n_flushed += groups[largest]
            waiting -= groups[largest]
            groups[largest] = 0
    return max(1.0, n_flushed / max(1, n_flushes))
