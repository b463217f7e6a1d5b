"""Find keys in a tree, and ranges of keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.format.keys import joined_texts, text_array
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.store import NodePath, NodeStore, check_depth

_MANY_KEYS = 16  # so many lookups in one node are faster on lists than on Arrow columns
_FEW_ROWS = 64  # fewer messages are merged faster one by one than by Arrow's functions


@dataclass(frozen=True, slots=True)
class Lookup:
    """The location of a key's value; None where there is no such key."""

    location: str | None


@dataclass(frozen=True, slots=True)
class Subtree:
    """The location of the child that tells about a key."""

    location: str


def find_key(node: NodeFile, key: str) -> Lookup | Subtree:
    """Return the place of a key as one node knows it. A message nearer the root is newer than everything below it."""
    if key in node.buffer:
        return Lookup(node.buffer[key])
    row = bisect_left(node.keys, key)
    if row < len(node.keys) and node.keys[row] == key:
        return Lookup(node.values[row])
    return Lookup(None) if node.is_leaf else Subtree(node.children[row])


def get(store: NodeStore, root: NodeFile, key: str) -> str | None:
    """Return the location of a key's value, or None. Reads at most one node per level below the root.

    Raises CorruptFileError where pointers lead in a circle, as all readers here do, and what reading raises.
    """
    lookup = find_key(root, key)
    depth = 0
    while isinstance(lookup, Subtree):
        depth += 1
        check_depth(depth, lookup.location)
        lookup = find_key(store.load(lookup.location), key)
    return lookup.location


def get_many(store: NodeStore, places: Mapping[str, Subtree]) -> dict[str, str | None]:
    """Return the locations of keys' values, or None. Each comes from the subtree that holds its key.

    Reads one level of nodes after the other, each level in parallel and each node once.
    """
    found: dict[str, str | None] = {}
    depth = 0
    while places:
        depth += 1
        check_depth(depth, next(iter(places.values())).location)
        locations = list(dict.fromkeys(place.location for place in places.values()))
        nodes = dict(zip(locations, store.load_many(locations), strict=True))
        keys_by_location: dict[str, list[str]] = {location: [] for location in locations}
        for key, place in places.items():
            keys_by_location[place.location].append(key)
        places = {}
        for location, keys in keys_by_location.items():
            for key, result in find_keys(nodes[location], keys):
                if isinstance(result, Lookup):
                    found[key] = result.location
                else:
                    places[key] = result
    return found


def find_keys(node: NodeFile, keys: Sequence[str]) -> Iterator[tuple[str, Lookup | Subtree]]:
    """Yield each of many keys with what :func:`find_key` returns for it."""
    if len(keys) >= _MANY_KEYS:  # Python strings of all rows, once, instead of a few for each key
        node = NodeFile(list(node.keys), list(node.values), list(node.children), node.buffer)
    for key in keys:
        yield key, find_key(node, key)


def scan(store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None) -> list[tuple[str, str]]:
    """Return all (key, location) with ``lower <= key < upper``, ascending; None is no bound.

    Reads one level of nodes after the other, each level in parallel.
    """
    keys, locations = scan_columns(store, root, lower, upper)
    return list(zip(keys.to_pylist(), locations.to_pylist(), strict=True))


def scan_columns(
    store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None
) -> tuple[pa.StringArray, pa.StringArray]:
    """Return the result of :func:`scan` as two columns of text, keys and locations, without Python strings."""
    parts, messages = _parts(store, root, lower, upper)
    keys = joined_texts([part.cut(part.node.keys) for part in parts])
    locations = joined_texts([part.cut(part.node.values) for part in parts])
    return with_messages(keys, locations, messages)


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys that are neighbors in a node: those of the rows from ``first`` on and before ``end``."""

    node: NodeFile
    first: int
    end: int

    def cut(self, texts: Sequence[str]) -> pa.StringArray:
        """Return these rows of the node's keys or values."""
        return text_array(texts).slice(self.first, self.end - self.first)


def _parts(
    store: NodeStore, root: NodeFile, lower: str | None, upper: str | None
) -> tuple[list[_Part], dict[str, str | None]]:
    """Return the keys of nodes from ``lower`` on and before ``upper``, in order, and the messages newer than them."""
    messages: dict[str, str | None] = {}
    node_path = NodePath()
    parts: list[_Part | str] = _expanded(root, lower, upper, messages)
    while below := [part for part in parts if isinstance(part, str)]:
        node_path.add(below)
        nodes = iter(store.load_many(below))
        parts = [
            inner
            for part in parts
            for inner in (_expanded(next(nodes), lower, upper, messages) if isinstance(part, str) else (part,))
        ]
    return [part for part in parts if not isinstance(part, str)], messages


def _expanded(
    node: NodeFile, lower: str | None, upper: str | None, messages: dict[str, str | None]
) -> list[_Part | str]:
    """Return the keys of a node within bounds and, among them, the children that hold others. Collect its messages."""
    for key, location in node.buffer.items():
        if (lower is None or lower <= key) and (upper is None or key < upper):
            messages.setdefault(key, location)  # messages nearer the root, which came first, are newer
    first = 0 if lower is None else _n_keys_below(node, lower)
    end = len(node.keys) if upper is None else max(first, _n_keys_below(node, upper))
    if node.is_leaf:
        return [_Part(node, first, end)]
    parts: list[_Part | str] = []
    for row, child in enumerate(node.children[first : end + 1], first):
        if lower is None or row >= end or row > first or node.keys[row] != lower:
            parts.append(child)
        if row < end:
            parts.append(_Part(node, row, row + 1))
    return parts


def _n_keys_below(node: NodeFile, bound: str) -> int:
    """Return how many keys are less than a bound.

    Nodes wholly on one side of it, nearly all, take one comparison or two.
    """
    if not node.keys or bound <= node.keys[0]:
        return 0
    return len(node.keys) if node.keys[-1] < bound else bisect_left(node.keys, bound)


def with_messages(
    keys: pa.StringArray, locations: pa.StringArray, messages: Mapping[str, str | None]
) -> tuple[pa.StringArray, pa.StringArray]:
    """Return ascending keys and their locations after messages that are newer than them."""
    if not messages:
        return keys, locations
    if len(keys) + len(messages) <= _FEW_ROWS:
        return _with_few_messages(keys, locations, messages)
    is_older = pc.invert(pc.is_in(keys, pa.array(list(messages), keys.type)))
    live = {key: location for key, location in messages.items() if location is not None}
    keys = joined_texts([keys.filter(is_older), pa.array(list(live), pa.utf8())])
    locations = joined_texts([locations.filter(is_older), pa.array(list(live.values()), pa.utf8())])
    order = pc.sort_indices(keys)
    return keys.take(order), locations.take(order)


def _with_few_messages(
    keys: pa.StringArray, locations: pa.StringArray, messages: Mapping[str, str | None]
) -> tuple[pa.StringArray, pa.StringArray]:
    rows = dict(zip(keys.to_pylist(), locations.to_pylist(), strict=True))
    for key, location in messages.items():
        if location is None:
            rows.pop(key, None)
        else:
            rows[key] = location
    order = sorted(rows)  # sorted by code points, the same order as bytes of UTF-8
    return pa.array(order, keys.type), pa.array([rows[key] for key in order], locations.type)


def prefix_keys(store: NodeStore, root: NodeFile, prefix: str) -> pa.ChunkedArray:
    """Return all keys that start with a prefix, ascending, as a column of text in chunks."""
    parts, messages = _parts(store, root, prefix, prefix_end(prefix))
    keys = pa.chunked_array([part.cut(part.node.keys) for part in parts], pa.utf8())
    if not messages or (len(keys) > _FEW_ROWS and _only_overwritten(keys, messages)):
        return keys
    joined = joined_texts(keys.chunks)
    return pa.chunked_array([with_messages(joined, pa.nulls(len(joined), pa.utf8()), messages)[0]])


def _only_overwritten(keys: pa.ChunkedArray, messages: Mapping[str, str | None]) -> bool:
    """Whether messages neither create nor drop a key."""
    known = set(keys.filter(pc.is_in(keys, pa.array(list(messages), keys.type))).to_pylist())
    return all((key in known) == (location is not None) for key, location in messages.items())


def prefix_end(prefix: str) -> str | None:
    """Return the least string above all that start with ``prefix``, or None when there is none."""
    stem = prefix.rstrip("\U0010ffff")
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None


_MOST_RANGES = 4_096
_TYPICAL_FILL = 0.8  # between the fill of nodes that were split and the fill of a tree built at once


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys from ``lower`` on and before ``upper``; None is no bound."""

    lower: str | None = None
    upper: str | None = None

    @classmethod
    def prefixed(cls, prefix: str) -> KeyRange:
        """Return the range of all keys that start with a prefix."""
        return cls(prefix, prefix_end(prefix))

    @classmethod
    def only(cls, key: str) -> KeyRange:
        """Return the range of one key."""
        return cls(key, key + "\0")

    @property
    def is_single(self) -> bool:
        """Whether this is the range of one key."""
        return self.lower is not None and self.upper == self.lower + "\0"

    def __contains__(self, key: str) -> bool:
        return (self.lower is None or self.lower <= key) and (self.upper is None or key < self.upper)

    def part_of(self, node: NodeFile) -> NodeFile:
        """Return a node with the keys of this range and the children that may hold others of it."""
        first = 0 if self.lower is None else bisect_left(node.keys, self.lower)
        end = len(node.keys) if self.upper is None else max(first, bisect_left(node.keys, self.upper))
        buffer = {key: location for key, location in node.buffer.items() if key in self}
        if end - first == len(node.keys):
            return node if len(buffer) == len(node.buffer) else replace(node, buffer=buffer)
        children = node.children[first : end + 1] if node.children else node.children
        return replace(node, keys=node.keys[first:end], values=node.values[first:end], children=children, buffer=buffer)


class NodesInRange(NodeStore):
    """The nodes of another store, as if their trees held the keys of one range only. No other keys are ever read."""

    def __init__(self, nodes: NodeStore, keys: KeyRange):
        self._nodes = nodes
        self._keys = keys

    def load(self, location: str) -> NodeFile:
        return self._keys.part_of(self._nodes.load(location))

    def load_many(self, locations: Sequence[str]) -> list[NodeFile]:
        return [self._keys.part_of(node) for node in self._nodes.load_many(locations)]


def split(nodes: NodeStore, root: NodeFile, order: int, within: KeyRange, objects_per_range: int) -> list[KeyRange]:
    """Return ranges that make up ``within``, each of about so many objects; ``order`` is that of the tree.

    Bounds are keys of the upper levels, and only the nodes are read that are needed for them. Leaves are not read,
    except for one that tells how deep the tree is.
    """
    if within.is_single:
        return [within]
    limited = NodesInRange(nodes, within)
    level = [within.part_of(root)]
    levels_below = _height(limited, level[0])
    bounds: set[str] = set()
    while True:
        bounds.update(key for node in level for key in node.keys if key != within.lower)
        children = [child for node in level for child in node.children]
        n_objects = len(children) * (1 + (order - 1) * _TYPICAL_FILL) ** levels_below
        wanted = min(max(1, round(n_objects / objects_per_range)), _MOST_RANGES)
        if len(bounds) + 1 >= wanted or levels_below <= 1:
            break
        level = limited.load_many(children)
        levels_below -= 1
    ordered = sorted(bounds)
    n_ranges = min(wanted, len(ordered) + 1)
    inner = [ordered[len(ordered) * number // n_ranges] for number in range(1, n_ranges)]
    edges = [within.lower, *inner, within.upper]
    return [KeyRange(lower, upper) for lower, upper in pairwise(edges)]


def _height(nodes: NodeStore, node: NodeFile) -> int:
    """Return how many levels are below a node."""
    height = 0
    while node.children:
        height += 1
        check_depth(height, node.children[0])
        node = nodes.load(node.children[0])
    return height
