"""Batch and streaming writes through the data source.

Spark may call a writer's ``abort`` while its tasks are still writing, and after any error that a commit raised, even if
the commit may have succeeded. Aborting therefore deletes nothing; unreferenced files are removed as orphans.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import DataFile
from pyiceberg.typedef import Record
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, ObjectExistsError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.iceberg.managed import without_history
from trinitylake_ops.iceberg.rows_digest import RowsDigest, total_of
from trinitylake_ops.iceberg.write.partition_key import check_partitions
from trinitylake_ops.iceberg.write.plan import TableWrite
from trinitylake_ops.iceberg.write.publication import Publication, publication_id, publish_once, published_version
from trinitylake_ops.iceberg.write.replacement import TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode, Replace, replaced_by, stage_appended, stage_data_files
from trinitylake_ops.iceberg.write.stream_epochs import QUERY_ID, Epoch, EpochGuard, find_epoch
from trinitylake_ops.spark.source.options import OPTIONS, ROOT, WRITE_OPTIONS, SourceOptions, WriteOptions
from trinitylake_ops.spark.tables.reader import check_reachable, resolved_name, table_name
from trinitylake_ops.spark.tables.writer import plan_rows
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ATTEMPTS = 5

_MAX_MESSAGE_CHARS = 500

#: Options of Spark's streams, which Spark also passes to their sinks.
_OF_SPARK = ("checkpointlocation", "queryname")
_WRITE = "write"


@dataclass(frozen=True)
class WriteTarget:
    """The table to write, and the write options."""

    #: The lakehouse.
    source: SourceOptions
    #: The write options.
    options: WriteOptions
    #: The table's namespace and name.
    name: tuple[str, str]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteTarget:
        """Parse write options. Raises InvalidInputError."""
        plain_options = {name.lower(): value for name, value in options.items() if name.lower() not in _OF_SPARK}
        if read_option := next((name for name in OPTIONS if name in plain_options and name != ROOT), None):
            raise InvalidInputError(
                f"option {read_option!r} is for reads; the options of writes are {', '.join(WRITE_OPTIONS)}"
            )
        source = SourceOptions.parse(plain_options, WRITE_OPTIONS)
        return cls(source, WriteOptions.parse(plain_options), table_name(source.request.table))

    def open(self) -> Lakehouse:
        """Open the lakehouse. Raises LakehouseNotFoundError, InvalidInputError, or StorageError."""
        lake = Lakehouse.open(self.source.root, self.source.storage_options)
        check_reachable(lake)
        return lake

    def plan(self, lake: Lakehouse, schema: StructType) -> TableWrite:
        """Plan the write. Raises the errors of :func:`~trinitylake_ops.spark.tables.writer.plan_rows`.

        Args:
            lake: The lakehouse.
            schema: The columns of the rows.
        """
        options = self.options
        return plan_rows(lake, schema, *self.name, options.partition_by, options.primary_key)


@dataclass
class WrittenFiles(WriterCommitMessage):
    """The files that a task has written."""

    #: The pickled list of data files.
    pickled_files: bytes
    #: For a stream, the pickled plan of the write.
    pickled_plan: bytes = b""
    #: Spark's id of a streaming query, which is part of its checkpoint.
    query_id: str | None = None
    #: The digest of a stream's rows.
    rows: RowsDigest = field(default_factory=RowsDigest)


def batch_writer(target: WriteTarget, schema: StructType, *, overwrite: bool) -> BatchWriter:
    """Return the writer of ``DataFrame.write``.

    Args:
        target: The table and the options.
        schema: The columns of the rows.
        overwrite: Whether the mode is ``overwrite``.

    Raises:
        InvalidInputError: If the options are invalid.
        ObjectExistsError: If the table must not exist, but does. Errors of planning are raised as well.
    """
    options = target.options
    if options.stream_id is not None:
        raise InvalidInputError("option 'stream_id' is for streams; use 'run_id' for a batch write")
    if options.replaces_partitions and not overwrite:
        raise InvalidInputError("option 'replace' requires mode overwrite")
    if options.partition is not None and not overwrite:
        raise InvalidInputError("option 'partition' requires mode overwrite")
    replaces_partitions = options.replaces_partitions or options.partition is not None
    mode: Mode = "append"
    if overwrite:
        mode = "replace_partitions" if replaces_partitions else "replace_table"
    lake = target.open()
    since = lake.latest_version()
    publication = None
    if options.run_id is not None:
        publication = publication_id(_WRITE, options.run_id, *target.name)
        since = pinned_version(lake.snapshot(), publication_id("pin", publication))
        if published_version(lake, publication, since) is not None:
            return BatchWriter(target, None, Replace.NOTHING, publication, since)
    plan = target.plan(lake, schema)
    if options.must_create and plan.base_metadata_location is not None:
        raise ObjectExistsError(f"table {'.'.join(target.name)} already exists")
    if overwrite and plan.base_metadata_location is not None:
        _check_states_its_reads(lake, target)
    partitions = None if options.partition is None else [options.partition]
    wanted, replacing = replaced_by(plan, mode, partitions, schema.names)
    return BatchWriter(target, plan, replacing, publication or str(uuid.uuid4()), since, wanted)


def _check_states_its_reads(lake: Lakehouse, target: WriteTarget) -> None:
    """Raise InvalidInputError for an overwrite under serializable isolation whose reads are unknown."""
    is_serializable = lake.snapshot().definition.isolation_level == IsolationLevel.SERIALIZABLE
    if is_serializable and target.options.reads is None:
        raise InvalidInputError(
            f"cannot overwrite rows of table {'.'.join(target.name)}: the lakehouse is serializable, and Spark does not"
            " report to a data source which tables were read; pass them with their versions in the option reads, for"
            ' example {"ns.t": 12}, or {} for none, or use PipelineRun'
        )


class BatchWriter(DataSourceArrowWriter):
    """Writes a batch and commits it.

    It is created in a helper process of the driver, and pickled to the tasks and to another helper for commit or abort.
    """

    def __init__(
        self,
        target: WriteTarget,
        plan: TableWrite | None,
        replacing: Replace | BooleanExpression,
        publication: str,
        since: int,
        wanted: frozenset[Record] | None = None,
    ):
        self._target = target
        self._plan = plan
        self._replacing = replacing
        self._publication = publication
        self._since = since
        self._wanted = wanted

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        # If an earlier attempt has committed, the write is not repeated.
        return WrittenFiles(pickle.dumps([] if self._plan is None else self._plan.write(iterator)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        plan = self._plan
        if plan is None:
            return
        lake = self._target.open()
        files = files_of(messages)
        check_partitions(files, self._wanted, [field.name for field in plan.metadata.spec().fields])
        options = self._target.options
        reads = [
            TableRead.of(snapshot, *resolved_name(name, snapshot))
            for name, version in (options.reads or {}).items()
            for snapshot in [lake.snapshot(version)]
        ]

        def publish(staged: StagedTable) -> Publication:
            return publish_once(
                lake,
                [staged],
                self._publication,
                since=self._since,
                operation=_WRITE,
                run_id=options.run_id,
                message=options.message or f"write {'.'.join(self._target.name)}"[:_MAX_MESSAGE_CHARS],
                reads=reads,
            )

        publish_written(
            lake,
            lambda: staged_by(lake, plan, files, self._replacing, self._wanted),
            publish,
            self._publication,
            since=self._since,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing, for the reason in the module's docstring."""


def files_of(messages: Sequence[WriterCommitMessage | None]) -> list[DataFile]:
    """Return the data files of all tasks."""
    new_files = [message for message in messages if isinstance(message, WrittenFiles)]
    return [file for message in new_files for file in pickle.loads(message.pickled_files)]


def staged_by(
    lake: Lakehouse,
    plan: TableWrite,
    files: Sequence[DataFile],
    replacing: Replace | BooleanExpression,
    partitions: Collection[Record] | None = None,
) -> StagedTable:
    """Stage a table with new files, which are added or replace existing files.

    Args:
        lake: The lakehouse.
        plan: The planned write.
        files: The new files.
        replacing: What the files replace.
        partitions: The replaced partitions, if ``replacing`` is a filter.

    Returns:
        The staged table.
    """
    if replacing is Replace.NOTHING:
        return stage_appended(lake, plan, files)
    return stage_data_files(lake, plan, files, replacing=replacing, partitions=partitions)


def publish_written(
    lake: Lakehouse,
    stage: Callable[[], StagedTable],
    publish: Callable[[StagedTable], Publication],
    publication: str,
    *,
    since: int,
) -> bool:
    """Stage and publish, and retry both if another commit changes the table in between.

    Args:
        lake: The lakehouse.
        stage: Stages the written files.
        publish: Publishes the staged table once, under ``publication``.
        publication: The publication id.
        since: The publication can only be in versions after this one.

    Returns:
        Whether this call, rather than an earlier attempt, has published.

    Raises:
        CommitConflictError: If the files no longer match the table.
        StorageError: If the storage fails. Other errors of both functions are raised as well.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            published = publish(stage())
        except CommitConflictError:
            if published_version(lake, publication, since) is not None:
                return False
            if attempt == MAX_ATTEMPTS:
                raise
        else:
            return not published.was_published
    raise AssertionError("the last attempt returns or raises")


_STREAM = "stream"
_QUERY_ID_PROPERTY = "sql.streaming.queryId"


def stream_writer(target: WriteTarget, schema: StructType, *, overwrite: bool) -> StreamWriter:
    """Return the writer of ``DataFrame.writeStream``.

    Args:
        target: The table and the options.
        schema: The columns of the rows.
        overwrite: Whether the output mode is ``complete``.

    Raises:
        InvalidInputError: If the options are invalid.
    """
    options = target.options
    if options.stream_id is None:
        raise InvalidInputError(
            "the option 'stream_id' is missing; pass a unique name of the stream that stays the same after restarts, so"
            " that each of its batches is committed once"
        )
    of_batches = (options.run_id, options.replaces_partitions, options.partition, options.must_create)
    if any(of_batches) or options.reads is not None:
        raise InvalidInputError(
            "the options 'run_id', 'replace', 'partition', 'create' and 'reads' are for batch writes; use 'stream_id'"
            " for a stream"
        )
    return StreamWriter(target, options.stream_id, schema, overwrite=overwrite)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream. A helper process of the driver creates it for each epoch, and another helper commits."""

    def __init__(self, target: WriteTarget, stream_id: str, schema: StructType, *, overwrite: bool):
        self._target = target
        self._stream_id = stream_id
        self._schema = schema
        self._is_complete = overwrite

    def __getstate__(self) -> dict[str, Any]:
        # Plan before pickling to the tasks. The helper that commits gets no pickled writer, and does not plan.
        return {"_pickled_plan": self._pickled_plan}

    @cached_attribute
    def _pickled_plan(self) -> bytes:
        plan = self._target.plan(self._target.open(), self._schema)
        return pickle.dumps(replace(plan, metadata=without_history(plan.metadata)))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        plan: TableWrite = pickle.loads(self._pickled_plan)
        rows = RowsDigest()
        files = pickle.dumps(plan.write(rows.over(iterator)))
        return WrittenFiles(files, self._pickled_plan, _query_id(), rows)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        new_files = [message for message in messages if isinstance(message, WrittenFiles)]
        files = files_of(messages)
        if not new_files or not (files or self._is_complete):
            return  # an epoch without rows creates no version, and its repetition is empty as well
        lake = self._target.open()
        query_id = new_files[0].query_id
        rows = str(total_of(message.rows for message in new_files))
        epoch = Epoch(self._stream_id, batchId, rows, query_id)
        search = find_epoch(lake, epoch)
        if search.version is not None:
            return
        plan: TableWrite = pickle.loads(new_files[0].pickled_plan)
        guard = EpochGuard(epoch, search.searched_to)

        def publish(staged: StagedTable) -> Publication:
            return publish_once(
                lake,
                [staged],
                epoch.publication,
                since=search.searched_to,
                operation=_STREAM,
                message=self._target.options.message or f"epoch {batchId} of {self._stream_id}",
                properties={
                    "stream_id": self._stream_id,
                    "epoch": str(batchId),
                    **({} if query_id is None else {QUERY_ID: query_id}),
                },
                require=guard,
            )

        is_ours = publish_written(
            lake,
            lambda: staged_by(lake, plan, files, Replace.ALL if self._is_complete else Replace.NOTHING),
            publish,
            epoch.publication,
            since=search.searched_to,
        )
        if not is_ours:  # check that the commit was made by the same query
            find_epoch(lake, epoch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing, for the reason in the module's docstring."""


def _query_id() -> str | None:
    """Return the id of this task's query, which stays the same for the lifetime of its checkpoint."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(_QUERY_ID_PROPERTY)
