"""The definition of publish assets, which commit all tables that a run staged as one version."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import TypeOfStored
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.runs.membership import NotStaged, check_together, publishes, requested_with
from trinitylake_ops.dagster_plugin.table_settings import check_stored, is_self_staging, table_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.staged_table import StagedTable


def _is_staged(_context: dg.TypeCheckContext, given: Any) -> dg.TypeCheck:
    message = (
        f"it is a {type(given).__name__}, as another IO manager stored it. Give its asset the io_manager_key of a"
        f" TrinityLakeIOManager. Of a lakehouse with a name it is NAME_{ONLY.io_manager_key}"
    )
    is_right = isinstance(given, StagedTable | NotStaged)
    return dg.TypeCheck(success=is_right, description=None if is_right else message)


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
    description: str = "Commits the staged tables of a run as one version, all or none.",
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
    check_together(asset_key, (spec for table in known for spec in table.specs), partitions_def)
    _check_distinct(known)

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
        automation_condition=requested_with(tables.values()),
        retry_policy=retry_policy,
        pool=pool,
        dagster_type=_NOTHING,
        output_required=False,  # Dagster takes no result of a partition that was deleted after the commit
        required_resource_keys={names.resource_key},
    )
    def published(context: dg.AssetExecutionContext, **inputs: StagedTable | NotStaged) -> Iterator[Any]:
        from trinitylake_ops.dagster_plugin.publish_step import publish_staged  # only steps need what it imports

        staged = {table_keys[name]: table for name, table in inputs.items() if isinstance(table, StagedTable)}
        yield from publish_staged(context, names, asset_key, list(table_keys.values()), staged)

    return published


def _check_distinct(assets: Sequence[dg.AssetsDefinition]) -> None:
    """Raise InvalidInputError if two assets write one table. Where only a key is known, the publication does."""
    writers: dict[tuple[str, str], str] = {}
    for asset in assets:
        name, key = table_of(asset.key, asset.metadata_by_key.get(asset.key, {})), asset.key.to_user_string()
        first = writers.setdefault(name, key)
        if first != key:
            raise InvalidInputError(
                f"assets {first} and {key} both write table {'.'.join(name)}, and one commit takes one change of a"
                " table; give each asset a publish asset, or write the table by one asset"
            )


def _key_of(table: dg.AssetKey | dg.AssetsDefinition) -> dg.AssetKey:
    """Return the key of an asset that stages a table. Raises InvalidInputError for one that could not be stored."""
    if isinstance(table, dg.AssetKey):
        return table
    check_stored(table)
    return table.key


def _type_of(table: dg.AssetKey | dg.AssetsDefinition, names: LakehouseNames) -> dg.DagsterType:
    """Return the type of an input, which says when definitions load that an asset lacks its IO manager."""
    if isinstance(table, dg.AssetKey) or is_self_staging(table, table.key):
        return STAGED
    asset, key = table.key.to_user_string(), table.get_io_manager_key_for_asset_key(table.key)
    refused = (
        f"asset {asset} is published as a table, and Dagster's own IO manager {key!r} would store it as a file of"
        f" Python. Give it io_manager_key={names.io_manager_key!r}"
    )
    return TypeOfStored(
        key, refused, key=f"{_STAGED_NAME} {asset} {key}", type_check_fn=_is_staged, typing_type=StagedTable
    )
