"""Combine appends to the same Iceberg table that were made on both sides of a clone.

By Iceberg's rules, appends never conflict. Combining requires that both sides have only appended since their common
snapshot, and that the table has the same columns, partitions, order and properties on both sides. Compactions in the
parent are allowed because they do not change rows.

The result is an additional snapshot of the parent's table. It records the newest clone snapshot whose files it
contains, so that no file is appended twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import new_table_path
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import load_table_metadata
from trinitylake_ops.iceberg.reach import DAMAGE, entries_in, manifests_in
from trinitylake_ops.iceberg.table_change import TransactionTarget
from trinitylake_ops.iceberg.trim import is_first
from trinitylake_ops.iceberg.write.data_files import with_path
from trinitylake_ops.iceberg.write.replacement import add_snapshot
from trinitylake_ops.operations.clones.compare import MergeInputs, ObjectState
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot as Version

#: The property of a combined snapshot that records the newest clone snapshot whose files it contains.
COMBINED_TO = "trinitylake.combined-to"

#: The latest Iceberg format version that this library writes.
_MAX_FORMAT_VERSION = 2
_ALLOWED_IN_PARENT = (Operation.APPEND, Operation.REPLACE)
_NOT_ONLY_APPENDS_IN_CLONE = "the clone changed it other than by appends"


@dataclass(frozen=True, slots=True)
class Appends:
    """Files that the clone appended to a table to which the parent also appended."""

    #: The key of the table in the tree.
    key: str
    #: The name of the table.
    name: ObjectName
    #: The URI of the parent's definition.
    parent_location: str
    #: The id of the table.
    table_id: str
    #: The data files that the parent's table lacks, with their locations in the clone.
    files: tuple[DataFile, ...]
    #: The clone's snapshot that contains these files.
    to_snapshot: int

    @property
    def rows(self) -> int:
        """The number of rows in the files, according to manifests."""
        return sum(file.record_count for file in self.files)


class AppendFinder:
    """Find files that the clone appended to tables changed on both sides. Reads metadata and manifests, not data."""

    def __init__(self, sides: MergeInputs):
        self._definitions = sides.clone.lake.files.definitions
        self._io = sides.clone_io()

    def __call__(self, state: ObjectState) -> Appends | str:
        """Return the files that the clone appended, or the reason why the changes to the table conflict.

        The reason is empty if the change itself explains the conflict. A damaged table is a conflict, so that the other
        tables can be merged.

        Raises:
            StorageError: A storage request failed.
        """
        try:
            return self._appends(state)
        except DAMAGE as error:
            return f"some of its files cannot be read: {error.message}"

    def _appends(self, state: ObjectState) -> Appends | str:
        if state.name.table is None or state.parent is None or state.clone is None:
            return ""
        parent, clone = self._definitions.table(state.parent), self._definitions.table(state.clone)
        if parent.id != clone.id:
            return "these are two tables with the same name"
        if difference := _difference(parent, clone):
            return f"their {difference} differ"
        base = None if state.base is None else self._definitions.table(state.base)
        base_id = None
        if base is not None and base.id == parent.id and iceberg_metadata(base):
            base_id = load_table_metadata(base, self._io).metadata.current_snapshot_id
        ours, theirs = (load_table_metadata(definition, self._io).metadata for definition in (parent, clone))
        new = new_in_clone(ours, theirs, base_id)
        if isinstance(new, str):
            return new
        files = self._added_files(new, self._io.for_table(clone))
        if files is None:
            return _NOT_ONLY_APPENDS_IN_CLONE
        to_snapshot = theirs.current_snapshot_id
        assert to_snapshot is not None, "a table with appends has a current snapshot"
        return Appends(state.key, state.name, state.parent, parent.id, tuple(files), to_snapshot)

    def _added_files(self, snapshots: list[Snapshot], io: StorageFileIO) -> list[DataFile] | None:
        """Return the data files that snapshots added, or None if the snapshots made any other change."""
        files = []
        for snapshot in reversed(snapshots):
            for manifest in manifests_in(snapshot, io):
                if manifest.added_snapshot_id != snapshot.snapshot_id:
                    continue
                for entry in entries_in(manifest, io):
                    if entry.status == ManifestEntryStatus.EXISTING:  # from merged manifests
                        continue
                    if entry.status != ManifestEntryStatus.ADDED or manifest.content != ManifestContent.DATA:
                        return None
                    files.append(entry.data_file)
        return files


def _difference(parent: TableDef, clone: TableDef) -> str:
    """Return the differences between two definitions apart from the metadata location; empty if there are none."""
    if parent.schema != clone.schema:
        return "columns"
    if parent.properties != clone.properties:
        return "properties"
    if not (parent.is_managed and parent.is_iceberg and iceberg_metadata(parent) and iceberg_metadata(clone)):
        return "definitions"
    properties = {**clone.format_properties, METADATA_LOCATION: parent.format_properties[METADATA_LOCATION]}
    return "" if replace(clone, format_properties=properties) == parent else "definitions"


def new_in_clone(parent: TableMetadata, clone: TableMetadata, base_id: int | None) -> list[Snapshot] | str:
    """Return the snapshots of the clone whose files the parent's table lacks, newest first.

    Args:
        parent: The metadata of the parent's table.
        clone: The metadata of the clone's table.
        base_id: The current snapshot of the last state that both sides had in common. If it is not an ancestor on one
            side, the table was rolled back on that side.

    Returns:
        The snapshots, or the reason why the changes conflict.
    """
    properties = zip(_compared_properties(parent).items(), _compared_properties(clone).values(), strict=True)
    if different := [name for (name, ours), theirs in properties if ours != theirs]:
        return f"their {' and '.join(different)} differ"
    format_version = max(parent.format_version, clone.format_version)
    if format_version > _MAX_FORMAT_VERSION:
        return f"writing tables of Iceberg format version {format_version} is not supported"
    if parent.current_snapshot_id is None or clone.current_snapshot_id is None:
        return "one of them has no snapshot"
    ours, theirs = list(_ancestors(parent)), list(_ancestors(clone))
    our_ids, their_ids = ({snapshot.snapshot_id for snapshot in chain} for chain in (ours, theirs))
    our_marks, their_marks = (
        {mark for snapshot in chain if (mark := _combined_to(snapshot)) is not None} for chain in (ours, theirs)
    )
    # The parent also has files that a refresh combined in the clone, if a concurrent promotion copied the same files.
    new = _until(
        theirs,
        lambda snapshot: (
            snapshot.snapshot_id in our_ids or not our_marks.isdisjoint({snapshot.snapshot_id, _combined_to(snapshot)})
        ),
    )
    own_snapshots = _until(
        ours, lambda snapshot: snapshot.snapshot_id in their_ids or _combined_to(snapshot) in their_ids
    )
    if new is None or any(_operation(snapshot) != Operation.APPEND for snapshot in new):
        return _NOT_ONLY_APPENDS_IN_CLONE
    if own_snapshots is None or any(_operation(snapshot) not in _ALLOWED_IN_PARENT for snapshot in own_snapshots):
        return "the parent changed it other than by appends"
    if all(any(_combined_to(snapshot) is not None for snapshot in chain) for chain in (new, own_snapshots)):
        return "it was refreshed and promoted at the same time"
    if base_id is not None and not (base_id in our_ids | our_marks and base_id in their_ids | their_marks):
        return "one of them was rolled back"
    return new


def _compared_properties(metadata: TableMetadata) -> dict[str, object]:
    order, schema = metadata.sort_order_by_id(metadata.default_sort_order_id), metadata.schema()
    return {
        "uuids": metadata.table_uuid,
        "columns": (schema.fields, metadata.last_column_id),
        "keys": set(schema.identifier_field_ids),
        "partitions": (metadata.spec(), metadata.default_spec_id),
        "orders": None if order is None else order.fields,
        "properties": metadata.properties,
    }


def _ancestors(metadata: TableMetadata) -> Iterator[Snapshot]:
    """Yield the current snapshot and its ancestors that have not expired."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    snapshot_id = metadata.current_snapshot_id
    while snapshot_id is not None and (snapshot := by_id.pop(snapshot_id, None)) is not None:
        yield snapshot
        snapshot_id = snapshot.parent_snapshot_id


def _until(chain: list[Snapshot], is_common: Callable[[Snapshot], bool]) -> list[Snapshot] | None:
    """Return the snapshots before the first common snapshot, or None if an expired ancestor comes first."""
    newer: list[Snapshot] = []
    for snapshot in chain:
        if is_common(snapshot):
            return newer
        newer.append(snapshot)
    return newer if newer and is_first(newer[-1]) else None


def _operation(snapshot: Snapshot) -> Operation | None:
    return None if snapshot.summary is None else snapshot.summary.operation


def _combined_to(snapshot: Snapshot) -> int | None:
    """Return the newest clone snapshot whose files a combined snapshot contains, or None if it is not combined."""
    properties: Mapping[str, str] = {} if snapshot.summary is None else snapshot.summary.additional_properties
    text = properties.get(COMBINED_TO, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def write_combined(
    lake: Lakehouse,
    base: Version,
    appended: Sequence[Appends],
    written: list[str],
    copy_uri: Callable[[str, str], str] | None = None,
) -> dict[str, tuple[str, TableDef]]:
    """Write metadata of the parent's tables that includes the files appended in the clone. It is not committed yet.

    Args:
        lake: The lakehouse that receives the tables: the parent or the clone.
        base: The version on which the tables are committed.
        appended: The files that the clone appended.
        written: Receives the location of each metadata file.
        copy_uri: Returns the URI of a file's copy in the parent, given the table id and the URI of the file in the
            clone. None for the clone, which adds its own files to the parent's tables.

    Returns:
        The paths of the new definitions, and the definitions, by key.

    Raises:
        StorageError: A storage request failed.
    """
    combined = {}
    limit_bytes = base.definition.file_path_max_size_bytes
    for appends in appended:
        definition = _combined_metadata(lake, base, appends, copy_uri)
        written.append(definition.format_properties[METADATA_LOCATION])
        combined[appends.key] = (
            new_table_path(appends.name.namespace, appends.name.table or "", limit_bytes),
            definition,
        )
    return combined


def _combined_metadata(
    lake: Lakehouse, base: Version, appends: Appends, copy_uri: Callable[[str, str], str] | None
) -> TableDef:
    transaction = lake.transaction(message="combine appends")
    transaction.base = base
    if copy_uri is None:
        transaction.restore_entry(appends.key, appends.parent_location)
    catalog = TrinityLakeCatalog.on(TransactionTarget(transaction, lake.storage_options))
    assert appends.name.table is not None
    name = (appends.name.namespace, appends.name.table)
    change = catalog.load_table(name).transaction()
    files = appends.files
    if copy_uri is not None:
        files = tuple(with_path(file, copy_uri(appends.table_id, file.file_path)) for file in files)
    add_snapshot(change, files, [], {COMBINED_TO: str(appends.to_snapshot)})
    change.commit_transaction()
    return transaction.table(*name)
