"""Frames whose rows tasks make, for sessions of Spark Connect.

In other sessions the data source takes the objects of this process through a folder of the driver (``handover``). A
server has another disk. So the reader goes inside a function, with the storage's credentials, and the input of each
task goes as rows.
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
    """Return the rows that ``read`` yields for each part. Each query reads them anew."""
    if not parts:
        return spark.createDataFrame([], schema)

    def over_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from read(part)

    given = pa.table([pa.array(parts, pa.binary())], names=[_PART])
    return spark.createDataFrame(given).mapInArrow(over_batches, schema)
