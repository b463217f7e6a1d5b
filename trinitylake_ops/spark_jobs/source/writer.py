"""``write`` and ``writeStream`` of the source: tasks write data files, and one commit of the lakehouse publishes them.

Spark may tell a writer to abort while its tasks still write. It also does so after a commit that raised an error,
whatever its outcome. So nothing is deleted then: a removal of orphans deletes files that no version names.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import DataFile
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.spark_jobs.source.options import OPTIONS, ROOT, SourceOptions
from trinitylake_ops.spark_jobs.source.stream_options import WRITE_OPTIONS, WriteOptions
from trinitylake_ops.spark_jobs.tables.reader import check_reachable, table_name
from trinitylake_ops.spark_jobs.tables.writer import plan_rows
from trinitylake_ops.tables.managed import without_history
from trinitylake_ops.tables.writing.publication import publication_id, publish_once, published_version
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import Replace, stage_appended, stage_data_files
from trinitylake_ops.tables.writing.stream_epochs import QUERY_ID, epoch_publication, find_epoch
from trinitylake_ops.tables.writing.write_mode import Mode, replaced_by
from trinitylake_ops.tables.writing.write_plan import TableWrite
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ATTEMPTS = 5

_LONGEST_MESSAGE_CHARS = 500

#: Spark passes a stream's own options to its sink.
_OF_SPARK = ("checkpointlocation", "queryname")
_QUERY_ID_PROPERTY = "sql.streaming.queryId"
_WRITE, _STREAM = "write", "stream"


@dataclass(frozen=True)
class WriteTarget:
    """The table to write, and how."""

    source: SourceOptions
    options: WriteOptions
    name: tuple[str, str]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteTarget:
        """Return the settings in options. Raises InvalidInputError."""
        given = {name.lower(): value for name, value in options.items() if name.lower() not in _OF_SPARK}
        if wrong := next((name for name in OPTIONS if name in given and name != ROOT), None):
            raise InvalidInputError(f"the option {wrong!r} is of reads; writes have {', '.join(WRITE_OPTIONS)}")
        source = SourceOptions.parse(given, WRITE_OPTIONS)
        return cls(source, WriteOptions.parse(given), table_name(source.request.table))

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError, InvalidInputError, StorageError."""
        lake = Lakehouse.open(self.source.root, self.source.storage_options)
        check_reachable(lake)
        return lake

    def plan(self, lake: Lakehouse, schema: StructType) -> TableWrite:
        """Plan the write. Raises what :func:`table_writer.plan_rows` raises."""
        options = self.options
        return plan_rows(lake, schema, *self.name, options.partition_by, options.primary_key)


@dataclass
class WrittenFiles(WriterCommitMessage):
    """The files of a task: pickled data files, and for a stream the pickled plan that they were written for.

    ``query_id`` is Spark's, which is in the stream's checkpoint.
    """

    pickled_files: bytes
    pickled_plan: bytes = b""
    query_id: str | None = None


def batch_writer(target: WriteTarget, schema: StructType, *, overwrite: bool) -> BatchWriter:
    """Return the writer of ``DataFrame.write``. Raises InvalidInputError, and what planning raises."""
    options = target.options
    if options.stream_id is not None:
        raise InvalidInputError("the option 'stream_id' is of streams; a batch write has 'run_id'")
    if options.replaces_partitions and not overwrite:
        raise InvalidInputError("the option 'replace' goes with the mode overwrite")
    mode: Mode = "append"
    if overwrite:
        mode = "replace_partitions" if options.replaces_partitions else "replace_table"
    lake = target.open()
    since = lake.latest_version()
    publication = None
    if options.run_id is not None:
        publication = publication_id(_WRITE, options.run_id, *target.name)
        since = pinned_version(lake.snapshot(), publication_id("pin", publication))
        if published_version(lake, publication, since) is not None:
            return BatchWriter(target, None, Replace.NOTHING, publication, since)
    plan = target.plan(lake, schema)
    _, replacing = replaced_by(plan, mode, None)
    return BatchWriter(target, plan, replacing, publication or str(uuid.uuid4()), since)


class BatchWriter(DataSourceArrowWriter):
    """A helper of the driver makes the writer.

    It is pickled to the tasks, and to another helper for commit or abort.
    """

    def __init__(
        self,
        target: WriteTarget,
        plan: TableWrite | None,
        replacing: Replace | BooleanExpression,
        publication: str,
        since: int,
    ):
        self._target = target
        self._plan = plan
        self._replacing = replacing
        self._publication = publication
        self._since = since

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        # A write that was committed by an earlier attempt is not repeated.
        return WrittenFiles(pickle.dumps([] if self._plan is None else self._plan.write(iterator)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        plan = self._plan
        if plan is None:
            return
        lake = self._target.open()
        files = _files_of(messages)
        _publish(
            lake,
            lambda: _staged(lake, plan, files, self._replacing),
            self._publication,
            since=self._since,
            operation=_WRITE,
            run_id=self._target.options.run_id,
            message=self._target.options.message or f"write {'.'.join(self._target.name)}"[:_LONGEST_MESSAGE_CHARS],
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the module says why."""


def stream_writer(target: WriteTarget, schema: StructType, *, overwrite: bool) -> StreamWriter:
    """Return the writer of ``DataFrame.writeStream``. Raises InvalidInputError."""
    options = target.options
    if options.stream_id is None:
        raise InvalidInputError(
            "the option 'stream_id' is missing: a name of this stream alone, which stays when it is"
            " started again, so that each of its batches is committed once"
        )
    if options.run_id is not None or options.replaces_partitions:
        raise InvalidInputError("the options 'run_id' and 'replace' are of batch writes; a stream has 'stream_id'")
    return StreamWriter(target, options.stream_id, schema, overwrite=overwrite)


class StreamWriter(DataSourceStreamArrowWriter):
    """A helper of the driver makes the writer for each epoch and sends it to the tasks. Another helper commits."""

    def __init__(self, target: WriteTarget, stream_id: str, schema: StructType, *, overwrite: bool):
        self._target = target
        self._stream_id = stream_id
        self._schema = schema
        self._is_complete = overwrite

    def __getstate__(self) -> dict[str, Any]:
        # The input of the tasks is planned now. The helper that commits is sent no writer, and plans nothing.
        return {"_pickled_plan": self._pickled_plan}

    @cached_property
    def _pickled_plan(self) -> bytes:
        plan = self._target.plan(self._target.open(), self._schema)
        return pickle.dumps(replace(plan, metadata=without_history(plan.metadata)))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        plan: TableWrite = pickle.loads(self._pickled_plan)
        return WrittenFiles(pickle.dumps(plan.write(iterator)), self._pickled_plan, _query_id())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        written = [message for message in messages if isinstance(message, WrittenFiles)]
        files = _files_of(messages)
        if not written or not (files or self._is_complete):
            return  # an epoch without rows is no version; a repetition is empty, too
        lake = self._target.open()
        query_id = written[0].query_id
        found = find_epoch(lake, self._stream_id, batchId, query_id)
        if found.version is not None:
            return
        plan: TableWrite = pickle.loads(written[0].pickled_plan)
        is_ours = _publish(
            lake,
            lambda: _staged(lake, plan, files, Replace.ALL if self._is_complete else Replace.NOTHING),
            epoch_publication(self._stream_id, batchId),
            since=found.looked_through,
            operation=_STREAM,
            run_id=None,
            message=self._target.options.message or f"epoch {batchId} of {self._stream_id}",
            properties={
                "stream_id": self._stream_id,
                "epoch": str(batchId),
                **({} if query_id is None else {QUERY_ID: query_id}),
            },
        )
        if not is_ours:  # the search for it did not know its query
            find_epoch(lake, self._stream_id, batchId, query_id)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: the module says why."""


def _query_id() -> str | None:
    """Return the id of this task's query, the same for as long as its checkpoint lives."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(_QUERY_ID_PROPERTY)


def _files_of(messages: Sequence[WriterCommitMessage | None]) -> list[DataFile]:
    written = [message for message in messages if isinstance(message, WrittenFiles)]
    return [file for message in written for file in pickle.loads(message.pickled_files)]


def _staged(
    lake: Lakehouse, plan: TableWrite, files: Sequence[DataFile], replacing: Replace | BooleanExpression
) -> StagedTable:
    if replacing is Replace.NOTHING:
        return stage_appended(lake, plan, files)
    return stage_data_files(lake, plan, files, replacing=replacing)


def _publish(
    lake: Lakehouse,
    stage: Callable[[], StagedTable],
    publication: str,
    *,
    since: int,
    operation: str,
    run_id: str | None,
    message: str,
    properties: Mapping[str, str] | None = None,
) -> bool:
    """Stage and publish, and repeat this if others changed the table in between. Returns whether this call published.

    Raises the errors of both.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            staged = stage()
            published = publish_once(
                lake,
                [staged],
                publication,
                since=since,
                operation=operation,
                run_id=run_id,
                message=message,
                properties=properties,
            )
        except CommitConflictError:
            if published_version(lake, publication, since) is not None:
                return False
            if attempt == MAX_ATTEMPTS:
                raise
        else:
            return not published.was_published
    raise AssertionError("the last attempt returns or raises")
