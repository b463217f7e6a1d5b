"""Tables between assets.

An output is staged as a table's new data. An input is read from its staged table, or from the lakehouse. The output of
an asset is written as data files and Iceberg metadata of its table, unpublished. A publish asset
(:func:`publish.build_publish_asset`) commits all tables of the run together, and reports their assets as materialized.
Between steps, a note of the asset carries a description of the staged table: no data, no shared disk. An input that the
run staged is read from there. Any other input is read from the lakehouse. Its version is the same for all steps of the
run, whatever others commit meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
from pydantic import Field
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, Or, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import Table

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.dagster_plugin.runs.reads import RESUMED_TAG, record_read, record_taken
from trinitylake_ops.dagster_plugin.runs.records import run_chain
from trinitylake_ops.dagster_plugin.runs.staging import newest_staged, note_staged
from trinitylake_ops.dagster_plugin.stored.frames import arrow_of, arrow_of_polars, is_pandas, is_polars, is_spark
from trinitylake_ops.dagster_plugin.stored.settings import Stored, said_of
from trinitylake_ops.dagster_plugin.stored.upserts import stage_upsert
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.arrow_writer import stage_arrow
from trinitylake_ops.tables.writing.publication import publication_id
from trinitylake_ops.tables.writing.reads import TableRead
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import load_staged
from trinitylake_ops.tables.writing.write_plan import Evolution, evolve_to
from trinitylake_ops.transaction.saved import pinned_version


class TrinityLakeIOManager(dg.ConfigurableIOManagerFactory[dg.IOManager]):
    """Stages the outputs of assets as tables of a lakehouse, and reads their inputs.

    Outputs are Spark DataFrames, pyarrow Tables and RecordBatchReaders, pandas DataFrames, frames of polars, or a
    StagedTable of the asset itself. Those that replace the whole table replace its columns, too. Levels with a name of
    an index of pandas become columns. Inputs have the type that the asset annotates: one of these, or a pyiceberg
    ``Table``, which reads lazily. If both assets have the same Dagster partitions, only the rows of the run's partition
    are read. Only Spark's types start Spark.
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
        if not context.has_asset_key:
            raise InvalidInputError(
                f"output {context.name!r} of step {context.step_key} is no asset, and only assets are stored as tables;"
                " within a graph, give the output an io_manager_key of its own, such as that of files"
            )
        partitions_def = context.asset_partitions_def if context.has_asset_partitions else None
        stored = Stored.of(context.asset_key, context.definition_metadata, partitions_def)
        staged = obj if isinstance(obj, StagedTable) else self._stage(context, obj, stored, partitions_def)
        values: Mapping[str, Mapping[str, str]] = {}
        if partitions_def is not None and stored.columns:
            keys = context.asset_partition_keys
            values = dict(zip(keys, stored.values(keys, partitions_def), strict=True))
        said = said_of(context.asset_key, context.definition_metadata, staged)
        note_staged(context, staged, said, values)

    def _stage(
        self,
        context: dg.OutputContext,
        obj: Any,
        stored: Stored,
        partitions_def: dg.PartitionsDefinition[str] | None,
    ) -> StagedTable:
        stored.check_rows_are_known(context.asset_key)
        partitions = None
        if stored.mode == "replace_partitions" and partitions_def is not None:
            partitions = stored.values(context.asset_partition_keys, partitions_def)
        lake = self._settings.lakehouse.open()
        partition_by, mode = list(stored.columns) or None, stored.mode
        if is_spark(type(obj)):
            if stored.keys:
                raise InvalidInputError(
                    f"asset {context.asset_key.to_user_string()}: upsert takes no DataFrame of Spark"
                )
            from trinitylake_ops.spark_jobs import stage_dataframe

            return stage_dataframe(
                lake,
                obj,
                *stored.name,
                partition_by=partition_by,
                mode=mode,
                partitions=partitions,
                evolve=_columns_of(obj) if mode == "replace_table" else None,
            )
        rows = arrow_of(obj) if is_pandas(type(obj)) else arrow_of_polars(obj) if is_polars(type(obj)) else obj
        if not isinstance(rows, pa.Table | pa.RecordBatchReader):
            raise InvalidInputError(
                f"asset {context.asset_key.to_user_string()} returned a {type(obj).__name__}; return a DataFrame of"
                " Spark, pandas or polars, a pyarrow Table or RecordBatchReader, or a StagedTable"
            )
        if stored.keys:
            return stage_upsert(lake, rows, stored.name, stored.keys)
        if partitions is not None:
            stored.check_days(context.asset_key, rows.schema, partitions_def)
        return stage_arrow(
            lake,
            rows,
            *stored.name,
            partition_by=partition_by,
            mode=mode,
            partitions=partitions,
            replaces_columns=True,
        )

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
        partitions_def = context.asset_partitions_def if context.has_asset_partitions else None
        stored = Stored.of(context.asset_key, metadata, partitions_def)
        if staged is not None:
            table = load_staged(lake, staged)
        else:
            name = stored.name
            version = self._version(lake)
            table = catalog_at(lake, version).load_table(name)
            self._record_read(lake, context.asset_key, version, name)
            context.log.info("reading %s.%s at version %s of the lakehouse", *name, version)
        return self._read(lake, table, wanted, _rows_of(context, stored))

    def _read(self, lake: Lakehouse, table: Table, wanted: Any, rows: BooleanExpression) -> Any:
        if wanted is Table:
            return table
        if is_spark(wanted):
            spark = self._settings.spark.session()
            from trinitylake_ops.spark_jobs.tables.reader import read_files

            return read_files(spark, lake, table, row_filter=rows)
        scan = table.scan(row_filter=rows)
        if wanted is pa.RecordBatchReader:
            return scan.to_arrow_batch_reader()
        if wanted is pa.Table:
            return scan.to_arrow()
        if is_pandas(wanted):
            return scan.to_arrow().to_pandas()
        if is_polars(wanted):
            return wanted(scan.to_arrow())
        raise InvalidInputError(
            f"annotate the input with what to read {'.'.join(table.name())} into: DataFrame of Spark, pandas or"
            " polars, LazyFrame, pyarrow.Table, pyarrow.RecordBatchReader, pyiceberg.table.Table or StagedTable, not"
            f" {wanted!r}"
        )

    def _staged(self, asset_key: dg.AssetKey) -> StagedTable | None:
        """Return the table that this run, or a run from which it goes on, staged for an asset. None if neither did."""
        if self._run is None or self._instance is None:
            return None
        found = newest_staged(self._instance, run_chain(self._instance, self._run), asset_key)
        if found is None:
            return None
        run_id, staged = found
        if run_id != self._run.run_id:
            record_taken(self._instance, self._run, asset_key, run_id)
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


def _columns_of(frame: Any) -> Evolution:
    """Return the change of a table's columns to those of a DataFrame of Spark."""
    from trinitylake_ops.spark_jobs.tables.schema import to_iceberg_schema

    return evolve_to(
        {field.name: field.field_type for field in to_iceberg_schema(frame.schema).fields}, replaces_table=True
    )


def _rows_of(context: dg.InputContext, stored: Stored) -> BooleanExpression:
    """Return the filter for the partitions of the run, if the table is partitioned as its asset is."""
    if not (context.has_asset_partitions and stored.columns):
        return AlwaysTrue()
    terms: list[BooleanExpression] = []
    for values in stored.values(context.asset_partition_keys, context.asset_partitions_def):
        equal: list[BooleanExpression] = [
            EqualTo(term=Reference(column), value=literal(text)) for column, text in values.items()
        ]
        terms.append(equal[0] if len(equal) == 1 else And(*equal))
    return terms[0] if len(terms) == 1 else Or(*terms)
