"""Planning the data of a table for the source: which files tasks read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import BooleanExpression
from pyiceberg.schema import Schema
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.spark_jobs.tables.reader import FoundTable, group_files
from trinitylake_ops.spark_jobs.tables.tasks import ReadJob, Scan, TableScanReader

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The read of a table. ``schema`` has the columns, and at least so many tasks share it if it is large enough."""

    name: tuple[str, str]
    found: FoundTable
    schema: Schema
    row_filter: BooleanExpression
    parallelism: int


class TableDataReader(DataSourceReader):
    """Plans the files of a frame in a helper of the driver. The tasks get it as a TableScanReader."""

    def __init__(self, plan: DataPlan, schema: StructType):
        self._plan = plan
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        groups = group_files(self._plan.found.tasks(self._plan.row_filter), self._plan.parallelism)
        return [InputPartition(pickle.dumps(group)) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._for_tasks().read(partition)

    def __reduce__(self) -> tuple[type[TableScanReader], tuple[Any, ...]]:
        return (TableScanReader, (self._scan(), self._schema))

    def _for_tasks(self) -> TableScanReader:
        return TableScanReader(self._scan(), self._schema)

    def _scan(self) -> Scan:
        found = self._plan.found
        job = ReadJob(found.io, found.metadata, self._plan.schema, self._plan.row_filter, found.version)
        return Scan(self._schema, pickle.dumps(job), ())
