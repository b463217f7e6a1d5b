"""Exactly-once publication of the tables that a run staged or took over.

The id of a publication is derived from the publishing asset, its partitions and the staged tables. Therefore, a
re-execution that takes over the same tables finds the commit of the earlier run, and a re-execution that stages tables
again publishes again. The commit of an earlier run is considered only for tables that are taken over from that run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import has_partitions
from trinitylake_ops.dagster_plugin.metadata import DATA_VERSION_TAG
from trinitylake_ops.dagster_plugin.runs.reads import (
    Attempt,
    RunReads,
    attempts_of,
    record_attempt,
    runs_with_staged,
)
from trinitylake_ops.dagster_plugin.runs.records import all_executions, has_succeeded
from trinitylake_ops.dagster_plugin.runs.staging import Note, newest_notes
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.iceberg.write.presence import undone_by
from trinitylake_ops.iceberg.write.publication import Publication, publication_id, published_versions
from trinitylake_ops.iceberg.write.rebase import rebase
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Replace

#: Metadata key of a failed step with the asset whose publication failed.
PUBLISHING = "publishing"
_CODE_VERSION_TAG = "dagster/code_version"
# A root has room for 4 KiB of JSON for all entries that describe a commit.
_LARGEST_NAME_BYTES = 384
_LARGEST_VERSIONS_BYTES = 2048


@dataclass(frozen=True, slots=True)
class RunPublication:
    """The outcome of a run's publication."""

    version: int
    #: Whether an earlier publication had already committed all tables.
    was_published: bool
    #: The tables as committed.
    tables: Mapping[dg.AssetKey, StagedTable]
    #: The versions of the tables that an earlier publication committed.
    earlier: Mapping[dg.AssetKey, int]
    runs: Sequence[dg.DagsterRun]
    reads: RunReads
    #: The version that undid an earlier commit of this publication, or None.
    undone_by: int | None = None


class RunPublisher:
    """Publishes the tables that a run staged or took over.

    ``id`` is the publication id, and ``left`` contains the tables that are still to be committed. ``outcome`` is set if
    earlier publications have committed all tables.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        lake: Lakehouse,
        asset_key: dg.AssetKey,
        staged: Mapping[dg.AssetKey, StagedTable],
    ):
        """Look for earlier commits of the tables.

        Args:
            context: The context of the publishing step.
            lake: The lakehouse.
            asset_key: The publishing asset.
            staged: The staged tables by their assets.

        Raises:
            CommitConflictError: A table that is taken over was published, and a later version undid the publication.
            StorageError: The history or a table cannot be read.
        """
        self._context, self._lake, self._asset_key, self._staged = context, lake, asset_key, staged
        self._instance = context.instance
        self._asset, self._partition = asset_key.to_user_string(), partition_of(context)
        self._runs = runs_with_staged(context.instance, context.run)
        self._notes = {key: newest_notes(context.instance, self._runs, key) for key in staged}
        self.reads = RunReads(context.instance, self._runs, self._notes)
        #: Publications started by these runs and by the other re-executions of the same run, by run id.
        self._attempts = {run.run_id: self.reads.attempts(run.run_id) for run in self._runs}
        for run in all_executions(context.instance, context.run):
            if run.run_id not in self._attempts:
                self._attempts[run.run_id] = attempts_of(context.instance, run.run_id)
        self.id = publication_of(asset_key, self._partition, staged.values())
        self._versions = self._earlier_versions()
        self._earlier: dict[dg.AssetKey, int] = {}
        self.outcome: RunPublication | None = None
        if self.id in self._versions:
            self.outcome = self._was_published(self._versions[self.id])
        else:
            self._earlier = self._published_earlier()
        self.left = {key: table for key, table in staged.items() if key not in self._earlier}
        if not self.left:
            self.outcome = self._outcome(max(self._earlier.values()), staged, was_published=True)

    def publish(self, publish_once: Callable[..., Publication], isolation: str | None) -> RunPublication:
        """Commit the remaining tables.

        Args:
            publish_once: The function :func:`publication.publish_once`.
            isolation: The isolation level, or None for the default level of the lakehouse.

        Raises:
            CommitConflictError: Another writer changed rows that are replaced or were read, or a table was read as
                staged but is not published.
            InvalidInputError: A partition of the run was deleted.
            TrinityLakeError: The publication failed for another reason.
        """
        if self.outcome is not None:
            return self.outcome
        taken_over = [table for key, table in self.left.items() if self._had_conflict(key)]
        if taken_over:
            names = ", ".join(sorted(f"{table.namespace}.{table.table}" for table in taken_over))
            self._context.log.info(
                "an earlier run failed with a conflict: replacing rows of the latest version in %s", names
            )
        attempt = Attempt.of(self.id, self._asset, self._partition, self._staged.values())
        if attempt not in self.reads.attempts(self._runs[0].run_id):  # a retried step has already recorded it
            record_attempt(self._instance, self._runs[0], attempt)
        publication = publish_once(
            self._lake,
            list(self.left.values()),
            self.id,
            since=attempt.since,
            require=lambda _: check_partitions_exist(self._context, self._notes),
            reads=self.reads.all(),
            staged_reads=self.reads.as_staged(),
            own=self.reads.staged(),
            was_published=self._has_a_version,
            replaces_latest=taken_over,
            superseded=self._superseded_tables(),
            isolation=isolation,
            run_id=self._runs[0].run_id,
            message=shortened(f"publish {self._asset_key.path[-1]}{f' {self._partition}' if self._partition else ''}"),
            properties=self._properties(),
        )
        if publication.was_published:
            return self._was_published(publication.version)
        committed = dict(zip(self.left, publication.tables, strict=True))
        return self._outcome(publication.version, {**self._staged, **committed}, was_published=False)

    def _earlier_versions(self) -> dict[str, int]:
        """Return the versions of publications that may have committed a table of this publication, by publication id.

        These are all publications of other runs, and those of other publishing assets of this run that share a table.
        """
        own_id, locations = self._runs[0].run_id, {table.metadata_location for table in self._staged.values()}
        attempts = ((run_id, attempt) for run_id, listed in self._attempts.items() for attempt in listed)
        return committed_versions(
            self._lake,
            (
                attempt
                for run_id, attempt in attempts
                if run_id != own_id or (attempt.publication != self.id and locations.intersection(attempt.tables))
            ),
        )

    def _published_earlier(self) -> dict[dg.AssetKey, int]:
        """Return the versions of the tables that another publication committed.

        Raises CommitConflictError if a later version undid a table's publication.
        """
        earlier: dict[dg.AssetKey, int] = {}
        for key, table in self._staged.items():
            is_changed = table.metadata_location != table.base_metadata_location
            committed = [
                version for location, version in self._committed_tables() if location == table.metadata_location
            ]
            if not (is_changed and committed):
                continue
            undone = undone_by(self._lake, committed[0], [table])
            if undone is not None:
                raise CommitConflictError(
                    f"table {table.namespace}.{table.table} cannot be published again: run {self._stager(key)} staged"
                    f" it, version {committed[0]} published it, and version {undone} undid that; start a new run that"
                    " stages it again",
                    base_version=committed[0],
                    latest_version=undone,
                )
            earlier[key] = committed[0]
        return earlier

    def _committed_tables(self) -> Iterator[tuple[str, int]]:
        """Yield the metadata locations of committed staged tables, each with its version."""
        for attempt in chain.from_iterable(self._attempts.values()):
            version = self._versions.get(attempt.publication)
            if version is not None:
                yield from ((location, version) for location in attempt.tables)

    def _has_a_version(self, staged: StagedTable) -> bool:
        """Whether a publication of these runs committed a staged table."""
        attempts = chain.from_iterable(self._attempts.values())
        matching_attempts = (attempt for attempt in attempts if staged.metadata_location in attempt.tables)
        return bool(committed_versions(self._lake, matching_attempts))

    def _stager(self, key: dg.AssetKey) -> str:
        """Return the run that staged a table."""
        notes = self._notes[key]
        return notes[0].run_id if notes else self._runs[0].run_id

    def _runs_before(self, key: dg.AssetKey) -> int:
        """Return the index of the run that staged a table."""
        return next((at for at, run in enumerate(self._runs) if run.run_id == self._stager(key)), 0)

    def _had_conflict(self, key: dg.AssetKey) -> bool:
        """Whether an earlier run failed with a conflict when it published a table that is taken over."""
        since_staged = self._runs[1 : self._runs_before(key) + 1]
        return any(_had_conflict(self._instance, run, self._asset) for run in since_staged)

    def _superseded_tables(self) -> list[StagedTable]:
        return [
            append
            for key, table in self.left.items()
            for append in superseded_appends(
                self._instance,
                all_executions(self._instance, self._runs[self._runs_before(key)]),
                (self._asset_key, self._partition),
                table,
                lambda run_id: self._attempts.get(run_id, ()),
                lambda _: self._versions,
            )
        ]

    def _was_published(self, version: int) -> RunPublication:
        undone = undone_by(self._lake, version, list(self._staged.values()))
        return self._outcome(version, self._staged, was_published=True, undone_by=undone)

    def _outcome(
        self,
        version: int,
        tables: Mapping[dg.AssetKey, StagedTable],
        *,
        was_published: bool,
        undone_by: int | None = None,
    ) -> RunPublication:
        return RunPublication(version, was_published, tables, self._earlier, self._runs, self.reads, undone_by)

    def _properties(self) -> dict[str, str]:
        return {
            "asset": shortened(self._asset),
            **({"partition": shortened(self._partition)} if self._partition else {}),
            **asset_versions(self._notes),
        }


def publication_of(asset_key: dg.AssetKey, partition: str, staged: Iterable[StagedTable]) -> str:
    """Return the id of an asset's publication of staged tables.

    Args:
        asset_key: The publishing asset.
        partition: Its partition, or an empty string.
        staged: The staged tables.
    """
    names = [f"{table.namespace}.{table.table} {table.metadata_location}" for table in staged]
    return publication_id("dagster", asset_key.to_user_string(), partition, *names)


def superseded_appends(
    instance: dg.DagsterInstance,
    runs: Sequence[dg.DagsterRun],
    publisher: tuple[dg.AssetKey, str],
    table: StagedTable,
    attempts_of: Callable[[str], Sequence[Attempt]],
    versions_of: Callable[[Iterable[Attempt]], Mapping[str, int]],
) -> list[StagedTable]:
    """Return the append of an interrupted publication that a staged table repeats.

    The caller replaces its rows, because the user repeats a failed step. If the publishing step succeeded in an earlier
    run, there is no such append, because the user intends to append again.

    Args:
        instance: The Dagster instance.
        runs: The run that staged the table, followed by the other executions of the same run, newest first.
        publisher: The publishing asset and its partition, or an empty string.
        table: The staged table.
        attempts_of: Returns the publications that a run started.
        versions_of: Returns the versions of the committed publications, by publication id.
    """
    if table.replaces != Replace.NOTHING.value:
        return []
    asset_key, partition = publisher
    names = (asset_key.to_user_string(), partition)
    for at, run in enumerate(runs):
        if at > 0 and has_succeeded(instance, run.run_id, asset_key):
            break
        own_attempts = [attempt for attempt in attempts_of(run.run_id) if (attempt.asset, attempt.partition) == names]
        before = [attempt for attempt in own_attempts if table.metadata_location not in attempt.tables]
        versions = versions_of(before) if before else {}
        for attempt in reversed(before):
            appended = (StagedTable.from_json(text) for text in attempt.appended if attempt.publication in versions)
            repeated = [
                append for append in appended if (append.namespace, append.table) == (table.namespace, table.table)
            ]
            if repeated:
                return repeated
    return []


def without_interrupted_rows(
    instance: dg.DagsterInstance,
    lake: Lakehouse,
    run: dg.DagsterRun,
    publishers: Iterable[tuple[dg.AssetKey, str]],
    staged: StagedTable,
) -> StagedTable:
    """Rebase a staged append without the rows that it repeats, so that no row is read twice before the publication.

    Args:
        instance: The Dagster instance.
        lake: The lakehouse.
        run: The run that staged the table.
        publishers: The publish assets of the table, each with the partition of the run.
        staged: The staged table.

    Raises:
        CommitConflictError: Another writer removed or rewrote the repeated rows.
        StorageError: A file cannot be read or written.
    """
    runs = all_executions(instance, run)
    for publisher in publishers:
        for append in superseded_appends(
            instance,
            runs,
            publisher,
            staged,
            lambda run_id: attempts_of(instance, run_id),
            lambda attempts: committed_versions(lake, attempts),
        ):
            return rebase(lake, staged, superseded=append)
    return staged


def committed_versions(lake: Lakehouse, attempts: Iterable[Attempt]) -> dict[str, int]:
    """Return the versions of the committed publications, by publication id. Raises StorageError."""
    since = {attempt.publication: attempt.since for attempt in attempts}
    return published_versions(lake, set(since), min(since.values())) if since else {}


def _had_conflict(instance: dg.DagsterInstance, run: dg.DagsterRun, asset: str) -> bool:
    """Whether a publication by an asset failed with a conflict in a run."""
    for record in instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE).records:
        event = record.event_log_entry.dagster_event
        failure = None if event is None else event.step_failure_data.user_failure_data
        metadata = {} if failure is None else {name: value.value for name, value in failure.metadata.items()}
        if (metadata.get("error_code"), metadata.get(PUBLISHING)) == (CommitConflictError.code, asset):
            return True
    return False


def _bytes_as_json(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode())


def shortened(text: str) -> str:
    """Truncate a text to the size available in a commit."""
    end = min(len(text), _LARGEST_NAME_BYTES)
    while _bytes_as_json(text[:end]) > _LARGEST_NAME_BYTES:
        end -= 1
    return text[:end]


def partition_of(context: dg.AssetExecutionContext) -> str:
    """Return the partition or the partition range of the run, or an empty string."""
    if context.has_partition_key:
        return str(context.partition_key)
    if not context.has_partition_key_range:
        return ""
    keys = context.partition_key_range
    return keys.start if keys.start == keys.end else f"{keys.start}...{keys.end}"


def partitions_exist(context: dg.AssetExecutionContext) -> bool:
    """Whether the partitions of the run still exist, because dynamic partitions can be deleted at any time."""
    return _with_deleted_partitions(context, {}) is None


def check_partitions_exist(context: dg.AssetExecutionContext, notes: Mapping[dg.AssetKey, Iterable[Note]]) -> None:
    """Check that the partitions of the run still exist, because Dagster shows no events of deleted partitions.

    Args:
        context: The context of the step that publishes.
        notes: The notes of the published assets, one for each of their partitions.

    Raises:
        InvalidInputError: A partition was deleted.
    """
    asset_key = _with_deleted_partitions(context, notes)
    if asset_key is not None:
        raise InvalidInputError(
            f"partition {partition_of(context)!r} of {asset_key.to_user_string()} cannot be published: the partition,"
            " or a part of the range, was deleted after it was staged; add the partition and start a new run"
        )


def _with_deleted_partitions(
    context: dg.AssetExecutionContext, notes: Mapping[dg.AssetKey, Iterable[Note]]
) -> dg.AssetKey | None:
    """Return an asset with a deleted partition, or None if all partitions exist."""
    keys = {key: {note.partition for note in listed if note.partition is not None} for key, listed in notes.items()}
    if context.assets_def.partitions_def is not None and partition_of(context):
        limits = context.partition_key_range
        for key in context.selected_asset_keys:
            keys.setdefault(key, set()).update((limits.start, limits.end))
    return next((key for key, partitions in keys.items() if not has_partitions(context, key, partitions)), None)


def asset_versions(notes: Mapping[dg.AssetKey, Sequence[Note]]) -> dict[str, str]:
    """Return the code and data versions of the staged assets, or a digest if they are too large for a commit."""
    versions: dict[str, dict[str, str]] = {}
    for asset_key, asset_notes in notes.items():
        tags = asset_notes[0].tags if asset_notes else {}
        values = {"code": tags.get(_CODE_VERSION_TAG), "data": tags.get(DATA_VERSION_TAG)}
        versions[asset_key.to_user_string()] = {name: value for name, value in values.items() if value}
    text = json.dumps(versions, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    if _bytes_as_json(text) <= _LARGEST_VERSIONS_BYTES:
        return {"asset_versions": text}
    return {"assets": str(len(versions)), "asset_versions_sha256": hashlib.sha256(text.encode()).hexdigest()}
