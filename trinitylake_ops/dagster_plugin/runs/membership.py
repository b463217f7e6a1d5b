"""Find the publish assets of a table, and determine what a step's run may do with the table.

The definitions decide: the metadata of a publish asset names the assets that it publishes. A table that is not named
by a publish asset is published by its own step. A table that is named by a publish asset is staged by its own step, and
only in runs that include the publish asset, because otherwise it would never become visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import StepAssets, is_in_backfill
from trinitylake_ops.dagster_plugin.runs.records import BACKFILL_TAG, backfill_of, step_failures, step_successes
from trinitylake_ops.dagster_plugin.runs.staging import is_unpublished, unpublished_by
from trinitylake_ops.errors import InvalidInputError

_PUBLISHES = "trinitylake/publishes"
_MAX_WAIT_SECONDS = 30
_MAX_WAITS = 1_000


@dataclass(frozen=True, slots=True)
class NotStaged:
    """The input of a publish asset for a table that its run did not stage and that is therefore not changed."""


def publishes(keys: Iterable[dg.AssetKey]) -> Mapping[str, Any]:
    """Return the metadata of a publish asset for the assets that it publishes."""
    return {_PUBLISHES: [key.to_user_string() for key in keys]}


def check_together(
    publisher: dg.AssetKey,
    tables: Iterable[dg.AssetSpec],
    partitions: dg.PartitionsDefinition[str] | None,
) -> None:
    """Raise InvalidInputError if no run could stage a table and publish it.

    Args:
        publisher: The publish asset.
        tables: The assets that it publishes, as far as their definitions are known.
        partitions: Its partitions, or None.
    """
    specs = {spec.key: spec for spec in tables}
    definitions = (spec.partitions_def for spec in specs.values() if spec.partitions_def is not None)
    expected = partitions or next(definitions, None)
    for key, spec in specs.items():
        definition, is_automated = spec.partitions_def, spec.automation_condition is not None
        is_split = definition is not None and definition != expected
        if is_split or (is_automated and (definition is None) != (partitions is None)):
            name, publisher_name = key.to_user_string(), publisher.to_user_string()
            raise InvalidInputError(
                f"{publisher_name} cannot publish {name}: {name} {_describe_partitions(definition)}, {publisher_name}"
                f" {_describe_partitions(expected if is_split else partitions)}, and no run can materialize both; build"
                f" a separate publish asset for {name}, with partitions_def="
                f"{'None' if definition is None else 'that of the asset'}"
            )


def check_publishers(assets: Iterable[dg.AssetsDefinition]) -> None:
    """Check the publish assets of a code location, when its definitions load.

    Args:
        assets: All assets of the code location.

    Raises:
        InvalidInputError: No run could stage a table and publish it, or another code location materializes the table.
    """
    materializable = {key: asset for asset in assets if asset.is_materializable for key in asset.keys}
    for publisher, asset in materializable.items():
        spec = asset.get_asset_spec(publisher)
        keys = _publishes(spec.metadata)
        for key in keys - materializable.keys():
            raise InvalidInputError(_foreign_location_message(key))
        tables = [materializable[key].get_asset_spec(key) for key in sorted(keys, key=dg.AssetKey.to_user_string)]
        check_together(publisher, tables, spec.partitions_def)


def _describe_partitions(partitions: dg.PartitionsDefinition[str] | None) -> str:
    return "has no partitions" if partitions is None else f"has the partitions {partitions}"


def requested_with(tables: Iterable[dg.AssetKey | dg.AssetsDefinition]) -> Any:
    """Return an ``AutomationCondition`` that requests a run whenever automation requests one of the tables.

    Returns None if automation never requests any of them. The asset of a key may have a condition, so a key counts as
    automated. Dagster requests assets with the same partitions in one run.
    """
    condition = dg.AutomationCondition
    if not any(
        isinstance(table, dg.AssetKey) or any(spec.automation_condition is not None for spec in table.specs)
        for table in tables
    ):
        return None
    return condition.any_deps_match(condition.will_be_requested()).with_label("requested_with_tables")


def is_publisher(assets: StepAssets) -> bool:
    """Whether a step materializes a publish asset."""
    return any(_PUBLISHES in assets.graph.get(key).metadata for key in assets.own)


def publishers_of(assets: StepAssets, key: dg.AssetKey) -> list[dg.AssetKey]:
    """Return the publish assets of the code location that publish an asset, in the order of their keys."""
    if not assets.graph.has(key):
        return []
    publishers = (child for child in assets.graph.get(key).child_keys if key in _published_by(assets, child))
    return sorted(publishers, key=dg.AssetKey.to_user_string)


def _published_by(assets: StepAssets, publisher: dg.AssetKey) -> set[dg.AssetKey]:
    return _publishes(assets.graph.get(publisher).metadata)


def _publishes(metadata: Mapping[str, Any]) -> set[dg.AssetKey]:
    """Return the assets that an asset's metadata lists as published. Only publish assets have such metadata."""
    value = metadata.get(_PUBLISHES)
    names = getattr(value, "value", value)
    return {dg.AssetKey.from_user_string(name) for name in names} if isinstance(names, Sequence) else set()


def selection(keys: Iterable[dg.AssetKey]) -> str:
    """Return an asset selection in the syntax of Dagster's command line and UI."""
    return " or ".join(f'key:"{key.to_user_string()}"' for key in keys)


@dataclass(frozen=True, slots=True)
class BackfillPart:
    """A backfill that materializes a publish asset and the asset's tables in different runs.

    Dagster splits a backfill into runs according to the mappings between partitions, so that a run may omit the publish
    asset of its tables. The backfill materializes it later.
    """

    #: The backfill id.
    backfill: str
    publisher: dg.AssetKey


@dataclass(frozen=True, slots=True)
class Membership:
    """The relation of a step's run to the publications of tables."""

    #: The assets of the step, of its run and of the code location.
    assets: StepAssets
    instance: dg.DagsterInstance | None
    run: dg.DagsterRun | None

    def backfill_part(self, key: dg.AssetKey) -> BackfillPart | None:
        """Return the run's backfill if it also materializes a publish asset of an asset, otherwise None."""
        backfill = None if self.run is None or self.instance is None else backfill_of(self.instance, self.run)
        if self.instance is None or backfill is None:
            return None
        record = self.instance.get_backfill(backfill)
        selected = () if record is None else record.asset_selection or ()
        publishers = (publisher for publisher in publishers_of(self.assets, key) if publisher in selected)
        return next((BackfillPart(backfill, publisher) for publisher in publishers), None)

    def check_is_published(self, key: dg.AssetKey, partitions: Sequence[str] = ()) -> BackfillPart | None:
        """Check that an asset will be published, and return the backfill that publishes it in a different run.

        Returns None if the asset has no publish asset, or if the run includes one of its publish assets.

        Args:
            key: The asset.
            partitions: The partitions that the step materializes.

        Raises:
            dg.Failure: The asset has publish assets, and neither the run nor its backfill includes one of them.
        """
        assets, publishers = self.assets, publishers_of(self.assets, key)
        if not publishers or assets.in_run(publishers):
            return None
        name, publisher = key.to_user_string(), publishers[0]
        # The backfill of a re-executed run may have ended, and then materializes no more publish assets.
        has_tag = self.run is not None and BACKFILL_TAG in self.run.tags
        part = self.backfill_part(key) if has_tag else None
        if part is None:
            raise dg.Failure(
                f"asset {name} was not stored: {publisher.to_user_string()} publishes it, and this run does not"
                f" include {publisher.to_user_string()}; materialize both, with this asset selection in the UI or after"
                f" --select: {selection([key, publisher])}",
                allow_retries=False,
            )
        omitted = [
            partition
            for partition in partitions
            if not is_in_backfill(self.instance, part.backfill, part.publisher, partition)
        ]
        if omitted:
            raise dg.Failure(
                f"asset {name} was not stored: backfill {part.backfill} includes its partition {omitted[0]}, but not"
                f" the same partition of {part.publisher.to_user_string()}, which publishes it; backfill the partition"
                " of both assets",
                allow_retries=False,
            )
        if assets.graph.get(part.publisher).partitions_def is None and assets.graph.get(key).partitions_def is not None:
            raise dg.Failure(
                f"asset {name} was not stored: {part.publisher.to_user_string()} has no partitions, so that a backfill"
                f" materializes it in another run; set its partitions_def= to that of {name}",
                allow_retries=False,
            )
        return part

    def reads_staged(self, key: dg.AssetKey) -> bool:
        """Whether the step may read staged rows of an asset, because its result is part of the same publication.

        This applies to checks, to the publish assets of the asset, and to all assets that these publish assets publish
        or depend on. Any other step reads only published rows.
        """
        own_keys, graph = self.assets.own, self.assets.graph
        publishers = publishers_of(self.assets, key)
        return not own_keys or any(
            own_keys & {publisher, *graph.get_ancestor_asset_keys(publisher)} for publisher in publishers
        )

    def wait_for_publication(self, key: dg.AssetKey, partitions: Sequence[str | None], attempt: int) -> None:
        """Return if the run has published an asset, or does not publish it at all.

        Args:
            key: The asset that the step reads.
            partitions: The partitions that it reads; [None] for an asset without partitions.
            attempt: The number of earlier attempts of the step.

        Raises:
            RetryRequested: The run has not published the asset yet. Dagster starts the step again later.
            dg.Failure: A step failed, so that the asset may never be published, or another run of the backfill
                publishes it.
        """
        assets, instance, run = self.assets, self.instance, self.run
        if instance is None or run is None:
            return
        publishers = assets.in_run(publishers_of(assets, key)) if assets.in_run([key]) else []
        if publishers and step_successes(instance, run.run_id).intersection(map(assets.step_key, publishers)):
            return
        name = key.to_user_string()
        if publishers and not step_failures(instance, run.run_id):
            raise dg.RetryRequested(_MAX_WAITS, min(2 ** min(attempt, 10), _MAX_WAIT_SECONDS))
        if publishers:
            raise dg.Failure(
                f"{name} was not read: {publishers[0].to_user_string()} has not published the table that this run"
                " staged for it, because a step failed; re-execute the run from failure",
                allow_retries=False,
            )
        part = self.backfill_part(key)
        if part is not None and any(
            is_unpublished(instance, part.backfill, key, partition) for partition in partitions
        ):
            publisher = part.publisher.to_user_string()
            raise dg.Failure(
                f"{name} was not read: backfill {part.backfill} staged it, and {publisher} has not published it; add"
                f" {publisher} to the deps of {', '.join(sorted(asset.to_user_string() for asset in assets.own))}",
                allow_retries=False,
            )


def check_can_stage(assets: StepAssets, key: dg.AssetKey) -> None:
    """Raise dg.Failure if another code location materializes an asset, so that no run could stage and publish it.

    Args:
        assets: The assets of the publish asset's step.
        key: An asset that it publishes.
    """
    if assets.graph.get(key).is_materializable:
        return
    raise dg.Failure(_foreign_location_message(key), allow_retries=False)


def _foreign_location_message(key: dg.AssetKey) -> str:
    name = key.to_user_string()
    return (
        f"{name} cannot be published: another code location materializes it, so that no run of this one can stage it;"
        f" remove it from the tables of the publish asset, or build the publish asset in the code location of {name}"
    )


def nothing_staged_message(instance: dg.DagsterInstance, publisher: dg.AssetKey, keys: Iterable[dg.AssetKey]) -> str:
    """Return the message for a publish asset with nothing to publish in its run: the cause, and what to do.

    If another run staged one of the tables without publishing it, the message names that run.

    Args:
        instance: The Dagster instance.
        publisher: The publish asset.
        keys: The assets that it publishes.
    """
    name = publisher.to_user_string()
    for key in keys:
        run_id = unpublished_by(instance, key)
        if run_id is not None:
            return (
                f"{name} published nothing: this run staged none of its tables, and run {run_id} staged"
                f" {key.to_user_string()} without publishing it; re-execute that run from failure"
            )
    return (
        f"{name} published nothing: this run staged none of its tables; materialize them together, with this asset"
        f" selection in the UI or after --select: 1+{selection([publisher])}"
    )
