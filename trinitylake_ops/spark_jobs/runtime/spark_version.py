"""The Spark that is installed here, from 4.0 on, and what its versions do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark
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


def check_spark(least: tuple[int, int], what: str) -> None:
    """Raise InvalidInputError where this Spark is older than ``what`` needs."""
    if spark_version() < least:
        needed = ".".join(map(str, least))
        raise InvalidInputError(f"{what} by this source need Spark {needed}, and this is {pyspark.__version__}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return what Spark checks batches of a schema against: timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema  # needs no pandas

    if spark_version() < _TIMEZONE_IN_SCHEMAS:
        return to_arrow_schema(schema)
    return to_arrow_schema(schema, timezone="UTC")
