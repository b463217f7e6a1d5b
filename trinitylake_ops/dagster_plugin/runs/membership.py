"""Which publish assets publish a table, and what the run of a step may do with the table.

The definitions decide: a publish asset names the assets that it publishes in its metadata. A table that no publish
asset names is published by its own step. A table that one names is staged by its step, and only in runs that include
the publish asset, because nothing else would make it visible.
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
_LONGEST_WAIT_SECONDS = 30
_MOST_WAITS = 1_000


@dataclass(frozen=True, slots=True)
class NotStaged:
    """The input of a publish asset for a table that its run did not stage: the table stays as it is."""


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
        partitions: Its partitions, None without any.
    """
    others = {spec.key: spec for spec in tables}
    known = (spec.partitions_def for spec in others.values() if spec.partitions_def is not None)
    expected = partitions or next(known, None)
    for key, spec in others.items():
        own, is_automated = spec.partitions_def, spec.automation_condition is not None
        is_split = own is not None and own != expected
        if is_split or (is_automated and (own is None) != (partitions is None)):
            shown = key.to_user_string()
            raise InvalidInputError(
                f"{publisher.to_user_string()} cannot publish {shown}: {_with(own)}, {publisher.to_user_string()}"
                f" {_with(expected if is_split else partitions)}, and no run makes both; build a publish asset for"
                f" {shown} alone, with partitions_def={'None' if own is None else 'that of the asset'}"
            )


def check_publishers(assets: Iterable[dg.AssetsDefinition]) -> None:
    """Check the publish assets of a code location, when its definitions load.

    Args:
        assets: All assets of the code location.

    Raises:
        InvalidInputError: No run could stage a table and publish it, or another code location makes the table.
    """
    made = {key: asset for asset in assets if asset.is_materializable for key in asset.keys}
    for publisher, asset in made.items():
        spec = asset.get_asset_spec(publisher)
        keys = _publishes(spec.metadata)
        for key in keys - made.keys():
            raise InvalidInputError(_foreign_location_message(key))
        tables = [made[key].get_asset_spec(key) for key in sorted(keys, key=dg.AssetKey.to_user_string)]
        check_together(publisher, tables, spec.partitions_def)


def _with(partitions: dg.PartitionsDefinition[str] | None) -> str:
    return "it has no partitions" if partitions is None else f"it has the partitions {partitions}"


def requested_with(tables: Iterable[dg.AssetKey | dg.AssetsDefinition]) -> Any:
    """Return the condition, an ``AutomationCondition``, to run whenever automation requests one of some tables.

    None is returned if automation requests none of them. The asset of a key may have a condition, so that a key is
    enough for one. Dagster requests assets of the same partitions in one run.
    """
    condition = dg.AutomationCondition
    if not any(
        isinstance(table, dg.AssetKey) or any(spec.automation_condition is not None for spec in table.specs)
        for table in tables
    ):
        return None
    return condition.any_deps_match(condition.will_be_requested()).with_label("requested_with_tables")


def is_publisher(assets: StepAssets) -> bool:
    """Whether a step is that of a publish asset."""
    return any(_PUBLISHES in assets.graph.get(key).metadata for key in assets.own)


def publishers_of(assets: StepAssets, key: dg.AssetKey) -> list[dg.AssetKey]:
    """Return the publish assets of the code location that publish an asset, in the order of their keys."""
    if not assets.graph.has(key):
        return []
    found = (child for child in assets.graph.get(key).child_keys if key in _published_by(assets, child))
    return sorted(found, key=dg.AssetKey.to_user_string)


def _published_by(assets: StepAssets, publisher: dg.AssetKey) -> set[dg.AssetKey]:
    return _publishes(assets.graph.get(publisher).metadata)


def _publishes(metadata: Mapping[str, Any]) -> set[dg.AssetKey]:
    """Return the assets that an asset with some metadata publishes, none if it is no publish asset."""
    value = metadata.get(_PUBLISHES)
    names = getattr(value, "value", value)
    return {dg.AssetKey.from_user_string(name) for name in names} if isinstance(names, Sequence) else set()


def selection(keys: Iterable[dg.AssetKey]) -> str:
    """Return the selection of some assets, as the command line and the UI of Dagster take it."""
    return " or ".join(f'key:"{key.to_user_string()}"' for key in keys)


@dataclass(frozen=True, slots=True)
class BackfillPart:
    """The part of a run in an asset backfill that makes a publish asset in other runs.

    Dagster splits a backfill into runs by the mappings between partitions, so that a run may leave out the publish
    asset of its tables. The backfill makes it later.
    """

    backfill: str
    publisher: dg.AssetKey


@dataclass(frozen=True, slots=True)
class Membership:
    """What the run of a step does with tables of publications."""

    #: The assets of the step, of its run and of the code location.
    assets: StepAssets
    instance: dg.DagsterInstance | None
    run: dg.DagsterRun | None

    def backfill_part(self, key: dg.AssetKey) -> BackfillPart | None:
        """Return the part of the run in an asset backfill that publishes an asset, None if there is none."""
        backfill = None if self.run is None or self.instance is None else backfill_of(self.instance, self.run)
        if self.instance is None or backfill is None:
            return None
        record = self.instance.get_backfill(backfill)
        made = () if record is None else record.asset_selection or ()
        return next((BackfillPart(backfill, one) for one in publishers_of(self.assets, key) if one in made), None)

    def check_is_published(self, key: dg.AssetKey, partitions: Sequence[str] = ()) -> BackfillPart | None:
        """Return the part of the run in a backfill that publishes an asset in another run.

        None is returned if no publish asset publishes it, or if the run includes one that does.

        Args:
            key: The asset.
            partitions: The partitions that the step makes.

        Raises:
            dg.Failure: Publish assets publish the asset, and neither the run nor its backfill includes one of them.
        """
        assets, publishers = self.assets, publishers_of(self.assets, key)
        if not publishers or assets.in_run(publishers):
            return None
        shown, publisher = key.to_user_string(), publishers[0]
        # The backfill of a re-executed run may have ended, and then makes no publish asset any more.
        has_tag = self.run is not None and BACKFILL_TAG in self.run.tags
        part = self.backfill_part(key) if has_tag else None
        if part is None:
            raise dg.Failure(
                f"asset {shown} was not stored: {publisher.to_user_string()} publishes it, and this run does not"
                f" include {publisher.to_user_string()}; materialize both: as asset selection in the UI, or after"
                f" --select, {selection([key, publisher])}",
                allow_retries=False,
            )
        left_out = [one for one in partitions if not is_in_backfill(self.instance, part.backfill, part.publisher, one)]
        if left_out:
            raise dg.Failure(
                f"asset {shown} was not stored: backfill {part.backfill} makes partition {left_out[0]} of it without"
                f" {part.publisher.to_user_string()} of that partition, which publishes it; backfill both for it",
                allow_retries=False,
            )
        if assets.graph.get(part.publisher).partitions_def is None and assets.graph.get(key).partitions_def is not None:
            raise dg.Failure(
                f"asset {shown} was not stored: {part.publisher.to_user_string()} has no partitions, and a backfill"
                f" makes it in another run; give it partitions_def= of {shown}",
                allow_retries=False,
            )
        return part

    def reads_staged(self, key: dg.AssetKey) -> bool:
        """Whether the step may read rows of an asset that are staged: its outcome is part of the asset's publication.

        That is a check, a publish asset of the asset, and an asset that one of those publishes or depends on. Any other
        step reads published rows only.
        """
        own, graph = self.assets.own, self.assets.graph
        publishers = publishers_of(self.assets, key)
        return not own or any(own & {one, *graph.get_ancestor_asset_keys(one)} for one in publishers)

    def wait_for_publication(self, key: dg.AssetKey, partitions: Sequence[str | None], attempt: int) -> None:
        """Return unless the run has yet to publish an asset.

        Args:
            key: The asset that the step reads.
            partitions: The partitions that it reads, None for an asset without partitions.
            attempt: How often the step was attempted before.

        Raises:
            RetryRequested: The publication is still to come. Dagster starts the step again later.
            dg.Failure: A step failed, so the publication may never come, or another run of the backfill publishes it.
        """
        assets, instance, run = self.assets, self.instance, self.run
        if instance is None or run is None:
            return
        publishers = assets.in_run(publishers_of(assets, key)) if assets.in_run([key]) else []
        if publishers and step_successes(instance, run.run_id).intersection(map(assets.step_key, publishers)):
            return
        shown = key.to_user_string()
        if publishers and not step_failures(instance, run.run_id):
            raise dg.RetryRequested(_MOST_WAITS, min(2 ** min(attempt, 10), _LONGEST_WAIT_SECONDS))
        if publishers:
            raise dg.Failure(
                f"{shown} was not read: {publishers[0].to_user_string()} has not published what this run staged for it,"
                " because a step failed; re-execute the run from failure",
                allow_retries=False,
            )
        part = self.backfill_part(key)
        if part is not None and any(is_unpublished(instance, part.backfill, key, one) for one in partitions):
            publisher = part.publisher.to_user_string()
            raise dg.Failure(
                f"{shown} was not read: backfill {part.backfill} staged it, and {publisher} has not published it; add"
                f" {publisher} to the deps of {', '.join(sorted(one.to_user_string() for one in assets.own))}",
                allow_retries=False,
            )


def check_can_stage(assets: StepAssets, key: dg.AssetKey) -> None:
    """Raise dg.Failure if no run of a publish asset could stage an asset, because another code location makes it.

    Args:
        assets: The assets of the step of the publish asset.
        key: An asset that it publishes.
    """
    if assets.graph.get(key).is_materializable:
        return
    raise dg.Failure(_foreign_location_message(key), allow_retries=False)


def _foreign_location_message(key: dg.AssetKey) -> str:
    shown = key.to_user_string()
    return (
        f"{shown} cannot be published: another code location makes it, so that no run of this one can stage it; leave"
        f" it out of the tables of the publish asset, or build the publish asset in the code location of {shown}"
    )


def nothing_staged(instance: dg.DagsterInstance, publisher: dg.AssetKey, keys: Iterable[dg.AssetKey]) -> str:
    """Return why a publish asset has nothing to publish in a run, with what to do: a run may hold staged tables.

    Args:
        instance: The Dagster instance.
        publisher: The publish asset.
        keys: The assets that it publishes.
    """
    shown = publisher.to_user_string()
    for key in keys:
        run_id = unpublished_by(instance, key)
        if run_id is not None:
            return (
                f"{shown} published nothing: this run staged none of its tables, and run {run_id} staged"
                f" {key.to_user_string()} without publishing it; re-execute that run from failure"
            )
    return (
        f"{shown} published nothing: this run staged none of its tables; materialize them with it: as asset"
        f" selection in the UI, or after --select, 1+{selection([publisher])}"
    )
