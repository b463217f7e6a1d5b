"""Publishing: all tables that a run staged become one version of the lakehouse, exactly once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.metadata import staged_tables_metadata
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import lakehouse_of
from trinitylake_ops.dagster_plugin.runs.beyond_public import TypeOfStored, forget_input_versions
from trinitylake_ops.dagster_plugin.runs.membership import (
    NotStaged,
    check_together,
    nothing_staged,
    publishes,
    requested_with,
)
from trinitylake_ops.dagster_plugin.runs.reads import RunReads
from trinitylake_ops.dagster_plugin.runs.records import created_at, newest_materialization, run_chain
from trinitylake_ops.dagster_plugin.runs.staging import newest_notes, published_events
from trinitylake_ops.dagster_plugin.step_publication import (
    PUBLISHING,
    asset_versions,
    isolation_of,
    no_retries_of_conflicts,
    partition_of,
    shortened,
)
from trinitylake_ops.dagster_plugin.stored.settings import check_stored, stages_itself
from trinitylake_ops.dagster_plugin.table_pages.published import PublishedPages
from trinitylake_ops.dagster_plugin.versions.page import VersionsPage
from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.tables.writing.lineage.told import tell_lineage
from trinitylake_ops.tables.writing.publication import (
    CLOCK_SKEW,
    Publication,
    publication_id,
    publish_once,
    published_version,
    version_before,
)
from trinitylake_ops.tables.writing.reads import check_unchanged
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import is_published
from trinitylake_ops.versions.snapshot import Snapshot


def _is_staged(_context: dg.TypeCheckContext, given: Any) -> dg.TypeCheck:
    said = (
        f"it is a {type(given).__name__}, as another IO manager stored it. Give its asset the io_manager_key of a"
        f" TrinityLakeIOManager. Of a lakehouse with a name it is NAME_{ONLY.io_manager_key}"
    )
    is_right = isinstance(given, StagedTable | NotStaged)
    return dg.TypeCheck(success=is_right, description=None if is_right else said)


_STAGED_NAME = "TrinityLakeStagedTable"
#: Tells the IO manager the wanted type: Dagster reads no types from a signature that takes any number of tables.
STAGED = dg.DagsterType(_is_staged, name=_STAGED_NAME, typing_type=StagedTable)
# The published version is in the metadata, so no IO manager has to store it.
_NOTHING = cast(dg.DagsterType, dg.Nothing)
_PRIORITY_TAG = "dagster/priority"


def build_publish_asset(
    *,
    key: Sequence[str],
    tables: Mapping[str, dg.AssetKey | dg.AssetsDefinition],
    description: str,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    group_name: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    pool: str | None = None,
    names: LakehouseNames = ONLY,
) -> dg.AssetsDefinition:
    """Return an asset that commits staged tables, and only together.

    ``tables`` are the assets that stage them, or their keys, by an identifier each. Their outputs are StagedTables, or
    stored by :class:`TrinityLakeIOManager`. How an asset is stored is checked when definitions load, its IO manager,
    too. That of a key is checked when it is stored. A blocking check of any of them that fails keeps this asset from
    running, so nothing is published. The commit's operation is ``publish``, and its run id is the Dagster run's. Its
    properties name this asset, the partition, and each table's code and data version.

    A run publishes once, however often its step is started. A repeated step reports the existing version. So does a
    re-execution if the run before it had committed, and died before Dagster knew. Where another run published other
    partitions of a table since, or appended to it, both stay. Where it changed what this run replaces, the commit fails
    at once. A re-execution from there takes what was staged, and replaces what is there by then. A serializable commit
    also fails at once if a table that the run read through the IO manager has changed since. After other failures
    ``retry_policy`` applies. ``pool`` is the pool of the step. ``names`` distinguish the lakehouse from others of the
    code location. Raises InvalidInputError.
    """
    asset_key = dg.AssetKey(list(key))
    table_keys = {name: _key_of(table) for name, table in tables.items()}
    known = [table for table in tables.values() if isinstance(table, dg.AssetsDefinition)]
    check_together(asset_key, known, partitions_def)

    @dg.asset(
        key=asset_key,
        ins={
            name: dg.AssetIn(table_key, dagster_type=_type_of(tables[name], names))
            for name, table_key in table_keys.items()
        },
        partitions_def=partitions_def,
        group_name=group_name,
        description=description,
        kinds={"trinitylake"},
        metadata=publishes(table_keys.values()),
        op_tags={_PRIORITY_TAG: "1"},  # assets that wait for the publication may be ready at the same time
        automation_condition=requested_with(known),
        retry_policy=retry_policy,
        pool=pool,
        dagster_type=_NOTHING,
        required_resource_keys={names.resource_key},
    )
    def published(context: dg.AssetExecutionContext, **inputs: StagedTable | NotStaged) -> Iterator[Any]:
        lakehouse = lakehouse_of(context.resources, names)
        lake = lakehouse.open()
        staged = {table_keys[name]: table for name, table in inputs.items() if isinstance(table, StagedTable)}
        if not staged:
            raise dg.Failure(nothing_staged(context.instance, asset_key, table_keys.values()), allow_retries=False)
        ordered = list(staged.values())
        listed = ", ".join(f"{table.namespace}.{table.table}" for table in ordered)
        with no_retries_of_conflicts(asset_key):
            publication = _publish(context, lake, asset_key, ordered, list(staged), isolation_of(lakehouse))
        if publication.was_published:
            context.log.info("%s had been published as version %s before", listed, publication.version)
        else:
            context.log.info("published %s as version %s", listed, publication.version)
        published_tables = publication.tables or ordered
        metadata = {"lakehouse_version": publication.version, **staged_tables_metadata(published_tables)}
        runs = run_chain(context.instance, context.run)
        tell_lineage(
            lake,
            publication.version,
            published_tables,
            lambda: RunReads(context.instance, runs, list(staged)).all(),
            integration="DAGSTER",
            job=asset_key.to_user_string(),
            run_id=context.run.run_id,
        )
        by_key = dict(zip(staged, published_tables, strict=True))
        page = VersionsPage.of(context, names, lakehouse.webserver_url)
        pages = PublishedPages(lake=lake, version=publication.version, links=page.links)
        yield from published_events(context.instance, runs, by_key, publication.version, pages)
        shown = {"operation": "publish", **page.metadata(lake), **metadata}
        yield dg.AssetMaterialization(asset_key=names.lakehouse_key, metadata=shown)
        forget_input_versions(context, table_keys.values())
        yield dg.MaterializeResult(metadata={"was_published": publication.was_published, **metadata})

    return published


def _key_of(table: dg.AssetKey | dg.AssetsDefinition) -> dg.AssetKey:
    """Return the key of an asset that stages a table. Raises InvalidInputError for one that could not be stored."""
    if isinstance(table, dg.AssetKey):
        return table
    check_stored(table)
    return table.key


def _type_of(table: dg.AssetKey | dg.AssetsDefinition, names: LakehouseNames) -> dg.DagsterType:
    """Return the type of an input, which says when definitions load that an asset lacks its IO manager."""
    if isinstance(table, dg.AssetKey) or stages_itself(table, table.key):
        return STAGED
    asset, key = table.key.to_user_string(), table.get_io_manager_key_for_asset_key(table.key)
    refused = (
        f"asset {asset} is published as a table, and Dagster's own IO manager {key!r} would store it as a file of"
        f" Python. Give it io_manager_key={names.io_manager_key!r}"
    )
    return TypeOfStored(
        key, refused, key=f"{_STAGED_NAME} {asset} {key}", type_check_fn=_is_staged, typing_type=StagedTable
    )


def _publish(
    context: dg.AssetExecutionContext,
    lake: Lakehouse,
    asset_key: dg.AssetKey,
    staged: Sequence[StagedTable],
    table_keys: Sequence[dg.AssetKey],
    isolation: str | None,
) -> Publication:
    asset, partition = asset_key.to_user_string(), partition_of(context)
    runs = run_chain(context.instance, context.run)
    own, *earlier = runs
    version = _unacknowledged(context.instance, lake, earlier, asset_key, partition)
    if version is not None:
        return Publication(version, was_published=True)
    properties = {
        "asset": shortened(asset),
        **({"partition": shortened(partition)} if partition else {}),
        **asset_versions({key: newest_notes(context.instance, runs, key) for key in table_keys}),
    }
    reads = RunReads(context.instance, runs, table_keys)
    is_anew = any(_met_a_conflict(context.instance, run, asset) for run in earlier)
    if is_anew:
        context.log.info("an earlier run met a conflict: what was staged replaces what is there now")
    return publish_once(
        lake,
        staged,
        publication_id(own.run_id, asset, partition),
        reads=reads.all(),
        own=reads.staged(),
        is_anew=is_anew,
        require=_not_made_of_older(staged, reads) if is_anew else None,
        isolation=isolation,
        run_id=own.run_id,
        message=shortened(f"publish {asset_key.path[-1]}{f' {partition}' if partition else ''}"),
        properties=properties,
    )


def _met_a_conflict(instance: dg.DagsterInstance, run: dg.DagsterRun, asset: str) -> bool:
    """Whether a publication failed in a run, as others had changed what it replaces."""
    for record in instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE).records:
        event = record.event_log_entry.dagster_event
        failure = None if event is None else event.step_failure_data.user_failure_data
        said = {} if failure is None else {name: value.value for name, value in failure.metadata.items()}
        if (said.get("error"), said.get(PUBLISHING)) == (CommitConflictError.__name__, asset):
            return True
    return False


def _not_made_of_older(staged: Sequence[StagedTable], reads: RunReads) -> Callable[[Snapshot], None]:
    """Return the check that no table has changed of which the run made new rows for that table itself."""
    names = {(table.namespace, table.table) for table in staged}
    of_itself = [read for read in reads.all() if (read.namespace, read.table) in names]
    return lambda latest: check_unchanged(latest, of_itself, reads.staged(), is_published)


def _unacknowledged(
    instance: dg.DagsterInstance,
    lake: Lakehouse,
    earlier: Sequence[dg.DagsterRun],
    asset_key: dg.AssetKey,
    partition: str,
) -> int | None:
    """Return the version that an earlier run committed without Dagster learning of it, None if there is none.

    If Dagster knows of such a publication, the user wants to publish again.
    """
    for run in earlier:
        if newest_materialization(instance, [run], asset_key) is not None:
            break
        begun = created_at(instance, run)
        if begun is None:
            continue
        publication = publication_id(run.run_id, asset_key.to_user_string(), partition)
        version = published_version(lake, publication, version_before(lake, begun - CLOCK_SKEW))
        if version is not None:
            return version
    return None
