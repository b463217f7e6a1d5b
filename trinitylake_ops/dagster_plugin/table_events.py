"""Events of table assets for changes that operations or other writers made to the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.metadata import column_schema
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_metadata import Bounds, TablePages, partition_row_count
from trinitylake_ops.dagster_plugin.table_settings import Stored, described_in, names_table, preview_rows_of, table_of
from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.totals import changed_partitions
from trinitylake_ops.iceberg.write.partition_key import PartitionKey
from trinitylake_ops.versions.history import Change
from trinitylake_ops.versions.snapshot import Snapshot

TableKey: TypeAlias = Callable[[str, str], dg.AssetKey]
TableEvent: TypeAlias = dg.AssetMaterialization | dg.AssetObservation


@dataclass(frozen=True, slots=True)
class _TableAsset:
    """An asset that contains a table."""

    key: dg.AssetKey
    #: Storage settings of a partitioned asset.
    stored: Stored | None = None
    #: Number of rows of the table to preview.
    preview_rows: int = 0
    #: Descriptions and tags of columns in the asset's metadata.
    described: dg.TableSchema | None = None
    partitions: dg.PartitionsDefinition[str] | None = None


class TableAssets:
    """The assets of a code location that contain the tables of one lakehouse.

    These are the assets that a TrinityLakeIOManager of the lakehouse stores, and observable table assets. The table of
    an asset is named by ``stored_as`` or by the asset key. If ``table_key`` is set, it determines the asset of each
    table instead. Without a code location, for example in a test, there are no assets unless ``table_key`` is set.
    """

    def __init__(
        self,
        repository: dg.RepositoryDefinition | None,
        names: LakehouseNames,
        lakehouse: TrinityLakeResource,
        table_key: TableKey | None = None,
    ):
        self._table_key = table_key
        self._found: dict[tuple[str, str], list[_TableAsset]] = {}
        self._holders: dict[dg.AssetKey, _TableAsset] = {}
        if repository is not None:
            self._scan_repository(repository, names, lakehouse)

    def _scan_repository(
        self, repository: dg.RepositoryDefinition, names: LakehouseNames, lakehouse: TrinityLakeResource
    ) -> None:
        io_manager_keys = {
            key
            for key, resource in repository.get_top_level_resources().items()
            if _is_of(resource, lakehouse) or key == names.io_manager_key
        }
        for node in repository.asset_graph.asset_nodes:
            is_stored = (
                node.is_materializable and node.assets_def.get_io_manager_key_for_asset_key(node.key) in io_manager_keys
            )
            is_observed = not node.is_materializable and names_table(node.metadata)
            if is_observed and names.name and node.key.path[0] != names.name:
                is_observed = False
            if not (is_stored or is_observed):
                continue
            try:
                name = table_of(node.key, node.metadata)
                partitions = node.partitions_def
                stored = None if partitions is None else Stored.of(node.key, node.metadata, partitions)
            except InvalidInputError:  # reported by the runs of the asset
                continue
            holder = _TableAsset(
                node.key, stored, preview_rows_of(node.metadata), described_in(node.metadata), partitions
            )
            self._holders[node.key] = holder
            self._found.setdefault(name, []).append(holder)

    def of(self, namespace: str, table: str) -> list[_TableAsset]:
        """Return the assets that contain a table."""
        if self._table_key is not None:
            key = self._table_key(namespace, table)
            return [self._holders.get(key, _TableAsset(key))]
        return self._found.get((namespace, table), [])


def _is_of(resource: dg.ResourceDefinition, lakehouse: TrinityLakeResource) -> bool:
    """Whether a resource is an IO manager of a lakehouse."""
    kind = getattr(resource, "configurable_resource_cls", None)
    if not (isinstance(kind, type) and issubclass(kind, TrinityLakeIOManager)):
        return False
    nested = getattr(resource, "nested_resources", {}).get("lakehouse")
    root = getattr(nested, "root", None)
    return (root.get_value() if isinstance(root, dg.EnvVar) else root) == lakehouse.root


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes to tables between two versions, from which asset events are created."""

    lake: Lakehouse
    before: Snapshot
    after: Snapshot
    assets: TableAssets
    instance: dg.DagsterInstance
    #: Metadata of the changed tables. By default, only columns and totals of the first tables are included.
    pages: TablePages | None = None

    def events(
        self, changes: Sequence[Change], metadata: Mapping[str, Any], *, has_new_rows: bool = True
    ) -> Iterator[TableEvent]:
        """Yield the asset events for changed tables.

        A table whose rows changed is reported as a materialization, for the partitions whose files changed, so that
        automation runs dependent assets. A table that was removed, or rewritten with the same rows, is reported as an
        observation.

        Args:
            changes: The changes.
            metadata: Further metadata of each event.
            has_new_rows: Whether the changes may have changed rows.
        """
        pages = self.pages or TablePages(self.lake, self.after, Links(ONLY), Bounds(pages=0, partitions=0))
        for change in changes:
            holders = [] if change.table is None else self.assets.of(change.namespace, change.table)
            if change.table is None or not holders:
                continue
            details = {
                "dagster/table_name": f"{change.namespace}.{change.table}",
                "lakehouse_version": self.after.version,
                "change": change.kind,
                **metadata,
            }
            if change.kind != "removed" and pages.bounds.take_table():
                preview_rows = max(holder.preview_rows for holder in holders)
                details = {**_page(pages, change.namespace, change.table, preview_rows), **details}
            for holder in holders:
                if holder.described is not None and change.kind != "removed":
                    definition = self.after.table(change.namespace, change.table)
                    details["dagster/column_schema"] = column_schema(definition, holder.described)
                if change.kind == "removed" or not has_new_rows:
                    yield dg.AssetObservation(holder.key, metadata=details)
                    continue
                partitions = self._partitions(change.namespace, change.table, holder)
                for partition, values in partitions.items():
                    counts = self._row_count(pages.bounds, change.namespace, change.table, values)
                    yield dg.AssetMaterialization(holder.key, partition=partition, metadata={**details, **counts})

    def _row_count(self, bounds: Bounds, namespace: str, table: str, values: Mapping[str, str]) -> dict[str, int]:
        """Return the row count of a partition as metadata, if the bounds allow it and the count can be determined."""
        if not values or not bounds.take_partition():
            return {}
        try:
            loaded = catalog_at(self.lake, self.after.version).load_table((namespace, table))
            rows = partition_row_count(loaded, values)
        except TrinityLakeError:  # the page of the table reports what cannot be read
            return {}
        return {} if rows is None else {"dagster/partition_row_count": rows}

    def _partitions(self, namespace: str, table: str, holder: _TableAsset) -> dict[str | None, Mapping[str, str]]:
        """Return the partitions of an asset whose files changed, with the values of the partition columns.

        Returns {None: {}} if the asset has no partitions or the changed partitions cannot be determined.
        """
        unpartitioned: dict[str | None, Mapping[str, str]] = {None: {}}
        if holder.stored is None or holder.partitions is None or not holder.stored.columns:
            return unpartitioned
        catalog = catalog_at(self.lake, self.after.version)
        try:
            states = [_definition(version, namespace, table) for version in (self.before, self.after)]
            before, after = (None if state is None else table_metadata(state, catalog.io) for state in states)
            assert after is not None
            changed_by_columns = changed_partitions(before, after, catalog.io)
            changed = {partition for names, partition in changed_by_columns if names == holder.stored.columns}
            keys = holder.partitions.get_partition_keys(dynamic_partitions_store=self.instance)
            values = holder.stored.values(keys, holder.partitions)
            partitions = [PartitionKey.of(after, column_values).record for column_values in values]
        except TrinityLakeError:
            return unpartitioned
        candidates = zip(keys, values, partitions, strict=True)
        return {key: column_values for key, column_values, partition in candidates if partition in changed}


def _page(pages: TablePages, namespace: str, table: str, preview_rows: int) -> dict[str, Any]:
    try:
        return pages.of(namespace, table, preview_rows=preview_rows)
    except TrinityLakeError as error:  # the change is reported nevertheless
        return {"not_shown": str(error)}


def _definition(version: Snapshot, namespace: str, table: str) -> TableDef | None:
    if not (version.has_namespace(namespace) and version.has_table(namespace, table)):
        return None
    definition = version.table(namespace, table)
    return definition if definition.is_iceberg else None
