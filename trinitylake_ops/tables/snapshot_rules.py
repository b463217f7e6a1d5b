"""Rules for new snapshots and branches of tables, which keep tables readable by all engines."""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.errors import InvalidDefinitionError


def check_new_snapshots(name: str, metadata: TableMetadata, current: TableMetadata | None) -> None:
    """Raise InvalidDefinitionError for a new snapshot, or a branch, that some engines cannot read.

    Args:
        name: The name of the table, for messages.
        metadata: The metadata of the table with its new snapshots.
        current: The metadata before the change, None for a new table. Its snapshots are accepted.

    Raises:
        InvalidDefinitionError: The id of a snapshot is not positive (pyiceberg takes -1 for no snapshot), its schema
            is not one of the table's, or its parents form a cycle. Or ``main`` is a tag, to which no engine can
            append.
    """
    known = set() if current is None else {snapshot.snapshot_id for snapshot in current.snapshots}
    fresh = [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id not in known]
    parents = {snapshot.snapshot_id: snapshot.parent_snapshot_id for snapshot in fresh}
    schema_ids = {schema.schema_id for schema in metadata.schemas}
    for snapshot in fresh:
        fault = _fault(snapshot, schema_ids) or _cycle(snapshot.snapshot_id, parents)
        if fault is not None:
            raise InvalidDefinitionError(f"snapshot {snapshot.snapshot_id} of table {name} {fault}")
    main = metadata.refs.get(MAIN_BRANCH)
    if main is not None and main.snapshot_ref_type is not SnapshotRefType.BRANCH:
        raise InvalidDefinitionError(f"{MAIN_BRANCH!r} of table {name} is a tag: it must be a branch; use another name")


def _fault(snapshot: Snapshot, schema_ids: set[int]) -> str | None:
    if snapshot.snapshot_id <= 0:
        return "has an id that is not positive; use a positive one"
    if snapshot.schema_id is not None and snapshot.schema_id not in schema_ids:
        return f"has the schema {snapshot.schema_id}, which the table does not have; add the schema first"
    return None


def _cycle(snapshot_id: int, parents: dict[int, int | None]) -> str | None:
    """Return the fault of a new snapshot that is its own ancestor. Only new snapshots can form a cycle."""
    ancestor = parents[snapshot_id]
    for _ in parents:
        if ancestor is None or ancestor not in parents:
            return None
        if ancestor == snapshot_id:
            break
        ancestor = parents[ancestor]
    return "is among its own ancestors; name the snapshot that it follows as its parent"
