"""Tables between assets.

The output of an asset is staged: written as data files and Iceberg metadata of its table, unpublished. A table that no
publish asset publishes is then published by the same step. A publish asset (:func:`publish.build_publish_asset`)
commits all tables of the run that it publishes together, and reports their assets as materialized. A run that would
stage such a table without its publish asset fails before it writes anything.

Between steps, a note of the asset carries a description of the staged table: no data, no shared disk. An input that the
run staged is read from there by checks and by assets of the same publication. Any other input is read from the
lakehouse. Its version is the same for all steps of the run, whatever others commit meanwhile, unless the run itself
published the table since.
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
    """What an IO manager of a run works with."""

    lakehouse: TrinityLakeResource
    spark: SparkResource
    #: The version, or export, that tables are read at; empty for the latest one when the run first reads.
    version: str
    #: The class of the configured IO manager, by which the assets that it stores are recognized.
    kind: type


class TableIOManager(dg.IOManager):
    """The IO manager of a run, or of a process without a run if that is None."""

    def __init__(self, settings: IOManagerSettings, run: dg.DagsterRun | None, instance: dg.DagsterInstance | None):
        self._settings = settings
        self._run = run
        self._instance = instance
        #: The reads of steps that publish their table themselves, by step.
        self._reads: dict[str, list[TableRead]] = {}

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Stage what an asset returned, and publish it unless a publish asset does."""
        if not context.has_asset_key:
            raise InvalidInputError(
                f"output {context.name!r} of step {context.step_key} is no asset, and only assets are stored as tables;"
                " within a graph, give the output an io_manager_key of its own, such as that of files"
            )
        key, membership = context.asset_key, self._membership(context)
        partitions_def = context.asset_partitions_def if context.has_asset_partitions else None
        made = own_keys(context) if context.has_asset_partitions else []
        part = membership.check_is_published(key, made)
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
            values = dict(zip(made, stored.values(made, partitions_def), strict=True))
            if stored.mode != "replace_table":
                listed = list(values.values())
                stored.check_values(key, staged.table_def.schema, listed, partitions_def, self._instance)
        notes = notes_of(context, staged, made, storage_metadata(key, context.definition_metadata, staged), values)
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
                    f"asset {context.asset_key.to_user_string()}: upsert takes no DataFrame of Spark"
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
                f"asset {context.asset_key.to_user_string()} returned a {type(obj).__name__}; return a DataFrame of"
                " Spark, pandas or polars, a pyarrow Table or RecordBatchReader, or a StagedTable"
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
        """Return the rows of an asset: as the run staged them, or as the lakehouse has them."""
        key, membership = context.asset_key, self._membership(context)
        assets = membership.assets
        wanted = InputType.of(context.dagster_type.typing_type)
        lake, keys = self._settings.lakehouse.open(), partitions_of(context)
        if is_publisher(assets) or wanted.kind is StagedTable:
            return self._staged_input(context, lake, membership, keys)
        if assets.is_stored_by(self._settings.kind):
            for own in assets.own:
                membership.check_is_published(own)  # before anything is computed
                with no_retries_of_conflicts(own):
                    check_other_writers(assets, own, self._settings.kind)
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
                is_replaced = wanted.kind is not Table and are_replaced(table, staged, values)
                self._record_staged_read(lake, key, staged, includes_base=staged.replaces != _ALL and not is_replaced)
                return wanted.read(lake, self._settings.spark, [Part(table, rows_of(table, values))])
            for one, covered in staged_by_other_runs(membership, key, keys, can_be_united=bool(stored.columns)):
                table, values = load_staged(lake, one), partition_values(context, stored, covered)
                read = None if wanted.kind is Table else values
                includes_base = one.replaces != _ALL and not are_replaced(table, one, read)
                self._record_backfill_read(
                    lake, key, covered, one, includes_base=includes_base, read=encoded_partitions(table, read)
                )
                parts.append(Part(table, rows_of(table, values)))
                keys = None if keys is None or covered is None else [each for each in keys if each not in covered]
        if parts and not keys:
            return wanted.read(lake, self._settings.spark, parts)
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
            return wanted.read(lake, spark, parts) if parts else wanted.empty(stored.name, spark)
        self._record_read(lake, context, assets, version, stored.name)
        context.log.info("reading %s.%s at version %s of the lakehouse", *stored.name, version)
        parts.append(Part(table, rows_of(table, partition_values(context, stored, keys))))
        return wanted.read(lake, self._settings.spark, parts)

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
        by_backfill = [one for one, _ in staged_by_other_runs(membership, key, keys, takes=publishes)]
        if len(by_backfill) > 1:
            raise dg.Failure(
                f"{key.to_user_string()} was not published: runs of the backfill staged its partitions apart, and this"
                " run publishes a range of them; give the publish asset the backfill_policy of its tables",
                allow_retries=False,
            )
        if by_backfill:
            if not publishes:
                includes_base = by_backfill[0].replaces != _ALL
                self._record_backfill_read(lake, key, keys, by_backfill[0], includes_base=includes_base)
            return by_backfill[0]
        if not publishes:
            raise InvalidInputError(f"asset {key.to_user_string()} was not staged by this run")
        check_can_stage(membership.assets, key)
        if membership.assets.in_run([key]):
            raise dg.Failure(
                f"{key.to_user_string()} was not published: the asset returned nothing to store; return a frame, or"
                " leave it out of the tables of the publish asset",
                allow_retries=False,
            )
        return NotStaged()

    def _version_with(
        self, lake: Lakehouse, membership: Membership, context: dg.InputContext, *, waits: bool
    ) -> int | str:
        """Return the version to read an asset at: that of the run, or a later one by which the run published the asset.

        An asset that the run has yet to publish is waited for, unless the step reads what is staged.
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
        """Return the table that this run, or a run from which it goes on, staged for an asset. None if neither did."""
        if self._run is None or self._instance is None:
            return None
        found = newest_staged(self._instance, run_chain(self._instance, self._run), asset_key)
        if found is None:
            return None
        run_id, staged = found
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
        """Let a read at the pinned version count when its step or the run publishes.

        A read at a requested version does not count. The read is recorded before the rows are read, so that a step that
        has rows has the record.
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
        """Record the read of a table that the run staged, before the rows are read."""
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
        """Record the read of a table that another run of the backfill staged, before the rows are read.

        ``read`` are the partitions that are read of the table, None for all rows.
        """
        if self._run is None or self._instance is None:
            return
        root, named = lake.files.storage.root, None if partitions is None else tuple(partitions)
        staged_read = StagedRead(
            root=root, staged=staged, includes_base=includes_base, by_another=True, partitions=read
        )
        record_backfill_read(self._instance, self._run, BackfillRead(asset_key, named, staged_read))

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
    from trinitylake_ops.spark.tables.schema import to_iceberg_schema

    return evolve_to(
        {field.name: field.field_type for field in to_iceberg_schema(frame.schema).fields}, replaces_table=True
    )
