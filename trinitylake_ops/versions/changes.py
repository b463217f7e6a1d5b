"""The changes between two versions, by namespace and table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.format.nodes.keys import KeyCodec
from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a namespace (``table`` is None) or of a table between two versions."""

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None


def diff_snapshots(before: Snapshot, after: Snapshot, files: LakehouseFiles | None = None) -> list[Change]:
    """Return the changes between two versions of one lakehouse. Objects of unknown type are left out.

    ``files`` are those of the lakehouse of ``after``, by default as one of both reads them. A version that stands
    elsewhere, such as one from before the beginning of a clone, is compared by the full locations of what it has.
    """
    if files is None:
        files = before.files if before.files.storage.root == after.files.storage.root else after.files
    with before.reading(), after.reading():
        differences = diff_trees(files.nodes, _root_in(files, before), _root_in(files, after))
        changes = [change_of(after.keys, change) for change in differences]
    return [change for change in changes if change is not None]


def _root_in(files: LakehouseFiles, version: Snapshot) -> NodeFile:
    """Return the root of a version with locations as a lakehouse writes them."""
    root = version.files.storage.root
    if root == files.storage.root:
        return version.root
    return version.root.rebased(lambda location: to_uri(root, location))


def change_of(keys: KeyCodec, change: KeyChange) -> Change | None:
    """Return what a changed key means, or None for an object of unknown type."""
    name = keys.decode(change.key)
    if name is None:
        return None
    if change.before is None:
        return Change("added", name.namespace, name.table)
    return Change("removed" if change.after is None else "changed", name.namespace, name.table)
