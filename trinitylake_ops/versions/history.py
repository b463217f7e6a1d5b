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

_BATCH = 32
_MOST = 2**63 - 1
#: The property of a commit that a client of the server asked for: who that was.
CLIENT_PROPERTY = "principal"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version as ``history`` lists it. Fields that its writer did not record are None or empty.

    ``members`` are the ids of the transactions in it. Where they are several, ``transactions`` says more of each.
    ``cost`` has the ``attempts`` of the commit, the ``requests`` that created its files, and the ``bytes`` of its
    definitions and nodes. ``root_bytes`` is the size of its root. ``is_clock_reset`` is set where the
    version has the storage's time although versions before it have later times.
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
        """The bytes of all files that the commit added: definitions, nodes and its root."""
        return self.cost.get("bytes", 0) + self.root_bytes

    @property
    def committer(self) -> str:
        """Who committed it: a client of the server, or else user and host of the program. Empty if nothing says so."""
        return _client(self.properties) or "@".join(filter(None, (self.user, self.host)))


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """One of several transactions that a version holds."""

    id: str
    operation: str | None
    message: str | None
    run_id: str | None
    approved_by: str | None
    counts: Mapping[str, int]
    properties: Mapping[str, str]

    @property
    def client(self) -> str:
        """The client of the server that asked for it. Empty if there was none."""
        return _client(self.properties)


def _client(properties: Mapping[str, str]) -> str:
    return f"{properties[CLIENT_PROPERTY]} (by the server)" if properties.get(CLIENT_PROPERTY) else ""


def history(files: LakehouseFiles, limit: int | None = None, latest: Snapshot | None = None) -> Iterator[VersionInfo]:
    """Yield versions up to ``latest``, newest first, at most ``limit``; roots are read in parallel batches.

    Versions whose roots other programs deleted are left out. Raises LakehouseNotFoundError, StorageError.
    """
    latest = latest or latest_snapshot(files)
    oldest = 0 if limit is None else max(0, latest.version + 1 - limit)
    yield from version_infos(files, range(latest.version, oldest - 1, -1), latest)


def version_infos(
    files: LakehouseFiles, versions: Sequence[int], latest: Snapshot, before: Snapshot | None = None
) -> Iterator[VersionInfo]:
    """Yield the records of some versions up to ``latest``, in their order, as :func:`history` does.

    A version whose stamp is also that of its neighbor, or of ``before``, counts as one without a stamp.
    """
    earlier = None if before is None else _Root(before.version, before.root.system, 0)
    held: _Root | None = None
    read = (_Root.of(files, version, data) for version, data in read_roots(files.roots, versions, _BATCH))
    for root in chain(read, [None]):
        if held is not None and held.system:
            yield _version_info(held.without_shared_stamp(earlier, root), latest.definition)
        earlier, held = held if held is not None else earlier, root


def snapshot_info(snapshot: Snapshot, definition: LakehouseDef) -> VersionInfo:
    """Return the record of a version that was read, by the latest lakehouse definition."""
    root = snapshot.root
    return _version_info(_Root(snapshot.version, root.system, root.file_size_bytes), definition)


@dataclass(frozen=True, slots=True)
class _Root:
    """The content of a version's root, nothing where it is gone, and its size."""

    version: int
    system: dict[str, str]
    size_bytes: int

    @classmethod
    def of(cls, files: LakehouseFiles, version: int, data: bytes | None) -> _Root:
        """Return the content that was read."""
        if data is None:
            return cls(version, {}, 0)
        return cls(version, decode_system_rows(data, files.roots.path(version)), len(data))

    def without_shared_stamp(self, *neighbors: _Root | None) -> _Root:
        """Return the root without its stamp, if a neighbor, the root of the version before, has the same."""
        before = next((one for one in neighbors if one is not None and one.version == self.version - 1), None)
        return self if before is None else replace(self, system=without_carried_stamp(self.system, before.system))


def _of_type(kind: type[T], value: object) -> T:
    """Return a value of ``commit_info``, or an empty one where others wrote another type."""
    return value if isinstance(value, kind) else kind()


def _text(value: object) -> str | None:
    """Return a text of ``commit_info``, None where others wrote another type."""
    return value if isinstance(value, str) else None


def _numbers(value: object) -> dict[str, int]:
    """Return the entries of an object of ``commit_info`` that are numbers as we write them."""
    entries: dict[str, object] = _of_type(dict, value)
    return {name: number for name, number in entries.items() if type(number) is int and 0 <= number <= _MOST}


def _texts(value: object) -> dict[str, str]:
    """Return the entries of an object of ``commit_info`` that are texts."""
    entries: dict[str, object] = _of_type(dict, value)
    return {name: text for name, text in entries.items() if isinstance(text, str)}


def version_at(location: str | None) -> int | None:
    """Return the version whose root has this location, None where there is none."""
    try:
        return None if location is None else parse_root_path(location)
    except VersionNotFoundError:
        return None


def rollback_from(version: int, system: Mapping[str, str]) -> int | None:
    """Return the version that a rollback went back from, None for any other version.

    Only the version before counts: another program may have copied the row from an earlier root.
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
    """Return the entries of ``commit_info`` for each of its transactions, nothing where they do not fit ``members``."""
    members, infos = _of_type(list, info.get("members")), _of_type(list, info.get("transactions"))
    if len(members) != len(infos):
        return ()
    return tuple(
        TransactionInfo(
            str(member),
            _text(own.get("operation")),
            _text(own.get("message")),
            _text(own.get("run_id")),
            _text(own.get("approved_by")),
            _numbers(own.get("counts")),
            _texts(own.get("properties")),
        )
        for member, own in zip(members, (_of_type(dict, one) for one in infos), strict=True)
    )


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a namespace (``table`` is None) or of a table between two versions."""

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None


def diff_snapshots(before: Snapshot, after: Snapshot, files: LakehouseFiles | None = None) -> list[Change]:
    """Return the changes between two versions of one lakehouse. Objects of unknown type are left out.

    ``files`` are those of the lakehouse of ``after``, by default as one of both reads them. A version that stands
    elsewhere, such as one from before the beginning of a clone, is compared by the full locations of what it has.
    """
    if files is None:
        files = before.files if before.files.storage.root == after.files.storage.root else after.files
    with before.reading(), after.reading():
        differences = diff_trees(files.nodes, _root_in(files, before), _root_in(files, after))
        changes = [change_of(after.keys, change) for change in differences]
    return [change for change in changes if change is not None]


def _root_in(files: LakehouseFiles, version: Snapshot) -> NodeFile:
    """Return the root of a version with locations as a lakehouse writes them."""
    root = version.files.storage.root
    if root == files.storage.root:
        return version.root
    return version.root.rebased(lambda location: to_uri(root, location))


def change_of(keys: KeyCodec, change: KeyChange) -> Change | None:
    """Return what a changed key means, or None for an object of unknown type."""
    name = keys.decode(change.key)
    if name is None:
        return None
    if change.before is None:
        return Change("added", name.namespace, name.table)
    return Change("removed" if change.after is None else "changed", name.namespace, name.table)
