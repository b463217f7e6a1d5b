"""The data files that new ones replace, and the tables that a publication read."""

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

#: Whether pyiceberg looks for files to remove by a filter, and raises where it found less. That of 0.11 looks into all
#: manifests, removes what it finds and says nothing: whoever asks it has to know that the files are there.
FILTERS_MANIFESTS = hasattr(_OverwriteFiles, "_build_manifest_evaluator")

# Beyond this many partitions all manifests are read instead of filtered: deep expressions overflow the stack.
_MAX_FILTERED_PARTITIONS = 100


def all_files(table: Table) -> list[DataFile]:
    """Return every data file of the current snapshot. Raises InvalidDefinitionError for delete files."""
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue())]


def files_at(table: Table, paths: Collection[str]) -> list[DataFile]:
    """Return the data files of the current snapshot that have one of the paths.

    Raises InvalidDefinitionError for delete files.
    """
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue()) if task.file.file_path in paths]


def files_in_partitions(table: Table, partitions: Collection[Record]) -> list[DataFile]:
    """Return the data files of some partitions of the table's current spec.

    Raises InvalidInputError for an unpartitioned table. Raises InvalidDefinitionError when the partition spec changed
    and files of an older one overlap.
    """
    spec = table.spec()
    if spec.is_unpartitioned():
        raise InvalidInputError(f"{'.'.join(table.name())} is unpartitioned; replace all, or nothing")
    if not partitions:
        return []
    columns = identity_columns(spec, table.schema())
    replaced = []
    for task in _planned(table, _partitions_filter(columns, partitions)):
        if task.file.spec_id != spec.spec_id:
            raise InvalidDefinitionError(
                f"{'.'.join(table.name())} holds files of an older partition spec; rewrite them first"
            )
        if task.file.partition in partitions:
            replaced.append(file_without_deletes(task))
    return replaced


def files_matching(table: Table, row_filter: str | BooleanExpression) -> list[DataFile]:
    """Return the data files whose rows all match a filter.

    Raises InvalidInputError when a file holds rows on both sides.
    """
    replaced = []
    for task in _planned(table, row_filter):
        if task.residual != AlwaysTrue():
            raise InvalidInputError(
                f"the filter {row_filter!r} may cut through {task.file.file_path!r}; filter by whole partitions"
            )
        replaced.append(file_without_deletes(task))
    return replaced


def add_snapshot(
    change: Transaction, added: Sequence[DataFile], removed: Sequence[DataFile], properties: dict[str, str]
) -> None:
    """Add and remove data files in a change of a table, as one snapshot.

    Raises LocationNotAllowedError for a file that the table cannot have.
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
    with _filtering_by_itself(snapshot.overwrite()) as overwrite:
        specs = change.table_metadata.specs()
        if FILTERS_MANIFESTS and any(specs[data_file.spec_id].is_unpartitioned() for data_file in removed):
            # Without this, pyiceberg searches no manifest of such a table for the files to delete.
            overwrite.delete_by_predicate(AlwaysTrue())
        for data_file in removed:
            overwrite.delete_data_file(data_file)
        for data_file in added:
            overwrite.append_data_file(data_file)


def _filtering_by_itself(overwrite: _OverwriteFiles) -> _OverwriteFiles:
    """Let each search in a manifest have a filter of its own.

    The search for files to delete runs in several threads of pyiceberg with one filter object. That holds the manifest
    of one search. So sometimes pyiceberg passes over the manifest that it needs, and refuses to commit.
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


_COMPACT_FIRST = "let 'trinitylake compact-tables' apply its delete files first"


def file_without_deletes(task: FileScanTask) -> DataFile:
    """Return the data file of a task. Raises InvalidDefinitionError if it has delete files."""
    if task.delete_files:
        raise InvalidDefinitionError(f"{task.file.file_path!r} has delete files; {_COMPACT_FIRST}")
    return task.file


def _partitions_filter(columns: list[str], partitions: Collection[Record]) -> BooleanExpression:
    if len(partitions) > _MAX_FILTERED_PARTITIONS:
        return AlwaysTrue()
    per_partition = [
        _all_of([_equals(name, partition[at]) for at, name in enumerate(columns)]) for partition in partitions
    ]
    return per_partition[0] if len(per_partition) == 1 else Or(*per_partition)


def _all_of(terms: list[BooleanExpression]) -> BooleanExpression:
    return terms[0] if len(terms) == 1 else And(*terms)


def _equals(column: str, value: Any) -> BooleanExpression:
    return IsNull(term=Reference(column)) if value is None else EqualTo(term=Reference(column), value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """A table as it was read. ``location`` is that of its definition in ``version`` of the lakehouse at ``root``.

    It is None if the version had no such table: the reader depends on that, as on the rows of a table.
    """

    root: str
    namespace: str
    table: str
    version: int
    location: str | None

    @classmethod
    def of(cls, snapshot: Snapshot, namespace: str, table: str) -> Self:
        """Return the read of a table at a version. Raises InvalidInputError if the version has none of that name."""
        location = snapshot.entry(snapshot.keys.table_key(namespace, table))
        if not isinstance(location, str):
            raise InvalidInputError(f"version {snapshot.version} has no table {namespace}.{table}, so none was read")
        root = snapshot.files.storage.root
        return cls(root=root, namespace=namespace, table=table, version=snapshot.version, location=location)

    @classmethod
    def of_missing(cls, snapshot: Snapshot, namespace: str, table: str) -> Self:
        """Return the read of a table that a version does not have.

        Args:
            snapshot: The version.
            namespace: The namespace of the table. It may be missing.
            table: The name of the table.
        """
        root = snapshot.files.storage.root
        return cls(root=root, namespace=namespace, table=table, version=snapshot.version, location=None)

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            return cls(**state)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"this is no read of a table: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRead:
    """A table that was read as its reader had staged it, before it was published to the lakehouse at ``root``.

    ``includes_base`` is set if rows of the version that it was staged on can be among those read. It is not set if the
    staged files replace all rows that were read. ``by_another`` is set if another unit of work staged the table. It
    must then be published, and other partitions than those that were read may have been changed since. ``partitions``
    are those that were read of such a table, in the form of ``StagedTable.replaced_partitions``, and None for all rows.
    """

    root: str
    staged: StagedTable
    includes_base: bool
    by_another: bool = False
    partitions: tuple[EncodedPartition, ...] | None = None

    def to_json(self) -> str:
        """Return one JSON object."""
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
        """Read what ``to_json`` wrote. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            partitions = state["partitions"]
            state["partitions"] = None if partitions is None else tuple(map(tuple, partitions))
            return cls(**{**state, "staged": StagedTable.from_json(state["staged"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(f"this is no read of a staged table: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadsCheck:
    """The check that a version still has what a publication was made of.

    ``reads`` and ``staged_reads`` are those that count. Tables of other lakehouses do not. ``own`` are tables that the
    reader staged itself, so that its own publications are no changes by other writers. ``strict`` returns whether the
    table of a staged read must be unchanged since. If not, it must have been published. ``was_published`` returns that
    where the snapshots that would show it were trimmed.
    """

    lake: Lakehouse
    reads: Sequence[TableRead]
    staged_reads: Sequence[StagedRead]
    own: Sequence[StagedTable]
    strict: Callable[[StagedTable], bool]
    was_published: Callable[[StagedTable], bool]

    def __call__(self, latest: Snapshot, publishing: Mapping[str, str]) -> None:
        """Check a version before the tables are committed on it.

        Args:
            latest: The version.
            publishing: The tables to commit: the location of the metadata to commit, by that of the staged metadata.

        Raises:
            CommitConflictError: A table was changed by other writers, or was read as staged and is not published.
            StorageError: A file of a table cannot be read.
        """
        root = latest.files.storage.root
        changed: dict[str, tuple[int, str]] = {}
        for read in (read for read in self.reads if read.root == root):
            name = (read.namespace, read.table)
            if latest.entry(latest.keys.table_key(*name)) == read.location:
                continue
            if not changed_only_by(self.lake, latest, read.location, name, self.own):
                what = "a concurrent commit changed it" if read.location else "a concurrent commit created it"
                changed.setdefault(".".join(name), (read.version, what))
        for staged_read in (read for read in self.staged_reads if read.root == root):
            staged = staged_read.staged
            how = self._change_of(latest, staged_read, publishing)
            if how is not None:
                changed.setdefault(f"{staged.namespace}.{staged.table}", (staged.base_version, how))
        if changed:
            raise _conflict(latest, changed)

    def _change_of(self, latest: Snapshot, read: StagedRead, publishing: Mapping[str, str]) -> str | None:
        """Return why a table is not what was read as staged, None if it is, or is about to be published as such."""
        staged, is_strict = read.staged, self.strict(read.staged)
        committed = publishing.get(staged.metadata_location)
        if committed is not None:
            is_same = committed == staged.metadata_location or not (is_strict and read.includes_base)
            return None if is_same else "a concurrent commit changed the rows that it was staged on"
        if not is_strict and not (staged.added_files or staged.removed_files):
            return None
        now = presence(self.lake, latest, staged)
        if now is Presence.ABSENT or (now is Presence.TRIMMED and not is_strict and not self.was_published(staged)):
            return "no version has it as it was staged"
        if now is Presence.AS_STAGED or not is_strict or (now is Presence.ON_NEWER and not read.includes_base):
            return None
        if read.by_another and not is_changed_since(
            self.lake, latest, staged, read.partitions, includes_base=read.includes_base
        ):
            return None
        return "a concurrent commit changed it"


def _conflict(latest: Snapshot, changed: Mapping[str, tuple[int, str]]) -> CommitConflictError:
    conflicts = tuple(
        f"table {table}: we read it at version {version}, {how}" for table, (version, how) in sorted(changed.items())
    )
    return CommitConflictError(
        f"version {latest.version} is not what this publication read: {'; '.join(conflicts)}; run it again from"
        " the beginning",
        conflicts=conflicts,
        base_version=min(version for version, _ in changed.values()),
        latest_version=latest.version,
    )
