"""Jobs and DataFrames whose tasks take and return bytes.

A local Spark runs them as RDDs. Spark Connect has only DataFrames: elements become rows, and the task becomes a
function over Arrow batches (``mapInArrow``), which needs pandas on the client like all of Spark Connect. In both cases
secrets, such as storages with their credentials, are inside the serialized function, which Spark shows neither in plans
nor in its UI nor in event logs. There is no shuffle, and each task runs once. A task that Spark repeats has an
``attemptNumber`` above 0 (decision 19).

In other sessions, data sources get objects of this process through a folder on the driver (``handover``). A server has
another disk, so there the reader with the storage's credentials is inside a function, and the input of each task is
sent as rows.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from trinitylake_ops.errors import JobFailedError
from trinitylake_ops.spark.runtime.connect import is_remote
from trinitylake_ops.spark.runtime.errors import spark_failures

logger = logging.getLogger(__name__)

#: The function of a task: maps each element to bytes, in order.
Task = Callable[[Iterator[bytes]], Iterator[bytes]]

#: The maximum size of a result row on a server, because messages and Arrow batches are limited. Results are split.
PIECE_BYTES = 1 << 20

_INPUT_SCHEMA = pa.schema([("number", pa.int64()), ("elements", pa.list_(pa.binary()))])
_RETURNED = pa.schema([("number", pa.int64()), ("piece", pa.binary())])
_RETURNED_DDL = "number long, piece binary"


def run_in_tasks(
    spark: SparkSession, description: str, task: Task, elements: Sequence[bytes], n_tasks: int
) -> list[bytes]:
    """Run one job over elements.

    The job is cancelled if an exception, such as an interrupt, leaves this call.

    Args:
        spark: The session.
        description: The operation, for error messages and the job's description.
        task: The function to run in the tasks.
        elements: The inputs.
        n_tasks: The maximum number of tasks.

    Returns:
        The result of each element, in order.

    Raises:
        JobFailedError: If Spark fails. Errors of this package that tasks raise keep their class.
    """
    if not elements:
        return []
    n_tasks = max(1, min(n_tasks, len(elements)))
    with spark_failures(description):
        results = (_remote_job if is_remote(spark) else _own_job)(spark, description, task, elements, n_tasks)
    if len(results) != len(elements):
        raise JobFailedError(
            f"cannot {description}: Spark returned {len(results)} results for {len(elements)} elements"
        )
    return results


def _own_job(spark: SparkSession, description: str, task: Task, elements: Sequence[bytes], n_tasks: int) -> list[bytes]:
    """Run a job in the local Spark."""
    context: Any = spark.sparkContext
    group = f"trinitylake-{uuid.uuid4()}"
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    context.setJobGroup(group, f"TrinityLake: {description}", interruptOnCancel=True)
    try:
        # The task's data is inside the serialized function, which Spark does not show.
        rows: list[bytes] = (
            context.parallelize(elements, n_tasks).mapPartitions(lambda part: task(iter(part))).collect()
        )
        return rows
    except BaseException:
        context.cancelJobGroup(group)
        raise
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)


def _remote_job(
    spark: SparkSession, description: str, task: Task, elements: Sequence[bytes], n_tasks: int
) -> list[bytes]:
    """Run a job on a Spark Connect server, in at most as many tasks as can run at a time."""

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _over_batches(task, batches)

    size = -(-len(elements) // n_tasks)
    offsets = range(0, len(elements), size)
    groups = [list(elements[first : first + size]) for first in offsets]
    table = pa.Table.from_pydict({"number": list(offsets), "elements": groups}, schema=_INPUT_SCHEMA)
    with _interrupted_by_errors(spark, description):
        rows: pa.Table = spark.createDataFrame(table).mapInArrow(over_batches, _RETURNED_DDL).toArrow()
    pieces: dict[int, list[bytes]] = {}
    for number, piece in _rows(rows.to_batches()):
        pieces.setdefault(number, []).append(piece)
    return [b"".join(pieces[number]) for number in sorted(pieces)]


def _over_batches(task: Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    numbers: list[int] = []

    def elements() -> Iterator[bytes]:
        for first, group in _rows(batches):
            for position, element in enumerate(group):
                numbers.append(first + position)
                yield element

    for position, result in enumerate(task(elements())):
        for start in range(0, max(1, len(result)), PIECE_BYTES):
            piece = [[numbers[position]], [result[start : start + PIECE_BYTES]]]
            yield pa.RecordBatch.from_pydict(dict(zip(_RETURNED.names, piece, strict=True)), schema=_RETURNED)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


@contextmanager
def _interrupted_by_errors(spark: SparkSession, description: str) -> Iterator[None]:
    """Tag the work of a Spark Connect session in a block, and interrupt it if an exception leaves the block."""
    tag = f"trinitylake: {description}: {uuid.uuid4()}"
    spark.addTag(tag)
    try:
        yield
    except BaseException:
        try:
            spark.interruptTag(tag)
        except PySparkException as error:  # the first error is raised
            logger.warning("cannot interrupt Spark's work to %s: %s", description, str(error).partition("\n")[0])
        raise
    finally:
        spark.removeTag(tag)


_PART = "part"


def frame_by_tasks(
    spark: SparkSession, schema: StructType, read: Callable[[bytes], Iterator[pa.RecordBatch]], parts: Sequence[bytes]
) -> DataFrame:
    """Return a DataFrame of the rows that ``read`` yields for each part. Each query reads them again.

    Args:
        spark: The session.
        schema: The columns.
        read: Yields the rows of a part, in a task.
        parts: The parts.
    """
    if not parts:
        return spark.createDataFrame([], schema)

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from read(part)

    table = pa.table([pa.array(parts, pa.binary())], names=[_PART])
    return spark.createDataFrame(table).mapInArrow(over_batches, schema)
