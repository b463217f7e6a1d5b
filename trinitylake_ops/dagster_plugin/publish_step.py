"""Exactly-once publication by the step of a publish asset, or by the step of an asset that publishes its own table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import (
    asset_context,
    log_no_materialization,
    reset_input_versions,
)
from trinitylake_ops.dagster_plugin.metadata import staged_tables_metadata
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource, lakehouse_of
from trinitylake_ops.dagster_plugin.runs.backfills import wait_for_sources
from trinitylake_ops.dagster_plugin.runs.membership import nothing_staged_message
from trinitylake_ops.dagster_plugin.runs.publications import (
    PUBLISHING,
    RunPublisher,
    asset_versions,
    check_partitions_exist,
    committed_versions,
    partition_of,
    partitions_exist,
    publication_of,
    shortened,
    superseded_appends,
)
from trinitylake_ops.dagster_plugin.runs.reads import Attempt, attempts_of, record_attempt
from trinitylake_ops.dagster_plugin.runs.records import all_executions
from trinitylake_ops.dagster_plugin.runs.staging import Note, published_event, published_events, undone_events
from trinitylake_ops.dagster_plugin.table_metadata import PublishedPages
from trinitylake_ops.dagster_plugin.version_page import VersionsPage, operation_metrics
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, TransactionExpiredError
from trinitylake_ops.iceberg.write.publication import Publication, emit_lineage, publish_once
from trinitylake_ops.iceberg.write.replacement import TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable


def publish_by_step(
    context: dg.OutputContext,
    lakehouse: TrinityLakeResource,
    staged: StagedTable,
    notes: Sequence[Note],
    reads: Sequence[TableRead],
) -> None:
    """Publish the table of an asset that no publish asset publishes, and report its version.

    Each attempt of the step stages the table again and publishes it. Rows that an interrupted attempt appended are
    replaced, so that each row exists once even if the step is started several times.

    Args:
        context: The output context of the asset.
        lakehouse: The lakehouse.
        staged: The staged table.
        notes: The notes of the staged table, one for each partition.
        reads: The tables that the step read.

    Raises:
        dg.Failure: Another writer changed the table or a table that was read. The step is not retried.
        TrinityLakeError: The commit failed for another reason.
    """
    key, lake, step = context.asset_key, lakehouse.open(), asset_context(context)
    names = LakehouseNames.of_io_manager(context.op_def.output_def_named(context.name).io_manager_key)
    with no_retries_of_conflicts(key):
        publication = _commit(step, lake, key, staged, notes, reads, isolation_of(lakehouse))
    (table,) = publication.tables or [staged]
    emit_lineage(
        lake,
        publication.version,
        [table],
        lambda: list(reads),
        integration="DAGSTER",
        job=key.to_user_string(),
        run_id=step.run.run_id,
    )
    page = VersionsPage.of(step, names, lakehouse.webserver_url)
    pages = PublishedPages(lake=lake, version=publication.version, links=page.links)
    for note in notes:
        event = published_event(key, note, table, publication.version, {})
        context.log_event(event.with_metadata({**pages(table, note), **event.metadata}))
    totals = staged_tables_metadata([table])
    metrics = operation_metrics("publish", totals)
    for page_event in page.events(lake, "publish", version=publication.version, metrics=metrics):
        context.log_event(page_event)
    context.add_output_metadata(
        {"was_published": publication.was_published, "lakehouse_version": publication.version, **totals}
    )
    log_no_materialization(context)


def _commit(
    context: dg.AssetExecutionContext,
    lake: Lakehouse,
    key: dg.AssetKey,
    staged: StagedTable,
    notes: Sequence[Note],
    reads: Sequence[TableRead],
    isolation: str | None,
) -> Publication:
    partition, instance, run = partition_of(context), context.instance, context.run
    publication = publication_of(key, partition, [staged])
    superseded: list[StagedTable] = []
    if run.parent_run_id is not None or _was_started_before(context):
        superseded = superseded_appends(
            instance,
            all_executions(instance, run),
            (key, partition),
            staged,
            lambda run_id: attempts_of(instance, run_id),
            lambda attempts: committed_versions(lake, attempts),
        )
    record_attempt(instance, run, Attempt.of(publication, key.to_user_string(), partition, [staged]))
    return publish_once(
        lake,
        [staged],
        publication,
        require=lambda _: check_partitions_exist(context, {key: notes}),
        superseded=superseded,
        reads=reads,
        isolation=isolation,
        run_id=run.run_id,
        message=shortened(f"publish {key.path[-1]}{f' {partition}' if partition else ''}"),
        properties={
            "asset": shortened(key.to_user_string()),
            **({"partition": shortened(partition)} if partition else {}),
            **asset_versions({key: notes}),
        },
    )


def _was_started_before(context: dg.AssetExecutionContext) -> bool:
    """Whether an earlier attempt of the step in the same run may have committed."""
    instance, run_id = context.instance, context.run.run_id
    if context.retry_number > 0:
        return True
    return bool(instance.run_monitoring_enabled) and instance.count_resume_run_attempts(run_id) > 0


def isolation_of(lakehouse: TrinityLakeResource) -> str | None:
    """Return the isolation level of the resource, or None for the default level of the lakehouse."""
    return None if lakehouse.isolation == "lakehouse" else lakehouse.isolation


@contextmanager
def no_retries_of_conflicts(asset_key: dg.AssetKey) -> Iterator[None]:
    """Fail a step without retries on a conflict, an expired transaction or invalid input."""
    try:
        yield
    except (CommitConflictError, InvalidInputError, TransactionExpiredError) as error:
        raise dg.Failure(
            description=str(error),
            metadata={"error_code": error.code, PUBLISHING: asset_key.to_user_string()},
            allow_retries=False,
        ) from error


def publish_staged(
    context: dg.AssetExecutionContext,
    names: LakehouseNames,
    asset_key: dg.AssetKey,
    table_keys: Sequence[dg.AssetKey],
    staged: Mapping[dg.AssetKey, StagedTable],
) -> Iterator[Any]:
    """Commit the staged tables of a run, and yield the events of the tables, of the lakehouse and of the publish asset.

    Args:
        context: The step context.
        names: The names of the lakehouse's definitions.
        asset_key: The publish asset.
        table_keys: The assets that it publishes.
        staged: The tables that the run staged, by asset.

    Raises:
        dg.Failure: Nothing is staged, or another writer changed rows that the commit replaces. The step is not retried.
        TrinityLakeError: The commit failed for another reason.
    """
    lakehouse = lakehouse_of(context.resources, names)
    lake = lakehouse.open()
    if not staged:
        raise dg.Failure(nothing_staged_message(context.instance, asset_key, table_keys), allow_retries=False)
    with no_retries_of_conflicts(asset_key):
        publisher = RunPublisher(context, lake, asset_key, staged)
        if publisher.outcome is None:
            wait_for_sources(context, lake, asset_key, publisher.reads.of_backfill(), staged.values())
        publication = publisher.publish(publish_once, isolation_of(lakehouse))
    version, published_tables = publication.version, list(publication.tables.values())
    listed = ", ".join(f"{table.namespace}.{table.table}" for table in published_tables)
    undone_by = publication.undone_by
    if undone_by is not None:
        context.log.warning("version %s published %s, but version %s undid it", version, listed, undone_by)
        yield from undone_events(context.instance, publication.runs, staged, version, undone_by)
        metadata = {"lakehouse_version": version, "undone_by_version": undone_by}
        yield dg.MaterializeResult(metadata={"was_published": True, **metadata})
        return
    if publication.was_published:
        context.log.info("%s was already published as version %s", listed, version)
    else:
        context.log.info("published %s as version %s", listed, version)
    totals = staged_tables_metadata(published_tables)
    metadata = {"lakehouse_version": version, **totals}
    emit_lineage(
        lake,
        version,
        published_tables,
        publication.reads.all,
        integration="DAGSTER",
        job=asset_key.to_user_string(),
        run_id=context.run.run_id,
    )
    page = VersionsPage.of(context, names, lakehouse.webserver_url)
    pages = PublishedPages(lake=lake, version=version, links=page.links)
    yield from published_events(
        context.instance, publication.runs, publication.tables, version, pages, publication.earlier
    )
    yield from page.events(lake, "publish", version=version, metrics=operation_metrics("publish", totals))
    if not partitions_exist(context):
        context.log.warning("the partition was deleted after version %s published it", version)
        return
    reset_input_versions(context, table_keys)
    yield dg.MaterializeResult(metadata={"was_published": publication.was_published, **metadata})
