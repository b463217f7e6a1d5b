"""The Spark that is installed here, from 4.0 on, and what its versions do differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

#: The first that takes Arrow batches for a stream, and the first that asks a source how far a batch goes.
STREAM_WRITES = (4, 1)
STREAM_READS = (4, 2)
_TIMEZONE_IN_SCHEMAS = (4, 2)


def spark_version() -> tuple[int, int]:
    """Return the major and minor version."""
    major, minor = pyspark.__version__.split(".")[:2]
    return int(major), int(minor)


def too_old(least: tuple[int, int], what: str) -> InvalidInputError:
    """Return the error for what needs a newer Spark than this."""
    needed = ".".join(map(str, least))
    return InvalidInputError(f"{what} by this source need Spark {needed}, and this is {pyspark.__version__}")


class TooOld(DataSourceStreamReader):
    """The reader of streams that an older Spark gets: it says so when it is used, as errors before that get lost."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        raise too_old(STREAM_READS, "streams that are read")

    def latestOffset(self, *_of_newer: Any) -> dict[str, Any]:  # noqa: N802 - Spark's name
        raise too_old(STREAM_READS, "streams that are read")

    def read(self, partition: InputPartition) -> Iterator[Any]:
        raise too_old(STREAM_READS, "streams that are read")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return what Spark checks batches of a schema against: timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema  # needs no pandas

    if spark_version() < _TIMEZONE_IN_SCHEMAS:
        return to_arrow_schema(schema)
    return to_arrow_schema(schema, timezone="UTC")


def value_of(partition: InputPartition | None) -> Any:
    """Return what a partition was made with, None where there were none.

    Spark reads once then, too: a partition without a value, and before 4.2 no partition.
    """
    return None if partition is None else partition.value
