"""What a run staged is noted with its asset, and reported as the asset's new data once a version has it.

Dagster logs a materialization of an asset as soon as its output is stored. For a staged table that would be too early.
Automation downstream would start on data that no version has. A publication that fails would leave the asset green. So
an observation is logged in its place. It has all that the materialization would have had. The step that publishes
makes the materialization of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import log_no_materialization, materializations_of
from trinitylake_ops.dagster_plugin.metadata import DATA_VERSION_TAG, PREVIEW_ROWS, staged_table_metadata
from trinitylake_ops.dagster_plugin.runs.records import asset_events
from trinitylake_ops.iceberg.write.staged_table import StagedTable

_PAGE = 20
#: The note of a staged table has this: its description.
STAGED = "trinitylake/staged"
_TAGS = "trinitylake/tags"
_VALUES = "trinitylake/partition_values"
_BACKFILL = "trinitylake/staged_by_backfill"
_VERSION = "lakehouse_version"
_COLUMNS = "dagster/column_schema"
_INTERNAL = (STAGED, _TAGS, _VALUES, _BACKFILL, PREVIEW_ROWS)
_INPUT_VERSION = "dagster/input_data_version/"
_INPUT_POINTER = "dagster/input_event_pointer/"


@dataclass(frozen=True, slots=True)
class Note:
    """The note of a staged table, for one partition of its asset. ``tags`` are those of the materialization."""

    run_id: str
    partition: str | None
    metadata: Mapping[str, Any]
    tags: Mapping[str, str]

    @property
    def staged(self) -> StagedTable | None:
        """The staged table, None if another IO manager stored it. Raises InvalidInputError."""
        described = self.metadata.get(STAGED)
        return None if described is None else StagedTable.from_json(json.dumps(described.value))

    @property
    def values(self) -> Mapping[str, str] | None:
        """The values of the partition columns, None where the table has none that the partition names."""
        noted = self.metadata.get(_VALUES)
        return None if noted is None else noted.value

    @property
    def preview_rows(self) -> int:
        """How many of the table's first rows its asset shows."""
        noted = self.metadata.get(PREVIEW_ROWS)
        return 0 if noted is None else int(noted.value)


def notes_of(
    context: dg.OutputContext,
    staged: StagedTable,
    keys: Sequence[str],
    described: Mapping[str, Any],
    values: Mapping[str, Mapping[str, str]],
) -> list[Note]:
    """Return the notes of a staged table, one for each partition of the run.

    Args:
        context: The context of the output that is being stored.
        staged: The staged table.
        keys: The partitions that the run writes, empty for an asset without partitions.
        described: What the asset says of its table, as metadata.
        values: Those of the partition columns, by partition of Dagster.
    """
    document = dg.MetadataValue.json(json.loads(staged.to_json()))
    metadata = {**staged_table_metadata(staged), **described, STAGED: document}
    return [
        Note(
            context.step_context.run_id,
            event.partition,
            {**event.metadata, **_values_entry(values.get(event.partition or ""))},
            event.tags or {},
        )
        for event in materializations_of(context, keys, metadata)
    ]


def _values_entry(values: Mapping[str, str] | None) -> dict[str, Any]:
    return {} if values is None else {_VALUES: dg.MetadataValue.json(dict(values))}


def log_staged(context: dg.OutputContext, notes: Sequence[Note]) -> None:
    """Log the notes of a staged table as observations of its asset, in place of a materialization."""
    for note in notes:
        tags = dg.MetadataValue.json(dict(note.tags))
        context.log_event(
            dg.AssetObservation(
                asset_key=context.asset_key,
                partition=note.partition,
                description="Staged, not published yet.",
                metadata={**note.metadata, _TAGS: tags},
            )
        )
    log_no_materialization(context)


def log_staged_by_backfill(
    context: dg.OutputContext, notes: Sequence[Note], backfill: str, publisher: dg.AssetKey
) -> None:
    """Log the notes of a table that another run of the same backfill publishes, as materializations of its asset.

    A backfill of Dagster continues with dependent assets only after materializations.

    Args:
        context: The context of the output that is being stored.
        notes: The notes.
        backfill: The id of the backfill.
        publisher: The publish asset, which the backfill also makes.
    """
    described = f"Staged by backfill {backfill}, not visible until {publisher.to_user_string()} publishes it."
    for note in notes:
        context.log_event(
            dg.AssetMaterialization(
                asset_key=context.asset_key,
                partition=note.partition,
                description=described,
                metadata={**note.metadata, _BACKFILL: backfill},
                tags=dict(note.tags),
            )
        )
    log_no_materialization(context)


def staged_by_backfill(
    instance: dg.DagsterInstance, backfill: str, asset_key: dg.AssetKey, partition: str | None
) -> Note | None:
    """Return the note of what runs of a backfill staged last for a partition of an asset, None if none did.

    It is returned after the publication, too.

    Args:
        instance: The Dagster instance.
        backfill: The id of the backfill.
        asset_key: The asset.
        partition: The partition, None for an asset without partitions.
    """
    wanted = dg.AssetRecordsFilter(asset_key, asset_partitions=None if partition is None else [partition])
    cursor: str | None = None
    while True:
        page = instance.fetch_materializations(wanted, limit=_PAGE, cursor=cursor)
        for record in page.records:
            event = record.asset_materialization
            if event is not None and _text(event.metadata.get(_BACKFILL)) == backfill:
                return Note(record.run_id, event.partition, event.metadata, event.tags or {})
        if not page.has_more:
            return None
        cursor = page.cursor


def is_unpublished(instance: dg.DagsterInstance, backfill: str, asset_key: dg.AssetKey, partition: str | None) -> bool:
    """Whether the newest data of a partition of an asset is staged by a backfill, and not published yet."""
    wanted = dg.AssetRecordsFilter(asset_key, asset_partitions=None if partition is None else [partition])
    records = instance.fetch_materializations(wanted, limit=1).records
    event = records[0].asset_materialization if records else None
    return event is not None and _text(event.metadata.get(_BACKFILL)) == backfill


def _text(value: Any) -> str | None:
    return None if value is None else str(value.value)


def newest_notes(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey) -> list[Note]:
    """Return the notes of an asset by the first of some runs that staged it, one for each partition.

    An asset that another IO manager stores is materialized when it is staged: then that is what is noted.
    """
    for of_type in (dg.DagsterEventType.ASSET_OBSERVATION, dg.DagsterEventType.ASSET_MATERIALIZATION):
        for run in runs:
            found: dict[str | None, Note] = {}
            for event in asset_events(instance, run.run_id, of_type, asset_key):
                if isinstance(event, dg.AssetMaterialization):
                    if STAGED in event.metadata or _VERSION not in event.metadata:  # else it reports a publication
                        found[event.partition] = Note(run.run_id, event.partition, event.metadata, event.tags or {})
                elif STAGED in event.metadata:
                    tags = event.metadata[_TAGS].value
                    assert isinstance(tags, dict)
                    found[event.partition] = Note(run.run_id, event.partition, event.metadata, tags)
            if found:
                return list(found.values())
    return []


def unpublished_by(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> str | None:
    """Return the run that staged an asset last, None if a later event reports the asset as published."""
    staged = instance.fetch_observations(asset_key, limit=1).records
    published = instance.fetch_materializations(asset_key, limit=1).records
    if not staged or (published and published[0].storage_id > staged[0].storage_id):
        return None
    event = staged[0].asset_observation
    return staged[0].run_id if event is not None and STAGED in event.metadata else None


def newest_staged(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> tuple[str, StagedTable] | None:
    """Return what the first of some runs that staged an asset staged, after the id of that run. None if none did.

    Raises InvalidInputError.
    """
    for note in newest_notes(instance, runs, asset_key):
        staged = note.staged
        if staged is not None:
            return note.run_id, staged
    return None


def published_events(
    instance: dg.DagsterInstance,
    runs: Sequence[dg.DagsterRun],
    tables: Mapping[dg.AssetKey, StagedTable],
    version: int,
    shown: Callable[[StagedTable, Note], Mapping[str, Any]] = lambda _staged, _note: {},
    earlier: Mapping[dg.AssetKey, int] = MappingProxyType({}),
) -> Iterator[dg.AssetMaterialization]:
    """Yield the materializations of the assets of tables that a version has now, those that others are made of first.

    ``shown`` returns what the page of an asset shows next to what was staged. ``earlier`` has the versions of tables
    that an earlier version published. Each event must be stored when the next one is asked for, as by a step that
    yields them: the next one names it.
    """
    notes = {key: newest_notes(instance, runs, key) for key in tables}
    reported: dict[dg.AssetKey, tuple[str | None, int | None]] = {}
    while len(reported) < len(tables):
        left = [key for key in tables if key not in reported]
        ready = [key for key in left if not _inputs(notes[key]) & {*left} - {key}]
        for key in ready or left:
            for note in notes[key]:
                event = published_event(key, note, tables[key], earlier.get(key, version), reported)
                yield event.with_metadata({**shown(tables[key], note), **event.metadata})
            records = instance.fetch_materializations(key, limit=1).records
            data_version = notes[key][0].tags.get(DATA_VERSION_TAG) if notes[key] else None
            reported[key] = (data_version, records[0].storage_id if records else None)


def undone_events(
    instance: dg.DagsterInstance,
    runs: Sequence[dg.DagsterRun],
    asset_keys: Iterable[dg.AssetKey],
    version: int,
    undone_by: int,
) -> Iterator[dg.AssetObservation]:
    """Yield observations of assets whose tables a version published and a later one undid.

    They are no materializations, because the lakehouse does not have these rows.

    Args:
        instance: The instance that has the notes of the tables.
        runs: The run, followed by those that it was re-executed from.
        asset_keys: The assets.
        version: The version that published the tables.
        undone_by: The version that undid it.
    """
    for key in asset_keys:
        for note in newest_notes(instance, runs, key):
            yield dg.AssetObservation(
                asset_key=key,
                partition=note.partition,
                description=f"Published as version {version} of the lakehouse, and undone by version {undone_by}.",
                metadata={
                    "lakehouse_version": version,
                    "undone_by_version": undone_by,
                    "staged_by": dg.MetadataValue.dagster_run(note.run_id),
                },
            )


def published_event(
    key: dg.AssetKey,
    note: Note,
    staged: StagedTable,
    version: int,
    reported: Mapping[dg.AssetKey, tuple[str | None, int | None]],
) -> dg.AssetMaterialization:
    """Return the materialization of an asset, for one partition, whose table a version has now.

    Args:
        key: The asset.
        note: Its note for the partition.
        staged: The table as it was published.
        version: The version of the lakehouse.
        reported: The data version and the event of each input that the same step has reported as published.
    """
    # Inputs that the run staged, too, were noted as they were published before.
    tags = dict(note.tags)
    for input_key, (data_version, storage_id) in reported.items():
        name = input_key.to_user_string()
        if f"{_INPUT_VERSION}{name}" in tags and data_version is not None:
            tags[f"{_INPUT_VERSION}{name}"] = data_version
            tags[f"{_INPUT_POINTER}{name}"] = "NULL" if storage_id is None else str(storage_id)
    given = {name: value for name, value in note.metadata.items() if name not in _INTERNAL}
    described = {_COLUMNS: given[_COLUMNS]} if _COLUMNS in given else {}  # with what the asset says of them
    return dg.AssetMaterialization(
        asset_key=key,
        partition=note.partition,
        description=f"Published as version {version} of the lakehouse.",
        metadata={
            **given,
            **staged_table_metadata(staged),
            **described,
            _VERSION: version,
            "snapshot": str(staged.snapshot_id),
            "staged_by": dg.MetadataValue.dagster_run(note.run_id),
        },
        tags=tags,
    )


def _inputs(notes: Sequence[Note]) -> set[dg.AssetKey]:
    names = {tag.removeprefix(_INPUT_VERSION) for note in notes for tag in note.tags if tag.startswith(_INPUT_VERSION)}
    return {dg.AssetKey.from_user_string(name) for name in names}
