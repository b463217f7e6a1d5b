"""Compaction of tables: their small data files become fewer, in one version for all tables. No row changes.

Files of which delete files delete rows are written anew, too, without these rows. Their delete files go.

Nothing is deleted. Older versions read the old files, which are freed when those versions are expired and purged. A
commit of others in between is no conflict as long as the old files are still the table's. Their appended rows stay.
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
from trinitylake_ops.operations.gc.tables import defined, tables_of
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version

_OPERATION = "compact-tables"
#: Failures of a table whose files are damaged or are not its own: the other tables are compacted.
_OF_ONE_TABLE = (InvalidDefinitionError, *DAMAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCompaction:
    """The plan for one table: ``files`` of ``data_files`` become about ``groups``."""

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
    found: tuple[FileGroup, ...] = field(repr=False, compare=False)
    metadata: TableMetadata = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class CompactTablesPlan(Plan):
    """The tables with data files that are worth writing anew.

    ``left`` names MANAGED Iceberg tables that are left as they are, with the reasons. ``older_spec_files`` names tables
    with files of an older partition spec that are left, and their number.
    """

    base_version: int
    tables: tuple[TableCompaction, ...]
    left: Mapping[str, str]
    older_spec_files: Mapping[str, int]
    operation: CompactTables = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and the files that each would have written anew."""
        content = [
            [one.namespace, one.table, one.table_id, [_paths(group) for group in one.found]] for one in self.tables
        ]
        return digest_of(self.base_version, self.base_id, _OPERATION, content)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.tables

    @property
    def files(self) -> int:
        """How many files would be written anew, of all tables."""
        return sum(one.files for one in self.tables)

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [
            (one.name, f"{one.files:,} of {one.data_files:,}", f"{one.groups:,}", one.partitions, f"{one.bytes:,}", "")
            for one in self.tables
        ]
        rows += [(name, "", "", "", "", reason) for name, reason in self.left.items()]
        rows += [
            (name, "", "", "", "", f"{number:,} files of an older partition spec stay, unless repartition is chosen")
            for name, number in self.older_spec_files.items()
        ]
        title = (
            f"Compaction of tables of version {self.base_version}: {self.files:,} files of {len(self.tables):,} tables"
        )
        return new_table(title, "table", "files", "become", "partitions", "bytes", "left as it is", rows=rows)

    def execute(
        self,
        write: GroupWriter = rewrite_in_process,
        *,
        run_id: str | None = None,
        approved_digest: str | None = None,
        message: str | None = None,
    ) -> CompactTablesReport:
        """Write the files of the plan anew and commit one version in which they replace the old ones.

        ``write`` writes the groups: in this process, or by Spark (``spark_jobs.group_writer``). A run with a ``run_id``
        commits once, however often it is started, within the lakehouse's ``txn_ttl_millis``. If others changed a table
        so that its new files no longer fit, it is left. Rows that others appended stay in any case.

        A table whose files are damaged, or whose number of rows changed, is left. Raises PlanChangedError when an
        approved digest is not that of the present plan. Raises CommitConflictError when no table could be compacted, or
        after MAX_ATTEMPTS. Raises ContentChangedError if the new files of any table hold other rows than the old ones.
        Raises the errors of ``write`` and of a commit, and the error of a damaged table if no other table could be
        compacted. New files are deleted then, best effort, and nothing is lost.
        """
        operation = replace(self.operation, write=write, run_id=run_id, message=message)
        return operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class CompactTables(PlannedOperation[CompactTablesPlan, CompactTablesReport]):
    """The compaction of tables by rules. ``only`` names them as ``namespace.table``, None for all."""

    telemetry_name = "compact-tables"

    rules: RewriteRules
    only: tuple[str, ...] | None
    write: GroupWriter = rewrite_in_process
    run_id: str | None = None
    message: str | None = None

    def plan(self) -> CompactTablesPlan:
        """Plan on the latest version. Raises what :func:`plan_compact_tables` raises."""
        base, io = self.lake.snapshot(), reading_io(self.lake)
        found: list[TableCompaction] = []
        left: dict[str, str] = {}
        older: dict[str, int] = {}

        def inspect_item(item: tuple[ObjectName, TableDef]) -> tuple[TableCompaction, int] | str | None:
            if not _is_candidate(item[1]):
                return None if self.only is None else "only MANAGED Iceberg tables can be"
            try:
                return _inspect_table(item[0], item[1], io, self.rules)
            except _OF_ONE_TABLE as error:
                return str(error)

        for batch in defined(base, tables_of(base, self.only)):
            items = [(name, definition) for name, _, definition in batch]
            looked = run_parallel(in_one_round_trip(inspect_item), items, self.lake.storage.concurrency)
            for (table, _), seen in zip(items, looked, strict=True):
                if isinstance(seen, str):
                    left[str(table)] = seen
                if seen is None or isinstance(seen, str):
                    continue
                compaction, older_files = seen
                if compaction.groups:
                    found.append(compaction)
                if older_files and not self.rules.repartition:
                    older[str(table)] = older_files
        if self.only is not None and left:
            name, reason = next(iter(left.items()))
            raise InvalidInputError(f"table {name} cannot be compacted: {reason}")
        return CompactTablesPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            tables=tuple(found),
            left=left,
            older_spec_files=older,
            operation=self,
        )

    def run(self, plan: CompactTablesPlan, approved_digest: str | None) -> CompactTablesReport:
        """Rewrite the data files of a plan and commit."""
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
        work = _Work(lake, plan, writing_io(self.lake), lake.storage.now_ms())
        work.write(self.write)
        try:
            published, left, attempts = work.commit(publication, since, self.run_id, self.message)
        except CommitOutcomeUnknownError:
            raise
        except TrinityLakeError:
            # Typed errors say that nothing was committed, so no version names these files.
            work.discard(plan.tables)
            raise
        if published.was_published:  # another process with the same run id was faster: only its files count
            work.discard(plan.tables)
            return report_of(published, {}, {}, attempts, metered.cost())
        work.discard([one for one in plan.tables if one.name in left])
        return report_of(published, work.staged, left, attempts, metered.cost())


def plan_compact_tables(
    lake: Lakehouse,
    tables: Sequence[str] | None = None,
    *,
    target_file_size_bytes: int | None = None,
    min_input_files: int = 5,
    repartition: bool = False,
) -> CompactTablesPlan:
    """Plan to write small data files of managed Iceberg tables anew as fewer. Only reads.

    Files of one partition below three quarters of the target are merged, up to the target. There must be
    ``min_input_files`` of them, or enough to fill a file. The target is ``target_file_size_bytes``, else the table's
    property ``write.target-file-size-bytes``, else 128 MiB. A file of which delete files delete rows is written anew,
    too, whatever its size, without these rows. With ``repartition`` all files of older partition specs are written by
    the current one. ``tables``, as ``namespace.table``, limit it.

    Tables that cannot be compacted are left, with the reason. Raises TableNotFoundError, CorruptFileError and other
    StorageErrors. Raises InvalidInputError for numbers out of range and for a named table that cannot be compacted.
    """
    if target_file_size_bytes is not None and target_file_size_bytes < 1:
        raise InvalidInputError(f"target_file_size_bytes is {target_file_size_bytes}, it must be at least 1")
    if min_input_files < 2:
        raise InvalidInputError(f"min_input_files is {min_input_files}, it must be at least 2")
    rules = RewriteRules(target_file_size_bytes, min_input_files, repartition)
    return CompactTables(lake=lake, rules=rules, only=None if tables is None else tuple(tables)).plan()


def _paths(group: FileGroup) -> list[str]:
    deletes = {file.file_path for found in group.deletes.values() for file in found}
    return [*(file.file_path for file in group.files), *sorted(deletes)]


def _is_candidate(definition: TableDef) -> bool:
    return definition.is_managed and definition.is_iceberg and METADATA_LOCATION in definition.format_properties


def _inspect_table(
    name: ObjectName, definition: TableDef, io: StorageFileIO, rules: RewriteRules
) -> tuple[TableCompaction, int]:
    metadata = table_metadata(definition, io)
    found = find_groups(metadata, io.for_table(definition), rules)
    compaction = TableCompaction(
        namespace=name.namespace,
        table=name.table or "",
        table_id=definition.id,
        metadata_location=definition.format_properties[METADATA_LOCATION],
        data_files=found.data_files,
        files=sum(len(group.files) for group in found.groups),
        groups=len(found.groups),
        partitions=len({group.partition for group in found.groups}),
        rows=sum(group.rows for group in found.groups),
        bytes=sum(group.bytes for group in found.groups),
        found=found.groups,
        metadata=metadata,
    )
    return compaction, found.older_spec_files


class _Work:
    """The files that were written for a plan, until they are committed or deleted."""

    def __init__(self, lake: Lakehouse, plan: CompactTablesPlan, io: StorageFileIO, begun_at_ms: int):
        self._lake = lake
        self._tables = plan.tables
        self._begun_at_ms = begun_at_ms
        # Other processes write by this storage, too: it is not counted.
        self._io = io
        self._rules = plan.operation.rules
        self._written: dict[str, list[DataFile]] = {one.name: [] for one in plan.tables}
        self._damaged: dict[str, str] = {}
        self.staged: dict[str, StagedTable] = {}

    def write(self, write: GroupWriter) -> None:
        """Write the groups of all tables, or of each table by itself if one of them cannot be read.

        Raises what ``write`` raises if no table can be read.
        """
        try:
            self._write(write, self._tables)
        except _OF_ONE_TABLE as error:
            for one in self._tables:
                try:
                    self._write(write, [one])
                except _OF_ONE_TABLE as damage:
                    self._damaged[one.name] = str(damage)
                except BaseException:
                    self.discard(self._tables)
                    raise
            if len(self._damaged) == len(self._tables):
                raise error

    def _write(self, write: GroupWriter, tables: Sequence[TableCompaction]) -> None:
        groups: list[tuple[Rewriting, FileGroup]] = []
        names: list[str] = []
        for one in tables:
            rewriting = rewriting_of(one.metadata, self._io.for_managed(one.table_id), self._rules, one.name)
            groups += [(rewriting, group) for group in one.found]
            names += [one.name] * len(one.found)
        for name, files in zip(names, write(groups), strict=True):
            self._written[name] += files

    def commit(
        self, publication: str, since: int, run_id: str | None, message: str | None
    ) -> tuple[Publication, dict[str, str], int]:
        """Stage the files that still fit and publish them.

        Returns the publication, tables that were left, and attempts.
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
        """Let the commit age from its first file, if reading and writing took longer than files may age.

        Raises TransactionExpiredError if one of the files is gone.
        """
        age_ms = self._lake.storage.now_ms() - self._begun_at_ms
        if age_ms > self._lake.snapshot().definition.txn_ttl_millis:
            written = (file.file_path for files in self._written.values() for file in files)
            self._begun_at_ms = oldest_of(lambda: written, self._io)

    def _publish(self, publication: str, since: int, run_id: str | None, message: str | None) -> Publication:
        files = sum(one.files for one in self._tables if one.name in self.staged)
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
        for one in (one for one in self._tables if one.name not in self._damaged):
            try:
                self.staged[one.name] = stage_rewritten(
                    self._lake,
                    (one.namespace, one.table),
                    one.metadata,
                    one.found,
                    self._written[one.name],
                    begun_at_ms=self._begun_at_ms,
                )
            except CommitConflictError as error:
                conflicts[one.name] = error
            except _OF_ONE_TABLE as error:
                damaged[one.name] = error
        if not self.staged:
            raise next(iter((conflicts or damaged).values()))
        return self._damaged | {name: str(error) for name, error in (conflicts | damaged).items()}

    def discard(self, tables: Sequence[TableCompaction]) -> None:
        """Delete the new files of tables, which no version names, best effort."""
        for one in tables:
            delete_data_files(self._io, self._written[one.name])
