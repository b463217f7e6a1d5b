"""Assets as tables in the catalog of Dagster."""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from trinitylake_ops.dagster_plugin.stored.settings import table_of

#: The kinds that the UI shows with each table.
KINDS = frozenset({"iceberg", "trinitylake"})


def as_tables(assets: Iterable[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """Return assets that a TrinityLakeIOManager stores, with what the catalog of Dagster shows of tables.

    These are the kinds ``iceberg`` and ``trinitylake``, the name of the table, and its kind of storage. Raises
    InvalidInputError for an asset whose key names no table.
    """
    return [*dg.map_asset_specs(_as_table, assets)]


def _as_table(spec: dg.AssetSpec) -> dg.AssetSpec:
    namespace, table = table_of(spec.key, spec.metadata)
    return spec.merge_attributes(
        kinds={*KINDS}, metadata={"dagster/table_name": f"{namespace}.{table}", "dagster/storage_kind": "iceberg"}
    )
