"""Reading a tree: point lookups and range scans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.format.text_column import text_array
from trinitylake_ops.tree.node_store import NodeStore


def get(store: NodeStore, root: NodeFile, key: str) -> str | None:
    """Return the location of a key's value, or None; reads at most one node per level below the root.

    A message nearer the root is newer than everything below it.
    """
    node = root
    while True:
        if key in node.buffer:
            return node.buffer[key]
        row = bisect_left(node.keys, key)
        if row < len(node.keys) and node.keys[row] == key:
            return node.values[row]
        if node.is_leaf:
            return None
        node = store.load(node.children[row])


def scan(store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None) -> list[tuple[str, str]]:
    """Return all (key, location) with ``lower <= key < upper``, ascending; None is no bound.

    Reads one level of nodes after the other, each level in parallel.
    """
    keys, locations = scan_columns(store, root, lower, upper)
    return list(zip(keys.to_pylist(), locations.to_pylist(), strict=True))


def scan_columns(
    store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None
) -> tuple[pa.StringArray, pa.StringArray]:
    """Return what :func:`scan` does as two columns of text, keys and locations, without a Python string for each."""
    keys: list[pa.StringArray] = []
    locations: list[pa.StringArray] = []
    messages: dict[str, str | None] = {}
    level = [root]
    while level:
        below: list[str] = []
        for node in level:
            first = 0 if lower is None else _n_keys_below(node, lower)
            end = len(node.keys) if upper is None else _n_keys_below(node, upper)
            keys.append(text_array(node.keys).slice(first, max(0, end - first)))
            locations.append(text_array(node.values).slice(first, max(0, end - first)))
            if node.children:
                is_own_key = lower is not None and first < len(node.keys) and node.keys[first] == lower
                below += node.children[first + is_own_key : end + 1]
            for key, location in node.buffer.items():
                if (lower is None or lower <= key) and (upper is None or key < upper):
                    messages.setdefault(key, location)  # those nearer the root, which came first, are newer
        level = store.load_many(below)
    return with_messages(pa.concat_arrays(keys), pa.concat_arrays(locations), messages)


def _n_keys_below(node: NodeFile, bound: str) -> int:
    """Return how many keys are less; for nodes wholly on one side of a bound, as nearly all are, at one look or two."""
    if not node.keys or bound <= node.keys[0]:
        return 0
    return len(node.keys) if node.keys[-1] < bound else bisect_left(node.keys, bound)


def with_messages(
    keys: pa.StringArray, locations: pa.StringArray, messages: Mapping[str, str | None]
) -> tuple[pa.StringArray, pa.StringArray]:
    """Return keys and their locations, in order, after messages that are newer than them."""
    if messages:
        is_older = pc.invert(pc.is_in(keys, pa.array(list(messages), pa.utf8())))
        live = {key: location for key, location in messages.items() if location is not None}
        keys = pa.concat_arrays([keys.filter(is_older), pa.array(list(live), pa.utf8())])
        locations = pa.concat_arrays([locations.filter(is_older), pa.array(list(live.values()), pa.utf8())])
    order = pc.sort_indices(keys)
    return keys.take(order), locations.take(order)


def prefix_keys(store: NodeStore, root: NodeFile, prefix: str) -> pa.StringArray:
    """Return all keys that start with a prefix, ascending."""
    keys, _ = scan_columns(store, root, prefix, prefix_end(prefix))
    return keys


def prefix_end(prefix: str) -> str | None:
    """Return the least string above all that start with ``prefix``, or None when there is none."""
    stem = prefix.rstrip("\U0010ffff")
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None
