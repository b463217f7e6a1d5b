"""Splitting and merging nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinitylake_ops.tree.nodes.node import DirtyNode


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
    """Return one node of two neighbours. It includes the entry between them, unless they are leaves being joined.

    The result may have more keys than fit; the caller splits it.
    """
    middle_keys, middle_values = ([between[0]], [between[1]]) if between else ([], [])
    return DirtyNode(
        left.keys + middle_keys + right.keys,
        left.values + middle_values + right.values,
        left.children + right.children,
        left.buffer | right.buffer,
    )
