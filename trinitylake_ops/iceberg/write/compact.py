"""Select the data files that are worth rewriting, and drop delete files that no longer apply."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.delete_files import DeleteFiles, live_entries
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import check_format_version
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.snapshot_retention import property_number
from trinitylake_ops.iceberg.validation.bounds import FaultyBounds
from trinitylake_ops.iceberg.write.data_files import TARGET_FILE_SIZE_BYTES, identity_columns

TARGET_PROPERTY = "write.target-file-size-bytes"
#: A file below this fraction of the target size is small.
SMALL_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class RewriteRules:
    """Options that determine which files are rewritten."""

    #: Target size of files; None to use the table property if it is set, otherwise the default.
    target_file_size_bytes: int | None = None
    #: Minimum number of files in a group, unless two of its files fill a target file or one file has deleted rows.
    min_input_files: int = 5
    #: Rewrite all files of older partition specs with the current spec, regardless of their size.
    repartition: bool = False
    #: Target size of files of tables without the property.
    default_file_size_bytes: int = TARGET_FILE_SIZE_BYTES

    def target_bytes(self, metadata: TableMetadata) -> int:
        """Return the target size of a table's files."""
        if self.target_file_size_bytes is not None:
            return self.target_file_size_bytes
        return property_number(metadata.properties, TARGET_PROPERTY) or self.default_file_size_bytes


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Data files to be rewritten as about one file."""

    files: tuple[DataFile, ...]
    #: Partition of the files; None for files with an older partition spec.
    partition: Record | None
    #: Delete files that apply to each data file, by path.
    deletes: Mapping[str, frozenset[DataFile]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.file_size_in_bytes for file in self.files)

    @property
    def rows(self) -> int:
        """Number of rows according to the manifests, including deleted rows."""
        return sum(file.record_count for file in self.files)

    @property
    def min_rows(self) -> int:
        """Lower bound of the number of rows that remain after deletes."""
        applied = {delete for deletes in self.deletes.values() for delete in deletes}
        if any(delete.content == DataFileContent.EQUALITY_DELETES for delete in applied):
            return 0  # one row of a delete file may delete any number of rows
        return max(0, self.rows - sum(delete.record_count for delete in applied))

    def deletes_of(self, file: DataFile) -> frozenset[DataFile]:
        """Return the delete files that apply to one of the files."""
        return self.deletes.get(file.file_path, frozenset())


@dataclass(frozen=True, slots=True)
class CompactionCandidates:
    """The data files of a table that are worth rewriting."""

    #: Groups to rewrite.
    groups: tuple[FileGroup, ...]
    #: Number of data files.
    data_files: int
    #: Number of files with older partition specs, excluding files that are rewritten for other reasons.
    older_spec_files: int


def find_groups(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules) -> CompactionCandidates:
    """Find the data files of a table that are worth rewriting, based on its manifests.

    Args:
        metadata: Metadata of the table.
        io: Reads the manifests of the table.
        rules: Determine which files to rewrite.

    Raises:
        InvalidDefinitionError: The format version cannot be written, a delete file is not supported, or rows would have
            to be split by a partition transform other than identity.
        StorageError: A manifest cannot be read.
    """
    check_format_version(metadata)
    snapshot = metadata.current_snapshot()
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    entries = live_entries(manifests, io, ManifestContent.DATA)
    deletes = DeleteFiles(live_entries(manifests, io, ManifestContent.DELETES), metadata)
    applied = {entry.data_file.file_path: frozenset(deletes.of(entry)) for entry in entries} if deletes.entries else {}
    return _GroupSelection(
        metadata, rules, {path: deletes_of_file for path, deletes_of_file in applied.items() if deletes_of_file}
    ).select(entries)


@dataclass(frozen=True)
class _GroupSelection:
    metadata: TableMetadata
    rules: RewriteRules
    deletes: Mapping[str, frozenset[DataFile]]

    def select(self, entries: Sequence[ManifestEntry]) -> CompactionCandidates:
        spec_id = self.metadata.default_spec_id
        files = [entry.data_file for entry in entries]
        of_older_specs = [file for file in files if file.spec_id != spec_id]
        older = self._older(of_older_specs)
        groups = [self._group(packed, None) for packed in _pack(older, self._target_bytes)]
        by_partition: dict[Record, list[DataFile]] = {}
        for file in files:
            is_small = file.file_size_in_bytes < SMALL_SHARE * self._target_bytes
            if file.spec_id == spec_id and (is_small or self._is_written_alone(file)):
                by_partition.setdefault(file.partition, []).append(file)
        for partition, chosen in by_partition.items():
            packed_groups = (self._group(packed, partition) for packed in _pack(chosen, self._target_bytes))
            groups += [group for group in packed_groups if self._is_worth(group)]
        left = of_older_specs if self.rules.repartition else [file for file in of_older_specs if file not in older]
        return CompactionCandidates(tuple(groups), len(entries), len(left))

    def _older(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Return the files with older partition specs that are rewritten with the current spec."""
        chosen = [file for file in files if self.rules.repartition or self._is_written_alone(file)]
        try:
            identity_columns(self.metadata.spec(), self.metadata.schema())
        except InvalidDefinitionError:
            if self.rules.repartition and chosen:
                raise
            return []
        return chosen

    def _group(self, files: tuple[DataFile, ...], partition: Record | None) -> FileGroup:
        paths = [file.file_path for file in files if file.file_path in self.deletes]
        return FileGroup(files, partition, {path: self.deletes[path] for path in paths})

    def _is_worth(self, group: FileGroup) -> bool:
        is_full = group.bytes >= SMALL_SHARE * self._target_bytes
        is_merged = len(group.files) >= self.rules.min_input_files or (is_full and len(group.files) > 1)
        return is_merged or any(map(self._is_written_alone, group.files))

    def _is_written_alone(self, file: DataFile) -> bool:
        """Whether a file is rewritten regardless of its size, because it has deleted rows or invalid bounds."""
        return file.file_path in self.deletes or isinstance(file, FaultyBounds)

    @property
    def _target_bytes(self) -> int:
        return self.rules.target_bytes(self.metadata)


def _pack(files: Iterable[DataFile], target_bytes: int) -> list[tuple[DataFile, ...]]:
    """Split files into groups of up to the target size.

    Neighboring files are grouped, so that files that were written together stay together.
    """
    groups: list[list[DataFile]] = []
    group_bytes = 0
    for file in files:
        if not groups or group_bytes + file.file_size_in_bytes > target_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(file)
        group_bytes += file.file_size_in_bytes
    return [tuple(group) for group in groups]


class DeleteManifestWriter(ManifestWriterV2):
    """Writes a manifest of delete files."""

    def content(self) -> ManifestContent:
        """Return the content type of the manifest."""
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def without_deletes(
    manifests: Sequence[ManifestFile], dropped: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> list[ManifestFile]:
    """Return the manifests of a new snapshot, with delete manifests rewritten to omit dropped delete files.

    As Iceberg requires, a rewritten manifest records the files that the snapshot deleted.

    Args:
        manifests: Manifests of the new snapshot.
        dropped: Delete files to drop.
        producer: The update that creates the snapshot.
        io: Reads the manifests.

    Raises:
        CorruptFileError: A manifest is corrupt.
        StorageError: A manifest cannot be read or written.
    """
    if not dropped:
        return list(manifests)
    return [
        _without(manifest, dropped, producer, io) if manifest.content == ManifestContent.DELETES else manifest
        for manifest in manifests
    ]


def _without(
    manifest: ManifestFile, dropped: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> ManifestFile:
    live = [entry for entry in entries_in(manifest, io) if entry.status != ManifestEntryStatus.DELETED]
    if not any(entry.data_file in dropped for entry in live):
        return manifest
    with DeleteManifestWriter(
        producer.spec(manifest.partition_spec_id),
        producer.schema(),
        producer.new_manifest_output(),
        producer.snapshot_id,
        producer._compression,
    ) as writer:
        for entry in live:
            writer.add_entry(_copied_entry(entry, producer.snapshot_id, is_dropped=entry.data_file in dropped))
    return writer.to_manifest_file()


def _copied_entry(entry: ManifestEntry, snapshot_id: int, *, is_dropped: bool) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.DELETED if is_dropped else ManifestEntryStatus.EXISTING,
        snapshot_id=snapshot_id if is_dropped else entry.snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )
