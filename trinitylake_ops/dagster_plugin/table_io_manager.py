"""IO manager that passes tables between assets.

The output of an asset is staged: its data files and Iceberg metadata are written but not published. If no publish asset
publishes the table, the same step publishes it. Otherwise, the publish asset (:func:`publish.build_publish_asset`)
commits all its tables that the run staged in one version, and reports their assets as materialized. A run that would
stage such a table without its publish asset fails before it writes anything.

Steps exchange descriptions of staged tables in notes, which are events of the assets, so that they need no shared disk.
Checks, and assets of the same publication, read an input that the run staged from its staged files. All other inputs
are read from the lakehouse. All steps of a run read the same version, regardless of commits by other writers, unless
the run itself has published the table since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import StepAssets, asset_context
from trinitylake_ops.dagster_plugin.assets import check_other_writers
from trinitylake_ops.dagster_plugin.inputs import (
    InputType,
    Part,
    are_replaced,
    check_columns_are_known,
    encoded_partitions,
    partition_values,
    partitions_of,
    rows_of,
)
from trinitylake_ops.dagster_plugin.partition_checks import own_keys
from trinitylake_ops.dagster_plugin.publish_step import no_retries_of_conflicts, publish_by_step
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.dagster_plugin.runs.backfills import is_deferred_to_last, staged_by_other_runs
from trinitylake_ops.dagster_plugin.runs.membership import (
    Membership,
    NotStaged,
    check_can_stage,
    is_publisher,
    publishers_of,
)
from trinitylake_ops.dagster_plugin.runs.publications import partition_of, without_interrupted_rows
from trinitylake_ops.dagster_plugin.runs.reads import (
    RESUMED_TAG,
    BackfillRead,
    record_backfill_read,
    record_read,
    record_staged_read,
    record_takeover,
)
from trinitylake_ops.dagster_plugin.runs.records import published_version_of, run_chain
from trinitylake_ops.dagster_plugin.runs.staging import (
    log_staged,
    log_staged_by_backfill,
    newest_staged,
    notes_of,
)
from trinitylake_ops.dagster_plugin.table_settings import (
    Stored,
    arrow_of,
    arrow_of_polars,
    is_pandas,
    is_polars,
    is_spark,
    storage_metadata,
)
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.plan import Evolution, evolve_to
from trinitylake_ops.iceberg.write.publication import publication_id
from trinitylake_ops.iceberg.write.replacement import StagedRead, TableRead
from trinitylake_ops.iceberg.write.staged_table import EncodedPartition, StagedTable
from trinitylake_ops.iceberg.write.staging import Replace, load_staged
from trinitylake_ops.iceberg.write.upsert import stage_upsert
from trinitylake_ops.transaction.saved import pinned_version

_ALL = Replace.ALL.value


@dataclass(frozen=True, slots=True)
class IOManagerSettings:
    """Settings of the IO manager of a run."""

    lakehouse: TrinityLakeResource
    spark: SparkResource
    #: The version or export at which tables are read. If empty, tables are read at the version that is the latest at
    #: the run's first read.
    version: str
    #: The class of the configured IO manager, which identifies the assets that it stores.
    kind: type


class TableIOManager(dg.IOManager):
    """The IO manager of a run, or of a process without a run if ``run`` is None."""

    def __init__(self, settings: IOManagerSettings, run: dg.DagsterRun | None, instance: dg.DagsterInstance | None):
        self._settings = settings
        self._run = run
        self._instance = instance
        #: The reads of steps that publish their own table, by step key.
        self._reads: dict[str, list[TableRead]] = {}

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Stage the output of an asset, and publish it unless a publish asset does."""
        if not context.has_asset_key:
            raise InvalidInputError(
                f"output {context.name!r} of step {context.step_key} cannot be stored as a table: it is not an asset;"
                " give outputs within a graph another io_manager_key, for example that of a file system IO manager"
            )
        key, membership = context.asset_key, self._membership(context)
        partitions_def = context.asset_partitions_def if context.has_asset_partitions else None
        partition_keys = own_keys(context) if context.has_asset_partitions else []
        part = membership.check_is_published(key, partition_keys)
        with no_retries_of_conflicts(key):
            check_other_writers(membership.assets, key, self._settings.kind)
        stored = Stored.of(key, context.definition_metadata, partitions_def)
        staged = obj if isinstance(obj, StagedTable) else self._stage(context, obj, stored, partitions_def)
        publishers = publishers_of(membership.assets, key)
        if self._run is not None and self._run.parent_run_id is not None and self._instance is not None:
            lake = self._settings.lakehouse.open()
            with no_retries_of_conflicts(key):
                partition = partition_of(asset_context(context))
                named = [(publisher, partition) for publisher in publishers]
                staged = without_interrupted_rows(self._instance, lake, self._run, named, staged)
        values: Mapping[str, Mapping[str, str]] = {}
        if partitions_def is not None and stored.columns:
            values = dict(zip(partition_keys, stored.values(partition_keys, partitions_def), strict=True))
            if stored.mode != "replace_table":
                listed = list(values.values())
                stored.check_values(key, staged.table_def.schema, listed, partitions_def, self._instance)
        notes = notes_of(
            context, staged, partition_keys, storage_metadata(key, context.definition_metadata, staged), values
        )
        if part is not None:
            log_staged_by_backfill(context, notes, part.backfill, part.publisher)
            return
        if publishers:
            log_staged(context, notes)
            return
        reads = self._reads.pop(context.step_context.step.key, [])
        publish_by_step(context, self._settings.lakehouse, staged, notes, reads)

    def _stage(
        self,
        context: dg.OutputContext,
        obj: Any,
        stored: Stored,
        partitions_def: dg.PartitionsDefinition[str] | None,
    ) -> StagedTable:
        stored.check_rows_are_known(context.asset_key)
        partitions = None
        if stored.mode != "replace_table" and stored.columns and partitions_def is not None:
            stored.check_partitions(context.asset_key, partitions_def)
            partitions = stored.values(own_keys(context), partitions_def)
        lake = self._settings.lakehouse.open()
        partition_by, mode = list(stored.columns) or None, stored.mode
        if is_spark(type(obj)):
            if stored.keys:
                raise InvalidInputError(
                    f"asset {context.asset_key.to_user_string()} cannot be stored: mode upsert does not support Spark"
                    " DataFrames; return a pandas or polars DataFrame or Arrow data"
                )
            from trinitylake_ops.spark import stage_dataframe

            stored.check_columns(context.asset_key, obj.columns)
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
                f"asset {context.asset_key.to_user_string()} cannot be stored: it returned a {type(obj).__name__};"
                " return a Spark, pandas or polars DataFrame, a pyarrow Table or RecordBatchReader, or a StagedTable"
            )
        stored.check_columns(context.asset_key, rows.schema.names)
        if partitions is not None:
            stored.check_days(context.asset_key, rows.schema, partitions_def)
        if stored.keys:
            return stage_upsert(
                lake, rows, *stored.name, keys=stored.keys, partition_by=partition_by, partitions=partitions
            )
        return stage_arrow(
            lake,
            rows,
            *stored.name,
            partition_by=partition_by,
            mode=mode,
            partitions=partitions,
            replaces_columns=True,
        )

    def _membership(self, context: dg.OutputContext | dg.InputContext) -> Membership:
        return Membership(StepAssets(context), self._instance, self._run)

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the rows of an asset from the files that the run staged, or from the lakehouse."""
        key, membership = context.asset_key, self._membership(context)
        assets = membership.assets
        input_type = InputType.of(context.dagster_type.typing_type)
        lake, keys = self._settings.lakehouse.open(), partitions_of(context)
        if is_publisher(assets) or input_type.kind is StagedTable:
            return self._staged_input(context, lake, membership, keys)
        if assets.is_stored_by(self._settings.kind):
            for own_key in assets.own:
                membership.check_is_published(own_key)  # fail before the step computes anything
                with no_retries_of_conflicts(own_key):
                    check_other_writers(assets, own_key, self._settings.kind)
        is_self = assets.reads_itself(context)
        output = context.upstream_output
        metadata: Mapping[str, Any] = {} if output is None else output.definition_metadata
        stored = Stored.of(key, metadata, None if keys is None else context.asset_partitions_def)
        check_columns_are_known(context, assets, stored, keys)
        parts: list[Part] = []
        reads_staged = membership.reads_staged(key)
        if is_self or reads_staged:
            staged = None if is_self else self._staged(key)
            if staged is not None:
                table, values = load_staged(lake, staged), partition_values(context, stored, keys)
                is_replaced = input_type.kind is not Table and are_replaced(table, staged, values)
                self._record_staged_read(lake, key, staged, includes_base=staged.replaces != _ALL and not is_replaced)
                return input_type.read(lake, self._settings.spark, [Part(table, rows_of(table, values))])
            for staged, covered in staged_by_other_runs(membership, key, keys, can_be_united=bool(stored.columns)):
                table, values = load_staged(lake, staged), partition_values(context, stored, covered)
                read = None if input_type.kind is Table else values
                includes_base = staged.replaces != _ALL and not are_replaced(table, staged, read)
                self._record_backfill_read(
                    lake, key, covered, staged, includes_base=includes_base, read=encoded_partitions(table, read)
                )
                parts.append(Part(table, rows_of(table, values)))
                keys = None if keys is None or covered is None else [other for other in keys if other not in covered]
        if parts and not keys:
            return input_type.read(lake, self._settings.spark, parts)
        version = self._version_with(lake, membership, context, waits=not reads_staged)
        try:
            table = catalog_at(lake, version).load_table(stored.name)
        except NoSuchTableError as error:
            if not (parts or is_self):
                raise InvalidInputError(
                    f"asset {key.to_user_string()} cannot be read: version {version} of the lakehouse has no table"
                    f" {'.'.join(stored.name)}; materialize {key.to_user_string()} first"
                ) from error
            self._record_read(lake, context, assets, version, stored.name, exists=False)
            spark = self._settings.spark
            return input_type.read(lake, spark, parts) if parts else input_type.empty(stored.name, spark)
        self._record_read(lake, context, assets, version, stored.name)
        context.log.info("reading %s.%s at version %s of the lakehouse", *stored.name, version)
        parts.append(Part(table, rows_of(table, partition_values(context, stored, keys))))
        return input_type.read(lake, self._settings.spark, parts)

    def _staged_input(
        self, context: dg.InputContext, lake: Lakehouse, membership: Membership, keys: list[str] | None
    ) -> StagedTable | NotStaged:
        key, publishes = context.asset_key, is_publisher(membership.assets)
        staged = self._staged(key)
        if staged is not None:
            if not publishes:
                self._record_staged_read(lake, key, staged, includes_base=staged.replaces != _ALL)
            return staged
        step = context.step_context
        own_range = step.partition_key_range if step.has_partitions else None
        if publishes and keys is None and is_deferred_to_last(membership, key, own_range):
            return NotStaged()
        by_backfill = [table for table, _ in staged_by_other_runs(membership, key, keys, takes_over=publishes)]
        if len(by_backfill) > 1:
            raise dg.Failure(
                f"{key.to_user_string()} was not published: separate runs of the backfill staged its partitions, and"
                " this run publishes a range of them; give the publish asset the backfill_policy of its tables",
                allow_retries=False,
            )
        if by_backfill:
            if not publishes:
                includes_base = by_backfill[0].replaces != _ALL
                self._record_backfill_read(lake, key, keys, by_backfill[0], includes_base=includes_base)
            return by_backfill[0]
        if not publishes:
            raise InvalidInputError(
                f"cannot read {key.to_user_string()} as a StagedTable: this run did not stage it; materialize it in the"
                " same run, or annotate the input with another type"
            )
        check_can_stage(membership.assets, key)
        if membership.assets.in_run([key]):
            raise dg.Failure(
                f"{key.to_user_string()} was not published: the asset returned nothing to store; return a DataFrame, or"
                " remove the asset from the tables of the publish asset",
                allow_retries=False,
            )
        return NotStaged()

    def _version_with(
        self, lake: Lakehouse, membership: Membership, context: dg.InputContext, *, waits: bool
    ) -> int | str:
        """Return the version at which to read an asset.

        It is the version of the run, or a later version in which the run published the asset. With ``waits``, wait for
        an asset that the run has not published yet.
        """
        version, key = self._version(lake), context.asset_key
        if self._run is None or self._instance is None or isinstance(version, str):
            return version
        if waits:
            attempt = context.step_context.previous_attempt_count
            partitions = [None] if not context.has_asset_partitions else partitions_of(context) or []
            membership.wait_for_publication(key, partitions, attempt)
        chain = run_chain(self._instance, self._run)
        return max(version, published_version_of(self._instance, chain, key))

    def _staged(self, asset_key: dg.AssetKey) -> StagedTable | None:
        """Return the table that this run, or a run that it re-executes, staged for an asset, or None."""
        if self._run is None or self._instance is None:
            return None
        newest = newest_staged(self._instance, run_chain(self._instance, self._run), asset_key)
        if newest is None:
            return None
        run_id, staged = newest
        if run_id != self._run.run_id:
            record_takeover(self._instance, self._run, asset_key, run_id)
        return staged

    def _record_read(
        self,
        lake: Lakehouse,
        context: dg.InputContext,
        assets: StepAssets,
        version: int | str,
        name: tuple[str, str],
        *,
        exists: bool = True,
    ) -> None:
        """Record a read at the pinned version, which is validated when the step or the run publishes.

        A read at a configured version is not recorded. Call this before reading any rows, so that no rows are used
        without a record.
        """
        if self._run is None or self._instance is None or self._settings.version:
            return
        snapshot = lake.snapshot(version)
        read = TableRead.of(snapshot, *name) if exists else TableRead.of_missing(snapshot, *name)
        is_alone = assets.own and not any(publishers_of(assets, key) for key in assets.own)
        if is_alone and assets.is_stored_by(self._settings.kind):
            self._reads.setdefault(context.step_context.step.key, []).append(read)
        else:
            record_read(self._instance, self._run, context.asset_key, read)

    def _record_staged_read(
        self, lake: Lakehouse, asset_key: dg.AssetKey, staged: StagedTable, *, includes_base: bool
    ) -> None:
        """Record the read of a table that the run staged. Call this before reading any rows."""
        if self._run is None or self._instance is None:
            return
        read = StagedRead(root=lake.files.storage.root, staged=staged, includes_base=includes_base)
        record_staged_read(self._instance, self._run, asset_key, read)

    def _record_backfill_read(
        self,
        lake: Lakehouse,
        asset_key: dg.AssetKey,
        partitions: list[str] | None,
        staged: StagedTable,
        *,
        includes_base: bool,
        read: tuple[EncodedPartition, ...] | None = None,
    ) -> None:
        """Record the read of a table that another run of the backfill staged. Call this before reading any rows.

        ``read`` contains the partitions of the table that are read, or is None for all rows.
        """
        if self._run is None or self._instance is None:
            return
        root, partition_keys = lake.files.storage.root, None if partitions is None else tuple(partitions)
        staged_read = StagedRead(
            root=root, staged=staged, includes_base=includes_base, by_another=True, partitions=read
        )
        record_backfill_read(self._instance, self._run, BackfillRead(asset_key, partition_keys, staged_read))

    def _version(self, lake: Lakehouse) -> int | str:
        if self._settings.version:
            return self._settings.version
        latest = lake.snapshot()
        if self._run is None or self._instance is None:
            return latest.version
        run = self._run
        if run.tags.get(RESUMED_TAG) == "true":
            run = run_chain(self._instance, run)[
                -1
            ]  # the run takes over tables that the first run staged on its version
        return pinned_version(latest, publication_id("pin", run.run_id))


def _columns_of(frame: Any) -> Evolution:
    """Return the schema evolution that makes a table's columns match a Spark DataFrame."""
    from trinitylake_ops.spark.tables.schema import to_iceberg_schema

    return evolve_to(
        {field.name: field.field_type for field in to_iceberg_schema(frame.schema).fields}, replaces_table=True
    )
