"""Rebase a staged table: add its data files, with new metadata, to the table that other writers have changed.

A table may be staged on one version and published on a later one. If other writers changed it in between, its new files
are added to the newer table, unless the data that they replace changed (``write.presence``). Data files are not
rewritten. A property of the new snapshot records the staged table, so that it can be found later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes

from pyiceberg.exceptions import ValidationError
from pyiceberg.manifest import DataFile, ManifestEntry, ManifestEntryStatus
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AddSchemaUpdate, SetCurrentSchemaUpdate

from trinitylake_ops.errors import CommitConflictError, FileMissingError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.totals import partition_text
from trinitylake_ops.iceberg.write.data_files import with_path
from trinitylake_ops.iceberg.write.partition_key import decode_partitions
from trinitylake_ops.iceberg.write.plan import extend_schema
from trinitylake_ops.iceberg.write.presence import (
    STAGED_AS,
    Presence,
    added_paths,
    changed_files,
    live_paths,
    presence,
    snapshots_since,
)
from trinitylake_ops.iceberg.write.replacement import add_snapshot, files_at, files_in_partitions
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Replace, StagingCatalog, files_to_remove, staging_conflict
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse

# Keys of a snapshot's summary that PyIceberg recomputes.
_RECOMPUTED_KEYS = re.compile(r"(added|changed|deleted|removed|total|partitions?)[-.].*")
_MAX_LISTED_PARTITIONS = 3
_COPY_CONCURRENCY = 4
_PIECE_BYTES = 8 << 20


def rebase(
    lake: Lakehouse, staged: StagedTable, *, replaces_latest: bool = False, superseded: StagedTable | None = None
) -> StagedTable:
    """Return a staged table rebased onto the latest version, or return it unchanged if the table has not changed.

    Args:
        lake: The lakehouse.
        staged: The staged table.
        replaces_latest: Whether to replace the rows of the latest version even if other writers changed these rows, as
            if the files had just been staged. This is not possible for upserts, which were compared with the rows of
            their base version.
        superseded: An earlier append to the same table, which the staged append repeats. The files of the earlier
            append are removed.

    Raises:
        CommitConflictError: Other writers changed data that the staged table replaces, or rewrote the superseded files;
            the error names the table and the partitions. Also raised if the table was dropped or recreated, if its
            columns or partitions changed, or if its files are (or, because of trimmed snapshots, may be) already in the
            table.
        StorageError: A file cannot be read or written.
    """
    catalog = StagingCatalog(lake)
    reader = catalog.target.reader()
    name = (staged.namespace, staged.table)
    exists = reader.has_namespace(staged.namespace) and reader.has_table(*name)
    base_location = staged.base_metadata_location
    if not exists and base_location is None:
        return staged
    if not exists:
        raise staging_conflict(name, staged.base_version, "it was dropped")
    definition = reader.table(*name)
    is_unchanged = definition.is_iceberg and definition.format_properties.get(METADATA_LOCATION) == base_location
    if is_unchanged and superseded is None:
        return staged
    if not definition.is_iceberg or (base_location is not None and definition.id != staged.table_def.id):
        raise staging_conflict(name, staged.base_version, "another table has its name")
    if base_location is None and definition.id == staged.table_def.id:
        raise staging_conflict(name, staged.base_version, "another publication created it")
    if staged.replaces is None:
        raise staging_conflict(name, staged.base_version, "it was changed")
    table = catalog.load_table(name)
    if superseded is None:
        version = lake.snapshot(catalog.base_version)
        rebased = _Rebase(catalog, table, staged, replaces_latest=replaces_latest)
        if rebased.lacks_history and presence(lake, version, staged) is Presence.TRIMMED:
            # Other writers may since have rewritten its rows into new files.
            raise staging_conflict(
                name, staged.base_version, "it lost the snapshots that show whether it was published"
            )
        return rebased.restage()
    files = _superseded_files(lake, catalog, table, superseded)
    if is_unchanged and not files:
        return staged
    return _Rebase(catalog, table, staged, superseded=files).restage()


def _superseded_files(
    lake: Lakehouse, catalog: StagingCatalog, table: Table, superseded: StagedTable
) -> list[DataFile]:
    """Return the files that an append added; empty if a later version undid the append.

    Raises CommitConflictError if other writers removed or rewrote some of them.
    """
    change = _StagedChange.of(superseded, catalog.io)
    paths = {_path_in(table, change, file.file_path) for file in change.added}
    files = files_at(table, paths)
    if len(files) == len(paths):
        return files
    if not files and presence(lake, lake.snapshot(), superseded) is Presence.ABSENT:
        return []
    raise staging_conflict(
        (superseded.namespace, superseded.table),
        superseded.base_version,
        "the rows of the superseded append were rewritten",
    )


def _path_in(table: Table, change: _StagedChange, path: str) -> str:
    """Return the path of a staged file in a table's folder, which differs if a concurrent creation won the race."""
    folder = f"{change.metadata.location}/"
    return f"{table.location()}/{path.removeprefix(folder)}" if path.startswith(folder) else path


class _Rebase:
    def __init__(
        self,
        catalog: StagingCatalog,
        table: Table,
        staged: StagedTable,
        *,
        replaces_latest: bool = False,
        superseded: Sequence[DataFile] = (),
    ):
        self._catalog = catalog
        self._table = table
        assert isinstance(table.io, StorageFileIO)
        self._io = table.io
        self._staged = staged
        self._replaces_latest = replaces_latest
        self._superseded = superseded
        self._change = _StagedChange.of(staged, catalog.io)
        metadata = self._change.metadata
        self._replaced = decode_partitions(staged.replaced_partitions, metadata.spec(), metadata.schema())
        #: The staged files, with paths in the table's folder, which differ if a concurrent creation of the table won
        #: the race.
        self._added = [with_path(file, _path_in(table, self._change, file.file_path)) for file in self._change.added]
        self._since = snapshots_since(table.metadata, self._change.base_snapshot_id)

    @property
    def lacks_history(self) -> bool:
        """Whether the table lacks snapshots since the base, or was rolled back to a snapshot before the base."""
        return self._since is None

    def restage(self) -> StagedTable:
        self._check_files()
        transaction = self._table.transaction()
        self._put_columns(transaction)
        removed = self._removed()
        properties = {**self._change.properties, STAGED_AS: self._staged.metadata_location}
        self._copy_to_own_folder()
        add_snapshot(transaction, self._added, removed, properties)
        transaction.commit_transaction()
        return with_changes(
            self._catalog.staged((self._staged.namespace, self._staged.table)),
            begun_at_ms=self._staged.begun_at_ms,
            replaces=self._staged.replaces,
            replaced_partitions=self._staged.replaced_partitions,
        )

    def _copy_to_own_folder(self) -> None:
        """Copy staged files into the folder of the table if a concurrent creation of the table won the race.

        File names contain a UUID, so existing copies from an earlier attempt are reused. Raises StorageError.
        """
        staged_io = self._catalog.io.for_table(self._staged.table_def)

        def copy(pair: tuple[str, str]) -> None:
            output = self._io.new_output(pair[1])
            if output.exists():
                return
            source = staged_io.new_input(pair[0])
            with output.create() as stream:
                for offset in range(0, len(source), _PIECE_BYTES):
                    stream.write(source.read_range(offset, min(_PIECE_BYTES, len(source) - offset)))

        pairs = [(old.file_path, new.file_path) for old, new in zip(self._change.added, self._added, strict=True)]
        run_parallel(copy, [pair for pair in pairs if pair[0] != pair[1]], _COPY_CONCURRENCY)

    def _removed(self) -> list[DataFile]:
        """Return the data files of the table that the staged change replaces."""
        if self._superseded:
            return list(self._superseded)
        if self._staged.replaces == Replace.PARTITIONS.value:
            return files_in_partitions(self._table, self._replaced)
        if self._staged.replaces == Replace.FILES.value:
            files = files_at(self._table, self._change.removed_paths)
            if len(files) != len(self._change.removed_paths):
                raise self._conflict("files that it replaces were rewritten")
            return files
        return files_to_remove(self._table, [], Replace(self._staged.replaces))

    def _check_files(self) -> None:
        """Raise CommitConflictError if replaced data changed, or if the files are already published."""
        metadata, added = self._table.metadata, {file.file_path for file in self._added}
        since = self._since
        existing = live_paths(metadata.current_snapshot(), self._io) if since is None else added_paths(since, self._io)
        if added & existing:
            raise self._conflict("its files were already published")
        replaces_latest = self._replaces_latest and self._staged.replaces != Replace.FILES.value
        if replaces_latest or self._staged.replaces == Replace.NOTHING.value:
            return
        if since is None:
            raise self._conflict("it was rolled back, or lost the snapshots since then")
        changed = {self._text_of(entry.data_file) for entry in changed_files(since, self._io, self._is_replaced)}
        if changed:
            partitions = ", ".join(sorted(changed)[:_MAX_LISTED_PARTITIONS]) + (
                ", ..." if len(changed) > _MAX_LISTED_PARTITIONS else ""
            )
            raise self._conflict(f"other writers changed the data that it replaces ({partitions})")

    def _is_replaced(self, entry: ManifestEntry) -> bool:
        """Whether a file may contain replaced rows. Files with other partition specs cannot be compared."""
        file, spec_id = entry.data_file, self._change.metadata.default_spec_id
        has_partitions = self._staged.replaces in (Replace.PARTITIONS.value, Replace.FILES.value)
        is_comparable = has_partitions and file.spec_id == spec_id
        return not is_comparable or file.partition in self._replaced

    def _text_of(self, file: DataFile) -> str:
        """Return the partition of a file in readable form, such as ``year=2013/month=1``."""
        spec = self._table.specs()[file.spec_id]
        if spec.is_unpartitioned() or len(file.partition) == 0:
            return "all rows"
        return partition_text(file.partition, spec, self._table.schema())

    def _put_columns(self, transaction: Transaction) -> None:
        """Apply the staged columns. Raises CommitConflictError if the files no longer fit the table."""
        before, staged, now = self._change.base, self._change.metadata, self._table.metadata
        try:
            if before is None or _columns(before) != _columns(now):
                extend_schema(transaction, staged.schema())
            elif _columns(staged) != _columns(now):
                schema_id = 1 + max(schema.schema_id for schema in now.schemas)
                schema = staged.schema().model_copy(update={"schema_id": schema_id})
                transaction._apply((AddSchemaUpdate(schema=schema), SetCurrentSchemaUpdate()), ())
        except (ValidationError, ValueError) as error:  # another writer changed the type of a column
            raise self._conflict("its columns were changed") from error
        columns = {field.field_id: field for field in transaction.table_metadata.schema().fields}
        fits = staged.spec() == now.spec() and staged.default_spec_id == now.default_spec_id
        if not fits or any(columns.get(field.field_id) != field for field in staged.schema().fields):
            raise self._conflict("its columns or partitions were changed")
        for part_of in (_keys, _order, _properties):
            was_changed = before is not None and part_of(before) != part_of(staged)
            if (was_changed or before is None) and part_of(now) != part_of(staged):
                raise self._conflict("its keys, sort order or properties were changed")

    def _conflict(self, how: str) -> CommitConflictError:
        return staging_conflict((self._staged.namespace, self._staged.table), self._staged.base_version, how)


@dataclass(frozen=True)
class _StagedChange:
    """A staged change: the metadata before and after it, and the data files that the snapshot added and removed."""

    base: TableMetadata | None
    metadata: TableMetadata
    added: Sequence[DataFile]
    removed_paths: frozenset[str]
    properties: Mapping[str, str]

    @classmethod
    def of(cls, staged: StagedTable, io: StorageFileIO) -> _StagedChange:
        """Load a staged change. Raises CommitConflictError if its base was purged, StorageError."""
        io = io.for_table(staged.table_def)
        metadata, base = table_metadata(staged.table_def, io), _base_of(staged, io)
        base_ids = set() if base is None else {snapshot.snapshot_id for snapshot in base.snapshots}
        snapshot = metadata.current_snapshot()
        if snapshot is None or snapshot.snapshot_id in base_ids:
            return cls(base, metadata, [], frozenset(), {})
        entries = [
            entry
            for manifest in manifests_in(snapshot, io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in entries_in(manifest, io)
        ]
        summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
        return cls(
            base,
            metadata,
            [entry.data_file for entry in entries if entry.status == ManifestEntryStatus.ADDED],
            frozenset(entry.data_file.file_path for entry in entries if entry.status == ManifestEntryStatus.DELETED),
            {key: value for key, value in summary.items() if not _RECOMPUTED_KEYS.fullmatch(key)},
        )

    @property
    def base_snapshot_id(self) -> int | None:
        """Id of the snapshot on which the change was staged."""
        return None if self.base is None else self.base.current_snapshot_id


def _base_of(staged: StagedTable, io: StorageFileIO) -> TableMetadata | None:
    location = staged.base_metadata_location
    if location is None:
        return None
    properties = {**staged.table_def.format_properties, METADATA_LOCATION: location}
    try:
        return table_metadata(with_changes(staged.table_def, format_properties=properties), io)
    except FileMissingError as error:
        name = (staged.namespace, staged.table)
        raise staging_conflict(name, staged.base_version, "the version that it was staged on was purged") from error


def _columns(metadata: TableMetadata) -> object:
    return metadata.schema().fields, metadata.last_column_id


def _keys(metadata: TableMetadata) -> object:
    return set(metadata.schema().identifier_field_ids)


def _order(metadata: TableMetadata) -> object:
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    return None if order is None else order.fields


def _properties(metadata: TableMetadata) -> object:
    return metadata.properties
