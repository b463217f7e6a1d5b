"""Forecasts a lakehouse's tree from its sizes and order, before there is one."""

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

#: The part of the places for keys that random insertions fill in a B-tree: ln 2.
RANDOM_FILL = math.log(2)

_ROOT_SYSTEM = {"system rows": "x" * 700}  # bytes of a root's system rows with a short message, about
_NODE_SYSTEM = {"created_at_millis": "1" * 13, "n_keys": "100"}
_NAME_CHARS = 10  # of names in file paths; keys are padded to their full size
_SIMULATED_MESSAGES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeForecast:
    """The forecast tree of ``objects`` tables. It grew in random order, and its tables change one by one at random.

    ``height`` counts levels below the root. ``buffer_messages`` is the number of messages in the root's buffer before a
    flush. ``nodes_per_commit`` and ``bytes_per_commit`` are averages of a commit of one table. They count the root and
    the nodes that flushes change, and nothing else. ``bytes_per_commit`` over ``message_bytes`` is the write
    amplification.
    """

    objects: int
    height: int
    nodes: int
    root_bytes: int
    leaf_bytes: int
    buffer_messages: int
    message_bytes: int
    nodes_per_commit: float
    bytes_per_commit: int

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte of change."""
        return self.bytes_per_commit / self.message_bytes


def forecast_tree(
    definition: LakehouseDef,
    objects: int,
    *,
    fill: float = RANDOM_FILL,
    buffer_target_bytes: int = DEFAULT_BUFFER_TARGET_BYTES,
) -> TreeForecast:
    """Return the forecast for the settings of a lakehouse and a number of tables.

    A node has ``fill`` of its places for keys taken, so ``fill * (order - 1)`` keys. Levels follow until one node holds
    the rest. In a steady state every message passes every level once. A flush moves the largest group of a full buffer,
    of :func:`mean_flush_messages` messages. It writes one node of the level below. So a commit writes the root. For
    each level below it, it writes one node per so many messages. A node flushes once for each group that it gets. If
    its own groups are smaller than that, its buffer outgrows the target, up to twice. Then it takes no larger groups.
    Between two flushes a buffer fills up again, so half a group of it is missing on average. Keys take their full
    padded size, and locations the size of short names.
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
    written = 1.0  # nodes of a level per commit
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
    """The number of messages in the nodes of a level when they flush, and the number that a flush moves."""

    n_children: int
    messages: int
    flushed: float


def _steady_buffers(buffer_messages: int, fan_outs: Sequence[int]) -> list[_Buffer]:
    """Return the buffers of each level that has children, the root's first.

    They follow from a target and numbers of children.
    """
    buffers: list[_Buffer] = []
    incoming = coming = 0.0  # messages that a flush brings, and messages that wait above for one node
    for depth, n_children in enumerate(fan_outs):
        messages, most = buffer_messages, 2 * buffer_messages if depth else buffer_messages
        while mean_flush_messages(messages, n_children) < incoming and messages < most:
            messages = min(most, messages + max(1, messages // 16))
        # A full node first takes the messages for the child that it will flush to.
        incoming = mean_flush_messages(messages + round(coming if messages == most else 0), n_children)
        coming = messages / n_children
        buffers.append(_Buffer(n_children, messages, incoming))
    for above, below in reversed(list(pairwise(buffers))):
        above.flushed = min(above.flushed, below.flushed)
    return buffers


@functools.cache
def mean_flush_messages(buffer_messages: int, n_children: int) -> float:
    """Return how many messages a flush of the largest group moves on average, by a simulation.

    Messages go to children at random. Whenever there are more than ``buffer_messages``, the largest group leaves. The
    result is at least 1.
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
