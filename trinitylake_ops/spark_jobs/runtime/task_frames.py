"""Frames whose rows tasks make, for sessions of Spark Connect.

Elsewhere the data source takes what this process has open through a folder of the driver (``handover``). A server
has another disk: what reads goes inside a function, with the storage's credentials, and what each task reads as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

_PART = "part"


def frame_by_tasks(
    spark: SparkSession, schema: StructType, read: Callable[[bytes], Iterator[pa.RecordBatch]], parts: Sequence[bytes]
) -> DataFrame:
    """Return the rows that ``read`` gives for each part, read anew by each query."""
    if not parts:
        return spark.createDataFrame([], schema)

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from read(part)

    given = pa.table([pa.array(parts, pa.binary())], names=[_PART])
    return spark.createDataFrame(given).mapInArrow(over_batches, schema)
