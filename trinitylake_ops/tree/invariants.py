"""The invariants of a tree (FORMAT.md, "Node files"), checked one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from trinitylake_ops.format.nodes.node_file import NodeFile, encoded_size_bytes
from trinitylake_ops.tree.nodes.node import TreeLimits
from trinitylake_ops.tree.nodes.node_store import NodeStore
from trinitylake_ops.tree.walk import VisitedNode, walk


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, at the location of the node that breaks it."""

    location: str
    message: str


def check_tree(store: NodeStore, root: NodeFile, root_location: str, limits: TreeLimits) -> list[Violation]:
    """Return all violations of one tree.

    Raises CorruptFileError for a node that is reached twice, and what reading its nodes raises.
    """
    violations: list[Violation] = []
    leaf_depth: int | None = None
    for visited in walk(store, root, root_location):
        violations += check_node(visited, limits)
        if visited.node.is_leaf:
            leaf_depth = visited.depth if leaf_depth is None else leaf_depth
            if visited.depth != leaf_depth:
                violations.append(
                    Violation(visited.location, f"leaf on level {visited.depth}, others on level {leaf_depth}")
                )
    return violations


def check_node(visited: VisitedNode, limits: TreeLimits) -> list[Violation]:
    """Return the violations that one node shows by itself."""
    return [Violation(visited.location, message) for message in _messages(visited, limits)]


def _messages(visited: VisitedNode, limits: TreeLimits) -> Iterator[str]:
    node, is_root = visited.node, visited.depth == 0
    if len(node.keys) > limits.max_keys and not node.is_flat:
        yield f"{len(node.keys)} keys, at most {limits.max_keys} fit order {limits.order}"
    if not is_root and len(node.keys) < limits.min_keys:
        yield f"{len(node.keys)} keys, a node of order {limits.order} has at least {limits.min_keys}"
    if is_root and not node.keys and not node.is_leaf:
        yield "the root has a child but no key"
    if not node.is_leaf and len(node.children) != len(node.keys) + 1:
        yield f"{len(node.children)} children for {len(node.keys)} keys"
    for lower, upper in pairwise(node.keys):
        if lower >= upper:
            yield f"key {upper!r} does not ascend after {lower!r}"
    for key in [*node.keys, *node.buffer]:
        if (visited.lower is not None and key <= visited.lower) or (visited.upper is not None and key >= visited.upper):
            yield f"key {key!r} is outside the range that the parent gives this node"
    size_bytes = encoded_size_bytes(
        max(limits.order, len(node.keys) + 1),
        node.keys,
        node.values,
        sum(len(child.encode("utf-8")) for child in node.children),
        node.buffer,
        node.system,
    )
    if node.buffer and size_bytes > limits.node_file_max_size_bytes:
        yield f"buffered messages make a file of {size_bytes} bytes, more than {limits.node_file_max_size_bytes}"
