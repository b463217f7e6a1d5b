"""Find the data files that new files replace, and check the tables that a publication read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, IsNull, Or, Reference
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import Record

from trinitylake_ops.errors import CommitConflictError, InvalidDefinitionError, InvalidInputError
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import table_id_of
from trinitylake_ops.iceberg.write.data_files import identity_columns
from trinitylake_ops.iceberg.write.presence import Presence, changed_only_by, is_changed_since, presence
from trinitylake_ops.iceberg.write.staged_table import EncodedPartition, StagedTable
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

#: Whether PyIceberg uses a filter to find the manifests of files to remove, and raises an error if files are missing.
#: PyIceberg 0.11 searches all manifests and ignores missing files, so callers must check that the files exist.
FILTERS_MANIFESTS = hasattr(_OverwriteFiles, "_build_manifest_evaluator")

# For more partitions, all manifests are read instead of filtered, because deep expressions overflow the stack.
_MAX_FILTERED_PARTITIONS = 100


def all_files(table: Table) -> list[DataFile]:
    """Return every data file of the current snapshot. Raises InvalidDefinitionError for delete files."""
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue())]


def files_at(table: Table, paths: Collection[str]) -> list[DataFile]:
    """Return the data files of the current snapshot with the given paths.

    Raises InvalidDefinitionError for delete files.
    """
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue()) if task.file.file_path in paths]


def files_in_partitions(table: Table, partitions: Collection[Record]) -> list[DataFile]:
    """Return the data files of partitions of the table's current spec.

    Args:
        table: The table.
        partitions: The partitions.

    Raises:
        InvalidInputError: The table is unpartitioned.
        InvalidDefinitionError: Files with an older partition spec overlap the partitions, or delete files apply to
            files.
    """
    spec = table.spec()
    if spec.is_unpartitioned():
        raise InvalidInputError(f"{'.'.join(table.name())} is unpartitioned; use replace_table or append")
    if not partitions:
        return []
    columns = identity_columns(spec, table.schema())
    replaced = []
    for task in _planned(table, _partitions_filter(columns, partitions)):
        if task.file.spec_id != spec.spec_id:
            raise InvalidDefinitionError(
                f"{'.'.join(table.name())} has files of an older partition spec; rewrite them first"
            )
        if task.file.partition in partitions:
            replaced.append(file_without_deletes(task))
    return replaced


def files_matching(table: Table, row_filter: str | BooleanExpression) -> list[DataFile]:
    """Return the data files whose rows all match a filter.

    Args:
        table: The table.
        row_filter: The filter.

    Raises:
        InvalidInputError: Only some rows of a file match.
        InvalidDefinitionError: Delete files apply to files.
    """
    replaced = []
    for task in _planned(table, row_filter):
        if task.residual != AlwaysTrue():
            raise InvalidInputError(
                f"the filter {row_filter!r} may match only some rows of {task.file.file_path!r}; filter by whole"
                " partitions"
            )
        replaced.append(file_without_deletes(task))
    return replaced


def add_snapshot(
    change: Transaction, added: Sequence[DataFile], removed: Sequence[DataFile], properties: dict[str, str]
) -> None:
    """Add and remove data files in a table's transaction, as one snapshot.

    Args:
        change: The transaction.
        added: Files to add.
        removed: Files to remove.
        properties: Properties of the snapshot.

    Raises:
        LocationNotAllowedError: The table may not refer to a file.
    """
    io = change._table.io
    assert isinstance(io, StorageFileIO)
    own_io = io.for_managed(table_id_of(change.table_metadata.location) or "")
    for data_file in added:
        own_io.check_may_have(data_file.file_path)
    if not added and not removed:
        return
    snapshot = change.update_snapshot(snapshot_properties=properties)
    if not removed:
        with snapshot.fast_append() as append:
            for data_file in added:
                append.append_data_file(data_file)
        return
    with _with_separate_filters(snapshot.overwrite()) as overwrite:
        specs = change.table_metadata.specs()
        if FILTERS_MANIFESTS and any(specs[data_file.spec_id].is_unpartitioned() for data_file in removed):
            # Otherwise PyIceberg would search no manifest of an unpartitioned table for the files to delete.
            overwrite.delete_by_predicate(AlwaysTrue())
        for data_file in removed:
            overwrite.delete_data_file(data_file)
        for data_file in added:
            overwrite.append_data_file(data_file)


def _with_separate_filters(overwrite: _OverwriteFiles) -> _OverwriteFiles:
    """Use a separate filter object for each manifest.

    PyIceberg searches for files to delete in several threads that share one filter object, which stores the manifest
    that is being searched. Because of this race condition, PyIceberg sometimes skips a required manifest and rejects
    the commit.
    """
    if not FILTERS_MANIFESTS:
        return overwrite
    build = overwrite._build_manifest_evaluator

    def build_for_each(spec_id: int) -> Callable[[ManifestFile], bool]:
        def evaluate(manifest: ManifestFile) -> bool:
            return build(spec_id)(manifest)

        return evaluate

    overwrite._build_manifest_evaluator = build_for_each  # type: ignore[method-assign]
    return overwrite


def _planned(table: Table, row_filter: str | BooleanExpression) -> list[FileScanTask]:
    try:
        return list(table.scan(row_filter=row_filter).plan_files())
    except ValueError as error:
        if "equality delete" not in str(error):
            raise
        raise InvalidDefinitionError(f"{'.'.join(table.name())} has equality deletes; {_COMPACT_FIRST}") from error


_COMPACT_FIRST = "apply its delete files with 'trinitylake compact-tables' first"


def file_without_deletes(task: FileScanTask) -> DataFile:
    """Return the data file of a task. Raises InvalidDefinitionError if it has delete files."""
    if task.delete_files:
        raise InvalidDefinitionError(f"{task.file.file_path!r} has delete files; {_COMPACT_FIRST}")
    return task.file


def _partitions_filter(columns: list[str], partitions: Collection[Record]) -> BooleanExpression:
    if len(partitions) > _MAX_FILTERED_PARTITIONS:
        return AlwaysTrue()
    per_partition = [
        _all_of([_equals(name, partition[index]) for index, name in enumerate(columns)]) for partition in partitions
    ]
    return per_partition[0] if len(per_partition) == 1 else Or(*per_partition)


def _all_of(terms: list[BooleanExpression]) -> BooleanExpression:
    return terms[0] if len(terms) == 1 else And(*terms)


def _equals(column: str, value: Any) -> BooleanExpression:
    return IsNull(term=Reference(column)) if value is None else EqualTo(term=Reference(column), value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """A table that was read."""

    #: Root of the lakehouse.
    root: str
    namespace: str
    table: str
    #: The version that was read.
    version: int
    #: Location of the table's definition. None if the table did not exist, which the reader also depends on.
    location: str | None

    @classmethod
    def of(cls, snapshot: Snapshot, namespace: str, table: str) -> Self:
        """Return the read of a table at a version. Raises InvalidInputError if the table does not exist."""
        location = snapshot.entry(snapshot.keys.table_key(namespace, table))
        if not isinstance(location, str):
            raise InvalidInputError(
                f"table {namespace}.{table} does not exist at version {snapshot.version}; use of_missing"
            )
        root = snapshot.files.storage.root
        return cls(root=root, namespace=namespace, table=table, version=snapshot.version, location=location)

    @classmethod
    def of_missing(cls, snapshot: Snapshot, namespace: str, table: str) -> Self:
        """Return the read of a table that does not exist at a version.

        Args:
            snapshot: The version.
            namespace: Namespace of the table. It may not exist.
            table: Name of the table.
        """
        root = snapshot.files.storage.root
        return cls(root=root, namespace=namespace, table=table, version=snapshot.version, location=None)

    def to_json(self) -> str:
        """Encode the read as a JSON object."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode a read that ``to_json`` encoded. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            return cls(**state)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"not a valid read of a table: {error}; read the table again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRead:
    """A staged table that was read before it was published."""

    #: Root of the lakehouse.
    root: str
    staged: StagedTable
    #: Whether rows of the version on which the table was staged may have been read. False if the staged files replace
    #: all rows that were read.
    includes_base: bool
    #: Whether another unit of work staged the table. In this case, the table must be published, and partitions that
    #: were not read may have changed since.
    by_another: bool = False
    #: Partitions of such a table that were read, encoded as in ``StagedTable.replaced_partitions``; None for all rows.
    partitions: tuple[EncodedPartition, ...] | None = None

    def to_json(self) -> str:
        """Encode the read as a JSON object."""
        state = {
            "root": self.root,
            "staged": self.staged.to_json(),
            "includes_base": self.includes_base,
            "by_another": self.by_another,
            "partitions": self.partitions,
        }
        return json.dumps(state, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode a read that ``to_json`` encoded. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            partitions = state["partitions"]
            state["partitions"] = None if partitions is None else tuple(map(tuple, partitions))
            return cls(**{**state, "staged": StagedTable.from_json(state["staged"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(f"not a valid read of a staged table: {error}; read the table again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadsCheck:
    """Checks that a version still has the data that a publication was computed from. Other lakehouses are ignored."""

    lake: Lakehouse
    #: Tables that were read.
    reads: Sequence[TableRead]
    #: Staged tables that were read before their publication.
    staged_reads: Sequence[StagedRead]
    #: Tables that the reader staged. Changes made by publishing these tables do not count.
    own: Sequence[StagedTable]
    #: Returns whether the table of a staged read must be unchanged since the read. Otherwise it must only be published.
    strict: Callable[[StagedTable], bool]
    #: Returns whether a table was published. Used for tables whose snapshots were trimmed.
    was_published: Callable[[StagedTable], bool]

    def __call__(self, latest: Snapshot, publishing: Mapping[str, str]) -> None:
        """Check a version before the tables are committed on it.

        Args:
            latest: The version.
            publishing: Locations of the metadata to commit, by the location of the staged metadata.

        Raises:
            CommitConflictError: Other writers changed a table, or a staged table that was read is not published.
            StorageError: A file of a table cannot be read.
        """
        root = latest.files.storage.root
        changed: dict[str, tuple[int, str]] = {}
        for read in (read for read in self.reads if read.root == root):
            name = (read.namespace, read.table)
            if latest.entry(latest.keys.table_key(*name)) == read.location:
                continue
            if not changed_only_by(self.lake, latest, read.location, name, self.own):
                change = "a concurrent commit changed it" if read.location else "a concurrent commit created it"
                changed.setdefault(".".join(name), (read.version, change))
        for staged_read in (read for read in self.staged_reads if read.root == root):
            staged = staged_read.staged
            staged_change = self._change_of(latest, staged_read, publishing)
            if staged_change is not None:
                changed.setdefault(f"{staged.namespace}.{staged.table}", (staged.base_version, staged_change))
        if changed:
            raise _conflict(latest, changed)

    def _change_of(self, latest: Snapshot, read: StagedRead, publishing: Mapping[str, str]) -> str | None:
        """Describe how a table differs from the staged table that was read. Return None if they are the same."""
        staged, is_strict = read.staged, self.strict(read.staged)
        committed = publishing.get(staged.metadata_location)
        if committed is not None:
            is_same = committed == staged.metadata_location or not (is_strict and read.includes_base)
            return None if is_same else "a concurrent commit changed the rows on which it was staged"
        if not is_strict and not (staged.added_files or staged.removed_files):
            return None
        now = presence(self.lake, latest, staged)
        if now is Presence.ABSENT or (now is Presence.TRIMMED and not is_strict and not self.was_published(staged)):
            return "no version contains it as staged"
        if now is Presence.AS_STAGED or not is_strict or (now is Presence.ON_NEWER and not read.includes_base):
            return None
        if read.by_another and not is_changed_since(
            self.lake, latest, staged, read.partitions, includes_base=read.includes_base
        ):
            return None
        return "a concurrent commit changed it"


def _conflict(latest: Snapshot, changed: Mapping[str, tuple[int, str]]) -> CommitConflictError:
    conflicts = tuple(
        f"table {table}: read at version {version}, {how}" for table, (version, how) in sorted(changed.items())
    )
    return CommitConflictError(
        f"version {latest.version} differs from the data that this publication read: {'; '.join(conflicts)}; run it"
        " again from the beginning",
        conflicts=conflicts,
        base_version=min(version for version, _ in changed.values()),
        latest_version=latest.version,
    )
