"""Definition of publish assets, which commit all tables that a run staged as one version."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import TypeOfStored
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.runs.membership import NotStaged, check_together, publishes, requested_with
from trinitylake_ops.dagster_plugin.table_settings import check_stored, is_self_staging, table_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.staged_table import StagedTable


def _is_staged(_context: dg.TypeCheckContext, value: Any) -> dg.TypeCheck:
    message = (
        f"the input is a {type(value).__name__} instead of a staged table, because another IO manager stored it; set"
        " the io_manager_key of its asset to that of a TrinityLakeIOManager, which is"
        f" NAME_{ONLY.io_manager_key} for a lakehouse with a name"
    )
    is_valid = isinstance(value, StagedTable | NotStaged)
    return dg.TypeCheck(success=is_valid, description=None if is_valid else message)


_STAGED_NAME = "TrinityLakeStagedTable"
#: Type of the inputs. Dagster cannot infer it, because the op function takes its inputs as keyword arguments.
STAGED = dg.DagsterType(_is_staged, name=_STAGED_NAME, typing_type=StagedTable)
# The published version is reported as metadata, so that no IO manager has to store an output.
_NOTHING = cast(dg.DagsterType, dg.Nothing)
_PRIORITY_TAG = "dagster/priority"


def build_publish_asset(
    *,
    key: Sequence[str],
    tables: Mapping[str, dg.AssetKey | dg.AssetsDefinition],
    description: str = "Commit all tables that a run staged as one version, or none of them.",
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    group_name: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    pool: str | None = None,
    names: LakehouseNames = ONLY,
) -> dg.AssetsDefinition:
    """Build an asset that commits staged tables atomically.

    If a blocking check of any table fails, this asset does not run and nothing is published. The commit has the
    operation ``publish`` and the run id of the Dagster run. Its properties record this asset, the partition, and the
    code and data version of each table.

    A run publishes exactly once, even if its step is started several times: a repeated step reports the existing
    version, and so does a re-execution of a run that died between its commit and its report to Dagster. If another run
    has published other partitions of a table, or appended to it, both changes are kept. If the other run changed rows
    that this run replaces, the commit fails without retries; a re-execution from failure publishes the staged tables
    again and replaces the current rows. A serializable commit also fails without retries if a table that the run read
    through the IO manager has changed. ``retry_policy`` applies to other failures only.

    Args:
        key: The asset key.
        tables: The assets that stage the tables, or their keys, by input name. They return StagedTables, or a
            :class:`TrinityLakeIOManager` stores them. The storage settings of an asset are validated when definitions
            load. For a key, they are validated when its asset is stored.
        description: The description of the asset.
        partitions_def: The asset's partitions.
        group_name: The asset group.
        retry_policy: The retry policy of the step.
        pool: The pool of the step.
        names: The names of the lakehouse's definitions.

    Raises:
        InvalidInputError: An asset cannot be stored as a table, two assets write the same table, or no run could stage
            and publish a table.
    """
    asset_key = dg.AssetKey(list(key))
    table_keys = {name: _key_of(table) for name, table in tables.items()}
    definitions = [table for table in tables.values() if isinstance(table, dg.AssetsDefinition)]
    check_together(asset_key, (spec for table in definitions for spec in table.specs), partitions_def)
    _check_distinct(definitions)

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
        op_tags={_PRIORITY_TAG: "1"},  # run before assets that read the published tables
        automation_condition=requested_with(tables.values()),
        retry_policy=retry_policy,
        pool=pool,
        dagster_type=_NOTHING,
        output_required=False,  # Dagster rejects an output for a partition that was deleted after the commit
        required_resource_keys={names.resource_key},
    )
    def published(context: dg.AssetExecutionContext, **inputs: StagedTable | NotStaged) -> Iterator[Any]:
        from trinitylake_ops.dagster_plugin.publish_step import (
            publish_staged,
        )  # imported here because only steps need it

        staged = {table_keys[name]: table for name, table in inputs.items() if isinstance(table, StagedTable)}
        yield from publish_staged(context, names, asset_key, list(table_keys.values()), staged)

    return published


def _check_distinct(assets: Sequence[dg.AssetsDefinition]) -> None:
    """Raise InvalidInputError if two assets write the same table. Publishing checks assets known only by key."""
    writers: dict[tuple[str, str], str] = {}
    for asset in assets:
        name, key = table_of(asset.key, asset.metadata_by_key.get(asset.key, {})), asset.key.to_user_string()
        first = writers.setdefault(name, key)
        if first != key:
            raise InvalidInputError(
                f"assets {first} and {key} cannot be published together: both write table {'.'.join(name)}; build a"
                " publish asset for each of them, or write the table from one asset"
            )


def _key_of(table: dg.AssetKey | dg.AssetsDefinition) -> dg.AssetKey:
    """Return the key of an asset that stages a table. Raises InvalidInputError if no run could store the asset."""
    if isinstance(table, dg.AssetKey):
        return table
    check_stored(table)
    return table.key


def _type_of(table: dg.AssetKey | dg.AssetsDefinition, names: LakehouseNames) -> dg.DagsterType:
    """Return the type of an input, which rejects Dagster's own IO managers when definitions load."""
    if isinstance(table, dg.AssetKey) or is_self_staging(table, table.key):
        return STAGED
    asset, key = table.key.to_user_string(), table.get_io_manager_key_for_asset_key(table.key)
    message = (
        f"asset {asset} cannot be published as a table: Dagster's own IO manager {key!r} would store it as a pickle"
        f" file; set its io_manager_key={names.io_manager_key!r}"
    )
    return TypeOfStored(
        key, message, key=f"{_STAGED_NAME} {asset} {key}", type_check_fn=_is_staged, typing_type=StagedTable
    )
