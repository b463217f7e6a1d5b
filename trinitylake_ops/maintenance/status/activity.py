"""Who committed the newest versions, how often they met others, and when operations happened last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.definitions import ExportState, LakehouseDef
from trinitylake_ops.versions.history import VersionInfo, history
from trinitylake_ops.versions.snapshot import Snapshot

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
