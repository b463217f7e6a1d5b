"""Tables between assets.

An output is staged as a table's new data. An input is read from its staged table, or from the lakehouse. The output of
an asset is written as data files and Iceberg metadata of its table, unpublished. A publish asset
(:func:`publish.build_publish_asset`) commits all tables of the run together. Between steps, the metadata of the asset's
event carries a description of the staged table: no data, no shared disk. An input that the run staged is read from
there. Any other input is read from the lakehouse. Its version is the same for all steps of the run, whatever others
commit meanwhile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import dagster as dg
import pyarrow as pa
from pydantic import Field
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, Or, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import Table

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.metadata import staged_table_metadata
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.dagster_plugin.runs.reads import RESUMED_TAG, record_read, record_taken
from trinitylake_ops.dagster_plugin.runs.records import STAGED, newest_materialization, run_chain, staged_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.nodes.keys import validate_name
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.arrow_writer import stage_arrow
from trinitylake_ops.tables.writing.publication import publication_id
from trinitylake_ops.tables.writing.reads import TableRead
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import load_staged
from trinitylake_ops.tables.writing.write_mode import Mode
from trinitylake_ops.transaction.saved import pinned_version

StoreMode: TypeAlias = Literal["overwrite", "overwrite_partition", "append"]

_MODES: Mapping[StoreMode, Mode] = {
    "overwrite": "replace_table",
    "overwrite_partition": "replace_partitions",
    "append": "append",
}
_TABLE = "trinitylake/table"
_MODE = "trinitylake/mode"
_PARTITION_BY = "trinitylake/partition_by"
_PARTITION_FORMAT = "trinitylake/partition_format"


#: A lakehouse allows less, or refuses with a message.
LONGEST_NAME_BYTES = 4096


def stored_as(
    *,
    table: str | None = None,
    mode: StoreMode = "overwrite",
    partition_by: Sequence[str] = (),
    partition_format: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the metadata of an asset that says how :class:`TrinityLakeIOManager` stores it.

    ``table`` is ``namespace.table``, by default the last two parts of the asset's key. With the ``mode`` ``overwrite``
    all rows are replaced, with ``append`` none. With ``overwrite_partition``, those of the run's partitions are
    replaced if the asset has Dagster partitions. Otherwise it replaces the partitions that rows arrive for.
    ``partition_by`` are the table's partition columns. Dagster's partition key is the value of the one column. In a key
    of several dimensions, each is the value of the column of its name. For partitions by time ``partition_format`` may
    give a ``strftime`` format per column, such as ``{"year": "%Y", "month": "%m"}``. Raises InvalidInputError.
    """
    if mode not in _MODES:
        raise InvalidInputError(f"mode {mode!r} is none of {', '.join(get_args(StoreMode))}")
    if table is not None:
        split_name(table)
    columns = list(partition_by)
    if mode == "overwrite_partition" and not columns:
        raise InvalidInputError("mode overwrite_partition needs the columns of the partitions, partition_by")
    if partition_format is not None and sorted(partition_format) != sorted(columns):
        raise InvalidInputError("partition_format needs a format for each column of partition_by, and for no other")
    metadata = {_TABLE: table, _MODE: mode, _PARTITION_BY: columns, _PARTITION_FORMAT: partition_format}
    return {name: value for name, value in metadata.items() if value}


class TrinityLakeIOManager(dg.ConfigurableIOManagerFactory[dg.IOManager]):
    """Stages the outputs of assets as tables of a lakehouse, and reads their inputs.

    Outputs are Spark DataFrames, pyarrow Tables and RecordBatchReaders, pandas DataFrames, or a StagedTable of the
    asset itself. Levels with a name of an index of pandas become columns. Inputs have the type that the asset
    annotates: one of these, or a pyiceberg ``Table``, which reads lazily. If both assets have the same Dagster
    partitions, only the rows of the run's partition are read. Only Spark's types start Spark.
    """

    lakehouse: TrinityLakeResource
    spark: SparkResource
    version: str = Field(
        default="",
        description="Read tables that the run does not stage at this version, or export; empty: the latest one when"
        " the run first reads, for all its steps.",
    )

    def __init__(self, **fields: Any):
        # Dagster finds resources in fields only if they are given.
        super().__init__(**{"spark": SparkResource(), **fields})

    def create_io_manager(self, context: dg.InitResourceContext) -> dg.IOManager:
        """Return the IO manager of a run. Without a run it reads the latest version."""
        return _TableIOManager(self, context.run, context.instance)


class _TableIOManager(dg.IOManager):
    def __init__(self, settings: TrinityLakeIOManager, run: dg.DagsterRun | None, instance: dg.DagsterInstance | None):
        self._settings = settings
        self._run = run
        self._instance = instance

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        metadata = context.definition_metadata
        namespace, table = _table_of(context.asset_key, metadata)
        staged = obj if isinstance(obj, StagedTable) else self._stage(context, obj, namespace, table)
        described = dg.MetadataValue.json(json.loads(staged.to_json()))
        context.add_output_metadata({**staged_table_metadata(staged), STAGED: described})

    def _stage(self, context: dg.OutputContext, obj: Any, namespace: str, table: str) -> StagedTable:
        metadata = context.definition_metadata
        partition_by = _plain(metadata.get(_PARTITION_BY)) or None
        mode = _MODES[_plain(metadata.get(_MODE)) or "overwrite"]
        partitions = None
        if mode == "replace_partitions" and context.has_asset_partitions:
            partitions = _partition_values(context, metadata)
        lake = self._settings.lakehouse.open()
        if _is_spark(type(obj)):
            from trinitylake_ops.spark_jobs import stage_dataframe

            return stage_dataframe(
                lake, obj, namespace, table, partition_by=partition_by, mode=mode, partitions=partitions
            )
        rows = _arrow_of(obj) if _is_pandas(type(obj)) else obj
        if not isinstance(rows, pa.Table | pa.RecordBatchReader):
            raise InvalidInputError(
                f"asset {context.asset_key.to_user_string()} returned a {type(obj).__name__}; return a DataFrame of"
                " Spark or pandas, a pyarrow Table or RecordBatchReader, or a StagedTable"
            )
        return stage_arrow(lake, rows, namespace, table, partition_by=partition_by, mode=mode, partitions=partitions)

    def load_input(self, context: dg.InputContext) -> Any:
        wanted = context.dagster_type.typing_type
        lake = self._settings.lakehouse.open()
        staged = self._staged(context.asset_key)
        if wanted is StagedTable:
            if staged is None:
                raise InvalidInputError(f"asset {context.asset_key.to_user_string()} was not staged by this run")
            return staged
        output = context.upstream_output
        metadata: Mapping[str, Any] = {} if output is None else output.definition_metadata
        if staged is not None:
            table = load_staged(lake, staged)
        else:
            name = _table_of(context.asset_key, metadata)
            version = self._version(lake)
            table = catalog_at(lake, version).load_table(name)
            self._record_read(lake, context.asset_key, version, name)
            context.log.info("reading %s.%s at version %s of the lakehouse", *name, version)
        return self._read(lake, table, wanted, _rows_of(context, metadata))

    def _read(self, lake: Lakehouse, table: Table, wanted: Any, rows: BooleanExpression) -> Any:
        if wanted is Table:
            return table
        if _is_spark(wanted):
            spark = self._settings.spark.session()
            from trinitylake_ops.spark_jobs.tables.reader import read_files

            return read_files(spark, lake, table, row_filter=rows)
        scan = table.scan(row_filter=rows)
        if wanted is pa.RecordBatchReader:
            return scan.to_arrow_batch_reader()
        if wanted is pa.Table:
            return scan.to_arrow()
        if _is_pandas(wanted):
            return scan.to_arrow().to_pandas()
        raise InvalidInputError(
            f"annotate the input with what to read {'.'.join(table.name())} into: DataFrame of Spark or pandas,"
            f" pyarrow.Table, pyarrow.RecordBatchReader, pyiceberg.table.Table or StagedTable, not {wanted!r}"
        )

    def _staged(self, asset_key: dg.AssetKey) -> StagedTable | None:
        """Return the table that this run, or a run from which it goes on, staged for an asset. None if neither did."""
        if self._run is None or self._instance is None:
            return None
        record = newest_materialization(self._instance, run_chain(self._instance, self._run), asset_key)
        staged = staged_of(record)
        if staged is not None and record is not None and record.run_id != self._run.run_id:
            record_taken(self._instance, self._run, asset_key, record.run_id)
        return staged

    def _record_read(self, lake: Lakehouse, asset_key: dg.AssetKey, version: int | str, name: tuple[str, str]) -> None:
        """Let a read at the pinned version count when the run publishes. A read at a requested version does not count.

        The read is recorded before the rows are read. So a step that has rows has the record.
        """
        if self._run is None or self._instance is None or self._settings.version:
            return
        record_read(self._instance, self._run, asset_key, TableRead.of(lake.snapshot(version), *name))

    def _version(self, lake: Lakehouse) -> int | str:
        if self._settings.version:
            return self._settings.version
        latest = lake.snapshot()
        if self._run is None or self._instance is None:
            return latest.version
        run = self._run
        if run.tags.get(RESUMED_TAG) == "true":
            run = run_chain(self._instance, run)[-1]  # the run takes over what that one staged, on that version
        return pinned_version(latest, publication_id("pin", run.run_id))


def _table_of(asset_key: dg.AssetKey, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return namespace and table of an asset. Raises InvalidInputError."""
    name = _plain(metadata.get(_TABLE))
    if name:
        return split_name(name)
    if len(asset_key.path) < 2:
        raise InvalidInputError(
            f"asset {asset_key.to_user_string()} names no namespace: give it a key such as ['sales', 'orders'], or"
            " metadata=stored_as(table='sales.orders')"
        )
    return asset_key.path[-2], asset_key.path[-1]


def split_name(name: str) -> tuple[str, str]:
    """Return namespace and table of ``namespace.table``. Raises InvalidInputError."""
    namespace, dot, table = name.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(f"{name!r} names no table; write NAMESPACE.TABLE")
    validate_name(namespace, LONGEST_NAME_BYTES, "namespace")
    validate_name(table, LONGEST_NAME_BYTES, "table")
    return namespace, table


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


def _is_spark(kind: Any) -> bool:
    """Whether a type is Spark's DataFrame, without importing Spark: where nobody did, there is none."""
    if not isinstance(kind, type) or "pyspark.sql.dataframe" not in sys.modules:
        return False
    from pyspark.sql import DataFrame

    return issubclass(kind, DataFrame)


def _is_pandas(kind: Any) -> bool:
    """Whether a type is the DataFrame of pandas, without importing pandas, which need not be installed."""
    module = getattr(kind, "__module__", "")
    return getattr(kind, "__name__", "") == "DataFrame" and (module == "pandas" or module.startswith("pandas."))


def _arrow_of(frame: Any) -> pa.Table:
    """Return a DataFrame of pandas with its columns and the named levels of its index.

    Row numbers are left out. Raises InvalidInputError for other levels, which would get lost, and for values that do
    not fit.
    """
    levels = frame.index.levels if frame.index.nlevels > 1 else [frame.index]
    for name, level in zip(frame.index.names, levels, strict=True):
        if name is None and len(level) and level.dtype.kind not in "iu":
            raise InvalidInputError(
                f"the index of the DataFrame holds {level.dtype} values and has no name: name it, and it becomes a"
                " column, or drop it with reset_index(drop=True)"
            )
    kept = [name for name in frame.index.names if name is not None and name not in frame.columns]
    try:
        return pa.Table.from_pandas(frame.reset_index(level=kept) if kept else frame, preserve_index=False)
    except (ValueError, TypeError, NotImplementedError) as error:  # also errors of Arrow
        raise InvalidInputError(f"the DataFrame of pandas cannot be stored: {error}") from error


def _rows_of(context: dg.InputContext, metadata: Mapping[str, Any]) -> BooleanExpression:
    """Return the filter for the partitions of the run, if the table is partitioned as its asset is."""
    if not (context.has_asset_partitions and _plain(metadata.get(_PARTITION_BY))):
        return AlwaysTrue()
    terms: list[BooleanExpression] = []
    for values in _partition_values(context, metadata):
        equal: list[BooleanExpression] = [
            EqualTo(term=Reference(column), value=literal(text)) for column, text in values.items()
        ]
        terms.append(equal[0] if len(equal) == 1 else And(*equal))
    return terms[0] if len(terms) == 1 else Or(*terms)


def _partition_values(context: dg.OutputContext | dg.InputContext, metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the values of the partition columns for each of the run's partitions. Raises InvalidInputError."""
    columns: list[str] = _plain(metadata.get(_PARTITION_BY))
    formats: Mapping[str, str] | None = _plain(metadata.get(_PARTITION_FORMAT))
    partitions = context.asset_partitions_def
    values: list[dict[str, str]] = []
    for key in context.asset_partition_keys:
        if formats:
            if not isinstance(partitions, dg.TimeWindowPartitionsDefinition):
                raise InvalidInputError("partition_format is for partitions by time")
            start = partitions.time_window_for_partition_key(key).start
            values.append({column: start.strftime(text) for column, text in formats.items()})
        elif isinstance(key, dg.MultiPartitionKey):
            values.append(dict(key.keys_by_dimension))
        elif len(columns) == 1:
            values.append({columns[0]: key})
        else:
            raise InvalidInputError(
                f"partition {key!r} is one value, the table has the partition columns {', '.join(columns)}; give a"
                " partition_format, or partitions of as many dimensions"
            )
    return values
