"""Choose the data files that are worth rewriting, and leave out delete files that no longer apply."""

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
from trinitylake_ops.iceberg.validation.bounds import FaultyBounds
from trinitylake_ops.iceberg.write.data_files import TARGET_FILE_SIZE_BYTES, identity_columns

TARGET_PROPERTY = "write.target-file-size-bytes"
_MOST_DIGITS = 18
#: A file below this share of the target is small.
SMALL_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class RewriteRules:
    """The options that say which files are worth writing anew.

    ``target_file_size_bytes`` None means the table's own property, else the default. A group needs ``min_input_files``,
    or else two that fill a file of the target, or one with deleted rows. With ``repartition`` all files of older
    partition specs are written by the current one, whatever their size.
    """

    target_file_size_bytes: int | None = None
    min_input_files: int = 5
    repartition: bool = False

    def target_bytes(self, metadata: TableMetadata) -> int:
        """Return the size of file that a table's files should have."""
        if self.target_file_size_bytes is not None:
            return self.target_file_size_bytes
        own = metadata.properties.get(TARGET_PROPERTY, "")
        # A longer text is no size of a file, and Python refuses numbers of thousands of digits.
        is_size = own.isascii() and own.isdecimal() and len(own) <= _MOST_DIGITS
        return (int(own) if is_size else 0) or TARGET_FILE_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Data files that become about one. ``partition`` is theirs, None for files of an older partition spec.

    ``deletes`` are the delete files that apply to each, by its path.
    """

    files: tuple[DataFile, ...]
    partition: Record | None
    deletes: Mapping[str, frozenset[DataFile]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(file.file_size_in_bytes for file in self.files)

    @property
    def rows(self) -> int:
        """Their rows, as manifests count them, with deleted ones."""
        return sum(file.record_count for file in self.files)

    @property
    def least_rows(self) -> int:
        """Their rows without as many as delete files can delete at most, as far as that is known."""
        applied = {delete for found in self.deletes.values() for delete in found}
        if any(delete.content == DataFileContent.EQUALITY_DELETES for delete in applied):
            return 0  # a row there may delete any number of rows
        return max(0, self.rows - sum(delete.record_count for delete in applied))

    def deletes_of(self, file: DataFile) -> frozenset[DataFile]:
        """Return the delete files that apply to one of the files."""
        return self.deletes.get(file.file_path, frozenset())


@dataclass(frozen=True, slots=True)
class CompactionCandidates:
    """The data files of a table: groups worth writing anew, and how many files of older partition specs it has.

    Without ``repartition`` files with deleted rows do not count there: they are written by the current spec.
    """

    groups: tuple[FileGroup, ...]
    data_files: int
    older_spec_files: int


def find_groups(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules) -> CompactionCandidates:
    """Look through a table's manifests for files that are worth writing anew.

    Raises InvalidDefinitionError for a table of a format version that cannot be written, or with delete files that are
    not read. Raises it also if rows would have to be split by a partition transform other than identity. Raises
    StorageError.
    """
    check_format_version(metadata)
    snapshot = metadata.current_snapshot()
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    entries = live_entries(manifests, io, ManifestContent.DATA)
    deletes = DeleteFiles(live_entries(manifests, io, ManifestContent.DELETES), metadata)
    applied = {entry.data_file.file_path: frozenset(deletes.of(entry)) for entry in entries} if deletes.entries else {}
    return _Choice(metadata, rules, {path: found for path, found in applied.items() if found}).among(entries)


@dataclass(frozen=True)
class _Choice:
    metadata: TableMetadata
    rules: RewriteRules
    deletes: Mapping[str, frozenset[DataFile]]

    def among(self, entries: Sequence[ManifestEntry]) -> CompactionCandidates:
        spec_id = self.metadata.default_spec_id
        files = [entry.data_file for entry in entries]
        of_older_specs = [file for file in files if file.spec_id != spec_id]
        older = self._older(of_older_specs)
        groups = [self._group(packed, None) for packed in _packed(older, self._target_bytes)]
        by_partition: dict[Record, list[DataFile]] = {}
        for file in files:
            is_small = file.file_size_in_bytes < SMALL_SHARE * self._target_bytes
            if file.spec_id == spec_id and (is_small or self._is_written_alone(file)):
                by_partition.setdefault(file.partition, []).append(file)
        for partition, chosen in by_partition.items():
            packed_groups = (self._group(packed, partition) for packed in _packed(chosen, self._target_bytes))
            groups += [group for group in packed_groups if self._is_worth(group)]
        left = of_older_specs if self.rules.repartition else [file for file in of_older_specs if file not in older]
        return CompactionCandidates(tuple(groups), len(entries), len(left))

    def _older(self, files: Sequence[DataFile]) -> list[DataFile]:
        """Return those of files of older partition specs that are written by the current one."""
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
        """Return whether a file of any size is rewritten: it has deleted rows, or faulty bounds."""
        return file.file_path in self.deletes or isinstance(file, FaultyBounds)

    @property
    def _target_bytes(self) -> int:
        return self.rules.target_bytes(self.metadata)


def _packed(files: Iterable[DataFile], target_bytes: int) -> list[tuple[DataFile, ...]]:
    """Return files in groups of up to the target.

    A group has neighbors, so that files that arrived together stay together.
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
        """Return what the manifest lists."""
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def without_deletes(
    manifests: Sequence[ManifestFile], gone: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> list[ManifestFile]:
    """Return the manifests of a new snapshot, those of delete files written anew where they list some that go.

    As Iceberg asks, a new manifest tells which files the snapshot deleted. Raises CorruptFileError, StorageError.
    """
    if not gone:
        return list(manifests)
    return [
        _without(manifest, gone, producer, io) if manifest.content == ManifestContent.DELETES else manifest
        for manifest in manifests
    ]


def _without(
    manifest: ManifestFile, gone: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> ManifestFile:
    live = [entry for entry in entries_in(manifest, io) if entry.status != ManifestEntryStatus.DELETED]
    if not any(entry.data_file in gone for entry in live):
        return manifest
    with DeleteManifestWriter(
        producer.spec(manifest.partition_spec_id),
        producer.schema(),
        producer.new_manifest_output(),
        producer.snapshot_id,
        producer._compression,
    ) as writer:
        for entry in live:
            writer.add_entry(_kept_or_deleted(entry, producer.snapshot_id, is_gone=entry.data_file in gone))
    return writer.to_manifest_file()


def _kept_or_deleted(entry: ManifestEntry, snapshot_id: int, *, is_gone: bool) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.DELETED if is_gone else ManifestEntryStatus.EXISTING,
        snapshot_id=snapshot_id if is_gone else entry.snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )
