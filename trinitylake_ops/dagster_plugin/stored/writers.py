"""Checks of the assets of a code location that write tables: each can be stored, and none replaces rows of another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import dagster as dg

from trinitylake_ops.dagster_plugin.runs.beyond_public import StepAssets
from trinitylake_ops.dagster_plugin.runs.membership import check_publishers
from trinitylake_ops.dagster_plugin.stored.settings import Stored, check_stored, is_stored_as, stages_itself
from trinitylake_ops.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class _Writer:
    """An asset that writes a table, and how."""

    key: dg.AssetKey
    stored: Stored
    partitions: dg.PartitionsDefinition[str] | None

    @classmethod
    def of(cls, asset: dg.AssetsDefinition, key: dg.AssetKey) -> _Writer | None:
        """Return an asset as a writer, None if its definition does not say what it replaces."""
        if not asset.is_materializable or stages_itself(asset, key):
            return None
        spec = asset.get_asset_spec(key)
        try:
            return cls(key, Stored.of(key, spec.metadata, spec.partitions_def), spec.partitions_def)
        except InvalidInputError:  # its own step fails
            return None

    def replaces_or_is_replaced(self, other: _Writer) -> bool:
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


def _two_writers(one: _Writer, other: _Writer) -> InvalidInputError:
    first, second = sorted((one.key.to_user_string(), other.key.to_user_string()))
    return InvalidInputError(
        f"assets {first} and {second} cannot both write table {'.'.join(one.stored.name)} in one run: one replaces the"
        " rows of the other, and neither depends on the other; materialize them in different runs, or name one in the"
        " deps of the other"
    )
