"""What sizes and order of a lakehouse mean for its tree, before there is one."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_node_path, new_table_path
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX
from trinitylake_ops.format.node_file import encoded_size_bytes
from trinitylake_ops.tree.node import DEFAULT_BUFFER_TARGET_BYTES

#: Part of the places for keys that random insertions leave taken in a B-tree: ln 2.
RANDOM_FILL = math.log(2)

_ROOT_SYSTEM = {"system rows": "x" * 700}  # what they take with a short message, about
_NODE_SYSTEM = {"created_at_millis": "1" * 13}
_NAME_CHARS = 10  # of names in file paths; keys are padded to their full size
_SIMULATED_MESSAGES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeForecast:
    """The tree of ``objects`` tables that grew in random order and whose tables change one by one at random.

    ``height`` counts levels below the root, ``buffer_messages`` what the root's buffer holds before
    it is flushed, ``nodes_per_commit`` and ``bytes_per_commit`` what a commit of one table writes on
    average: the root, the nodes that flushes change, and nothing else. ``bytes_per_commit`` over
    ``message_bytes`` is the write amplification.
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
    """Return what the settings of a lakehouse mean at a number of tables.

    Nodes have ``fill`` of their places for keys taken, so ``fill * (order - 1)`` keys; levels follow
    until one node holds the rest. In a steady state every message passes every level once. A flush
    moves the largest group of a full buffer, of :func:`mean_flush_messages` messages, and writes one
    node of the level below. So a commit writes the root and, for each level below it, one node per
    so many messages, with buffers that are as good as full. Keys take their full padded size,
    locations that of short names.
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
        entry = "x" * key_bytes, "x" * location_bytes
        return encoded_size_bytes(
            definition.order,
            [entry[0]] * n_keys,
            [entry[1]] * n_keys,
            0 if is_leaf else len(new_node_path()) * (n_keys + 1),
            {f"{number:0{key_bytes}}": entry[1] for number in range(n_messages)},
            system,
        )

    n_root_keys = levels[1] - 1 if height else objects
    root_bytes = node_bytes(n_root_keys, buffer_messages, not height, _ROOT_SYSTEM)
    leaf_bytes = node_bytes(min(keys_per_node, objects), 0, True, _NODE_SYSTEM)
    inner_bytes = node_bytes(keys_per_node, buffer_messages, False, _NODE_SYSTEM) if height > 1 else 0
    nodes_per_commit = below_bytes = 0.0
    for depth in range(1, height + 1):
        n_children = levels[1] if depth == 1 else keys_per_node + 1
        written = 1 / mean_flush_messages(buffer_messages, n_children)
        nodes_per_commit += written
        below_bytes += written * (leaf_bytes if depth == height else inner_bytes)
    return TreeForecast(
        objects=objects,
        height=height,
        nodes=sum(levels),
        root_bytes=root_bytes,
        leaf_bytes=leaf_bytes,
        buffer_messages=buffer_messages,
        message_bytes=message_bytes,
        nodes_per_commit=nodes_per_commit,
        bytes_per_commit=round(root_bytes + below_bytes),
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


@functools.cache
def mean_flush_messages(buffer_messages: int, n_children: int) -> float:
    """Return how many messages a flush of the largest group moves on average, by playing it through.

    Messages go to children at random; whenever there are more than ``buffer_messages``, the largest
    group leaves. At least 1.
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
