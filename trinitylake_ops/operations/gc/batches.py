"""The batches of expired versions: their state, and the files that their plans list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState, LakehouseDef
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.gc.plan_files import read_plan_file
from trinitylake_ops.operations.gc.survey import versions_in
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import utc_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeBatch:
    """A batch of expired versions, as seen by a purge."""

    id: str
    versions: str
    state: str
    purgeable_at: datetime
    is_due: bool
    #: Whether the plan of the batch can be read.
    has_plan: bool


def unpurged_batches(
    lake: Lakehouse, definition: LakehouseDef, now_ms: int, grace_ms: int
) -> tuple[tuple[PurgeBatch, ...], VersionRanges, dict[str, int]]:
    """Return all unpurged batches, and the versions and planned files of the batches that are due.

    Args:
        lake: The lakehouse.
        definition: The lakehouse definition.
        now_ms: The storage's time, in milliseconds since the epoch.
        grace_ms: The grace period after the expiration, in milliseconds.
    """
    versions = VersionRanges()
    planned: dict[str, int] = {}
    purge_batches: list[PurgeBatch] = []
    for batch in definition.expirations:
        if batch.state == ExpirationState.PURGED:
            continue
        expired_at_ms = _expired_at_ms(lake, batch)
        is_due = batch.state == ExpirationState.PURGING or expired_at_ms + grace_ms <= now_ms
        sizes_bytes = planned_files(lake, batch)
        if is_due:
            planned |= sizes_bytes or {}
            versions |= batch.ranges()
        purge_batches.append(
            PurgeBatch(
                id=batch.id,
                versions=batch.versions,
                state=batch.state.name.lower(),
                purgeable_at=utc_of(expired_at_ms + grace_ms),
                is_due=is_due,
                has_plan=sizes_bytes is not None,
            )
        )
    return tuple(purge_batches), versions, planned


def _expired_at_ms(lake: Lakehouse, batch: ExpirationBatch) -> int:
    """Return when a batch expired: the later of the recorded time and the time of the root that recorded it."""
    try:
        written_ms = lake.storage.stat(lake.files.roots.path(batch.expired_at_version)).last_modified_ms
    except FileMissingError:
        written_ms = 0
    return max(batch.expired_at_millis, written_ms)


def planned_files(lake: Lakehouse, batch: ExpirationBatch) -> dict[str, int] | None:
    """Return the files in a batch's plan with their sizes, or None if the plan cannot be read.

    Args:
        lake: The lakehouse.
        batch: The batch.

    Raises:
        StorageError: The storage failed.
    """
    try:
        return dict(read_plan_file(lake.storage, batch).sizes_bytes)
    except (FileMissingError, CorruptFileError):
        return None


def with_purged(batches: Iterable[ExpirationBatch], finished: Iterable[str]) -> tuple[ExpirationBatch, ...]:
    """Mark batches as purged. All purged versions are recorded in one batch.

    Args:
        batches: All batches.
        finished: The ids of the batches whose purge is complete.
    """
    finished = set(finished)
    done = [batch for batch in batches if batch.state == ExpirationState.PURGED or batch.id in finished]
    left = tuple(batch for batch in batches if batch not in done)
    if not done:
        return left
    return (replace(done[-1], versions=str(versions_in(done)), state=ExpirationState.PURGED, plan_path=""), *left)
