"""Who committed the newest versions, and how many bytes can be reclaimed."""

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

_MOST_COMMITTERS = 8
_MOST_OPERATIONS = 3
_LONGEST_NAME_CHARS = 80
_MS_PER_SECOND = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """Who committed: a user at a host, or the client of a server, with the engine. ``lost`` attempts met others."""

    name: str
    engine: str | None
    versions: int
    transactions: int
    lost: int
    last_at: datetime
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commits:
    """The newest versions together. ``lost`` counts attempts that met other commits and were made again.

    ``foreign`` versions were written by other programs. ``infos`` are the versions, newest first.
    """

    versions: int = 0
    transactions: int = 0
    attempts: int = 0
    lost: int = 0
    since: datetime | None = None
    committers: tuple[Committer, ...] = ()
    foreign: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()
    infos: tuple[VersionInfo, ...] = field(default=(), repr=False)

    @property
    def newest(self) -> VersionInfo | None:
        """The latest version, None if it was not read."""
        return self.infos[0] if self.infos else None


def commits_of(latest: Snapshot, last: int) -> Commits:
    """Return who committed the newest ``last`` versions. Reads as many roots. Raises CorruptFileError, StorageError."""
    infos = tuple(history(latest.files, last, latest))
    if not infos:
        raise CorruptFileError("no root of the newest versions is there", path=latest.location)
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
        return info.committer[:_LONGEST_NAME_CHARS]
    return "another program" if info.commit_id is None else "unknown"


def _committers(infos: Sequence[VersionInfo]) -> tuple[Committer, ...]:
    """Return who committed most, in this order; the others together."""
    by_name: dict[tuple[str, str | None], list[VersionInfo]] = {}
    for info in infos:
        by_name.setdefault((_name(info), info.engine), []).append(info)
    found = [_committer(name, engine, own) for (name, engine), own in by_name.items()]
    found.sort(key=lambda one: (-one.versions, one.name))
    if len(found) <= _MOST_COMMITTERS:
        return tuple(found)
    kept = {(one.name, one.engine) for one in found[: _MOST_COMMITTERS - 1]}
    rest = [info for info in infos if (_name(info), info.engine) not in kept]
    others = _committer(f"{len(found) - len(kept)} others", None, rest)
    return (*found[: _MOST_COMMITTERS - 1], others)


def _committer(name: str, engine: str | None, infos: Sequence[VersionInfo]) -> Committer:
    operations = Counter(operation for info in infos for operation in _operations(info))
    return Committer(
        name=name,
        engine=engine,
        versions=len(infos),
        transactions=sum(map(_transactions, infos)),
        lost=sum(max(0, info.cost.get("attempts", 1) - 1) for info in infos),
        last_at=max(info.created_at for info in infos),
        operations=tuple(operation for operation, _ in operations.most_common(_MOST_OPERATIONS)),
    )


def _operations(info: VersionInfo) -> Iterable[str]:
    names = [one.operation for one in info.transactions] or [info.operation]
    return [name[:_LONGEST_NAME_CHARS] for name in names if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """How many seconds ago something happened last, None if it never did, or nobody recorded it."""

    commit_seconds: float | None = None
    verify_seconds: float | None = None
    export_seconds: float | None = None
    expiry_seconds: float | None = None
    orphans_seconds: float | None = None

    @classmethod
    def of(cls, definition: LakehouseDef, verified_ms: int | None, now_ms: int, committed_ms: int) -> Activity:
        """Return the ages by the settings of a version, and by the newest record of a verification."""
        exports = [
            one.created_at_millis
            for one in definition.exports
            if one.state == ExportState.COMPLETE and not one.clone_id
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
    from trinitylake_ops.operations.gc.expire import plan_expiration  # with Iceberg
    from trinitylake_ops.operations.gc.purge import plan_purge

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
