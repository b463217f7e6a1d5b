"""Appends on both sides of one Iceberg table: the parent's table, with the files that were appended in the clone.

By Iceberg's rules appended files conflict with nothing. Here both sides must have appended alone since the snapshot
that both have, on a table of the same columns, partitions, order and properties. A compaction counts as nothing, since
it changes no row. What is combined is one more snapshot on the parent's. It names the clone's snapshot up to which the
clone's files are in it, so that no file is appended twice.
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

#: The property of a combined snapshot: the clone's snapshot whose files, and those of the snapshots before, it has.
COMBINED_TO = "trinitylake.combined-to"

# The latest version of Iceberg's format whose tables are written.
_LATEST_WRITTEN = 2
_SAME_ROWS = (Operation.APPEND, Operation.REPLACE)
_NOT_ONLY_IN_CLONE = "in the clone it was not only appended to"


@dataclass(frozen=True, slots=True)
class Appends:
    """What was appended in the clone to a table that the parent appended to, too.

    ``parent_location`` is the URI of the parent's definition. ``files`` are those that the parent's table lacks, with
    their places in the clone. ``to_snapshot`` is the clone's snapshot that has them.
    """

    key: str
    name: ObjectName
    parent_location: str
    table_id: str
    files: tuple[DataFile, ...]
    to_snapshot: int

    @property
    def rows(self) -> int:
        """Their rows, as manifests count them."""
        return sum(file.record_count for file in self.files)


class FindsAppends:
    """Finds out whether both sides appended to a table, and what. Reads metadata and manifests, no data."""

    def __init__(self, sides: MergeInputs):
        self._definitions = sides.clone.lake.files.definitions
        self._io = sides.clone_io()

    def __call__(self, state: ObjectState) -> Appends | str:
        """Return what the clone appended, or why the table's changes are not such: an empty text where that is plain.

        A table that is damaged on one side is a conflict, so that the others can be merged. Raises StorageError.
        """
        try:
            return self._appends(state)
        except DAMAGE as error:
            return f"its files cannot all be read: {error.message}"

    def _appends(self, state: ObjectState) -> Appends | str:
        if state.name.table is None or state.parent is None or state.clone is None:
            return ""
        parent, clone = self._definitions.table(state.parent), self._definitions.table(state.clone)
        if parent.id != clone.id:
            return "two tables of one name"
        if differing := _differing(parent, clone):
            return f"their {differing} differ"
        base = None if state.base is None else self._definitions.table(state.base)
        base_id = None
        if base is not None and base.id == parent.id and iceberg_metadata(base):
            base_id = load_table_metadata(base, self._io).metadata.current_snapshot_id
        ours, theirs = (load_table_metadata(one, self._io).metadata for one in (parent, clone))
        new = new_in_clone(ours, theirs, base_id)
        if isinstance(new, str):
            return new
        files = self._added(new, self._io.for_table(clone))
        if files is None:
            return _NOT_ONLY_IN_CLONE
        to_snapshot = theirs.current_snapshot_id
        assert to_snapshot is not None, "an append left a snapshot"
        return Appends(state.key, state.name, state.parent, parent.id, tuple(files), to_snapshot)

    def _added(self, snapshots: list[Snapshot], io: StorageFileIO) -> list[DataFile] | None:
        """Return the data files that snapshots added, None if they have anything else."""
        found = []
        for snapshot in reversed(snapshots):
            for manifest in manifests_in(snapshot, io):
                if manifest.added_snapshot_id != snapshot.snapshot_id:
                    continue
                for entry in entries_in(manifest, io):
                    if entry.status == ManifestEntryStatus.EXISTING:  # manifests that were merged
                        continue
                    if entry.status != ManifestEntryStatus.ADDED or manifest.content != ManifestContent.DATA:
                        return None
                    found.append(entry.data_file)
        return found


def _differing(parent: TableDef, clone: TableDef) -> str:
    """Return what differs between two definitions, beside where the metadata is; nothing if no more does."""
    if parent.schema != clone.schema:
        return "columns"
    if parent.properties != clone.properties:
        return "properties"
    if not (parent.is_managed and parent.is_iceberg and iceberg_metadata(parent) and iceberg_metadata(clone)):
        return "definitions"
    properties = {**clone.format_properties, METADATA_LOCATION: parent.format_properties[METADATA_LOCATION]}
    return "" if replace(clone, format_properties=properties) == parent else "definitions"


def new_in_clone(parent: TableMetadata, clone: TableMetadata, base_id: int | None) -> list[Snapshot] | str:
    """Return the snapshots whose files the parent's table lacks, the newest first.

    Or why not, unless both sides have appended alone since the newest snapshot that both have. ``base_id`` is the
    current snapshot of the last state that both sides had: where one side left it, the table was set back.
    """
    shapes = zip(_shape(parent).items(), _shape(clone).values(), strict=True)
    if differing := [what for (what, here), there in shapes if here != there]:
        return f"their {' and '.join(differing)} differ"
    if max(parent.format_version, clone.format_version) > _LATEST_WRITTEN:
        return f"tables of Iceberg's format {max(parent.format_version, clone.format_version)} are not written"
    if parent.current_snapshot_id is None or clone.current_snapshot_id is None:
        return "one of them has no rows"
    ours, theirs = list(_chain(parent)), list(_chain(clone))
    here, there = ({one.snapshot_id for one in chain} for chain in (ours, theirs))
    marks, their_marks = ({mark for one in chain if (mark := _mark(one)) is not None} for chain in (ours, theirs))
    # What a refresh combined in the clone is in the parent, too, if a promotion beside it brought the same.
    new = _until(theirs, lambda one: one.snapshot_id in here or not marks.isdisjoint({one.snapshot_id, _mark(one)}))
    own = _until(ours, lambda one: one.snapshot_id in there or _mark(one) in there)
    if new is None or any(_operation(one) != Operation.APPEND for one in new):
        return _NOT_ONLY_IN_CLONE
    if own is None or any(_operation(one) not in _SAME_ROWS for one in own):
        return "in the parent it was not only appended to"
    if all(any(_mark(one) is not None for one in chain) for chain in (new, own)):
        return "it was refreshed and promoted at the same time"
    if base_id is not None and not (base_id in here | marks and base_id in there | their_marks):
        return "one of them was set back"
    return new


def _shape(metadata: TableMetadata) -> dict[str, object]:
    order, schema = metadata.sort_order_by_id(metadata.default_sort_order_id), metadata.schema()
    return {
        "uuids": metadata.table_uuid,
        "columns": (schema.fields, metadata.last_column_id),
        "keys": set(schema.identifier_field_ids),
        "partitions": (metadata.spec(), metadata.default_spec_id),
        "orders": None if order is None else order.fields,
        "properties": metadata.properties,
    }


def _chain(metadata: TableMetadata) -> Iterator[Snapshot]:
    """Yield the current snapshot and its ancestors, as far as the table has them."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    number = metadata.current_snapshot_id
    while number is not None and (found := by_id.pop(number, None)) is not None:
        yield found
        number = found.parent_snapshot_id


def _until(chain: list[Snapshot], ends: Callable[[Snapshot], bool]) -> list[Snapshot] | None:
    """Return the snapshots before the first that ends the search, None if the chain breaks off before."""
    found: list[Snapshot] = []
    for snapshot in chain:
        if ends(snapshot):
            return found
        found.append(snapshot)
    return found if found and is_first(found[-1]) else None


def _operation(snapshot: Snapshot) -> Operation | None:
    return None if snapshot.summary is None else snapshot.summary.operation


def _mark(snapshot: Snapshot) -> int | None:
    """Return up to which snapshot of the clone a combined one goes, None for any other."""
    properties: Mapping[str, str] = {} if snapshot.summary is None else snapshot.summary.additional_properties
    text = properties.get(COMBINED_TO, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def write_combined(
    lake: Lakehouse,
    base: Version,
    appended: Sequence[Appends],
    written: list[str],
    moved: Callable[[str, str], str] | None = None,
) -> dict[str, tuple[str, TableDef]]:
    """Write the metadata of the parent's tables with the files that the clone appended. Nothing names it yet.

    Args:
        lake: The lakehouse that gets the tables: the parent, or the clone.
        base: The version of it on which they are committed.
        appended: What the clone appended.
        written: Receives the location of each metadata file.
        moved: Returns, for the id of a table and the URI of a file of it in the clone, the URI of its copy in the
            parent. None for the clone, which adds its own files to the parent's tables.

    Returns:
        The paths of the new definitions, and the definitions, by key.

    Raises:
        StorageError: A file cannot be read or written.
    """
    combined = {}
    limit_bytes = base.definition.file_path_max_size_bytes
    for one in appended:
        definition = _combined(lake, base, one, moved)
        written.append(definition.format_properties[METADATA_LOCATION])
        combined[one.key] = (new_table_path(one.name.namespace, one.name.table or "", limit_bytes), definition)
    return combined


def _combined(lake: Lakehouse, base: Version, appends: Appends, moved: Callable[[str, str], str] | None) -> TableDef:
    transaction = lake.transaction(message="combine appends")
    transaction.base = base
    if moved is None:
        transaction.restore_entry(appends.key, appends.parent_location)
    catalog = TrinityLakeCatalog.on(TransactionTarget(transaction, lake.storage_options))
    assert appends.name.table is not None
    name = (appends.name.namespace, appends.name.table)
    change = catalog.load_table(name).transaction()
    files = appends.files
    if moved is not None:
        files = tuple(with_path(file, moved(appends.table_id, file.file_path)) for file in files)
    add_snapshot(change, files, [], {COMBINED_TO: str(appends.to_snapshot)})
    change.commit_transaction()
    return transaction.table(*name)
