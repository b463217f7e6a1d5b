"""Reading a tree: point lookups and range scans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.format.text_column import joined_texts, text_array
from trinitylake_ops.tree.node_store import NodeStore


@dataclass(frozen=True, slots=True)
class Found:
    """The location of a key's value; None where there is no such key."""

    location: str | None


@dataclass(frozen=True, slots=True)
class Below:
    """The location of the child that tells about a key."""

    location: str


def look(node: NodeFile, key: str) -> Found | Below:
    """Return what one node tells about a key. A message nearer the root is newer than everything below it."""
    if key in node.buffer:
        return Found(node.buffer[key])
    row = bisect_left(node.keys, key)
    if row < len(node.keys) and node.keys[row] == key:
        return Found(node.values[row])
    return Found(None) if node.is_leaf else Below(node.children[row])


def get(store: NodeStore, root: NodeFile, key: str) -> str | None:
    """Return the location of a key's value, or None; reads at most one node per level below the root."""
    told = look(root, key)
    while isinstance(told, Below):
        told = look(store.load(told.location), key)
    return told.location


def get_many(store: NodeStore, places: Mapping[str, Below]) -> dict[str, str | None]:
    """Return the locations of keys' values, or None, each from the subtree that tells about it.

    Reads one level of nodes after the other, each level in parallel and each node once.
    """
    found: dict[str, str | None] = {}
    while places:
        locations = list(dict.fromkeys(place.location for place in places.values()))
        nodes = dict(zip(locations, store.load_many(locations), strict=True))
        told = {key: look(nodes[place.location], key) for key, place in places.items()}
        found |= {key: place.location for key, place in told.items() if isinstance(place, Found)}
        places = {key: place for key, place in told.items() if isinstance(place, Below)}
    return found


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
    return with_messages(joined_texts(keys), joined_texts(locations), messages)


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
        is_older = pc.invert(pc.is_in(keys, pa.array(list(messages), keys.type)))
        live = {key: location for key, location in messages.items() if location is not None}
        keys = joined_texts([keys.filter(is_older), pa.array(list(live), pa.utf8())])
        locations = joined_texts([locations.filter(is_older), pa.array(list(live.values()), pa.utf8())])
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
