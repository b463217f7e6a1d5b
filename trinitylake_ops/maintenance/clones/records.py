"""Clones as both lakehouses record them, and opening one from its parent (docs/decisions/0060)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import (
    ExportNotFoundError,
    InvalidInputError,
    LakehouseNotFoundError,
    MaintenanceBlockedError,
)
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, LakehouseDef, ParentRecord, TableDef
from trinitylake_ops.format.locations import as_uri
from trinitylake_ops.maintenance.plans.cost import MeteredLakehouse, uncached_on
from trinitylake_ops.maintenance.reach.table_files import iceberg_metadata
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.local.folders import lies_within
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot

_MOST_NAMED = 3


def clone_record(definition: LakehouseDef, name: str) -> ExportRecord:
    """Return the record of a clone in its parent's definition. Raises ExportNotFoundError."""
    clones = clones_of(definition)
    record = next((one for one in clones if one.name == name), None)
    if record is None:
        known = ", ".join(one.name for one in clones) or "none"
        raise ExportNotFoundError(f"there is no clone {name!r}; clones: {known}")
    return record


def same_clone(definition: LakehouseDef, record: ExportRecord) -> ExportRecord:
    """Return the record of a clone as it is now. Raises ExportNotFoundError if it was dropped meanwhile."""
    found = clone_record(definition, record.name)
    if found.clone_id != record.clone_id:
        raise ExportNotFoundError(f"clone {record.name!r} was dropped meanwhile, and another one has its name")
    return found


def check_no_table_root(definition: LakehouseDef, root: str) -> None:
    """Raise InvalidInputError for a lakehouse whose tables stand elsewhere: nobody could tell whose they are then."""
    if definition.table_root:
        raise InvalidInputError(
            f"{root} cannot have clones: its tables are under its table root {definition.table_root};"
            " make a full export instead"
        )


def records_of_clone(definition: LakehouseDef, clone_id: str) -> list[ExportRecord]:
    """Return all records that keep versions of the parent for one clone."""
    return [record for record in definition.exports if record.clone_id == clone_id]


class OtherLakehouseError(InvalidInputError):
    """The root of a clone has another lakehouse, or a clone of another one."""

    code = "other-lakehouse"


@dataclass(frozen=True)
class OpenedClone:
    """A clone, opened from its parent: its lakehouse, its latest version, and what it says of its parent."""

    lake: Lakehouse
    latest: Snapshot
    parent: ParentRecord


def is_parent(parent: ParentRecord, record: ExportRecord, source_id: str) -> bool:
    """Whether what a lakehouse says of its parent is that it is this very clone."""
    return parent.clone_id == record.clone_id and parent.lakehouse_id == source_id


def lakehouse_of(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None
) -> Lakehouse:
    """Return whatever lakehouse stands at the root of a clone. Raises LocationNotAllowedError.

    Whoever writes there may not have the rights of this process. So no link is followed out of it.
    """
    source = metered.lake
    if target_options is None:  # otherwise the caller knows the target
        source.elsewhere.places.check_root(record.target_uri)
        target_options = options_for(source, record.target_uri)
    options = StorageOptions({**(target_options or {}), "file.follow_links": "false"})
    return uncached_on(metered.also(open_storage(record.target_uri, options)), target_options)


def opened_clone(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None = None
) -> OpenedClone:
    """Open a clone. Its requests are counted with those of its parent.

    Both sides have to know each other: a record alone could name the lakehouse of anybody. Raises
    LakehouseNotFoundError if there is none, OtherLakehouseError for another one, LocationNotAllowedError, StorageError.
    """
    source = metered.lake
    lake = lakehouse_of(metered, record, target_options)
    try:
        latest = lake.snapshot()
    except LakehouseNotFoundError as error:
        raise LakehouseNotFoundError(
            f"clone {record.name!r} is gone: there is no lakehouse at {lake.root}; bring it back, or forget it:"
            f" trinitylake drop-clone {record.name}",
            path=error.path,
        ) from error
    parent = latest.definition.parent
    if parent is None or not is_parent(parent, record, source.snapshot().definition.id):
        raise OtherLakehouseError(
            f"the lakehouse at {lake.root} is not the clone {record.name!r} of this one: another one has taken its"
            " place; drop the clone, which leaves that lakehouse alone",
            path=lake.root,
        )
    lake.elsewhere.give(source.storage)
    return OpenedClone(lake, latest, parent)


def foreign_parent(lake: Lakehouse, clone: OpenedClone) -> str | None:
    """Return why a clone does not belong to ``lake``: it was made at another root. None where it does.

    A copy of the parent's files has its identity and its records, and nothing tells a copy from a parent that moved. So
    who deletes or commits in a clone has to stand where the clone says that its parent is.
    """
    if clone.parent.root == lake.root:
        return None
    return (
        f"the clone at {clone.lake.root} belongs to the lakehouse at {clone.parent.root}, and {lake.root} is a copy of"
        f" it or another name; change the clone by --root {clone.parent.root}, a drop here only forgets it"
    )


def check_belongs_here(lake: Lakehouse, clone: OpenedClone) -> None:
    """Raise OtherLakehouseError for a clone that was made at another root than that of ``lake``."""
    if reason := foreign_parent(lake, clone):
        raise OtherLakehouseError(reason, path=clone.lake.root)


def check_no_dependents(clone: OpenedClone) -> None:
    """Raise MaintenanceBlockedError where an export of the clone at another root reads its files."""
    others = [
        record for record in clone.latest.definition.exports if record.target_uri and record.level != ExportLevel.FULL
    ]
    if others:
        raise MaintenanceBlockedError(
            f"the lakehouse at {others[0].target_uri} reads files of the clone, as its export {others[0].name!r}; drop"
            " that export first",
            path=clone.lake.root,
            version=clone.latest.version,
        )


def check_not_registered(lake: Lakehouse, latest: Snapshot, record: ExportRecord, clone: OpenedClone) -> None:
    """Raise MaintenanceBlockedError where the parent has registered tables of the clone, which would lose their files.

    What it has from before the clone was made is none of the clone's.
    """
    cloned = lake.snapshot(record.version, latest=latest)
    entries = [
        (latest.keys.decode(change.key), change.after)
        for change in diff_trees(lake.files.nodes, cloned.root, latest.root)
        if change.after is not None
    ]
    tables = {after: name for name, after in entries if name is not None and name.table is not None}
    read = zip(tables.values(), lake.files.definitions.tables(list(tables)), strict=True)
    found = sorted(str(name) for name, definition in read if _is_read_there(definition, clone.lake.root))
    if found:
        names = ", ".join(found[:_MOST_NAMED]) + (", ..." if len(found) > _MOST_NAMED else "")
        raise MaintenanceBlockedError(
            f"the parent reads files of the clone by {names}, registered from there; drop these tables, and promote"
            " what is needed, or drop the clone without --delete-files",
            path=clone.lake.root,
            version=latest.version,
        )


def _is_read_there(definition: TableDef, root: str) -> bool:
    metadata = iceberg_metadata(definition)
    return not definition.is_managed and bool(metadata) and lies_within(as_uri(str(metadata)), root)
