"""Compaction of tables: merges small data files into fewer files without changing rows, in one version for all tables.

Data files with deleted rows are rewritten without these rows, and their delete files are dropped.

Nothing is deleted. Older versions still read the old files, which are reclaimed when those versions are expired and
purged. A concurrent commit does not conflict if the table still has the old files, and rows that it appended are kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import (
    CommitConflictError,
    CommitOutcomeUnknownError,
    InvalidDefinitionError,
    InvalidInputError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io, writing_io
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.new_files import oldest_of
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.iceberg.write.compact import FileGroup, RewriteRules, find_groups
from trinitylake_ops.iceberg.write.data_files import delete_data_files
from trinitylake_ops.iceberg.write.publication import Publication, publication_id, publish_once, published_version
from trinitylake_ops.iceberg.write.rewrite import (
    GroupWriter,
    Rewriting,
    rewrite_in_process,
    rewriting_of,
    stage_rewritten,
)
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.operations.base import MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of
from trinitylake_ops.operations.compaction.data_files import CompactTablesReport, report_of
from trinitylake_ops.operations.definition_commits import commit_on_latest
from trinitylake_ops.operations.gc.tables import tables_of, with_definitions
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version

_OPERATION = "compact-tables"
#: Errors that affect only one table, because its files are damaged or do not belong to it. Other tables are compacted.
_OF_ONE_TABLE = (InvalidDefinitionError, *DAMAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCompaction:
    """The planned compaction of one table. It replaces ``files`` of the ``data_files`` with about ``groups`` files."""

    namespace: str
    table: str
    table_id: str
    metadata_location: str
    data_files: int
    files: int
    groups: int
    partitions: int
    rows: int
    bytes: int
    file_groups: tuple[FileGroup, ...] = field(repr=False, compare=False)
    metadata: TableMetadata = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class CompactTablesPlan(Plan):
    """The tables with data files to rewrite."""

    base_version: int
    tables: tuple[TableCompaction, ...]
    #: MANAGED Iceberg tables that are skipped, with the reason.
    left: Mapping[str, str]
    #: The number of files with an older partition spec that are not rewritten, by table.
    older_spec_files: Mapping[str, int]
    operation: CompactTables = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and the files to rewrite."""
        content = [
            [table.namespace, table.table, table.table_id, [_paths(group) for group in table.file_groups]]
            for table in self.tables
        ]
        return digest_of(self.base_version, self.base_id, _OPERATION, content)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.tables

    @property
    def files(self) -> int:
        """The total number of files to rewrite in all tables."""
        return sum(table.files for table in self.tables)

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [
            (
                table.name,
                f"{table.files:,} of {table.data_files:,}",
                f"{table.groups:,}",
                table.partitions,
                f"{table.bytes:,}",
                "",
            )
            for table in self.tables
        ]
        rows += [(name, "", "", "", "", reason) for name, reason in self.left.items()]
        rows += [
            (name, "", "", "", "", f"{number:,} files of an older partition spec stay; use repartition to rewrite them")
            for name, number in self.older_spec_files.items()
        ]
        title = (
            f"Compaction of tables of version {self.base_version}: {self.files:,} files of {len(self.tables):,} tables"
        )
        return new_table(title, "table", "files", "become", "partitions", "bytes", "skipped because", rows=rows)

    def execute(
        self,
        write: GroupWriter = rewrite_in_process,
        *,
        run_id: str | None = None,
        approved_digest: str | None = None,
        message: str | None = None,
    ) -> CompactTablesReport:
        """Write the new files, and commit one version in which they replace the old files.

        A table is skipped if a concurrent commit changed it so that its new files no longer fit, if its files are
        damaged, or if its number of rows changed. Appended rows are always kept. New files of skipped tables are
        deleted on a best-effort basis.

        Args:
            write: Writes groups of files: in this process, or with Spark (``spark.write_groups_on``).
            run_id: The id of the run. The run commits at most once within the lakehouse's ``txn_ttl_millis``.
            approved_digest: The digest of the approved plan, if any.
            message: The message of the commit.

        Raises:
            PlanChangedError: The new plan is not the approved one.
            CommitConflictError: No table could be compacted, or all attempts conflicted.
            ContentChangedError: The new files do not contain the same rows as the old files.
            TrinityLakeError: Writing or committing failed, or all tables are damaged.
        """
        operation = replace(self.operation, write=write, run_id=run_id, message=message)
        return operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class CompactTables(PlannedOperation[CompactTablesPlan, CompactTablesReport]):
    """Compacts tables by rules."""

    telemetry_name = "compact-tables"

    rules: RewriteRules
    #: The tables, as ``namespace.table``; None for all tables.
    only: tuple[str, ...] | None
    #: Whether to skip named tables that cannot be compacted.
    skips_unsuitable: bool = False
    write: GroupWriter = rewrite_in_process
    run_id: str | None = None
    message: str | None = None

    def plan(self) -> CompactTablesPlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_compact_tables`."""
        base, io = self.lake.snapshot(), reading_io(self.lake)
        compactions: list[TableCompaction] = []
        left: dict[str, str] = {}
        older: dict[str, int] = {}

        def inspect_item(item: tuple[ObjectName, TableDef]) -> tuple[TableCompaction, int] | str | None:
            if not _is_candidate(item[1]):
                return (
                    None
                    if self.only is None or self.skips_unsuitable
                    else "only MANAGED Iceberg tables can be compacted"
                )
            try:
                return _inspect_table(item[0], item[1], io, self.rules)
            except _OF_ONE_TABLE as error:
                return str(error)

        for batch in with_definitions(base, tables_of(base, self.only)):
            items = [(name, definition) for name, _, definition in batch]
            inspected = run_parallel(in_one_round_trip(inspect_item), items, self.lake.storage.concurrency)
            for (table, _), inspection in zip(items, inspected, strict=True):
                if isinstance(inspection, str):
                    left[str(table)] = inspection
                if inspection is None or isinstance(inspection, str):
                    continue
                compaction, older_files = inspection
                if compaction.groups:
                    compactions.append(compaction)
                if older_files and not self.rules.repartition:
                    older[str(table)] = older_files
        if self.only is not None and left and not self.skips_unsuitable:
            name, reason = next(iter(left.items()))
            raise InvalidInputError(f"table {name} cannot be compacted: {reason}")
        return CompactTablesPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            tables=tuple(compactions),
            left=left,
            older_spec_files=older,
            operation=self,
        )

    def run(self, plan: CompactTablesPlan, approved_digest: str | None) -> CompactTablesReport:
        """Rewrite the data files of a plan, and commit."""
        metered = MeteredLakehouse(self.lake)
        lake = metered.lake
        base = lake.snapshot()
        publication, since = publication_id(_OPERATION, self.run_id or str(uuid.uuid4())), base.version
        if self.run_id is not None:
            since = pinned_version(base, publication_id("pin", _OPERATION, self.run_id))
            version = published_version(lake, publication, since)
            if version is not None:
                return report_of(Publication(version, was_published=True), {}, {}, 0, metered.cost())
        replace(self, lake=lake).checked(plan, approved_digest)
        if plan.is_empty:
            return report_of(Publication(base.version, was_published=False), {}, {}, 0, metered.cost())
        work = _Rewrite(lake, plan, writing_io(self.lake), lake.storage.now_ms())
        work.write(self.write)
        try:
            published, left, attempts = work.commit(publication, since, self.run_id, self.message)
        except CommitOutcomeUnknownError:
            raise
        except TrinityLakeError:
            # A typed error means that nothing was committed, so no version refers to these files.
            work.discard(plan.tables)
            raise
        if published.was_published:  # another process with the same run id committed first, so only its files are used
            work.discard(plan.tables)
            return report_of(published, {}, {}, attempts, metered.cost())
        work.discard([table for table in plan.tables if table.name in left])
        return report_of(published, work.staged, left, attempts, metered.cost())


def plan_compact_tables(
    lake: Lakehouse,
    tables: Sequence[str] | None = None,
    *,
    target_file_size_bytes: int | None = None,
    min_input_files: int = 5,
    repartition: bool = False,
) -> CompactTablesPlan:
    """Plan to merge small data files of managed Iceberg tables, without writing.

    Files of a partition that are smaller than three quarters of the target size are merged. Data files with deleted
    rows are rewritten regardless of their size. Tables that cannot be compacted are skipped.

    Args:
        lake: The lakehouse.
        tables: The tables to compact, as ``namespace.table``; by default, all managed tables.
        target_file_size_bytes: The target size; by default, the table property ``write.target-file-size-bytes`` or, if
            it is not set, 128 MiB.
        min_input_files: The minimum number of files to merge. Fewer files are merged only if they fill a file.
        repartition: Whether to rewrite all files of older partition specs with the current spec.

    Raises:
        TableNotFoundError: A named table does not exist.
        InvalidInputError: A number is out of range, or a named table cannot be compacted.
        StorageError: A file cannot be read.
    """
    if target_file_size_bytes is not None and target_file_size_bytes < 1:
        raise InvalidInputError(f"target_file_size_bytes is {target_file_size_bytes}; it must be at least 1")
    if min_input_files < 2:
        raise InvalidInputError(f"min_input_files is {min_input_files}; it must be at least 2")
    rules = RewriteRules(target_file_size_bytes, min_input_files, repartition)
    return CompactTables(lake=lake, rules=rules, only=None if tables is None else tuple(tables)).plan()


def _paths(group: FileGroup) -> list[str]:
    deletes = {file.file_path for files in group.deletes.values() for file in files}
    return [*(file.file_path for file in group.files), *sorted(deletes)]


def _is_candidate(definition: TableDef) -> bool:
    return definition.is_managed and definition.is_iceberg and METADATA_LOCATION in definition.format_properties


def _inspect_table(
    name: ObjectName, definition: TableDef, io: StorageFileIO, rules: RewriteRules
) -> tuple[TableCompaction, int]:
    metadata = table_metadata(definition, io)
    search = find_groups(metadata, io.for_table(definition), rules)
    compaction = TableCompaction(
        namespace=name.namespace,
        table=name.table or "",
        table_id=definition.id,
        metadata_location=definition.format_properties[METADATA_LOCATION],
        data_files=search.data_files,
        files=sum(len(group.files) for group in search.groups),
        groups=len(search.groups),
        partitions=len({group.partition for group in search.groups}),
        rows=sum(group.rows for group in search.groups),
        bytes=sum(group.bytes for group in search.groups),
        file_groups=search.groups,
        metadata=metadata,
    )
    return compaction, search.older_spec_files


class _Rewrite:
    """The new files of a plan, until they are committed or deleted."""

    def __init__(self, lake: Lakehouse, plan: CompactTablesPlan, io: StorageFileIO, begun_at_ms: int):
        self._lake = lake
        self._tables = plan.tables
        self._begun_at_ms = begun_at_ms
        # Not metered, because other processes also write with this storage.
        self._io = io
        self._rules = plan.operation.rules
        self._written: dict[str, list[DataFile]] = {table.name: [] for table in plan.tables}
        self._damaged: dict[str, str] = {}
        self.staged: dict[str, StagedTable] = {}

    def write(self, write: GroupWriter) -> None:
        """Write the groups of all tables, or the groups of each table separately if one table cannot be read.

        Raises the errors of ``write`` if no table can be read.
        """
        try:
            self._write(write, self._tables)
        except _OF_ONE_TABLE as error:
            for table in self._tables:
                try:
                    self._write(write, [table])
                except _OF_ONE_TABLE as damage:
                    self._damaged[table.name] = str(damage)
                except BaseException:
                    self.discard(self._tables)
                    raise
            if len(self._damaged) == len(self._tables):
                raise error

    def _write(self, write: GroupWriter, tables: Sequence[TableCompaction]) -> None:
        groups: list[tuple[Rewriting, FileGroup]] = []
        names: list[str] = []
        for table in tables:
            rewriting = rewriting_of(table.metadata, self._io.for_managed(table.table_id), self._rules, table.name)
            groups += [(rewriting, group) for group in table.file_groups]
            names += [table.name] * len(table.file_groups)
        for name, files in zip(names, write(groups), strict=True):
            self._written[name] += files

    def commit(
        self, publication: str, since: int, run_id: str | None, message: str | None
    ) -> tuple[Publication, dict[str, str], int]:
        """Stage the files that are still valid, and publish them.

        Args:
            publication: The id of the publication.
            since: The first version that may contain an earlier publication with this id.
            run_id: The id of the run, if any.
            message: The message of the commit.

        Returns:
            The publication, the skipped tables with the reasons, and the number of attempts.
        """
        self._count_from_first_file()

        def attempt(number: int) -> tuple[Publication, dict[str, str], int]:
            try:
                left = self._stage()
                return self._publish(publication, since, run_id, message), left, number
            except CommitConflictError:
                version = published_version(self._lake, publication, since)
                if version is None:
                    raise
                return Publication(version, was_published=True), {}, number

        return commit_on_latest(attempt, may_succeed=lambda: bool(self.staged))

    def _count_from_first_file(self) -> None:
        """Measure the commit age from the first file if reading and writing took longer than the file age limit.

        Raises TransactionExpiredError if one of the files was deleted.
        """
        age_ms = self._lake.storage.now_ms() - self._begun_at_ms
        if age_ms > self._lake.snapshot().definition.txn_ttl_millis:
            written = (file.file_path for files in self._written.values() for file in files)
            self._begun_at_ms = oldest_of(lambda: written, self._io)

    def _publish(self, publication: str, since: int, run_id: str | None, message: str | None) -> Publication:
        files = sum(table.files for table in self._tables if table.name in self.staged)
        return publish_once(
            self._lake,
            list(self.staged.values()),
            publication,
            run_id=run_id,
            message=message or f"{files} files of {len(self.staged)} tables",
            operation=_OPERATION,
            since=since,
        )

    def _stage(self) -> dict[str, str]:
        self.staged = {}
        conflicts: dict[str, TrinityLakeError] = {}
        damaged: dict[str, TrinityLakeError] = {}
        for table in (table for table in self._tables if table.name not in self._damaged):
            try:
                self.staged[table.name] = stage_rewritten(
                    self._lake,
                    (table.namespace, table.table),
                    table.metadata,
                    table.file_groups,
                    self._written[table.name],
                    begun_at_ms=self._begun_at_ms,
                )
            except CommitConflictError as error:
                conflicts[table.name] = error
            except _OF_ONE_TABLE as error:
                damaged[table.name] = error
        if not self.staged:
            raise next(iter((conflicts or damaged).values()))
        return self._damaged | {name: str(error) for name, error in (conflicts | damaged).items()}

    def discard(self, tables: Sequence[TableCompaction]) -> None:
        """Delete the new files of tables on a best-effort basis. No version refers to them."""
        for table in tables:
            delete_data_files(self._io, self._written[table.name])
