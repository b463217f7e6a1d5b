"""Load inputs of assets: rows of one or several staged or published tables, as the annotated type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import dagster as dg
import pyarrow as pa
from pyiceberg.expressions import AlwaysFalse, AlwaysTrue, BooleanExpression, Or
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import StepAssets, checked_partitions
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.dagster_plugin.table_settings import Stored, is_pandas, is_polars, is_spark
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.partition_key import PartitionKey, decode_partitions, encode_partitions, rows_where
from trinitylake_ops.iceberg.write.staged_table import EncodedPartition, StagedTable
from trinitylake_ops.iceberg.write.staging import Replace


@dataclass(frozen=True, slots=True)
class Part:
    """A subset of the rows of a published or staged table."""

    table: Table
    rows: BooleanExpression


@dataclass(frozen=True, slots=True)
class InputType:
    """The annotated type of an input."""

    kind: Any
    is_optional: bool

    @classmethod
    def of(cls, annotation: Any) -> InputType:
        """Return the type of an annotation."""
        if get_origin(annotation) in (Union, UnionType):
            kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
            if len(kinds) == 1:
                return cls(kinds[0], is_optional=True)
        return cls(annotation, is_optional=False)

    def read(self, lake: Lakehouse, spark: SparkResource, parts: Sequence[Part]) -> Any:
        """Load the rows of all parts of a table.

        Args:
            lake: The lakehouse.
            spark: Spark, which is started only for Spark DataFrames.
            parts: At least one part.

        Raises:
            InvalidInputError: The type is not supported, or cannot combine several parts.
        """
        first = parts[0].table
        if self.kind is Table and len(parts) == 1:
            return first
        if is_spark(self.kind):
            from trinitylake_ops.spark.tables.reader import read_files

            session = spark.session()
            frame, *others = (read_files(session, lake, part.table, row_filter=part.rows) for part in parts)
            for other in others:
                frame = frame.unionByName(other, allowMissingColumns=True)
            return frame
        if self.kind is pa.RecordBatchReader and len(parts) == 1:
            return first.scan(row_filter=parts[0].rows).to_arrow_batch_reader()
        if self.kind is Table:
            raise InvalidInputError(
                f"table {'.'.join(first.name())} cannot be read as a pyiceberg Table: separate runs of a backfill"
                " staged its partitions; annotate the input as pyarrow.Table"
            )
        if not (self.kind in (pa.Table, pa.RecordBatchReader) or is_pandas(self.kind) or is_polars(self.kind)):
            raise self._unknown_error(first.name())
        tables = [part.table.scan(row_filter=part.rows).to_arrow() for part in parts]
        return self._of_arrow(tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive"))

    def empty(self, name: tuple[str, str], spark: SparkResource) -> Any:
        """Return an empty value without columns for a table that does not exist yet, or None for an optional input.

        Args:
            name: The table.
            spark: Spark, which is started only for Spark DataFrames.

        Raises:
            InvalidInputError: The type is not supported.
        """
        if self.is_optional:
            return None
        if is_spark(self.kind):
            from pyspark.sql.types import StructType

            return spark.session().createDataFrame([], StructType([]))
        if self.kind is Table:
            raise InvalidInputError(
                f"table {'.'.join(name)} cannot be read: it does not exist yet; annotate the input as Optional[Table]"
                " to get None"
            )
        if self.kind in (pa.Table, pa.RecordBatchReader) or is_pandas(self.kind) or is_polars(self.kind):
            return self._of_arrow(pa.table({}))
        raise self._unknown_error(name)

    def _of_arrow(self, rows: pa.Table) -> Any:
        if self.kind is pa.Table:
            return rows
        if self.kind is pa.RecordBatchReader:
            return rows.to_reader()
        return rows.to_pandas() if is_pandas(self.kind) else self.kind(rows)

    def _unknown_error(self, name: Sequence[str]) -> InvalidInputError:
        return InvalidInputError(
            f"table {'.'.join(name)} cannot be read: the type of the input is not supported; annotate it as a Spark,"
            " pandas or polars DataFrame, polars LazyFrame, pyarrow.Table, pyarrow.RecordBatchReader,"
            " pyiceberg.table.Table or StagedTable, not"
            f" {self.kind!r}"
        )


def partitions_of(context: dg.InputContext) -> list[str] | None:
    """Return the partitions of the asset that an input reads, or None if it has no partitions.

    A check has no partitions itself. It reads the partitions of the run.
    """
    if not context.has_asset_partitions:
        return None
    partitions: Any = context.asset_partitions_def
    own = checked_partitions(context)
    keys = context.asset_partition_keys if own is None else own
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return [partitions.get_partition_key_from_str(key) for key in keys]
    return [*keys]


def check_columns_are_known(
    context: dg.InputContext, assets: StepAssets, stored: Stored, keys: Sequence[str] | None
) -> None:
    """Check that partitions of another code location's asset can be read.

    Only the asset's spec in this code location can name the partition column of the table. Without that column, the
    rows of all partitions would be read.

    Args:
        context: The input context.
        assets: The assets of the step.
        stored: The storage settings in the asset's spec.
        keys: The partitions to read, or None for an asset without partitions.

    Raises:
        InvalidInputError: The column is unknown, and only some of the partitions are read.
    """
    key = context.asset_key
    is_known = stored.columns or stored.mode != "replace_partitions"
    if not keys or is_known or not assets.graph.has(key) or not assets.graph.get(key).is_external:
        return
    every = context.asset_partitions_def.get_partition_keys(dynamic_partitions_store=context.instance)
    if set(every) - set(keys):
        raise InvalidInputError(
            f"partition {keys[0]} of asset {key.to_user_string()} cannot be read: another code location stores the"
            f" asset, and its spec here does not name the column of table {'.'.join(stored.name)} that contains the"
            " partitions; give the AssetSpec metadata=stored_as(partition_by=[COLUMN]), as the asset has"
        )


def partition_values(
    context: dg.InputContext, stored: Stored, keys: Sequence[str] | None
) -> Sequence[Mapping[str, str]] | None:
    """Return the values of the partition columns, or None if the table is not partitioned like its asset.

    Args:
        context: The input context.
        stored: The storage settings of the input's asset.
        keys: The partitions, or None for an asset without partitions.
    """
    return None if keys is None or not stored.columns else stored.values(keys, context.asset_partitions_def)


def are_replaced(table: Table, staged: StagedTable, partitions: Sequence[Mapping[str, str]] | None) -> bool:
    """Whether staged files replace all rows of the partitions, so that no rows of the table's base are read.

    Args:
        table: The staged table.
        staged: The description of the staged table.
        partitions: The values of the partition columns, or None for all rows.
    """
    records = _records_of(table, partitions) if staged.replaces == Replace.PARTITIONS.value else None
    if records is None:
        return False
    return records <= decode_partitions(staged.replaced_partitions, table.spec(), table.schema())


def encoded_partitions(
    table: Table, partitions: Sequence[Mapping[str, str]] | None
) -> tuple[EncodedPartition, ...] | None:
    """Return partitions of a table in the format of ``StagedTable.replaced_partitions``, or None for all rows.

    Args:
        table: The table.
        partitions: The values of the partition columns, or None for all rows.
    """
    records = _records_of(table, partitions)
    return None if records is None else encode_partitions(records, table.spec(), table.schema())


def _records_of(table: Table, partitions: Sequence[Mapping[str, str]] | None) -> set[Record] | None:
    """Return the partitions of a table that contain all rows with these values, or None if that is unknown."""
    if partitions is None:
        return None
    try:
        return {PartitionKey.of(table.metadata, values).record for values in partitions}
    except InvalidInputError:
        return None


def rows_of(table: Table, partitions: Sequence[Mapping[str, str]] | None) -> BooleanExpression:
    """Return the filter for the rows of partitions, or for all rows if ``partitions`` is None.

    Args:
        table: The table.
        partitions: The values of the partition columns.
    """
    if partitions is None:
        return AlwaysTrue()
    terms = [rows_where(table.schema(), values) for values in partitions]
    if not terms:  # for example, the partition before the first one
        return AlwaysFalse()
    return terms[0] if len(terms) == 1 else Or(*terms)
