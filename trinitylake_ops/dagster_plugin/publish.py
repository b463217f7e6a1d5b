"""Publishing: all tables that a run staged become one version of the lakehouse."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.metadata import staged_tables_metadata
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.tables.staged_table import StagedTable
from trinitylake_ops.tables.staging import publish

#: The asset that stands for the lakehouse as a whole: its materializations are its versions.
LAKEHOUSE_KEY = dg.AssetKey(["lakehouse"])


def build_publish_asset(
    *,
    key: Sequence[str],
    tables: Mapping[str, dg.AssetKey],
    description: str,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    group_name: str | None = None,
) -> dg.AssetsDefinition:
    """Return an asset that commits staged tables, and only together.

    ``tables`` are the assets that stage them, by an identifier each; their outputs are StagedTables.
    A blocking check of any of them that fails keeps this asset from running, so nothing is published.
    The commit's operation is ``publish``; its run id is the Dagster run's.
    """

    @dg.asset(
        key=dg.AssetKey(list(key)),
        ins={name: dg.AssetIn(asset_key) for name, asset_key in tables.items()},
        partitions_def=partitions_def,
        group_name=group_name,
        description=description,
        kinds={"trinitylake"},
    )
    def published(
        context: dg.AssetExecutionContext, lakehouse: TrinityLakeResource, **staged: StagedTable
    ) -> Iterator[Any]:
        lake = lakehouse.open()
        ordered = [staged[name] for name in tables]
        message = f"publish {context.partition_key if context.has_partition_key else key[-1]}"
        version = publish_staged(
            lake, ordered, isolation=lakehouse.isolation, run_id=context.run.run_id, message=message
        )
        names = ", ".join(f"{table.namespace}.{table.table}" for table in ordered)
        context.log.info("published %s as version %s", names, version)
        metadata = staged_tables_metadata(ordered)
        yield dg.AssetMaterialization(
            asset_key=LAKEHOUSE_KEY, metadata={"lakehouse_version": version, "operation": "publish", **metadata}
        )
        yield dg.Output(version, metadata={"lakehouse_version": version, **metadata})

    return published


def publish_staged(
    lake: Lakehouse,
    staged: Sequence[StagedTable],
    *,
    isolation: str | None = None,
    run_id: str | None = None,
    message: str | None = None,
) -> int:
    """Commit staged tables as one version and return it, creating the namespaces that new tables need.

    Raises CommitConflictError when a table moved since it was staged, and what a commit raises.
    """
    with lake.transaction(isolation, message, operation="publish", run_id=run_id) as txn:
        publish(txn, staged)
    assert txn.committed_version is not None
    return txn.committed_version
