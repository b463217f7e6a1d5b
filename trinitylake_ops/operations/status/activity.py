"""Recent committers, and the bytes that can be reclaimed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from trinitylake_ops.errors import CorruptFileError, FileMissingError, MaintenanceBlockedError
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState, ExportState, LakehouseDef
from trinitylake_ops.operations.gc.batches import PurgeBatch
from trinitylake_ops.operations.gc.plan_files import PlanFile
from trinitylake_ops.operations.retention import protected_ms
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.history import VersionInfo, history
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

_MAX_COMMITTERS = 8
_MAX_OPERATIONS = 3
_MAX_NAME_CHARS = 80
_MS_PER_SECOND = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """A committer: a user on a host or a client of a server, and the engine."""

    name: str
    engine: str | None
    versions: int
    transactions: int
    #: The number of attempts that conflicted with other commits.
    lost: int
    last_at: datetime
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commits:
    """A summary of the newest versions."""

    versions: int = 0
    transactions: int = 0
    attempts: int = 0
    #: The number of attempts that conflicted with other commits and were retried.
    lost: int = 0
    since: datetime | None = None
    committers: tuple[Committer, ...] = ()
    #: Versions written by other programs.
    foreign: tuple[int, ...] = ()
    #: Versions that are not newer than their predecessor according to their recorded times.
    backwards: tuple[int, ...] = ()
    #: The versions, newest first.
    infos: tuple[VersionInfo, ...] = field(default=(), repr=False)

    @property
    def newest(self) -> VersionInfo | None:
        """The latest version, or None if it was not read."""
        return self.infos[0] if self.infos else None


def commits_of(latest: Snapshot, last: int) -> Commits:
    """Summarize the newest versions. Reads one root for each version.

    Args:
        latest: The latest version.
        last: The number of versions.

    Raises:
        CorruptFileError: A root is damaged or missing.
        StorageError: A storage request failed.
    """
    infos = tuple(history(latest.files, last, latest))
    if not infos:
        raise CorruptFileError("the roots of the newest versions are missing", path=latest.location)
    attempts = sum(info.cost.get("attempts", 1) for info in infos)
    return Commits(
        versions=len(infos),
        transactions=sum(map(_transactions, infos)),
        attempts=attempts,
        lost=attempts - len(infos),
        since=infos[-1].created_at,
        committers=_committers(infos),
        foreign=tuple(info.version for info in infos if info.commit_id is None),
        backwards=tuple(
            newer.version
            for newer, older in pairwise(infos)
            if newer.version == older.version + 1 and newer.created_at <= older.created_at
        ),
        infos=infos,
    )


def _transactions(info: VersionInfo) -> int:
    return max(1, len(info.members))


def _name(info: VersionInfo) -> str:
    if info.committer:
        return info.committer[:_MAX_NAME_CHARS]
    return "another program" if info.commit_id is None else "unknown"


def _committers(infos: Sequence[VersionInfo]) -> tuple[Committer, ...]:
    """Return the most frequent committers in descending order, and all other committers combined."""
    by_name: dict[tuple[str, str | None], list[VersionInfo]] = {}
    for info in infos:
        by_name.setdefault((_name(info), info.engine), []).append(info)
    committers = [_committer(name, engine, versions) for (name, engine), versions in by_name.items()]
    committers.sort(key=lambda committer: (-committer.versions, committer.name))
    if len(committers) <= _MAX_COMMITTERS:
        return tuple(committers)
    kept = {(committer.name, committer.engine) for committer in committers[: _MAX_COMMITTERS - 1]}
    rest = [info for info in infos if (_name(info), info.engine) not in kept]
    remainder = _committer(f"{len(committers) - len(kept)} others", None, rest)
    return (*committers[: _MAX_COMMITTERS - 1], remainder)


def _committer(name: str, engine: str | None, infos: Sequence[VersionInfo]) -> Committer:
    operations = Counter(operation for info in infos for operation in _operations(info))
    return Committer(
        name=name,
        engine=engine,
        versions=len(infos),
        transactions=sum(map(_transactions, infos)),
        lost=sum(max(0, info.cost.get("attempts", 1) - 1) for info in infos),
        last_at=max(info.created_at for info in infos),
        operations=tuple(operation for operation, _ in operations.most_common(_MAX_OPERATIONS)),
    )


def _operations(info: VersionInfo) -> Iterable[str]:
    names = [member.operation for member in info.transactions] or [info.operation]
    return [name[:_MAX_NAME_CHARS] for name in names if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The seconds since the last activity of each kind; None if there was no activity, or it was not recorded."""

    commit_seconds: float | None = None
    verify_seconds: float | None = None
    export_seconds: float | None = None
    expiry_seconds: float | None = None
    orphans_seconds: float | None = None

    @classmethod
    def of(cls, definition: LakehouseDef, verified_ms: int | None, now_ms: int, committed_ms: int) -> Activity:
        """Compute the ages.

        Args:
            definition: The lakehouse definition.
            verified_ms: When the newest record of a verification was written, if any.
            now_ms: The storage's time.
            committed_ms: When the latest version was committed. All times are in milliseconds since the epoch.
        """
        exports = [
            record.created_at_millis
            for record in definition.exports
            if record.state == ExportState.COMPLETE and not record.clone_id
        ]
        removed_ms = definition.orphans_removed_before_millis

        def age(times_ms: Sequence[int]) -> float | None:
            return max(0, now_ms - max(times_ms)) / _MS_PER_SECOND if times_ms else None

        return cls(
            commit_seconds=age([committed_ms]),
            verify_seconds=age([] if verified_ms is None else [verified_ms]),
            export_seconds=age(exports),
            expiry_seconds=age([batch.expired_at_millis for batch in definition.expirations]),
            orphans_seconds=age([removed_ms] if removed_ms else []),
        )


#: The number of oldest batches whose plans are read, and the maximum size of each plan file.
_MAX_BATCHES = 16
_MAX_PLAN_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The number of reclaimable bytes; None if they were not counted."""

    expirable_bytes: int | None = None
    purgeable_bytes: int | None = None
    #: The source of the numbers, or the reason why there are none.
    note: str = ""
    #: The batches of expired versions whose purge is not finished.
    batches: tuple[PurgeBatch, ...] = field(default=(), repr=False)

    @property
    def reclaimable_bytes(self) -> int | None:
        """The sum of the known numbers."""
        sizes = [size for size in (self.expirable_bytes, self.purgeable_bytes) if size is not None]
        return sum(sizes) if sizes else None


class _TimeLimitError(Exception):
    """Planning exceeded the time limit."""


def recorded_space(latest: Snapshot, now_ms: int) -> Space:
    """Return the bytes that a purge would reclaim according to the recorded plans. Reads at most 16 files.

    Files that have become needed again since the plan was made are included.

    Args:
        latest: The latest version.
        now_ms: The storage's time, in milliseconds since the epoch.

    Raises:
        StorageError: A storage request failed.
    """
    unpurged = [batch for batch in latest.definition.expirations if batch.state != ExpirationState.PURGED]
    grace_ms, storage = protected_ms(latest.definition), latest.files.roots.storage
    sizes_bytes: dict[str, int] = {}
    batches, n_unknown = [], max(0, len(unpurged) - _MAX_BATCHES)
    for batch in unpurged[:_MAX_BATCHES]:
        planned = _planned_sizes(storage, batch)
        sizes_bytes |= planned or {}
        n_unknown += planned is None
        purgeable_ms = batch.expired_at_millis + grace_ms
        batches.append(
            PurgeBatch(
                id=batch.id,
                versions=batch.versions,
                state=batch.state.name.lower(),
                purgeable_at=utc_of(purgeable_ms),
                is_due=batch.state == ExpirationState.PURGING or purgeable_ms <= now_ms,
                has_plan=planned is not None,
            )
        )
    if not unpurged:
        return Space(purgeable_bytes=0, note="no expired version is waiting for a purge")
    note = "from the plans of expirations" + (f"; {n_unknown} of them were not read" if n_unknown else "")
    return Space(purgeable_bytes=sum(sizes_bytes.values()), note=note, batches=tuple(batches))


def _planned_sizes(storage: Storage, batch: ExpirationBatch) -> dict[str, int] | None:
    """Return the files of a batch's plan; None if the plan is missing, too large, or not the recorded plan."""
    try:
        data = storage.read(batch.plan_path, limit_bytes=_MAX_PLAN_BYTES) if batch.plan_path else b""
        plan = PlanFile.from_bytes(data, batch.plan_path)
    except (FileMissingError, CorruptFileError):
        return None
    return dict(plan.sizes_bytes) if plan.digest == batch.digest else None


def planned_space(lake: Lakehouse, max_seconds: float) -> Space:
    """Count the bytes that an expiration by the lakehouse settings and a subsequent purge would reclaim.

    Reads all unpurged roots, and the nodes that they reach. If this takes too long, a file is damaged, or the lakehouse
    needs a reconcile, the note states the reason.

    Args:
        lake: The lakehouse.
        max_seconds: The time limit.
    """
    from trinitylake_ops.operations.gc.expire import plan_expiration  # imports Iceberg
    from trinitylake_ops.operations.gc.purge import plan_purge

    end_s = time.monotonic() + max_seconds

    def check_time(_what: str, _done: int, _all: int) -> None:
        if time.monotonic() > end_s:
            raise _TimeLimitError

    try:
        expirable = plan_expiration(lake, progress=check_time).bytes
        purgeable = plan_purge(lake, progress=check_time).bytes
    except _TimeLimitError:
        return Space(note=f"not counted: it takes more than {max_seconds:g} seconds")
    except (MaintenanceBlockedError, CorruptFileError, FileMissingError) as error:
        return Space(note=f"not counted: {error}")
    return Space(expirable_bytes=expirable, purgeable_bytes=purgeable, note="from new plans")
