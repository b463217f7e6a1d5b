"""The contents of a lakehouse as Dagster assets, and validation of the assets that write tables.

The data version of an asset is the version of the lakehouse, or the location of the table's metadata. It changes if and
only if the lakehouse or the table changes, so that dependent assets become stale after any commit, whether by Dagster
or by another program. Runs that commit also log a materialization of the lakehouse asset.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin._dagster_internals import CheckedSelection, StepAssets
from trinitylake_ops.dagster_plugin.lakehouse_metadata import GAP, VERSION, head_metadata, lake_status
from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.metadata import DATA_VERSION_TAG, metadata_entries
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.options import NO_OPTIONS
from trinitylake_ops.dagster_plugin.resources import lakehouse_of
from trinitylake_ops.dagster_plugin.runs.membership import check_publishers
from trinitylake_ops.dagster_plugin.table_metadata import KINDS, TablePages
from trinitylake_ops.dagster_plugin.table_settings import Stored, check_stored, is_self_staging, is_stored_as, stored_as
from trinitylake_ops.dagster_plugin.version_page import VersionsPage
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.operations import ExportInfo


@dataclass(frozen=True, slots=True)
class _Writer:
    """An asset that writes a table, and its write settings."""

    key: dg.AssetKey
    stored: Stored
    partitions: dg.PartitionsDefinition[str] | None

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, key: dg.AssetKey) -> "_Writer | None":
        """Return the writer for an asset, or None if its definition does not determine which rows it replaces."""
        if not asset.is_materializable or is_self_staging(asset, key):
            return None
        spec = asset.get_asset_spec(key)
        try:
            return cls(key, Stored.of(key, spec.metadata, spec.partitions_def), spec.partitions_def)
        except InvalidInputError:  # reported by the asset's own step
            return None

    def replaces_or_is_replaced(self, other: "_Writer") -> bool:
        """Whether one writer replaces rows that the other writes in the same run."""
        modes = {self.stored.mode, other.stored.mode}
        if self.stored.name != other.stored.name:
            return False
        if "replace_table" in modes:
            return True
        has_same_partitions = self.partitions is not None and self.partitions == other.partitions
        has_same_columns = set(self.stored.columns) == set(other.stored.columns)
        has_same_values = has_same_columns and self.stored.formats == other.stored.formats
        return "replace_partitions" in modes and has_same_partitions and has_same_values


def check_assets(assets: Iterable[dg.AssetsDefinition], io_manager_key: str) -> None:
    """Validate the assets of a code location when its definitions load.

    Assets without metadata from :func:`stored_as` are validated when they run, because they may not return anything to
    store.

    Args:
        assets: The assets.
        io_manager_key: The key of the IO manager that stores tables.

    Raises:
        InvalidInputError: No run could store or publish an asset, or two assets of one step replace each other's rows.
    """
    assets = list(assets)
    check_publishers(assets)
    for asset in assets:
        if not asset.is_materializable:
            continue
        keys = [
            key
            for key in asset.keys
            if asset.get_io_manager_key_for_asset_key(key) == io_manager_key
            and is_stored_as(asset.get_asset_spec(key).metadata)
        ]
        check_stored(asset, keys)
        if asset.can_subset:
            continue
        writers = filter(None, (_Writer.of(asset, key) for key in keys))
        for first, second in combinations(writers, 2):
            depends = {*asset.asset_deps[first.key], *asset.asset_deps[second.key]} & {first.key, second.key}
            if not depends and first.replaces_or_is_replaced(second):
                raise _two_writers_error(first, second)


def check_other_writers(assets: StepAssets, key: dg.AssetKey, io_manager: type) -> None:
    """Check that an asset and the other assets of the run do not replace each other's rows.

    An asset may replace the rows of an asset that it depends on: they execute in a fixed order, so that the remaining
    rows are well defined.

    Args:
        assets: The assets of a step.
        key: An asset of the step.
        io_manager: The class of the IO manager that stores tables.

    Raises:
        InvalidInputError: Another asset of the run writes the same table, and one replaces the rows of the other.
    """
    graph, writer = assets.graph, None
    for other_key in assets.stored_with(key, io_manager):
        writer = writer or _Writer.of(graph.get(key).assets_def, key)
        other = _Writer.of(graph.get(other_key).assets_def, other_key)
        if writer is None or other is None or not writer.replaces_or_is_replaced(other):
            continue
        if not assets.in_run([other_key]):
            continue
        if key not in graph.get_ancestor_asset_keys(other_key) and other_key not in graph.get_ancestor_asset_keys(key):
            raise _two_writers_error(writer, other)


def _two_writers_error(writer: _Writer, other: _Writer) -> InvalidInputError:
    first, second = sorted((writer.key.to_user_string(), other.key.to_user_string()))
    return InvalidInputError(
        f"assets {first} and {second} cannot both write table {'.'.join(writer.stored.name)} in one run: one replaces"
        " the rows of the other, and neither depends on the other; materialize them in separate runs, or add one to the"
        " deps of the other"
    )


#: The unprefixed name of the job that observes the assets.
OBSERVE_JOB = "observe"

#: Default time limit for counting reclaimable bytes in an observation of the lakehouse.
RECLAIMABLE_SECONDS = 60.0

# Number of observations to search for the latest one with a version, because commits and sensors also log observations.
_OBSERVATIONS = 500

# Dagster parses a partition key that contains this string as a range. Export names cannot contain the other reserved
# strings.
_RANGE_OF_PARTITIONS = "..."


def build_head_asset(
    names: LakehouseNames = ONLY,
    *,
    deps: Sequence[dg.AssetKey] = (),
    reclaimable_seconds: float = RECLAIMABLE_SECONDS,
    group_name: str | None = None,
) -> dg.AssetsDefinition:
    """Build the observable asset of the lakehouse. Its data version is the latest version of the lakehouse.

    An observation reports the metadata from :func:`head_metadata` and updates the partitions of the exports asset.

    Args:
        names: The names of the lakehouse's definitions.
        deps: The assets that publish into the lakehouse.
        reclaimable_seconds: Time limit for counting reclaimable bytes, which requires as many reads as planning an
            expiration. 0 disables it.
        group_name: The asset group.
    """

    def observe_head(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        resource = lakehouse_of(context.resources, names)
        lake = resource.open()
        head = lake.snapshot()
        since = _last_observed(context.instance, names.lakehouse_key)
        page = VersionsPage.of(context, names, resource.webserver_url)
        status = lake_status(lake, plan_seconds=reclaimable_seconds)
        metadata = {
            VERSION: head.version,
            **page.screen(lake, head, status),
            **head_metadata(lake, head, status, since, is_planned=reclaimable_seconds > 0),
        }
        report_exports(context.instance, lake, names, page.links)
        data_version = dg.DataVersion(str(head.version))
        yield dg.ObserveResult(asset_key=names.lakehouse_key, metadata=metadata, data_version=data_version)

    spec = dg.AssetSpec(
        names.lakehouse_key,
        deps=deps,
        group_name=group_name,
        description="The lakehouse. Each materialization is one of its versions.",
        kinds={"trinitylake"},
    )
    return _observable(names.of("observe_head"), spec, names, observe_head)


def _observable(
    op: str, spec: dg.AssetSpec, names: LakehouseNames, observe: Callable[..., Iterator[dg.ObserveResult]]
) -> dg.AssetsDefinition:
    """Build an observable asset.

    Uses Dagster's function for multiple assets, because the function for a single asset does not support owners and
    deps. Suppresses the beta warning, which would appear in every process that loads the definitions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        observable = dg.multi_observable_source_asset(
            name=op, specs=[spec], required_resource_keys={names.resource_key}
        )(observe)
    assert isinstance(observable, dg.AssetsDefinition)
    return observable


def build_observe_job(names: LakehouseNames = ONLY, tables: Sequence[dg.AssetKey] = ()) -> Any:
    """Build a job that observes the lakehouse and its tables. Returns the same type as ``dagster.define_asset_job``.

    Resolving the job validates the assets of the code location, which fails to load if an asset cannot be stored as a
    table of the lakehouse.

    Args:
        names: The names of the lakehouse's definitions.
        tables: The keys of the observable table assets.
    """
    return dg.define_asset_job(
        names.of(OBSERVE_JOB),
        selection=CheckedSelection(
            dg.AssetSelection.assets(names.lakehouse_key, *tables).without_checks(),
            lambda assets: check_assets(assets, names.io_manager_key),
        ),
        description="Observe the lakehouse, its exports, and the tables that no asset of this code location writes.",
        config=NO_OPTIONS,
    )


def _last_observed(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """Return the most recently observed version, or None before the first observation."""
    for record in instance.fetch_observations(key, limit=_OBSERVATIONS).records:
        observation = record.asset_observation
        value = None if observation is None or GAP in observation.metadata else observation.metadata.get(VERSION)
        if value is not None and isinstance(value.value, int):
            return value.value
    return None


def build_table_asset(
    table: str,
    names: LakehouseNames = ONLY,
    *,
    key: dg.AssetKey | None = None,
    io_manager_key: str | None = None,
    preview_rows: int = 0,
    **spec: Any,
) -> dg.AssetsDefinition:
    """Build an observable asset for a table that no asset of the project writes.

    An observation reports the metadata from :class:`TablePages`. The data version is the location of the table's
    metadata.

    Args:
        table: The table as ``namespace.table``, for example ``"sales.orders"``.
        names: The names of the lakehouse's definitions.
        key: The asset key. Defaults to the table's namespace and name.
        io_manager_key: The key of the TrinityLakeIOManager with which other assets read the table. Defaults to
            Dagster's default IO manager key.
        preview_rows: Number of rows to show in the metadata. Dagster stores these rows.
        spec: Further arguments for ``dagster.AssetSpec``, for example ``owners``, ``description``, ``group_name``,
            ``tags`` and ``freshness_policy``.

    Raises:
        InvalidInputError: The table name or ``preview_rows`` is invalid.
    """
    namespace, name = split_name(table)
    asset_key = key or names.table_key(namespace, name)

    def observe_table(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        resource = lakehouse_of(context.resources, names)
        lake = resource.open()
        head = lake.snapshot()
        definition = head.table(namespace, name)
        run_context: Any = context
        pages = TablePages(lake, head, Links.of(run_context, names, resource.webserver_url))
        metadata = pages.of(namespace, name, preview_rows=preview_rows)
        yield dg.ObserveResult(asset_key=asset_key, metadata=metadata, data_version=_data_version(definition))

    asset_spec = dg.AssetSpec(asset_key, **{"kinds": {*KINDS}, **spec}).merge_attributes(
        metadata={**stored_as(table=table, preview_rows=preview_rows), "dagster/table_name": table}
    )
    if io_manager_key is not None:
        asset_spec = asset_spec.with_io_manager_key(io_manager_key)
    return _observable("observe_" + asset_key.to_python_identifier(), asset_spec, names, observe_table)


def _data_version(definition: TableDef) -> dg.DataVersion:
    """Return the location of a table's Iceberg metadata, or a digest of its definition if it has another format."""
    location = definition.format_properties.get(METADATA_LOCATION) if definition.is_iceberg else None
    return dg.DataVersion(location or hashlib.sha256(definition.to_bytes()).hexdigest())


def build_exports_asset(names: LakehouseNames = ONLY, *, group_name: str | None = None) -> dg.AssetSpec:
    """Build an external asset that has one partition for each export of the lakehouse."""
    return dg.AssetSpec(
        names.exports_key,
        deps=[names.lakehouse_key],
        partitions_def=dg.DynamicPartitionsDefinition(name=names.exports_partitions),
        group_name=group_name,
        description="Exports of the lakehouse: versions pinned by name, one partition each. Dropping an export deletes"
        " its partition.",
        kinds={"trinitylake"},
    )


def report_exports(
    instance: dg.DagsterInstance, lake: Lakehouse, names: LakehouseNames = ONLY, links: Links | None = None
) -> tuple[list[str], list[str]]:
    """Synchronize the partitions of the exports asset with the exports of the lakehouse.

    A materialization is reported for each export that is new, was completed, or was recreated under the same name.
    Materializations are reported before the partitions are added, so that the next call repeats an interrupted report.

    Args:
        instance: The Dagster instance.
        lake: The lakehouse.
        names: The names of the lakehouse's definitions.
        links: Links from each export to the launchpads for rolling back to it, restoring it and dropping it.

    Returns:
        The added and the deleted partitions.
    """
    partitions = names.exports_partitions
    exports = {_partition_of(export.name): export for export in operations.list_exports(lake)}
    existing = set(instance.get_dynamic_partitions(partitions))
    added, dropped = sorted(exports.keys() - existing), sorted(existing - exports.keys())
    for name, export in sorted(exports.items()):
        state = metadata_entries(
            {"created_at": export.created_at and export.created_at.isoformat(), **_export_metrics(export)}
        )
        data_version = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        if name in existing and _reported_export(instance, names.exports_key, name) == data_version:
            continue
        materialization = dg.AssetMaterialization(
            names.exports_key,
            partition=name,
            metadata={
                **metadata_entries(_export_metrics(export)),
                **({} if links is None else _export_links(export, links)),
            },
            tags={DATA_VERSION_TAG: data_version},
        )
        instance.report_runless_asset_event(materialization)
    if added:
        instance.add_dynamic_partitions(partitions, added)
    for name in dropped:
        instance.delete_dynamic_partition(partitions, name)
    return added, dropped


def _partition_of(export: str) -> str:
    """Return the partition key of an export: its name, with dots escaped if Dagster would parse it as a range."""
    return export.replace(".", "%2E") if _RANGE_OF_PARTITIONS in export else export


def _export_metrics(export: ExportInfo) -> dict[str, object]:
    return {VERSION: export.version, "level": export.level, "state": export.state, "dagster/uri": export.location}


def _export_links(export: ExportInfo, links: Links) -> dict[str, Any]:
    name = {"name": export.name}
    rollback = {} if export.target else links.entry("rollback", {"to": {"export": export.name}})
    return {**rollback, **links.entry("restore", name), **links.entry("drop_export", name)}


def _reported_export(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str) -> str | None:
    """Return the last reported data version of a partition, or None if there is none."""
    records_filter = dg.AssetRecordsFilter(key, asset_partitions=[partition])
    for record in instance.fetch_materializations(records_filter, limit=1).records:
        event = record.asset_materialization
        return None if event is None else (event.tags or {}).get(DATA_VERSION_TAG)
    return None
