"""The bytes that can be freed: by the plans that expiries recorded, or by new plans, which read all kept roots."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trinitylake_ops.errors import CorruptFileError, FileMissingError, MaintenanceBlockedError
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState
from trinitylake_ops.maintenance.gc.batches import PurgeBatch
from trinitylake_ops.maintenance.plans.retention import protected_ms
from trinitylake_ops.maintenance.state.plan_file import PlanFile
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

#: The oldest batches, whose plans are read; and how large a plan may be for that.
_MOST_BATCHES = 16
_MOST_PLAN_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The bytes that can be freed, None where nobody counted them. ``note`` says by what, or why not.

    ``batches`` are those of expired versions that no purge has finished.
    """

    expirable_bytes: int | None = None
    purgeable_bytes: int | None = None
    note: str = ""
    batches: tuple[PurgeBatch, ...] = field(default=(), repr=False)

    @property
    def reclaimable_bytes(self) -> int | None:
        """All of them together, as far as they are known."""
        known = [one for one in (self.expirable_bytes, self.purgeable_bytes) if one is not None]
        return sum(known) if known else None


class _TooLongError(Exception):
    """The plans take longer than they may."""


def recorded_space(latest: Snapshot, now_ms: int) -> Space:
    """Return what a purge would free by the recorded plans. Reads one file for each of at most 16 batches.

    It is what those plans said: what has been needed again since stays. Raises StorageError.
    """
    unpurged = [one for one in latest.definition.expirations if one.state != ExpirationState.PURGED]
    grace_ms, storage = protected_ms(latest.definition), latest.files.roots.storage
    sizes_bytes: dict[str, int] = {}
    batches, n_unknown = [], max(0, len(unpurged) - _MOST_BATCHES)
    for batch in unpurged[:_MOST_BATCHES]:
        found = _planned(storage, batch)
        sizes_bytes |= found or {}
        n_unknown += found is None
        purgeable_ms = batch.expired_at_millis + grace_ms
        batches.append(
            PurgeBatch(
                id=batch.id,
                versions=batch.versions,
                state=batch.state.name.lower(),
                purgeable_at=utc_of(purgeable_ms),
                is_due=batch.state == ExpirationState.PURGING or purgeable_ms <= now_ms,
                has_plan=found is not None,
            )
        )
    if not unpurged:
        return Space(purgeable_bytes=0, note="no expired version waits for a purge")
    note = "by the plans of the expiries" + (f"; {n_unknown} of them were not read" if n_unknown else "")
    return Space(purgeable_bytes=sum(sizes_bytes.values()), note=note, batches=tuple(batches))


def _planned(storage: Storage, batch: ExpirationBatch) -> dict[str, int] | None:
    """Return the files of a batch's plan, None if it is lost, too large for a look, or another one."""
    try:
        data = storage.read(batch.plan_path, limit_bytes=_MOST_PLAN_BYTES) if batch.plan_path else b""
        plan = PlanFile.from_bytes(data, batch.plan_path)
    except (FileMissingError, CorruptFileError):
        return None
    return dict(plan.sizes_bytes) if plan.digest == batch.digest else None


def planned_space(lake: Lakehouse, max_seconds: float) -> Space:
    """Return the bytes that an expiry by the lakehouse's settings and a purge would free, counted apart.

    For this, all roots that were not purged are read, and the nodes that they reach. If it takes more than
    ``max_seconds``, a file is damaged, or the lakehouse waits for a reconcile, the note says so instead.
    """
    from trinitylake_ops.maintenance.gc.expire import plan_expiration  # with Iceberg
    from trinitylake_ops.maintenance.gc.purge import plan_purge

    end_s = time.monotonic() + max_seconds

    def check_time(_what: str, _done: int, _all: int) -> None:
        if time.monotonic() > end_s:
            raise _TooLongError

    try:
        expirable = plan_expiration(lake, progress=check_time).bytes
        purgeable = plan_purge(lake, progress=check_time).bytes
    except _TooLongError:
        return Space(note=f"not counted: it takes more than {max_seconds:g} seconds")
    except (MaintenanceBlockedError, CorruptFileError, FileMissingError) as error:
        return Space(note=f"not counted: {error}")
    return Space(expirable_bytes=expirable, purgeable_bytes=purgeable, note="by plans of now")
