"""The record of each version, and the changes between two versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any, Literal, TypeVar

from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.format.keys import (
    COMMIT_ID,
    CREATED_AT_MILLIS,
    ROLLBACK_FROM_ROOT,
    SEALED_AT_MILLIS,
    KeyCodec,
    decode_commit_info,
    is_clock_reset,
    without_carried_stamp,
)
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.format.node_file import NodeFile, decode_system_rows
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot, utc_datetime

_BATCH = 32  # number of roots that are read at a time
_MAX_COUNT = 2**63 - 1
#: The property of the REST server's commits that names the client.
CLIENT_PROPERTY = "principal"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version in the history. Fields that its writer did not record are None or empty.

    ``members`` contains the ids of the transactions in the version. If there are several, ``transactions`` describes
    each of them. ``cost`` contains the ``attempts`` of the commit, the ``requests`` that wrote its files, and the
    ``bytes`` of its definitions and nodes. ``root_bytes`` is the size of its root. ``is_clock_reset`` is set if the
    version has the storage's current time even though earlier versions have later times.
    """

    version: int
    created_at: datetime
    operation: str | None
    message: str | None
    commit_id: str | None
    rollback_from: int | None
    state: Literal["live", "expired", "sealed"]
    run_id: str | None = None
    approved_by: str | None = None
    user: str | None = None
    host: str | None = None
    engine: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    cost: Mapping[str, int] = field(default_factory=dict)
    root_bytes: int = field(default=0, compare=False)
    transactions: tuple[TransactionInfo, ...] = ()
    is_clock_reset: bool = False

    @property
    def bytes_written(self) -> int:
        """The size of all files that the commit added: definitions, nodes and the root."""
        return self.cost.get("bytes", 0) + self.root_bytes

    @property
    def committer(self) -> str:
        """The committer: the REST server's client if there is one, otherwise user and host. Empty if unknown."""
        return _client(self.properties) or "@".join(filter(None, (self.user, self.host)))


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """One of several transactions in a version."""

    id: str
    operation: str | None
    message: str | None
    run_id: str | None
    approved_by: str | None
    counts: Mapping[str, int]
    properties: Mapping[str, str]

    @property
    def client(self) -> str:
        """The client of the REST server that submitted the transaction. Empty if there was none."""
        return _client(self.properties)


def _client(properties: Mapping[str, str]) -> str:
    return f"{properties[CLIENT_PROPERTY]} (by the server)" if properties.get(CLIENT_PROPERTY) else ""


def history(files: LakehouseFiles, limit: int | None = None, latest: Snapshot | None = None) -> Iterator[VersionInfo]:
    """Yield versions, newest first. Roots are read in parallel batches.

    Versions whose roots were deleted by other programs are left out.

    Args:
        files: The files of the lakehouse.
        limit: Maximum number of versions; None for all versions.
        latest: The version to start with; by default the latest version.

    Raises:
        LakehouseNotFoundError: There is no lakehouse.
        StorageError: A root cannot be read.
    """
    latest = latest or latest_snapshot(files)
    oldest = 0 if limit is None else max(0, latest.version + 1 - limit)
    yield from version_infos(files, range(latest.version, oldest - 1, -1), latest)


def version_infos(
    files: LakehouseFiles, versions: Sequence[int], latest: Snapshot, before: Snapshot | None = None
) -> Iterator[VersionInfo]:
    """Yield the records of some versions in the given order.

    If a version has the same stamp as its predecessor, another program has copied the stamp, and it is ignored.

    Args:
        files: The files of the lakehouse.
        versions: The versions, up to ``latest``.
        latest: The latest version.
        before: The neighbor of the first version, if it has already been read.

    Raises:
        StorageError: A root cannot be read.
    """
    earlier = None if before is None else _Root(before.version, before.root.system, 0)
    pending: _Root | None = None
    read = (_Root.of(files, version, data) for version, data in read_roots(files.roots, versions, _BATCH))
    for root in chain(read, [None]):
        if pending is not None and pending.system:
            yield _version_info(pending.without_shared_stamp(earlier, root), latest.definition)
        earlier, pending = pending if pending is not None else earlier, root


def snapshot_info(snapshot: Snapshot, definition: LakehouseDef) -> VersionInfo:
    """Return the record of a version that has already been read.

    Args:
        snapshot: The version.
        definition: The latest lakehouse definition, which lists expired versions.
    """
    root = snapshot.root
    return _version_info(_Root(snapshot.version, root.system, root.file_size_bytes), definition)


@dataclass(frozen=True, slots=True)
class _Root:
    """The system rows and size of a version's root. The rows are empty if the root was deleted."""

    version: int
    system: dict[str, str]
    size_bytes: int

    @classmethod
    def of(cls, files: LakehouseFiles, version: int, data: bytes | None) -> _Root:
        """Decode the bytes of a root, None for a deleted one."""
        if data is None:
            return cls(version, {}, 0)
        return cls(version, decode_system_rows(data, files.roots.path(version)), len(data))

    def without_shared_stamp(self, *neighbors: _Root | None) -> _Root:
        """Return the root without its stamp if its predecessor, which is one of the neighbors, has the same stamp."""
        before = next((root for root in neighbors if root is not None and root.version == self.version - 1), None)
        return self if before is None else replace(self, system=without_carried_stamp(self.system, before.system))


def _of_type(kind: type[T], value: object) -> T:
    """Return a value of ``commit_info``, or an empty one if it has another type."""
    return value if isinstance(value, kind) else kind()


def _text(value: object) -> str | None:
    """Return a string of ``commit_info``, None if it has another type."""
    return value if isinstance(value, str) else None


def _numbers(value: object) -> dict[str, int]:
    """Return the entries of an object of ``commit_info`` that are non-negative integers."""
    entries: dict[str, object] = _of_type(dict, value)
    return {name: number for name, number in entries.items() if type(number) is int and 0 <= number <= _MAX_COUNT}


def _texts(value: object) -> dict[str, str]:
    """Return the entries of an object of ``commit_info`` that are strings."""
    entries: dict[str, object] = _of_type(dict, value)
    return {name: text for name, text in entries.items() if isinstance(text, str)}


def version_at(location: str | None) -> int | None:
    """Return the version whose root is at this location, None if it is not the location of a root."""
    try:
        return None if location is None else parse_root_path(location)
    except VersionNotFoundError:
        return None


def rollback_from(version: int, system: Mapping[str, str]) -> int | None:
    """Return the version before a rollback, None if the version is not a rollback.

    The row must name the previous version, because another program may have copied it from an earlier root.

    Args:
        version: The version.
        system: The system rows of its root.
    """
    named = version_at(system.get(ROLLBACK_FROM_ROOT))
    return named if named is not None and named == version - 1 else None


def _version_info(root: _Root, definition: LakehouseDef) -> VersionInfo:
    version, system = root.version, root.system
    info = decode_commit_info(system)
    is_expired = any(batch.contains(version) for batch in definition.expirations)
    return VersionInfo(
        version=version,
        created_at=utc_datetime(int(system[CREATED_AT_MILLIS])),
        operation=_text(info.get("operation")),
        message=_text(info.get("message")),
        commit_id=system.get(COMMIT_ID),
        rollback_from=rollback_from(version, system),
        state="sealed" if SEALED_AT_MILLIS in system else "expired" if is_expired else "live",
        run_id=_text(info.get("run_id")),
        approved_by=_text(info.get("approved_by")),
        user=_text(info.get("user")),
        host=_text(info.get("host")),
        engine=_text(info.get("engine")),
        counts=_numbers(info.get("counts")),
        properties=_texts(info.get("properties")),
        members=tuple(map(str, _of_type(list, info.get("members")))),
        cost=_numbers(info.get("cost")),
        root_bytes=root.size_bytes,
        transactions=_transactions(info),
        is_clock_reset=is_clock_reset(system, version),
    )


def _transactions(info: Mapping[str, Any]) -> tuple[TransactionInfo, ...]:
    """Return the transactions in ``commit_info``, or none if their number differs from the number of ``members``."""
    members, infos = _of_type(list, info.get("members")), _of_type(list, info.get("transactions"))
    if len(members) != len(infos):
        return ()
    return tuple(
        TransactionInfo(
            str(member),
            _text(entry.get("operation")),
            _text(entry.get("message")),
            _text(entry.get("run_id")),
            _text(entry.get("approved_by")),
            _numbers(entry.get("counts")),
            _texts(entry.get("properties")),
        )
        for member, entry in zip(members, (_of_type(dict, item) for item in infos), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a namespace (``table`` is None) or of a table between two versions."""

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None


def diff_snapshots(before: Snapshot, after: Snapshot, files: LakehouseFiles | None = None) -> list[Change]:
    """Return the changes between two versions of one lakehouse. Objects of unknown type are left out.

    A version at another root, for example a version of a clone's parent, is compared by absolute locations.

    Args:
        before: The earlier version.
        after: The later version.
        files: The files of the lakehouse that contains ``after``; by default the files of one of the versions.

    Raises:
        VersionExpiredError: A version was purged.
        StorageError: A node cannot be read.
    """
    if files is None:
        files = before.files if before.files.storage.root == after.files.storage.root else after.files
    with before.reading(), after.reading():
        differences = diff_trees(files.nodes, _root_in(files, before), _root_in(files, after))
        changes = [change_of(after.keys, change) for change in differences]
    return [change for change in changes if change is not None]


def _root_in(files: LakehouseFiles, version: Snapshot) -> NodeFile:
    """Return the root of a version with locations relative to a lakehouse."""
    root = version.files.storage.root
    if root == files.storage.root:
        return version.root
    return version.root.rebased(lambda location: to_uri(root, location))


def change_of(keys: KeyCodec, change: KeyChange) -> Change | None:
    """Decode a changed key, None for an object of unknown type.

    Args:
        keys: The encoding of keys.
        change: The change.
    """
    name = keys.decode(change.key)
    if name is None:
        return None
    if change.before is None:
        return Change("added", name.namespace, name.table)
    return Change("removed" if change.after is None else "changed", name.namespace, name.table)
