"""Clones as both lakehouses record and list them."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial

from trinitylake_ops.errors import (
    CorruptFileError,
    ExportNotFoundError,
    InvalidInputError,
    LakehouseNotFoundError,
    MaintenanceBlockedError,
    TrinityLakeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import (
    ExportLevel,
    ExportRecord,
    ExportState,
    LakehouseDef,
    ParentRecord,
    TableDef,
)
from trinitylake_ops.format.locations import as_uri
from trinitylake_ops.operations.base import MeteredLakehouse, uncached_on
from trinitylake_ops.operations.exports.roots import leaves_objects
from trinitylake_ops.operations.gc.survey import is_past
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.local.posix_files import lies_within
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.history import VersionInfo, version_infos
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

_MOST_NAMED = 3


def clone_record(definition: LakehouseDef, name: str) -> ExportRecord:
    """Return the record of a clone in its parent's definition. Raises ExportNotFoundError."""
    clones = clones_of(definition)
    record = next((one for one in clones if one.name == name), None)
    if record is None:
        known = ", ".join(one.name for one in clones) or "none"
        raise ExportNotFoundError(f"there is no clone {name!r}; clones: {known}")
    return record


def same_clone(definition: LakehouseDef, record: ExportRecord) -> ExportRecord:
    """Return the record of a clone as it is now. Raises ExportNotFoundError if it was dropped meanwhile."""
    found = clone_record(definition, record.name)
    if found.clone_id != record.clone_id:
        raise ExportNotFoundError(f"clone {record.name!r} was dropped meanwhile, and another one has its name")
    return found


def check_no_table_root(definition: LakehouseDef, root: str) -> None:
    """Raise InvalidInputError for a lakehouse whose tables stand elsewhere: nobody could tell whose they are then."""
    if definition.table_root:
        raise InvalidInputError(
            f"{root} cannot have clones: its tables are under its table root {definition.table_root};"
            " make a full export instead"
        )


def records_of_clone(definition: LakehouseDef, clone_id: str) -> list[ExportRecord]:
    """Return all records that keep versions of the parent for one clone."""
    return [record for record in definition.exports if record.clone_id == clone_id]


class OtherLakehouseError(InvalidInputError):
    """The root of a clone has another lakehouse, or a clone of another one."""

    code = "other-lakehouse"


@dataclass(frozen=True)
class OpenedClone:
    """A clone, opened from its parent: its lakehouse, its latest version, and what it says of its parent."""

    lake: Lakehouse
    latest: Snapshot
    parent: ParentRecord


def is_parent(parent: ParentRecord, record: ExportRecord, source_id: str) -> bool:
    """Whether what a lakehouse says of its parent is that it is this very clone."""
    return parent.clone_id == record.clone_id and parent.lakehouse_id == source_id


def lakehouse_of(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None
) -> Lakehouse:
    """Return whatever lakehouse stands at the root of a clone. Raises LocationNotAllowedError.

    Whoever writes there may not have the rights of this process. So no link is followed out of it.
    """
    source = metered.lake
    if target_options is None:  # otherwise the caller knows the target
        source.external_storages.allowed_roots.check_root(record.target_uri)
        target_options = options_for(source, record.target_uri)
    options = StorageOptions({**(target_options or {}), "file.follow_links": "false"})
    return uncached_on(metered.also(open_storage(record.target_uri, options)), target_options)


def opened_clone(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None = None
) -> OpenedClone:
    """Open a clone. Its requests are counted with those of its parent.

    Both sides have to know each other: a record alone could name the lakehouse of anybody. Raises
    LakehouseNotFoundError if there is none, OtherLakehouseError for another one, LocationNotAllowedError, StorageError.
    """
    source = metered.lake
    lake = lakehouse_of(metered, record, target_options)
    try:
        latest = lake.snapshot()
    except LakehouseNotFoundError as error:
        raise LakehouseNotFoundError(
            f"clone {record.name!r} is gone: there is no lakehouse at {lake.root}; bring it back, or forget it:"
            f" trinitylake drop-clone {record.name}",
            path=error.path,
        ) from error
    parent = latest.definition.parent
    if parent is None or not is_parent(parent, record, source.snapshot().definition.id):
        raise OtherLakehouseError(
            f"the lakehouse at {lake.root} is not the clone {record.name!r} of this one: another one has taken its"
            " place; drop the clone, which leaves that lakehouse alone",
            path=lake.root,
        )
    lake.external_storages.register_storage(source.storage)
    return OpenedClone(lake, latest, parent)


def foreign_parent(lake: Lakehouse, clone: OpenedClone) -> str | None:
    """Return why a clone does not belong to ``lake``: it was made at another root. None where it does.

    A copy of the parent's files has its identity and its records, and nothing tells a copy from a parent that moved. So
    who deletes or commits in a clone has to stand where the clone says that its parent is.
    """
    if clone.parent.root == lake.root:
        return None
    return (
        f"the clone at {clone.lake.root} belongs to the lakehouse at {clone.parent.root}, and {lake.root} is a copy of"
        f" it or another name; change the clone by --root {clone.parent.root}, a drop here only forgets it"
    )


def check_is_clone_of(lake: Lakehouse, clone: OpenedClone) -> None:
    """Raise OtherLakehouseError for a clone that was made at another root than that of ``lake``."""
    if reason := foreign_parent(lake, clone):
        raise OtherLakehouseError(reason, path=clone.lake.root)


def check_no_dependents(clone: OpenedClone) -> None:
    """Raise MaintenanceBlockedError where an export of the clone at another root reads its files."""
    others = [
        record for record in clone.latest.definition.exports if record.target_uri and record.level != ExportLevel.FULL
    ]
    if others:
        raise MaintenanceBlockedError(
            f"the lakehouse at {others[0].target_uri} reads files of the clone, as its export {others[0].name!r}; drop"
            " that export first",
            path=clone.lake.root,
            version=clone.latest.version,
        )


def check_not_registered(lake: Lakehouse, latest: Snapshot, record: ExportRecord, clone: OpenedClone) -> None:
    """Raise MaintenanceBlockedError where the parent has registered tables of the clone, which would lose their files.

    What it has from before the clone was made is none of the clone's.
    """
    cloned = lake.snapshot(record.version, latest=latest)
    entries = [
        (latest.keys.decode(change.key), change.after)
        for change in diff_trees(lake.files.nodes, cloned.root, latest.root)
        if change.after is not None
    ]
    tables = {after: name for name, after in entries if name is not None and name.table is not None}
    read = zip(tables.values(), lake.files.definitions.tables(list(tables)), strict=True)
    found = sorted(str(name) for name, definition in read if _is_read_at(definition, clone.lake.root))
    if found:
        names = ", ".join(found[:_MOST_NAMED]) + (", ..." if len(found) > _MOST_NAMED else "")
        raise MaintenanceBlockedError(
            f"the parent reads files of the clone by {names}, registered from there; drop these tables, and promote"
            " what is needed, or drop the clone without --delete-files",
            path=clone.lake.root,
            version=latest.version,
        )


def _is_read_at(definition: TableDef, root: str) -> bool:
    metadata = iceberg_metadata(definition)
    return not definition.is_managed and bool(metadata) and lies_within(as_uri(str(metadata)), root)


logger = logging.getLogger(__name__)

_MOST_READ = 1_000
_MOST_COMPARED = 100


class CloneState(StrEnum):
    """What has become of a clone."""

    #: It was cut off while it was made: make it again, or drop it.
    CUT_OFF = "cut off"
    STANDING = "standing"
    #: It is past its time: drop it. What it reads is kept until then.
    OVERDUE = "overdue"
    #: Its lakehouse is gone, or another one stands there: drop it.
    GONE = "gone"
    #: Its storage does not answer, or refuses.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class CloneInfo:
    """One clone. Numbers that only an open clone tells are None where it cannot be read.

    ``cloned_version`` is the version of which it was made. ``version`` is the one with which both sides are compared,
    a later one after a refresh. ``versions`` counts those that changed objects there since it was made.
    ``parent_versions`` counts those that changed objects here since ``version``, as far as the clone has their
    namespaces, but for promotions of this clone. ``own_bytes`` are those of all files below its root. ``reason`` says
    why it cannot be read, or that it was made at another root, by the original of this copy.
    """

    name: str
    clone_id: str
    root: str
    state: CloneState
    namespaces: tuple[str, ...]
    cloned_version: int
    version: int
    created_at: datetime
    retain_until: datetime | None
    parent_versions: int
    versions: int | None = None
    own_files: int | None = None
    own_bytes: int | None = None
    reason: str | None = None


def list_clones(lake: Lakehouse, target_options: Mapping[str, str] | None = None) -> list[CloneInfo]:
    """Return all clones by name, with what a listing of each one's root tells.

    ``target_options`` are for the storages of the clones, by default those of this one where the scheme is the same.
    A clone that cannot be read is among them, with the reason. Raises StorageError if this lakehouse cannot be read.
    """
    metered = MeteredLakehouse(lake)
    latest = metered.lake.snapshot()
    counting = _Counting(metered.lake, latest)
    return [_info(metered, record, counting, target_options) for record in clones_of(latest.definition)]


def overdue_clones(lake: Lakehouse) -> list[str]:
    """Return the names of the clones whose time is past, by the records of the parent alone. Raises StorageError."""
    definition, now_ms = lake.snapshot().definition, lake.storage.now_ms()
    return [one.name for one in clones_of(definition) if is_past(one, now_ms)]


def _info(
    metered: MeteredLakehouse,
    record: ExportRecord,
    counting: _Counting,
    target_options: Mapping[str, str] | None,
) -> CloneInfo:
    state, reason, now_ms = CloneState.STANDING, None, metered.lake.storage.now_ms()
    version, own = record.version, None
    if record.state == ExportState.COPYING:
        state = CloneState.CUT_OFF
    else:
        try:
            clone = opened_clone(metered, record, target_options)
            version = clone.parent.version
            sizes_bytes = [info.size_bytes for info in clone.lake.storage.list()]
            changed = _Counting(clone.lake, clone.latest).changed_since(0, ())
            own = (changed, len(sizes_bytes), sum(sizes_bytes))
            state = CloneState.OVERDUE if is_past(record, now_ms) else CloneState.STANDING
            reason = foreign_parent(metered.lake, clone)
        except (LakehouseNotFoundError, OtherLakehouseError) as error:
            state, reason = CloneState.GONE, error.message
        except TrinityLakeError as error:  # also a record that names no place of ours
            state, reason = CloneState.UNREADABLE, error.message
    versions, own_files, own_bytes = own or (None, None, None)
    return CloneInfo(
        name=record.name,
        clone_id=record.clone_id,
        root=record.target_uri,
        state=state,
        namespaces=record.namespaces,
        cloned_version=record.version,
        version=version,
        created_at=utc_of(record.created_at_millis),
        retain_until=None if record.retain_until_millis is None else utc_of(record.retain_until_millis),
        parent_versions=counting.changed_since(version, record.namespaces, {one.version for one in record.promotions}),
        versions=versions,
        own_files=own_files,
        own_bytes=own_bytes,
        reason=reason,
    )


class _Counting:
    """Counts the versions of a lakehouse that changed objects.

    Each is read once. Only the newest are looked at. An older one counts, and so does one whose root is gone.
    """

    def __init__(self, lake: Lakehouse, latest: Snapshot):
        self._lake = lake
        self._latest = latest
        self._infos: list[VersionInfo] = []  # newest first
        self._read_to = latest.version + 1

    def changed_since(self, version: int, namespaces: Sequence[str], but: Container[int] = ()) -> int:
        """Return how many versions after one changed objects, those of some namespaces if any are given."""
        self._read_down_to(max(version + 1, self._latest.version - _MOST_READ + 1))
        infos = [info for info in self._infos if info.version > version]
        unchanged = {info.version for info in infos if info.version in but or leaves_objects(info)}
        if namespaces:
            left = [info.version for info in infos if info.version not in unchanged][:_MOST_COMPARED]
            found = run_parallel(partial(self._changed, set(namespaces)), left, self._lake.storage.concurrency)
            unchanged |= {one for one, is_changed in zip(left, found, strict=True) if not is_changed}
        return max(0, self._latest.version - version - len(unchanged))

    def _read_down_to(self, version: int) -> None:
        if version >= self._read_to:
            return
        versions = range(self._read_to - 1, version - 1, -1)
        self._read_to = version
        try:
            self._infos.extend(version_infos(self._lake.files, versions, self._latest))
        except CorruptFileError:  # verify tells it; what was not read counts
            logger.debug("versions of %s cannot be counted exactly", self._lake.root, exc_info=True)

    def _changed(self, namespaces: Container[str], version: int) -> bool:
        """Whether a version changed an object of some namespaces. One that cannot be compared counts as changed."""
        try:
            before, after = (self._lake.snapshot(one, latest=self._latest) for one in (version - 1, version))
        except (VersionExpiredError, VersionNotFoundError):
            return True
        changes = diff_trees(self._lake.files.nodes, before.root, after.root)
        names = (after.keys.decode(change.key) for change in changes)
        return any(name is None or name.namespace in namespaces for name in names)
