"""Pointers that lead nowhere: to a lost file, or by damage to a file that never was."""

from __future__ import annotations

from bisect import bisect_left

from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.file_names import is_misnamed
from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.tree.nodes.descent import check_depth
from trinitylake_ops.tree.nodes.node_store import NodeStore


def is_damaged_pointer(error: object) -> bool:
    """Whether a file is missing because the pointer to it is damaged: its prefix is not that of its name."""
    return isinstance(error, FileMissingError) and error.path is not None and is_misnamed(error.path)


def told_of_pointer(error: FileMissingError) -> FileMissingError:
    """Return the error of a file that a damaged pointer leads to."""
    message = "the pointer to it is damaged, as its prefix is not that of its name: verify says which node holds it"
    return FileMissingError(f"{error.message}; {message}", path=error.path, version=error.version)


def holder_of(store: NodeStore, root: NodeFile, root_location: str, key: str) -> str:
    """Return the location of the node that holds the value of a key. Raises what reading raises."""
    node, location, depth = root, root_location, 0
    while key not in node.buffer and not node.is_leaf:
        row = bisect_left(node.keys, key)
        if row < len(node.keys) and node.keys[row] == key:
            break
        location = node.children[row]
        depth += 1
        check_depth(depth, location)
        node = store.load(location)
    return location
