"""Reading a tree: point lookups and range scans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from trinitylake_ops.format.node_file import NodeFile
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
    levels: list[list[NodeFile]] = [[root]]
    while children := [
        child for node in levels[-1] for child in node.children[_first_child(node, lower) : _end_child(node, upper)]
    ]:
        levels.append(store.load_many(children))
    found: dict[str, str] = {}
    for level in levels:
        for node in level:
            first = 0 if lower is None else bisect_left(node.keys, lower)
            end = len(node.keys) if upper is None else bisect_left(node.keys, upper)
            found.update(zip(node.keys[first:end], node.values[first:end], strict=True))
    for level in reversed(levels):
        for node in level:
            for key, value in node.buffer.items():
                if (lower is not None and key < lower) or (upper is not None and key >= upper):
                    continue
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value
    return sorted(found.items())


def scan_prefix(store: NodeStore, root: NodeFile, prefix: str) -> list[tuple[str, str]]:
    """Return all (key, location) whose key starts with a prefix, ascending."""
    return scan(store, root, prefix, prefix_end(prefix))


def prefix_end(prefix: str) -> str | None:
    """Return the least string above all that start with ``prefix``, or None when there is none."""
    stem = prefix.rstrip("\U0010ffff")
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None


def _first_child(node: NodeFile, lower: str | None) -> int:
    return 0 if lower is None else bisect_right(node.keys, lower)


def _end_child(node: NodeFile, upper: str | None) -> int:
    return len(node.children) if upper is None else bisect_left(node.keys, upper) + 1
