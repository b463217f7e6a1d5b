"""Order the publications of a backfill by the dependencies between their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NoReturn

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import is_backfill_running, last_of_backfill, step_key_of
from trinitylake_ops.dagster_plugin.runs.membership import Membership
from trinitylake_ops.dagster_plugin.runs.reads import BackfillRead, backfill_reads, record_takeover
from trinitylake_ops.dagster_plugin.runs.records import (
    BACKFILL_TAG,
    ROOT_TAG,
    backfill_of,
    failed_blocking_checks,
    has_waited,
)
from trinitylake_ops.dagster_plugin.runs.staging import staged_by_backfill
from trinitylake_ops.iceberg.write.presence import Presence, presence
from trinitylake_ops.iceberg.write.staged_table import StagedTable

_PARTITION_TAG = "dagster/partition"
_RANGE_TAGS = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
_ACTIVE = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
_MAX_WAIT_SECONDS = 30
#: Maximum number of retries, which take one hour including the waits between them.
_MAX_WAITS = 125
#: Runs that wait for queued runs fail if no run of the instance started or ended within this time.
IDLE_SECONDS = 300


def wait_for_sources(
    context: dg.AssetExecutionContext,
    lake: Lakehouse,
    publisher: dg.AssetKey,
    reads: Iterable[BackfillRead],
    publishing: Collection[StagedTable],
) -> None:
    """Return if all source tables of this publication are published or are part of the publication.

    Args:
        context: The context of the publishing step.
        lake: The lakehouse.
        publisher: The publish asset.
        reads: The reads from which the tables of the publication were computed.
        publishing: The staged tables of the publication.

    Raises:
        RetryRequested: Another run has not published a source yet. Dagster starts the step again later.
        dg.Failure: Another run failed or cannot start, or the wait exceeds an hour.
        StorageError: A file of a table cannot be read.
    """
    backfill, latest = backfill_of(context.instance, context.run), lake.snapshot()
    if backfill is None:
        return
    own_locations = {table.metadata_location for table in publishing}
    missing: dict[tuple[dg.AssetKey, str | None], None] = {}
    for read in reads:
        staged = read.read.staged
        is_own = staged.metadata_location in own_locations or read.read.root != latest.files.storage.root
        if not is_own and presence(lake, latest, staged) is Presence.ABSENT:
            missing.update({(read.asset_key, partition): None for partition in read.partitions or [None]})
    if not missing:
        return
    runs = [
        run
        for run in _runs_of(context.instance, backfill)
        if run.asset_selection is None or publisher in run.asset_selection
    ]
    for source, partition in missing:
        name = source.to_user_string()
        if partition is None and context.assets_def.partitions_def is not None:
            raise dg.Failure(
                f"{publisher.to_user_string()} published nothing: its tables were computed from {name}, which is"
                f" published with the last partition of the backfill; publish {name} by a separate publish asset, or"
                " set backfill_policy=BackfillPolicy.single_run() on all these assets",
                allow_retries=False,
            )
        source_name = name if partition is None else f"{name} of partition {partition}"
        publishing_runs = [run for run in runs if _materializes(context, run, partition)]
        _wait_for(context, publisher, source_name, publishing_runs, backfill)


def staged_by_other_runs(
    membership: Membership,
    key: dg.AssetKey,
    partitions: Sequence[str] | None,
    *,
    can_be_united: bool = True,
    takes_over: bool = False,
) -> list[tuple[StagedTable, list[str] | None]]:
    """Return the tables that other runs of the backfill staged for an asset, with the partitions that each covers.

    Args:
        membership: The assets of the step, and its run.
        key: The asset.
        partitions: The partitions to return; None for an asset without partitions.
        can_be_united: Whether the rows of partitions that several runs staged can be read together.
        takes_over: Whether the run takes over the tables.

    Raises:
        dg.Failure: A blocking check of the asset failed in the run that staged it, or its partitions cannot be united.
    """
    instance, run = membership.instance, membership.run
    part = membership.backfill_part(key)
    if instance is None or run is None or part is None:
        return []
    by_run: dict[str, tuple[StagedTable, list[str]]] = {}
    for partition in [None] if partitions is None else partitions:
        note = staged_by_backfill(instance, part.backfill, key, partition)
        staged = None if note is None else note.staged
        if note is not None and staged is not None and note.run_id != run.run_id:
            by_run.setdefault(note.run_id, (staged, []))[1].append(partition or "")
    if not can_be_united and len(by_run) > 1:
        raise dg.Failure(
            f"{key.to_user_string()} was not read: different runs of backfill {part.backfill} staged its"
            " partitions, and its table has no column with the partition; add stored_as(partition_by=[COLUMN]) to it",
            allow_retries=False,
        )
    for run_id in by_run:
        _check_no_failed_check(instance, key, run_id)
        if takes_over:
            record_takeover(instance, run, key, run_id)
    return [(staged, None if partitions is None else covered) for staged, covered in by_run.values()]


def is_deferred_to_last(membership: Membership, key: dg.AssetKey, partitions: dg.PartitionKeyRange | None) -> bool:
    """Whether the last publication of the backfill publishes a table without partitions, instead of this one.

    Such a table may be computed from partitions that each publication of the backfill publishes, so that only the last
    publication can wait for all others.

    Args:
        membership: The assets of the publishing step, and its run.
        key: The asset of the table.
        partitions: The partitions of the publication, or None.
    """
    instance, run, part = membership.instance, membership.run, membership.backfill_part(key)
    if instance is None or run is None or part is None or partitions is None:
        return False
    note = staged_by_backfill(instance, part.backfill, key, None)
    if note is None or note.run_id == run.run_id or not backfill_reads(instance, note.run_id):
        return False
    definition = membership.assets.graph.get(part.publisher).partitions_def
    last = last_of_backfill(instance, part.backfill, part.publisher, definition)
    return last is not None and last not in {partitions.start, partitions.end}


def _check_no_failed_check(instance: dg.DagsterInstance, key: dg.AssetKey, run_id: str) -> None:
    """Raise dg.Failure if a blocking check of an asset failed in the run that staged it."""
    for check in failed_blocking_checks(instance, run_id, key):
        raise dg.Failure(
            f"{key.to_user_string()} as staged by run {run_id} is neither read nor published: its blocking check"
            f" {check} failed in that run; correct the data, then backfill these partitions again",
            allow_retries=False,
        )


def _runs_of(instance: dg.DagsterInstance, backfill: str) -> list[dg.DagsterRun]:
    """Return the re-executions of a backfill's runs, then the runs.

    Re-executions that started after the backfill ended lack the backfill's tag.
    """
    runs = instance.get_runs(dg.RunsFilter(tags={BACKFILL_TAG: backfill}))
    roots = [run.run_id for run in runs]
    reexecutions = instance.get_runs(dg.RunsFilter(tags={ROOT_TAG: roots})) if roots else []
    return [*reexecutions, *(run for run in runs if run.root_run_id is None)]


def _wait_for(
    context: dg.AssetExecutionContext,
    publisher: dg.AssetKey,
    source: str,
    runs: Iterable[dg.DagsterRun],
    backfill: str,
) -> None:
    """Return if the runs that publish a source succeeded; otherwise request a retry, or fail.

    ``runs`` are ordered from newest to oldest.
    """
    newest: dict[str, dg.DagsterRun] = {}
    for run in runs:
        newest.setdefault(run.root_run_id or run.run_id, run)
    name, own_root = publisher.to_user_string(), context.run.root_run_id or context.run.run_id
    if own_root in newest:
        return  # this publication contains another version of the source, which the validation of its reads reports
    failed = next((run for run in newest.values() if run.is_finished and not run.is_success), None)
    if failed is not None:
        _fail(name, source, f"run {failed.run_id} did not publish it; re-execute run {failed.run_id} from failure")
    waiting_for = [run for run in newest.values() if not run.is_success]
    if newest and not waiting_for:
        return
    if not newest and not is_backfill_running(context.instance, backfill):
        _fail(name, source, f"backfill {backfill} ended without a run that publishes it; backfill {name} for it")
    listed = ", ".join(f"run {run.run_id}" for run in waiting_for) or f"backfill {backfill}"
    if context.retry_number >= _MAX_WAITS:
        _fail(name, source, f"{listed} did not publish it in time; after it has")
    if is_stuck(context):
        _fail(name, source, f"{listed} cannot start while runs that wait for it occupy all slots; after it has ended")
    context.log.info("waiting for %s, which publishes %s", listed, source)
    raise dg.RetryRequested(_MAX_WAITS, min(2 ** min(context.retry_number, 10), _MAX_WAIT_SECONDS))


def is_stuck(context: dg.AssetExecutionContext) -> bool:
    """Whether all runs in progress wait for other runs, and no run of the instance started or ended for minutes."""
    instance, step_key = context.instance, step_key_of(context)
    active = instance.get_runs(dg.RunsFilter(statuses=_ACTIVE))
    others = [run for run in active if run.run_id != context.run.run_id]
    if not all(has_waited(instance, run.run_id, step_key) for run in others):
        return False
    changed_after = datetime.now(UTC) - timedelta(seconds=IDLE_SECONDS)
    return not instance.get_runs(dg.RunsFilter(updated_after=changed_after), limit=1)


def _fail(publisher: str, source: str, cause: str) -> NoReturn:
    raise dg.Failure(
        f"{publisher} published nothing: its tables were computed from {source}, and {cause}, then re-execute this run"
        " from failure",
        allow_retries=False,
    )


def _materializes(context: dg.AssetExecutionContext, run: dg.DagsterRun, partition: str | None) -> bool:
    """Whether a run materializes a partition of the publish asset.

    A table without partitions (``partition`` is None) may be published in any run.
    """
    partitions = context.assets_def.partitions_def
    if partition is None or partitions is None:
        return True
    start, end = (run.tags.get(tag) for tag in _RANGE_TAGS)
    if start is None or end is None:
        return run.tags.get(_PARTITION_TAG) == partition
    return partition in partitions.get_partition_keys_in_range(
        dg.PartitionKeyRange(start, end), dynamic_partitions_store=context.instance
    )
