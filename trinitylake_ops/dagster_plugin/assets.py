"""What is in a lakehouse as Dagster assets: its head, its tables and its exports, observed and never made.

The data version of each is what changes when, and only when, the thing itself did: the version of the lakehouse, the
metadata of a table. So whatever depends on one becomes stale when somebody commits, from Dagster or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.dagster_plugin.io_manager import split_name, stored_as
from trinitylake_ops.dagster_plugin.metadata import column_schema, figures, markdown_table
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.errors import VersionExpiredError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import VERIFIED_PREFIX
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.managed import metadata_uri
from trinitylake_ops.transaction.lakehouse import diff_snapshots
from trinitylake_ops.transaction.snapshot import Snapshot

#: The exports of the lakehouse, one dynamic partition each.
EXPORTS_KEY = dg.AssetKey(["exports"])
_EXPORTS_NAME = "trinitylake_exports"
EXPORTS = dg.DynamicPartitionsDefinition(name=_EXPORTS_NAME)

_VERSION = "lakehouse_version"
_MS_PER_HOUR = 3_600_000


def build_head_asset(*, key: dg.AssetKey = LAKEHOUSE_KEY, group_name: str | None = None) -> dg.SourceAsset:
    """Return the lakehouse as an observable asset: its data version is its latest version.

    An observation shows what :func:`head_metadata` returns, and brings the partitions of exports up to date.
    """

    @dg.observable_source_asset(
        key=key, group_name=group_name, description="The lakehouse: each materialization is one of its versions."
    )
    def observe_head(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> dg.ObserveResult:
        lake = lakehouse.open()
        head = lake.snapshot()
        metadata = head_metadata(lake, head, _last_observed(context.instance, key))
        report_exports(context.instance, lake)
        return dg.ObserveResult(metadata=metadata, data_version=dg.DataVersion(str(head.version)))

    assert isinstance(observe_head, dg.SourceAsset)
    return observe_head


def head_metadata(lake: Lakehouse, head: Snapshot, since: int | None = None) -> dict[str, Any]:
    """Return what an operator wants to see of a version, read from its tree and its settings.

    Changes are those since version ``since``, by default those of this version alone. Hours since an expiry or an
    export began, or a verification was recorded, are "none" where there was none.
    """
    namespaces = head.namespaces()
    tables = sum(len(head.tables(namespace)) for namespace in namespaces)
    shape = head.tree_shape()
    definition = head.definition
    now_ms = lake.storage.now_ms()
    verified = [info.last_modified_ms for info in lake.storage.list(VERIFIED_PREFIX)]
    return {
        _VERSION: head.version,
        "created_at": dg.MetadataValue.timestamp(head.created_at),
        "namespaces": len(namespaces),
        "tables": tables,
        "objects": len(namespaces) + tables,
        **_changes(lake, head, since),
        "height": shape.height,
        "nodes": shape.nodes,
        "leaf_fill": shape.leaf_fill,
        "buffered_messages": shape.messages,
        "tree_bytes": shape.file_bytes,
        **figures(
            {
                "hours_since_expiry": _hours(now_ms, [batch.expired_at_millis for batch in definition.expirations]),
                "hours_since_export": _hours(now_ms, [export.created_at_millis for export in definition.exports]),
                "hours_since_verify": _hours(now_ms, verified),
            }
        ),
    }


def _hours(now_ms: int, times_ms: Sequence[int]) -> float | None:
    return round(max(0, now_ms - max(times_ms)) / _MS_PER_HOUR, 3) if times_ms else None


def _changes(lake: Lakehouse, head: Snapshot, since: int | None) -> dict[str, Any]:
    """Return which objects changed; an unknown number where the version to compare with expired."""
    before = min(since, head.version) if since is not None else max(head.version - 1, 0)
    try:
        changes = diff_snapshots(lake.snapshot(before, latest=head), head)
    except VersionExpiredError:
        return {"changes": f"version {before}, which was observed last, has expired"}
    rows = [(change.kind, change.namespace, change.table or "") for change in changes]
    return {
        "changed_since": before,
        "changed_tables": sum(change.table is not None for change in changes),
        "changes": markdown_table(("change", "namespace", "table"), rows),
    }


def _last_observed(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """Return the version that was observed last, None before the first observation."""
    for record in instance.fetch_observations(key, limit=1).records:
        observation = record.asset_observation
        value = None if observation is None else observation.metadata.get(_VERSION)
        if value is not None and isinstance(value.value, int):
            return value.value
    return None


def build_table_asset(table: str, *, key: dg.AssetKey | None = None, group_name: str | None = None) -> dg.SourceAsset:
    """Return a table of the lakehouse, such as ``"sales.orders"``, as an observable asset.

    It is for a table that no asset of the project stages. Its key is namespace and name by default. An observation has
    the metadata of :func:`table_metadata`, its data version is the table's metadata. Raises InvalidInputError.
    """
    namespace, name = split_name(table)

    @dg.observable_source_asset(
        key=key or dg.AssetKey([namespace, name]), group_name=group_name, metadata=stored_as(table=table)
    )
    def observe_table(lakehouse: TrinityLakeResource) -> dg.ObserveResult:
        lake = lakehouse.open()
        head = lake.snapshot()
        definition = head.table(namespace, name)
        data_version = definition.format_properties.get(METADATA_LOCATION, definition.id)
        metadata = table_metadata(lake, head, namespace, name, definition)
        return dg.ObserveResult(metadata=metadata, data_version=dg.DataVersion(data_version))

    assert isinstance(observe_table, dg.SourceAsset)
    return observe_table


def table_metadata(
    lake: Lakehouse, version: Snapshot, namespace: str, table: str, definition: TableDef
) -> dict[str, Any]:
    """Return what Dagster's catalog shows of a table: columns, rows, place, snapshot, and the lakehouse's version."""
    shown: dict[str, Any] = {
        "dagster/table_name": f"{namespace}.{table}",
        "dagster/column_schema": column_schema(definition),
        _VERSION: version.version,
        "format": definition.table_format,
    }
    if not definition.is_iceberg:
        return shown
    loaded = catalog_at(lake, version.version).load_table((namespace, table))
    snapshot = loaded.current_snapshot()
    summary = {} if snapshot is None or snapshot.summary is None else snapshot.summary.additional_properties
    return {
        **shown,
        "dagster/uri": metadata_uri(definition, lake.root),
        "dagster/row_count": int(summary.get("total-records", 0)),
        "bytes": int(summary.get("total-files-size", 0)),
        "data_files": int(summary.get("total-data-files", 0)),
        "snapshot_id": "none" if snapshot is None else str(snapshot.snapshot_id),
    }


def build_exports_asset(
    *, deps: Sequence[dg.AssetKey] = (LAKEHOUSE_KEY,), group_name: str | None = None
) -> dg.AssetSpec:
    """Return the exports of the lakehouse as one external asset with a partition each."""
    return dg.AssetSpec(
        EXPORTS_KEY,
        deps=deps,
        partitions_def=EXPORTS,
        group_name=group_name,
        description="Exports: versions kept under a name. A partition is deleted when its export is dropped.",
        kinds={"trinitylake"},
    )


def report_exports(instance: dg.DagsterInstance, lake: Lakehouse) -> tuple[list[str], list[str]]:
    """Let the partitions of the exports asset be the exports of the lakehouse; returns those added and deleted.

    Each new one gets a materialization first: what is cut off is done again by the next report.
    """
    exports = {export.name: export for export in maintenance.list_exports(lake)}
    known = set(instance.get_dynamic_partitions(_EXPORTS_NAME))
    added, dropped = sorted(exports.keys() - known), sorted(known - exports.keys())
    for name in added:
        export = exports[name]
        metadata = figures(
            {_VERSION: export.version, "level": export.level, "state": export.state, "dagster/uri": export.location}
        )
        instance.report_runless_asset_event(dg.AssetMaterialization(EXPORTS_KEY, partition=name, metadata=metadata))
        instance.add_dynamic_partitions(_EXPORTS_NAME, [name])
    for name in dropped:
        instance.delete_dynamic_partition(_EXPORTS_NAME, name)
    return added, dropped
