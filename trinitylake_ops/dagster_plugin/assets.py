"""The contents of a lakehouse as Dagster assets, and checks of the assets that write tables.

The data version of each changes if and only if its object changes. It is the version of the lakehouse, or the metadata
of a table. So dependent assets become stale when somebody commits, from Dagster or not. Runs that commit also log a
materialization of the head.
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
    """An asset that writes a table, and how."""

    key: dg.AssetKey
    stored: Stored
    partitions: dg.PartitionsDefinition[str] | None

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, key: dg.AssetKey) -> "_Writer | None":
        """Return an asset as a writer, None if its definition does not say what it replaces."""
        if not asset.is_materializable or is_self_staging(asset, key):
            return None
        spec = asset.get_asset_spec(key)
        try:
            return cls(key, Stored.of(key, spec.metadata, spec.partitions_def), spec.partitions_def)
        except InvalidInputError:  # its own step fails
            return None

    def replaces_or_is_replaced(self, other: "_Writer") -> bool:
        """Return whether one of two writers replaces rows that the other one writes in the same run."""
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
    """Check the assets of a code location, when its definitions load.

    Assets without metadata of :func:`stored_as` are checked by their runs, because they may return nothing to store.

    Args:
        assets: The assets.
        io_manager_key: The key of the IO manager that stores tables.

    Raises:
        InvalidInputError: No run could store an asset or publish it, or two assets of one step replace the rows of each
            other.
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
        for one, other in combinations(writers, 2):
            depends = {*asset.asset_deps[one.key], *asset.asset_deps[other.key]} & {one.key, other.key}
            if not depends and one.replaces_or_is_replaced(other):
                raise _two_writers(one, other)


def check_other_writers(assets: StepAssets, key: dg.AssetKey, io_manager: type) -> None:
    """Check that no other asset of the run replaces the rows that an asset writes, or has its rows replaced by it.

    An asset that depends on the other one is executed after it, so that the user knows whose rows remain.

    Args:
        assets: The assets of a step.
        key: An asset of the step.
        io_manager: The class of the IO manager that stores tables.

    Raises:
        InvalidInputError: Another asset of the run replaces rows of the same table.
    """
    graph, own = assets.graph, None
    for other_key in assets.stored_with(key, io_manager):
        own = own or _Writer.of(graph.get(key).assets_def, key)
        other = _Writer.of(graph.get(other_key).assets_def, other_key)
        if own is None or other is None or not own.replaces_or_is_replaced(other) or not assets.in_run([other_key]):
            continue
        if key not in graph.get_ancestor_asset_keys(other_key) and other_key not in graph.get_ancestor_asset_keys(key):
            raise _two_writers(own, other)


def _two_writers(one: _Writer, other: "_Writer") -> InvalidInputError:
    first, second = sorted((one.key.to_user_string(), other.key.to_user_string()))
    return InvalidInputError(
        f"assets {first} and {second} cannot both write table {'.'.join(one.stored.name)} in one run: one replaces the"
        " rows of the other, and neither depends on the other; materialize them in different runs, or name one in the"
        " deps of the other"
    )


#: The name of the job that observes, for a lakehouse that is alone.
OBSERVE_JOB = "observe"

#: How long an observation of the head may count the bytes that can be freed, unless told otherwise.
RECLAIMABLE_SECONDS = 60.0

_OBSERVATIONS = 500  # events to search for one of the head: those of commits and sensors are between

# Dagster takes these for a range of partitions. The other texts that it refuses are no names of exports either.
_RANGE_OF_PARTITIONS = "..."


def build_head_asset(
    names: LakehouseNames = ONLY,
    *,
    deps: Sequence[dg.AssetKey] = (),
    reclaimable_seconds: float = RECLAIMABLE_SECONDS,
    group_name: str | None = None,
) -> dg.AssetsDefinition:
    """Return the lakehouse as an observable asset: its data version is its latest version.

    ``deps`` are the assets that publish into it. An observation shows what :func:`head_metadata` returns, and brings
    the partitions of exports up to date. It counts the bytes that can be freed within ``reclaimable_seconds``, which
    costs the reads of a plan of expiry. With 0 it does not.
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
        description="The lakehouse: each materialization is one of its versions.",
        kinds={"trinitylake"},
    )
    return _observable(names.of("observe_head"), spec, names, observe_head)


def _observable(
    op: str, spec: dg.AssetSpec, names: LakehouseNames, observe: Callable[..., Iterator[dg.ObserveResult]]
) -> dg.AssetsDefinition:
    """Return an observable asset. This is the form for several, as the one for a single asset takes no owners or deps.

    Dagster's warning, in each process that loads definitions, that observable assets are in beta is left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        observable = dg.multi_observable_source_asset(
            name=op, specs=[spec], required_resource_keys={names.resource_key}
        )(observe)
    assert isinstance(observable, dg.AssetsDefinition)
    return observable


def build_observe_job(names: LakehouseNames = ONLY, tables: Sequence[dg.AssetKey] = ()) -> Any:
    """Return a job, of the type of ``dagster.define_asset_job``, which observes the head, and tables.

    A code location with this job does not load if an asset of it cannot be stored as a table of the lakehouse.

    Args:
        names: The names of the lakehouse's definitions.
        tables: The assets of observed tables.
    """
    return dg.define_asset_job(
        names.of(OBSERVE_JOB),
        selection=CheckedSelection(
            dg.AssetSelection.assets(names.lakehouse_key, *tables).without_checks(),
            lambda assets: check_assets(assets, names.io_manager_key),
        ),
        description="Observes the lakehouse as a whole, its exports, and the tables that nothing here stages.",
        config=NO_OPTIONS,
    )


def _last_observed(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """Return the version that was observed last, None before the first observation."""
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
    """Return a table of the lakehouse, such as ``"sales.orders"``, as an observable asset.

    It is for a table that no asset of the project stages. Its key is namespace and name by default. An observation has
    the metadata of :class:`TablePages`. Its data version is the table's metadata. ``io_manager_key`` names the
    TrinityLakeIOManager by which assets read it, if that is not the default one. ``preview_rows`` of its first rows are
    shown, and kept by Dagster. Further keywords, such as ``owners``, ``description``, ``group_name``, ``tags`` and
    ``freshness_policy``, are those of ``dagster.AssetSpec``. Raises InvalidInputError.
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

    described = dg.AssetSpec(asset_key, **{"kinds": {*KINDS}, **spec}).merge_attributes(
        metadata={**stored_as(table=table, preview_rows=preview_rows), "dagster/table_name": table}
    )
    if io_manager_key is not None:
        described = described.with_io_manager_key(io_manager_key)
    return _observable("observe_" + asset_key.to_python_identifier(), described, names, observe_table)


def _data_version(definition: TableDef) -> dg.DataVersion:
    """Return a text that changes with the table: its Iceberg metadata, or its definition if it has another format."""
    location = definition.format_properties.get(METADATA_LOCATION) if definition.is_iceberg else None
    return dg.DataVersion(location or hashlib.sha256(definition.to_bytes()).hexdigest())


def build_exports_asset(names: LakehouseNames = ONLY, *, group_name: str | None = None) -> dg.AssetSpec:
    """Return the exports of the lakehouse as one external asset with a partition each."""
    return dg.AssetSpec(
        names.exports_key,
        deps=[names.lakehouse_key],
        partitions_def=dg.DynamicPartitionsDefinition(name=names.exports_partitions),
        group_name=group_name,
        description="Exports: versions kept under a name. A partition is deleted when its export is dropped.",
        kinds={"trinitylake"},
    )


def report_exports(
    instance: dg.DagsterInstance, lake: Lakehouse, names: LakehouseNames = ONLY, links: Links | None = None
) -> tuple[list[str], list[str]]:
    """Let the partitions of the exports asset be the exports of the lakehouse. Returns the added and the deleted ones.

    Each export gets a materialization when it is new or changed: finished, or made again under its name. This comes
    first, so that the next report repeats work that was cut off. ``links`` lead from an export to the launchpads that
    go back to it, restore it and drop it.
    """
    partitions = names.exports_partitions
    exports = {_partition_of(export.name): export for export in operations.list_exports(lake)}
    known = set(instance.get_dynamic_partitions(partitions))
    added, dropped = sorted(exports.keys() - known), sorted(known - exports.keys())
    for name, export in sorted(exports.items()):
        state = metadata_entries(
            {"created_at": export.created_at and export.created_at.isoformat(), **_export_metrics(export)}
        )
        data_version = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        if name in known and _reported_export(instance, names.exports_key, name) == data_version:
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
    """Return the partition of an export: its name, with dots escaped where Dagster would see a range."""
    return export.replace(".", "%2E") if _RANGE_OF_PARTITIONS in export else export


def _export_metrics(export: ExportInfo) -> dict[str, object]:
    return {VERSION: export.version, "level": export.level, "state": export.state, "dagster/uri": export.location}


def _export_links(export: ExportInfo, links: Links) -> dict[str, Any]:
    name = {"name": export.name}
    here = {} if export.target else links.entry("rollback", {"to": {"export": export.name}})
    return {**here, **links.entry("restore", name), **links.entry("drop_export", name)}


def _reported_export(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str) -> str | None:
    """Return the data version under which a partition was last reported, None if there is none."""
    records_filter = dg.AssetRecordsFilter(key, asset_partitions=[partition])
    for record in instance.fetch_materializations(records_filter, limit=1).records:
        event = record.asset_materialization
        return None if event is None else (event.tags or {}).get(DATA_VERSION_TAG)
    return None
