"""Notes about staged tables, which become materializations when the tables are published.

Dagster logs a materialization of an asset as soon as its output is stored. For a staged table this would be too early:
downstream automation would start before the data is published, and an asset whose publication fails would be shown as
materialized. Therefore, an observation with the same content is logged instead: the note. The publishing step creates
the materialization from it.
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
#: Metadata key of a note with the description of the staged table.
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
    """The note of a staged table for one partition of its asset."""

    #: The run that staged the table.
    run_id: str
    partition: str | None
    metadata: Mapping[str, Any]
    #: The tags of the future materialization.
    tags: Mapping[str, str]

    @property
    def staged(self) -> StagedTable | None:
        """The staged table, or None if another IO manager stored the asset. Raises InvalidInputError."""
        entry = self.metadata.get(STAGED)
        return None if entry is None else StagedTable.from_json(json.dumps(entry.value))

    @property
    def values(self) -> Mapping[str, str] | None:
        """The values of the partition columns, or None if the partition does not determine any."""
        entry = self.metadata.get(_VALUES)
        return None if entry is None else entry.value

    @property
    def preview_rows(self) -> int:
        """The number of rows of the table to preview."""
        entry = self.metadata.get(PREVIEW_ROWS)
        return 0 if entry is None else int(entry.value)


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
        described: The asset's metadata that describes its table.
        values: The values of the partition columns, by Dagster partition.
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
    """Log the notes of a staged table as observations of its asset, instead of a materialization."""
    for note in notes:
        tags = dg.MetadataValue.json(dict(note.tags))
        context.log_event(
            dg.AssetObservation(
                asset_key=context.asset_key,
                partition=note.partition,
                description="Staged, not yet published.",
                metadata={**note.metadata, _TAGS: tags},
            )
        )
    log_no_materialization(context)


def log_staged_by_backfill(
    context: dg.OutputContext, notes: Sequence[Note], backfill: str, publisher: dg.AssetKey
) -> None:
    """Log the notes of a table that another run of the same backfill publishes, as materializations of its asset.

    A Dagster backfill continues with dependent assets only after materializations.

    Args:
        context: The context of the output that is being stored.
        notes: The notes.
        backfill: The backfill id.
        publisher: The publish asset, which the backfill also materializes.
    """
    description = f"Staged by backfill {backfill}, not visible until {publisher.to_user_string()} publishes it."
    for note in notes:
        context.log_event(
            dg.AssetMaterialization(
                asset_key=context.asset_key,
                partition=note.partition,
                description=description,
                metadata={**note.metadata, _BACKFILL: backfill},
                tags=dict(note.tags),
            )
        )
    log_no_materialization(context)


def staged_by_backfill(
    instance: dg.DagsterInstance, backfill: str, asset_key: dg.AssetKey, partition: str | None
) -> Note | None:
    """Return the newest note that runs of a backfill logged for a partition of an asset, or None.

    The note is returned even after the publication.

    Args:
        instance: The Dagster instance.
        backfill: The backfill id.
        asset_key: The asset.
        partition: The partition, or None for an asset without partitions.
    """
    records_filter = dg.AssetRecordsFilter(asset_key, asset_partitions=None if partition is None else [partition])
    cursor: str | None = None
    while True:
        page = instance.fetch_materializations(records_filter, limit=_PAGE, cursor=cursor)
        for record in page.records:
            event = record.asset_materialization
            if event is not None and _text(event.metadata.get(_BACKFILL)) == backfill:
                return Note(record.run_id, event.partition, event.metadata, event.tags or {})
        if not page.has_more:
            return None
        cursor = page.cursor


def is_unpublished(instance: dg.DagsterInstance, backfill: str, asset_key: dg.AssetKey, partition: str | None) -> bool:
    """Whether an asset partition's newest data was staged by a backfill and is not yet published.

    Args:
        instance: The Dagster instance.
        backfill: The backfill id.
        asset_key: The asset.
        partition: The partition, or None for an asset without partitions.
    """
    records_filter = dg.AssetRecordsFilter(asset_key, asset_partitions=None if partition is None else [partition])
    records = instance.fetch_materializations(records_filter, limit=1).records
    event = records[0].asset_materialization if records else None
    return event is not None and _text(event.metadata.get(_BACKFILL)) == backfill


def _text(value: Any) -> str | None:
    return None if value is None else str(value.value)


def newest_notes(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey) -> list[Note]:
    """Return the notes of an asset, one for each partition, from the first run that staged it.

    For an asset that another IO manager stores, the materializations serve as notes.

    Args:
        instance: The Dagster instance.
        runs: The runs, newest first.
        asset_key: The asset.
    """
    for of_type in (dg.DagsterEventType.ASSET_OBSERVATION, dg.DagsterEventType.ASSET_MATERIALIZATION):
        for run in runs:
            notes: dict[str | None, Note] = {}
            for event in asset_events(instance, run.run_id, of_type, asset_key):
                if isinstance(event, dg.AssetMaterialization):
                    if STAGED in event.metadata or _VERSION not in event.metadata:  # otherwise it reports a publication
                        notes[event.partition] = Note(run.run_id, event.partition, event.metadata, event.tags or {})
                elif STAGED in event.metadata:
                    tags = event.metadata[_TAGS].value
                    assert isinstance(tags, dict)
                    notes[event.partition] = Note(run.run_id, event.partition, event.metadata, tags)
            if notes:
                return list(notes.values())
    return []


def unpublished_by(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> str | None:
    """Return the run that last staged an asset, or None if a later event reports the asset as published."""
    staged = instance.fetch_observations(asset_key, limit=1).records
    published = instance.fetch_materializations(asset_key, limit=1).records
    if not staged or (published and published[0].storage_id > staged[0].storage_id):
        return None
    event = staged[0].asset_observation
    return staged[0].run_id if event is not None and STAGED in event.metadata else None


def newest_staged(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> tuple[str, StagedTable] | None:
    """Return the first run that staged an asset and the staged table, or None.

    Args:
        instance: The Dagster instance.
        runs: The runs, newest first.
        asset_key: The asset.

    Raises:
        InvalidInputError: A note is invalid.
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
    extra_metadata: Callable[[StagedTable, Note], Mapping[str, Any]] = lambda _staged, _note: {},
    earlier: Mapping[dg.AssetKey, int] = MappingProxyType({}),
) -> Iterator[dg.AssetMaterialization]:
    """Yield the materializations of published tables' assets, inputs before the assets derived from them.

    Each event must be stored before the next one is requested, as in a step that yields them, because the next event
    may refer to it.

    Args:
        instance: The Dagster instance.
        runs: The run, followed by the runs that it re-executes, newest first.
        tables: The tables as published, by asset.
        version: The version that published them.
        extra_metadata: Returns further metadata of an asset.
        earlier: The versions of the tables that an earlier version published.
    """
    notes = {key: newest_notes(instance, runs, key) for key in tables}
    reported: dict[dg.AssetKey, tuple[str | None, int | None]] = {}
    while len(reported) < len(tables):
        remaining = [key for key in tables if key not in reported]
        ready = [key for key in remaining if not _inputs(notes[key]) & {*remaining} - {key}]
        for key in ready or remaining:
            for note in notes[key]:
                event = published_event(key, note, tables[key], earlier.get(key, version), reported)
                yield event.with_metadata({**extra_metadata(tables[key], note), **event.metadata})
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
    """Yield observations of assets whose tables were published by a version that a later version undid.

    They are not materializations, because the latest version does not contain these rows.

    Args:
        instance: The Dagster instance.
        runs: The run, followed by the runs that it re-executes, newest first.
        asset_keys: The assets.
        version: The version that published the tables.
        undone_by: The version that undid the publication.
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
    """Return the materialization of a published asset for one partition.

    Args:
        key: The asset.
        note: Its note for the partition.
        staged: The table as published.
        version: The version of the lakehouse.
        reported: The data version and the event of each input that the same step has already reported as published.
    """
    # When the note was logged, inputs that the run also staged had only their previous publications.
    tags = dict(note.tags)
    for input_key, (data_version, storage_id) in reported.items():
        name = input_key.to_user_string()
        if f"{_INPUT_VERSION}{name}" in tags and data_version is not None:
            tags[f"{_INPUT_VERSION}{name}"] = data_version
            tags[f"{_INPUT_POINTER}{name}"] = "NULL" if storage_id is None else str(storage_id)
    metadata = {name: value for name, value in note.metadata.items() if name not in _INTERNAL}
    described = {_COLUMNS: metadata[_COLUMNS]} if _COLUMNS in metadata else {}  # includes the asset's descriptions
    return dg.AssetMaterialization(
        asset_key=key,
        partition=note.partition,
        description=f"Published as version {version} of the lakehouse.",
        metadata={
            **metadata,
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
