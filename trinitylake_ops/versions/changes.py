"""The changes between two versions, by namespace and table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trinitylake_ops.format.nodes.keys import KeyCodec
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a namespace (``table`` is None) or of a table between two versions."""

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None


def diff_snapshots(before: Snapshot, after: Snapshot) -> list[Change]:
    """Return the changes between two versions of one lakehouse. Objects of unknown type are left out."""
    with before.reading(), after.reading():
        changes = [change_of(after.keys, change) for change in diff_trees(before.files.nodes, before.root, after.root)]
    return [change for change in changes if change is not None]


def change_of(keys: KeyCodec, change: KeyChange) -> Change | None:
    """Return what a changed key means, or None for an object of unknown type."""
    name = keys.decode(change.key)
    if name is None:
        return None
    if change.before is None:
        return Change("added", name.namespace, name.table)
    return Change("removed" if change.after is None else "changed", name.namespace, name.table)
