"""The target of a stream, from its options and the opened table."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.metadata.reader import OpenedMetadata
from trinitylake_ops.spark_jobs.source.opened_table import OpenedData, OpenedTable
from trinitylake_ops.spark_jobs.source.options import SourceOptions
from trinitylake_ops.spark_jobs.source.stream_options import STREAM_OPTIONS, StreamOptions
from trinitylake_ops.spark_jobs.source.stream_reader import Followed, FollowedHistory, StreamReader
from trinitylake_ops.transaction.lakehouse import Lakehouse

if TYPE_CHECKING:
    from trinitylake_ops.spark_jobs.tables.table_data import DataPlan

_FOLLOWED = ("versions", "changes")


@dataclass(frozen=True)
class LakehouseAt:
    """A lakehouse by its root and options."""

    options: SourceOptions

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError, StorageError."""
        return Lakehouse.open(self.options.root, self.options.storage_options)


def stream_reader(options: Mapping[str, str], opened: OpenedTable, schema: StructType) -> StreamReader:
    """Return the reader of a stream. Raises InvalidInputError for a table that cannot be a stream."""
    source = SourceOptions.parse(options, STREAM_OPTIONS)
    request = source.request
    if request.time is not None:
        raise InvalidInputError(f"a stream begins by 'starting_version', and knows no option {request.time!r}")
    if request.first_version is not None or request.last_version is not None:
        raise InvalidInputError("a stream begins by 'starting_version', and knows no options 'from' and 'to'")
    followed = _followed(opened, request.parallelism)
    given = {name.lower(): value for name, value in options.items()}
    return StreamReader(LakehouseAt(source), followed, StreamOptions.parse(given), schema)


def _followed(opened: OpenedTable, parallelism: int) -> Followed:
    if isinstance(opened, OpenedMetadata):
        if opened.name not in _FOLLOWED:
            raise InvalidInputError(f"{opened.name!r} cannot be read as a stream; {' and '.join(_FOLLOWED)} can")
        return FollowedHistory(opened, parallelism)
    assert isinstance(opened, OpenedData)
    from trinitylake_ops.spark_jobs.source.appended_rows import FollowedTable

    plan: DataPlan = pickle.loads(opened.pickled_plan)
    loaded = plan.found.metadata
    assert plan.found.version is not None  # a stream reads no export, so this is a version of the lakehouse itself
    return FollowedTable(
        *plan.name,
        plan.found.version.version,
        loaded.table_uuid,
        loaded.schema(),
        plan.schema,
        plan.row_filter,
        parallelism,
    )
