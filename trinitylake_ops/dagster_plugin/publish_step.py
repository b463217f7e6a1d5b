"""The step of a publish asset: all tables that a run staged become one version of the lakehouse, exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.metadata import staged_tables_metadata
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import lakehouse_of
from trinitylake_ops.dagster_plugin.runs.backfills import wait_for_sources
from trinitylake_ops.dagster_plugin.runs.beyond_public import forget_input_versions
from trinitylake_ops.dagster_plugin.runs.membership import nothing_staged
from trinitylake_ops.dagster_plugin.runs.publications import RunPublisher, partitions_exist
from trinitylake_ops.dagster_plugin.runs.staging import published_events, undone_events
from trinitylake_ops.dagster_plugin.step_publication import isolation_of, no_retries_of_conflicts
from trinitylake_ops.dagster_plugin.table_pages.published import PublishedPages
from trinitylake_ops.dagster_plugin.versions.page import VersionsPage, operation_metrics
from trinitylake_ops.tables.writing.lineage.told import tell_lineage
from trinitylake_ops.tables.writing.publication import publish_once
from trinitylake_ops.tables.writing.staged_table import StagedTable


def publish_staged(
    context: dg.AssetExecutionContext,
    names: LakehouseNames,
    asset_key: dg.AssetKey,
    table_keys: Sequence[dg.AssetKey],
    staged: Mapping[dg.AssetKey, StagedTable],
) -> Iterator[Any]:
    """Commit the staged tables of a run, and yield the events of the tables, of the lakehouse and of the publish asset.

    Args:
        context: The context of the step.
        names: The names of the lakehouse.
        asset_key: The publish asset.
        table_keys: The assets that it publishes.
        staged: The tables that the run staged, by their assets.

    Raises:
        dg.Failure: Nothing is staged, or other writers changed what the commit replaces. Retries would not help.
        TrinityLakeError: The commit failed in another way.
    """
    lakehouse = lakehouse_of(context.resources, names)
    lake = lakehouse.open()
    if not staged:
        raise dg.Failure(nothing_staged(context.instance, asset_key, table_keys), allow_retries=False)
    with no_retries_of_conflicts(asset_key):
        publisher = RunPublisher(context, lake, asset_key, staged)
        if publisher.outcome is None:
            wait_for_sources(context, lake, asset_key, publisher.reads.of_backfill(), staged.values())
        publication = publisher.publish(publish_once, isolation_of(lakehouse))
    version, published_tables = publication.version, list(publication.tables.values())
    listed = ", ".join(f"{table.namespace}.{table.table}" for table in published_tables)
    undone_by = publication.undone_by
    if undone_by is not None:
        context.log.warning("version %s published %s, and version %s undid it", version, listed, undone_by)
        yield from undone_events(context.instance, publication.runs, staged, version, undone_by)
        metadata = {"lakehouse_version": version, "undone_by_version": undone_by}
        yield dg.MaterializeResult(metadata={"was_published": True, **metadata})
        return
    if publication.was_published:
        context.log.info("%s had been published as version %s before", listed, version)
    else:
        context.log.info("published %s as version %s", listed, version)
    counted = staged_tables_metadata(published_tables)
    metadata = {"lakehouse_version": version, **counted}
    tell_lineage(
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
    yield from page.events(lake, "publish", version=version, metrics=operation_metrics("publish", counted))
    if not partitions_exist(context):
        context.log.warning("the partition was deleted after version %s published it", version)
        return
    forget_input_versions(context, table_keys)
    yield dg.MaterializeResult(metadata={"was_published": publication.was_published, **metadata})
