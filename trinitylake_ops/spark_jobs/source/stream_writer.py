"""``writeStream`` of the source: each epoch with rows is one commit of the lakehouse, made once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from trinitylake_ops.cached_attribute import cached_attribute
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.source.writer import WriteTarget, WrittenFiles, files_of, publish_written, staged_by
from trinitylake_ops.tables.managed import without_history
from trinitylake_ops.tables.writing.publication import Publication, publish_once
from trinitylake_ops.tables.writing.rows_digest import RowsDigest, total_of
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import Replace
from trinitylake_ops.tables.writing.stream_epochs import QUERY_ID, Epoch, EpochGuard, find_epoch
from trinitylake_ops.tables.writing.write_plan import TableWrite

if TYPE_CHECKING:
    import pyarrow as pa

_STREAM = "stream"
_QUERY_ID_PROPERTY = "sql.streaming.queryId"


def stream_writer(target: WriteTarget, schema: StructType, *, overwrite: bool) -> StreamWriter:
    """Return the writer of ``DataFrame.writeStream``. Raises InvalidInputError."""
    options = target.options
    if options.stream_id is None:
        raise InvalidInputError(
            "the option 'stream_id' is missing; give a name of this stream alone, which stays when it is"
            " started again, so that each of its batches is committed once"
        )
    of_batches = (options.run_id, options.replaces_partitions, options.partition, options.must_create)
    if any(of_batches) or options.reads is not None:
        raise InvalidInputError(
            "the options 'run_id', 'replace', 'partition', 'create' and 'reads' are of batch writes; a stream has"
            " 'stream_id'"
        )
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
        written = [message for message in messages if isinstance(message, WrittenFiles)]
        files = files_of(messages)
        if not written or not (files or self._is_complete):
            return  # an epoch without rows is no version; a repetition is empty, too
        lake = self._target.open()
        query_id = written[0].query_id
        rows = str(total_of(message.rows for message in written))
        epoch = Epoch(self._stream_id, batchId, rows, query_id)
        found = find_epoch(lake, epoch)
        if found.version is not None:
            return
        plan: TableWrite = pickle.loads(written[0].pickled_plan)
        guard = EpochGuard(epoch, found.looked_through)

        def publish(staged: StagedTable) -> Publication:
            return publish_once(
                lake,
                [staged],
                epoch.publication,
                since=found.looked_through,
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
            since=found.looked_through,
        )
        if not is_ours:  # the search for it did not know its query
            find_epoch(lake, epoch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: :mod:`writer` says why."""


def _query_id() -> str | None:
    """Return the id of this task's query, the same for as long as its checkpoint lives."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(_QUERY_ID_PROPERTY)
