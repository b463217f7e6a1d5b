"""Jobs whose tasks take and give bytes, on sessions of both kinds: with a JVM of their own, and of Spark Connect.

The elements are rows of a frame and the function a plain one over Arrow batches (``mapInArrow``), which both kinds
have. What must not be seen - storages with their credentials - goes inside the function: Spark shows neither it nor
the rows in plans, in its UI, or in event logs. The plan has no shuffle and is evaluated once; a task that Spark
repeats has an ``attemptNumber`` above 0 (decision 19).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from trinitylake_ops.errors import JobFailedError
from trinitylake_ops.spark_jobs.spark_errors import spark_failures

logger = logging.getLogger(__name__)

#: What a task does: bytes for each of its elements, in order.
Task = Callable[[Iterator[bytes]], Iterator[bytes]]

#: A result goes in rows of at most so many bytes: messages of Spark Connect, and batches of Arrow, have limits.
PIECE_BYTES = 1 << 20

_GIVEN = pa.schema([("number", pa.int64()), ("elements", pa.list_(pa.binary()))])
_RETURNED = pa.schema([("number", pa.int64()), ("piece", pa.binary())])
_RETURNED_DDL = "number long, piece binary"


def run_in_tasks(
    spark: SparkSession, what: str, task: Task, elements: Sequence[bytes], most_tasks: int | None = None
) -> list[bytes]:
    """Run one job over elements; returns what became of each, in order.

    Spark makes as many tasks as run at a time; ``most_tasks`` bounds them, however many could run by now. The job ends
    where this is left by an exception, such as an interrupt. Raises what tasks raise where it is an error of this
    package, JobFailedError for what else failed.
    """

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _over_batches(task, batches)

    size = 1 if most_tasks is None else -(-len(elements) // most_tasks)
    firsts = range(0, len(elements), size)
    groups = [list(elements[first : first + size]) for first in firsts]
    given = pa.Table.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip((firsts, groups), _GIVEN, strict=True)], schema=_GIVEN
    )
    with spark_failures(what), _interrupted_by_errors(spark, what):
        rows: pa.Table = spark.createDataFrame(given).mapInArrow(over_batches, _RETURNED_DDL).toArrow()
    pieces: list[list[bytes]] = [[] for _ in elements]
    for number, piece in _rows(rows.to_batches()):
        pieces[number].append(piece)
    if not all(pieces):
        raise JobFailedError(f"cannot {what}: Spark gave back less than there is")
    return [b"".join(one) for one in pieces]


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
    """Tag the jobs of a block, and cancel them where it is left by an exception."""
    tag = f"trinitylake: {what}: {uuid.uuid4()}"
    spark.addTag(tag)
    try:
        yield
    except BaseException:
        try:
            spark.interruptTag(tag)
        except (PySparkException, Py4JError) as error:  # what went wrong first is what is told
            logger.warning("cannot interrupt Spark, which was to %s: %s", what, str(error).partition("\n")[0])
        raise
    finally:
        spark.removeTag(tag)
