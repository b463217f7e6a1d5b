"""The choice of data files that are worth writing anew: small ones, and those of which delete files delete rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntry
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.tables.claims.bounds import FaultyBounds
from trinitylake_ops.tables.files.deletes.index import DeleteFiles, live_entries
from trinitylake_ops.tables.files.reach import manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import check_format_version
from trinitylake_ops.tables.writing.data_files import TARGET_FILE_SIZE_BYTES, identity_columns

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
class FoundFiles:
    """The data files of a table: groups worth writing anew, and how many files of older partition specs it has.

    Without ``repartition`` files with deleted rows do not count there: they are written by the current spec.
    """

    groups: tuple[FileGroup, ...]
    data_files: int
    older_spec_files: int


def find_groups(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules) -> FoundFiles:
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

    def among(self, entries: Sequence[ManifestEntry]) -> FoundFiles:
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
        return FoundFiles(tuple(groups), len(entries), len(left))

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

    A group has neighbours, so that files that arrived together stay together.
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
