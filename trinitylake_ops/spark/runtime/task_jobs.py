"""Jobs and frames of tasks that take and return bytes.

A Spark of this process has RDDs. A server has frames. There the elements are rows, and the function is one over Arrow
batches (``mapInArrow``). It needs pandas where it is called, as all of Spark Connect's client does. In both, secrets -
storages with their credentials - go inside the function. Spark shows them neither in plans nor in its UI nor in event
logs. There is no shuffle, and each task runs once. A task that Spark repeats has an ``attemptNumber`` above 0 (decision
18).

In other sessions the data source takes the objects of this process through a folder of the driver (``handover``). A
server has another disk. So the reader goes inside a function, with the storage's credentials, and the input of each
task goes as rows.
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

#: The function of a task: bytes for each of its elements, in order.
Task = Callable[[Iterator[bytes]], Iterator[bytes]]

#: In a server a result goes in rows of at most so many bytes, as messages and batches of Arrow have limits.
PIECE_BYTES = 1 << 20

_GIVEN = pa.schema([("number", pa.int64()), ("elements", pa.list_(pa.binary()))])
_RETURNED = pa.schema([("number", pa.int64()), ("piece", pa.binary())])
_RETURNED_DDL = "number long, piece binary"


def run_in_tasks(spark: SparkSession, what: str, task: Task, elements: Sequence[bytes], n_tasks: int) -> list[bytes]:
    """Run one job over elements, in at most so many tasks. Returns the result of each, in order.

    The job ends if this call is left by an exception, such as an interrupt. Raises errors of this package that tasks
    raise, JobFailedError for other failures.
    """
    if not elements:
        return []
    n_tasks = max(1, min(n_tasks, len(elements)))
    with spark_failures(what):
        results = (_remote_job if is_remote(spark) else _own_job)(spark, what, task, elements, n_tasks)
    if len(results) != len(elements):
        raise JobFailedError(f"cannot {what}: Spark gave back {len(results)} results for {len(elements)}")
    return results


def _own_job(spark: SparkSession, what: str, task: Task, elements: Sequence[bytes], n_tasks: int) -> list[bytes]:
    """Run a job in the Spark of this process."""
    context: Any = spark.sparkContext
    group = f"trinitylake-{uuid.uuid4()}"
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    context.setJobGroup(group, f"TrinityLake: {what}", interruptOnCancel=True)
    try:
        # To Spark this is a function of our own, so that the task's data go inside it.
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


def _remote_job(spark: SparkSession, what: str, task: Task, elements: Sequence[bytes], n_tasks: int) -> list[bytes]:
    """Run a job in a server of Spark Connect. It makes as many tasks as run at a time, or fewer."""

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _over_batches(task, batches)

    size = -(-len(elements) // n_tasks)
    firsts = range(0, len(elements), size)
    groups = [list(elements[first : first + size]) for first in firsts]
    given = pa.Table.from_pydict({"number": list(firsts), "elements": groups}, schema=_GIVEN)
    with _interrupted_by_errors(spark, what):
        rows: pa.Table = spark.createDataFrame(given).mapInArrow(over_batches, _RETURNED_DDL).toArrow()
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
def _interrupted_by_errors(spark: SparkSession, what: str) -> Iterator[None]:
    """Tag the work of a session of Spark Connect in a block, and cancel it if an exception leaves the block."""
    tag = f"trinitylake: {what}: {uuid.uuid4()}"
    spark.addTag(tag)
    try:
        yield
    except BaseException:
        try:
            spark.interruptTag(tag)
        except PySparkException as error:  # the first error is the one that is raised
            logger.warning("cannot interrupt Spark, which was to %s: %s", what, str(error).partition("\n")[0])
        raise
    finally:
        spark.removeTag(tag)


_PART = "part"


def frame_by_tasks(
    spark: SparkSession, schema: StructType, read: Callable[[bytes], Iterator[pa.RecordBatch]], parts: Sequence[bytes]
) -> DataFrame:
    """Return the rows that ``read`` yields for each part. Each query reads them anew."""
    if not parts:
        return spark.createDataFrame([], schema)

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from read(part)

    given = pa.table([pa.array(parts, pa.binary())], names=[_PART])
    return spark.createDataFrame(given).mapInArrow(over_batches, schema)
