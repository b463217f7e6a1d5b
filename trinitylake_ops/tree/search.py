"""Look up keys and key ranges in a tree."""

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

_MANY_KEYS = 16  # for at least this many lookups in one node, lists are faster than Arrow columns
_FEW_ROWS = 64  # up to this number of rows, merging messages one by one is faster than Arrow's functions


@dataclass(frozen=True, slots=True)
class Lookup:
    """The location of a key's value; None if the key does not exist."""

    location: str | None


@dataclass(frozen=True, slots=True)
class Subtree:
    """The location of the child whose subtree contains a key, if it exists."""

    location: str


def find_key(node: NodeFile, key: str) -> Lookup | Subtree:
    """Look up a key in one node. A buffered message takes precedence, because it is newer than everything below it.

    Args:
        node: The node.
        key: The key.

    Returns:
        The result if the node determines it, otherwise the subtree to continue with.
    """
    if key in node.buffer:
        return Lookup(node.buffer[key])
    row = bisect_left(node.keys, key)
    if row < len(node.keys) and node.keys[row] == key:
        return Lookup(node.values[row])
    return Lookup(None) if node.is_leaf else Subtree(node.children[row])


def get(store: NodeStore, root: NodeFile, key: str) -> str | None:
    """Return the location of a key's value, or None. Reads at most one node per level below the root.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        key: The key.

    Raises:
        CorruptFileError: A node is damaged, or pointers form a cycle.
        StorageError: A node cannot be read.
    """
    lookup = find_key(root, key)
    depth = 0
    while isinstance(lookup, Subtree):
        depth += 1
        check_depth(depth, lookup.location)
        lookup = find_key(store.load(lookup.location), key)
    return lookup.location


def get_many(store: NodeStore, subtrees: Mapping[str, Subtree]) -> dict[str, str | None]:
    """Return the location of each key's value, or None.

    Nodes are read level by level, the nodes of a level in parallel, and each node once. Errors are those of
    :func:`get`.

    Args:
        store: Reads the nodes.
        subtrees: The subtree that contains each key.
    """
    values: dict[str, str | None] = {}
    depth = 0
    while subtrees:
        depth += 1
        check_depth(depth, next(iter(subtrees.values())).location)
        locations = list(dict.fromkeys(subtree.location for subtree in subtrees.values()))
        nodes = dict(zip(locations, store.load_many(locations), strict=True))
        keys_by_location: dict[str, list[str]] = {location: [] for location in locations}
        for key, subtree in subtrees.items():
            keys_by_location[subtree.location].append(key)
        subtrees = {}
        for location, keys in keys_by_location.items():
            for key, result in find_keys(nodes[location], keys):
                if isinstance(result, Lookup):
                    values[key] = result.location
                else:
                    subtrees[key] = result
    return values


def find_keys(node: NodeFile, keys: Sequence[str]) -> Iterator[tuple[str, Lookup | Subtree]]:
    """Yield each key with the result of :func:`find_key`."""
    if len(keys) >= _MANY_KEYS:  # convert all rows to Python strings once, instead of a few for each key
        node = NodeFile(list(node.keys), list(node.values), list(node.children), node.buffer)
    for key in keys:
        yield key, find_key(node, key)


def scan(store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None) -> list[tuple[str, str]]:
    """Return all (key, location) entries of a key range, in ascending order of keys.

    Nodes are read level by level, the nodes of a level in parallel. Raises the errors of :func:`get`.

    Args:
        store: Reads the nodes.
        root: The root of the tree.
        lower: The inclusive lower bound; None for no bound.
        upper: The exclusive upper bound; None for no bound.
    """
    keys, locations = scan_columns(store, root, lower, upper)
    return list(zip(keys.to_pylist(), locations.to_pylist(), strict=True))


def scan_columns(
    store: NodeStore, root: NodeFile, lower: str | None = None, upper: str | None = None
) -> tuple[pa.StringArray, pa.StringArray]:
    """Return the result of :func:`scan` as two Arrow columns, keys and locations, without creating Python strings."""
    parts, messages = _parts(store, root, lower, upper)
    keys = joined_texts([part.cut(part.node.keys) for part in parts])
    locations = joined_texts([part.cut(part.node.values) for part in parts])
    return with_messages(keys, locations, messages)


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of rows of a node: from ``first`` (inclusive) to ``end`` (exclusive)."""

    node: NodeFile
    first: int
    end: int

    def cut(self, texts: Sequence[str]) -> pa.StringArray:
        """Return these rows of the node's keys or values."""
        return text_array(texts).slice(self.first, self.end - self.first)


def _parts(
    store: NodeStore, root: NodeFile, lower: str | None, upper: str | None
) -> tuple[list[_Part], dict[str, str | None]]:
    """Return the rows of all nodes within bounds, in key order, and the messages that are newer than these rows."""
    messages: dict[str, str | None] = {}
    node_path = NodePath()
    parts: list[_Part | str] = _expand(root, lower, upper, messages)
    while below := [part for part in parts if isinstance(part, str)]:
        node_path.add(below)
        nodes = iter(store.load_many(below))
        parts = [
            inner
            for part in parts
            for inner in (_expand(next(nodes), lower, upper, messages) if isinstance(part, str) else (part,))
        ]
    return [part for part in parts if not isinstance(part, str)], messages


def _expand(node: NodeFile, lower: str | None, upper: str | None, messages: dict[str, str | None]) -> list[_Part | str]:
    """Return a node's rows within bounds, interleaved with the children within bounds. Collect the node's messages."""
    for key, location in node.buffer.items():
        if (lower is None or lower <= key) and (upper is None or key < upper):
            messages.setdefault(key, location)  # messages nearer the root are newer, and were collected first
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

    Nearly all nodes are entirely on one side of the bound and take only one or two comparisons.
    """
    if not node.keys or bound <= node.keys[0]:
        return 0
    return len(node.keys) if node.keys[-1] < bound else bisect_left(node.keys, bound)


def with_messages(
    keys: pa.StringArray, locations: pa.StringArray, messages: Mapping[str, str | None]
) -> tuple[pa.StringArray, pa.StringArray]:
    """Apply newer messages to columns of entries.

    Args:
        keys: The keys, in ascending order.
        locations: The locations of the keys.
        messages: The new location of each key; None to delete the key.

    Returns:
        The resulting keys, in ascending order, and their locations.
    """
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
    order = sorted(rows)  # code point order is the same as UTF-8 byte order
    return pa.array(order, keys.type), pa.array([rows[key] for key in order], locations.type)


def prefix_keys(store: NodeStore, root: NodeFile, prefix: str) -> pa.ChunkedArray:
    """Return all keys that start with a prefix, in ascending order, as a chunked Arrow column."""
    parts, messages = _parts(store, root, prefix, prefix_end(prefix))
    keys = pa.chunked_array([part.cut(part.node.keys) for part in parts], pa.utf8())
    if not messages or (len(keys) > _FEW_ROWS and _only_overwrites(keys, messages)):
        return keys
    joined = joined_texts(keys.chunks)
    return pa.chunked_array([with_messages(joined, pa.nulls(len(joined), pa.utf8()), messages)[0]])


def _only_overwrites(keys: pa.ChunkedArray, messages: Mapping[str, str | None]) -> bool:
    """Whether messages neither add nor delete a key."""
    existing = set(keys.filter(pc.is_in(keys, pa.array(list(messages), keys.type))).to_pylist())
    return all((key in existing) == (location is not None) for key, location in messages.items())


def prefix_end(prefix: str) -> str | None:
    """Return the smallest string greater than all strings that start with ``prefix``, or None if there is none."""
    stem = prefix.rstrip("\U0010ffff")
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None


_MAX_RANGES = 4_096
_TYPICAL_FILL = 0.8  # between the fill of nodes after splits and the fill of a bulk-loaded tree


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of keys."""

    #: The inclusive lower bound; None for no bound.
    lower: str | None = None
    #: The exclusive upper bound; None for no bound.
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
        """Return a copy of a node with only the keys of this range and the children that may contain such keys."""
        first = 0 if self.lower is None else bisect_left(node.keys, self.lower)
        end = len(node.keys) if self.upper is None else max(first, bisect_left(node.keys, self.upper))
        buffer = {key: location for key, location in node.buffer.items() if key in self}
        if end - first == len(node.keys):
            return node if len(buffer) == len(node.buffer) else replace(node, buffer=buffer)
        children = node.children[first : end + 1] if node.children else node.children
        return replace(node, keys=node.keys[first:end], values=node.values[first:end], children=children, buffer=buffer)


class NodesInRange(NodeStore):
    """A view of another store that restricts every node to one range of keys. Nodes outside the range are not read."""

    def __init__(self, nodes: NodeStore, keys: KeyRange):
        self._nodes = nodes
        self._keys = keys

    def load(self, location: str) -> NodeFile:
        return self._keys.part_of(self._nodes.load(location))

    def load_many(self, locations: Sequence[str]) -> list[NodeFile]:
        return [self._keys.part_of(node) for node in self._nodes.load_many(locations)]


def split(nodes: NodeStore, root: NodeFile, order: int, within: KeyRange, objects_per_range: int) -> list[KeyRange]:
    """Split a key range into ranges with about the same number of objects.

    The bounds are keys of upper levels, and only the nodes needed to determine them are read. Only one leaf is read, to
    determine the height of the tree. Raises the errors of :func:`get`.

    Args:
        nodes: Reads the nodes.
        root: The root of the tree.
        order: The order of the tree.
        within: The range to split.
        objects_per_range: Approximate number of objects in each range.
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
        n_wanted = min(max(1, round(n_objects / objects_per_range)), _MAX_RANGES)
        if len(bounds) + 1 >= n_wanted or levels_below <= 1:
            break
        level = limited.load_many(children)
        levels_below -= 1
    ordered = sorted(bounds)
    n_ranges = min(n_wanted, len(ordered) + 1)
    inner = [ordered[len(ordered) * number // n_ranges] for number in range(1, n_ranges)]
    edges = [within.lower, *inner, within.upper]
    return [KeyRange(lower, upper) for lower, upper in pairwise(edges)]


def _height(nodes: NodeStore, node: NodeFile) -> int:
    """Return the number of levels below a node."""
    height = 0
    while node.children:
        height += 1
        check_depth(height, node.children[0])
        node = nodes.load(node.children[0])
    return height
