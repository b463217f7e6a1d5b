"""Records of clones in the parent and in the clone, and the list of clones."""

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

_MAX_NAMES = 3


def clone_record(definition: LakehouseDef, name: str) -> ExportRecord:
    """Return the record of a clone in its parent's definition. Raises ExportNotFoundError."""
    clones = clones_of(definition)
    record = next((clone for clone in clones if clone.name == name), None)
    if record is None:
        names = ", ".join(clone.name for clone in clones) or "none"
        raise ExportNotFoundError(f"clone {name!r} does not exist; clones: {names}")
    return record


def current_record(definition: LakehouseDef, record: ExportRecord) -> ExportRecord:
    """Return the current record of a clone. Raises ExportNotFoundError if the clone was dropped or replaced."""
    current = clone_record(definition, record.name)
    if current.clone_id != record.clone_id:
        raise ExportNotFoundError(f"clone {record.name!r} was dropped, and another one now has this name")
    return current


def check_no_table_root(definition: LakehouseDef, root: str) -> None:
    """Raise InvalidInputError if a lakehouse has a table root, because the owner of a table would be ambiguous."""
    if definition.table_root:
        raise InvalidInputError(
            f"{root} cannot have clones: its tables are under the table root {definition.table_root};"
            " make a full export instead"
        )


def records_of_clone(definition: LakehouseDef, clone_id: str) -> list[ExportRecord]:
    """Return all records that keep versions of the parent for one clone."""
    return [record for record in definition.exports if record.clone_id == clone_id]


class OtherLakehouseError(InvalidInputError):
    """The lakehouse at the root of a clone is not that clone, or is a clone of another lakehouse."""

    code = "other-lakehouse"


@dataclass(frozen=True)
class OpenedClone:
    """A clone opened from its parent."""

    #: The clone's lakehouse.
    lake: Lakehouse
    #: The latest version of the clone.
    latest: Snapshot
    #: The clone's record of its parent.
    parent: ParentRecord


def is_parent(parent: ParentRecord, record: ExportRecord, source_id: str) -> bool:
    """Whether the parent record of a lakehouse identifies the lakehouse as a specific clone.

    Args:
        parent: The parent record of the lakehouse at the clone's root.
        record: The clone's record in the parent.
        source_id: The id of the parent.
    """
    return parent.clone_id == record.clone_id and parent.lakehouse_id == source_id


def clone_lakehouse(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None
) -> Lakehouse:
    """Return the lakehouse at the root of a clone, without checking that this lakehouse is the clone.

    Other users may have write access there. Therefore, symbolic links that lead out of the root are not followed.

    Args:
        metered: The parent. Requests to the clone are counted with its requests.
        record: The clone's record in the parent.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        LocationNotAllowedError: The root of the clone is outside the allowed roots.
    """
    source = metered.lake
    if target_options is None:  # explicit options mean that the caller trusts the target
        source.external_storages.allowed_roots.check_root(record.target_uri)
        target_options = options_for(source, record.target_uri)
    options = StorageOptions({**(target_options or {}), "file.follow_links": "false"})
    return uncached_on(metered.meter(open_storage(record.target_uri, options)), target_options)


def open_clone(
    metered: MeteredLakehouse, record: ExportRecord, target_options: Mapping[str, str] | None = None
) -> OpenedClone:
    """Open a clone, and check that it and its parent refer to each other.

    A record alone could refer to any lakehouse.

    Args:
        metered: The parent. Requests to the clone are counted with its requests.
        record: The clone's record in the parent.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        LakehouseNotFoundError: No lakehouse exists at the clone's root.
        OtherLakehouseError: Another lakehouse exists at the clone's root.
        LocationNotAllowedError: The root of the clone is outside the allowed roots.
        StorageError: A storage request failed.
    """
    source = metered.lake
    lake = clone_lakehouse(metered, record, target_options)
    try:
        latest = lake.snapshot()
    except LakehouseNotFoundError as error:
        raise LakehouseNotFoundError(
            f"clone {record.name!r} does not exist: there is no lakehouse at {lake.root}; restore its files, or drop it"
            f" with: trinitylake drop-clone {record.name}",
            path=error.path,
        ) from error
    parent = latest.definition.parent
    if parent is None or not is_parent(parent, record, source.snapshot().definition.id):
        raise OtherLakehouseError(
            f"the lakehouse at {lake.root} is not clone {record.name!r} of this lakehouse: another one replaced it;"
            " drop the clone, which does not touch that lakehouse",
            path=lake.root,
        )
    lake.external_storages.register_storage(source.storage)
    return OpenedClone(lake, latest, parent)


def parent_mismatch(lake: Lakehouse, clone: OpenedClone) -> str | None:
    """Return an error message if a clone does not belong to a lakehouse because it was created from another root.

    A copy of the parent's files has the same identity and records, and cannot be distinguished from a parent that was
    moved. Therefore, only the lakehouse at the root recorded in the clone may delete or change the clone.

    Args:
        lake: The lakehouse.
        clone: The clone.
    """
    if clone.parent.root == lake.root:
        return None
    return (
        f"the clone at {clone.lake.root} belongs to the lakehouse at {clone.parent.root}, of which {lake.root} is a"
        f" copy or another name; change the clone with --root {clone.parent.root}, or drop only its record here"
    )


def check_is_clone_of(lake: Lakehouse, clone: OpenedClone) -> None:
    """Raise OtherLakehouseError if a clone was not created from the root of ``lake``."""
    if reason := parent_mismatch(lake, clone):
        raise OtherLakehouseError(reason, path=clone.lake.root)


def check_no_dependents(clone: OpenedClone) -> None:
    """Raise MaintenanceBlockedError if an export of the clone at another root reads its files."""
    dependents = [
        record for record in clone.latest.definition.exports if record.target_uri and record.level != ExportLevel.FULL
    ]
    if dependents:
        raise MaintenanceBlockedError(
            f"the clone cannot be dropped: the lakehouse at {dependents[0].target_uri} reads files of the clone, as its"
            f" export {dependents[0].name!r}; drop that export first",
            path=clone.lake.root,
            version=clone.latest.version,
        )


def check_not_registered(lake: Lakehouse, latest: Snapshot, record: ExportRecord, clone: OpenedClone) -> None:
    """Check that the parent has no registered tables whose files are in the clone.

    Tables that already existed in the parent when the clone was created cannot refer to the clone.

    Args:
        lake: The parent.
        latest: The latest version of the parent.
        record: The clone's record in the parent.
        clone: The clone.

    Raises:
        MaintenanceBlockedError: The parent reads files of the clone.
        StorageError: A storage request failed.
    """
    cloned_snapshot = lake.snapshot(record.version, latest=latest)
    entries = [
        (latest.keys.decode(change.key), change.after)
        for change in diff_trees(lake.files.nodes, cloned_snapshot.root, latest.root)
        if change.after is not None
    ]
    tables = {after: name for name, after in entries if name is not None and name.table is not None}
    definitions = zip(tables.values(), lake.files.definitions.tables(list(tables)), strict=True)
    registered = sorted(str(name) for name, definition in definitions if _is_registered_at(definition, clone.lake.root))
    if registered:
        names = ", ".join(registered[:_MAX_NAMES]) + (", ..." if len(registered) > _MAX_NAMES else "")
        raise MaintenanceBlockedError(
            f"the files of the clone cannot be deleted: the parent has registered tables there ({names}); drop these"
            " tables and promote what is needed, or drop the clone without --delete-files",
            path=clone.lake.root,
            version=latest.version,
        )


def _is_registered_at(definition: TableDef, root: str) -> bool:
    metadata = iceberg_metadata(definition)
    return not definition.is_managed and bool(metadata) and lies_within(as_uri(str(metadata)), root)


logger = logging.getLogger(__name__)

_MAX_VERSIONS_READ = 1_000
_MAX_VERSIONS_COMPARED = 100


class CloneState(StrEnum):
    """The state of a clone."""

    #: Creating the clone was interrupted: clone again, or drop it.
    INCOMPLETE = "incomplete"
    ACTIVE = "active"
    #: The retention time of the clone has ended: drop it. Until then, the parent keeps the files that the clone reads.
    OVERDUE = "overdue"
    #: The clone's lakehouse does not exist or was replaced by another lakehouse: drop the clone.
    MISSING = "missing"
    #: The clone's storage cannot be reached or rejects requests.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class CloneInfo:
    """One clone. Numbers that are read from the clone are None if it cannot be read."""

    #: The name of the clone.
    name: str
    #: The id of the clone.
    clone_id: str
    #: The root of the clone.
    root: str
    #: The state of the clone.
    state: CloneState
    #: The cloned namespaces; empty for all.
    namespaces: tuple[str, ...]
    #: The parent version from which the clone was created.
    cloned_version: int
    #: The parent version with which both sides are compared; a refresh advances it.
    version: int
    #: When the clone was recorded.
    created_at: datetime
    #: When the clone becomes overdue; None for never.
    retain_until: datetime | None
    #: The number of versions after ``version`` that changed cloned namespaces in the parent, except promotions of this
    #: clone.
    parent_versions: int
    #: The number of versions that changed objects in the clone.
    versions: int | None = None
    #: The number of files below the root of the clone.
    own_files: int | None = None
    #: The total size of these files.
    own_bytes: int | None = None
    #: Why the clone cannot be read, or a note that it belongs to a parent at another root, of which this lakehouse is a
    #: copy.
    reason: str | None = None


def list_clones(lake: Lakehouse, target_options: Mapping[str, str] | None = None) -> list[CloneInfo]:
    """List all clones by name. Clones that cannot be read are included with the reason.

    Args:
        lake: The parent.
        target_options: Options of the clones' storages; None to derive them from the options of the parent.

    Raises:
        StorageError: A request to the parent's storage failed.
    """
    metered = MeteredLakehouse(lake)
    latest = metered.lake.snapshot()
    counter = _ChangeCounter(metered.lake, latest)
    return [_info(metered, record, counter, target_options) for record in clones_of(latest.definition)]


def overdue_clones(lake: Lakehouse) -> list[str]:
    """Return the names of overdue clones, according to the parent's records. Raises StorageError."""
    definition, now_ms = lake.snapshot().definition, lake.storage.now_ms()
    return [record.name for record in clones_of(definition) if is_past(record, now_ms)]


def _info(
    metered: MeteredLakehouse,
    record: ExportRecord,
    counter: _ChangeCounter,
    target_options: Mapping[str, str] | None,
) -> CloneInfo:
    state, reason, now_ms = CloneState.ACTIVE, None, metered.lake.storage.now_ms()
    version, files_of_clone = record.version, None
    if record.state == ExportState.COPYING:
        state = CloneState.INCOMPLETE
    else:
        try:
            clone = open_clone(metered, record, target_options)
            version = clone.parent.version
            sizes_bytes = [info.size_bytes for info in clone.lake.storage.list()]
            changed = _ChangeCounter(clone.lake, clone.latest).changed_since(0, ())
            files_of_clone = (changed, len(sizes_bytes), sum(sizes_bytes))
            state = CloneState.OVERDUE if is_past(record, now_ms) else CloneState.ACTIVE
            reason = parent_mismatch(metered.lake, clone)
        except (LakehouseNotFoundError, OtherLakehouseError) as error:
            state, reason = CloneState.MISSING, error.message
        except TrinityLakeError as error:  # including a root outside the allowed roots
            state, reason = CloneState.UNREADABLE, error.message
    versions, own_files, own_bytes = files_of_clone or (None, None, None)
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
        parent_versions=counter.changed_since(
            version, record.namespaces, {promotion.version for promotion in record.promotions}
        ),
        versions=versions,
        own_files=own_files,
        own_bytes=own_bytes,
        reason=reason,
    )


class _ChangeCounter:
    """Count the versions of a lakehouse that changed objects.

    Each version is read once, and only the newest versions are read. Older versions, and versions whose root cannot be
    read, count as changed.
    """

    def __init__(self, lake: Lakehouse, latest: Snapshot):
        self._lake = lake
        self._latest = latest
        self._infos: list[VersionInfo] = []  # newest first
        self._read_to = latest.version + 1

    def changed_since(self, version: int, namespaces: Sequence[str], excluded: Container[int] = ()) -> int:
        """Return how many versions after ``version`` changed objects, only in ``namespaces`` if any are given."""
        self._read_down_to(max(version + 1, self._latest.version - _MAX_VERSIONS_READ + 1))
        infos = [info for info in self._infos if info.version > version]
        unchanged = {info.version for info in infos if info.version in excluded or leaves_objects(info)}
        if namespaces:
            candidates = [info.version for info in infos if info.version not in unchanged][:_MAX_VERSIONS_COMPARED]
            results = run_parallel(partial(self._changed, set(namespaces)), candidates, self._lake.storage.concurrency)
            unchanged |= {candidate for candidate, changed in zip(candidates, results, strict=True) if not changed}
        return max(0, self._latest.version - version - len(unchanged))

    def _read_down_to(self, version: int) -> None:
        if version >= self._read_to:
            return
        versions = range(self._read_to - 1, version - 1, -1)
        self._read_to = version
        try:
            self._infos.extend(version_infos(self._lake.files, versions, self._latest))
        except CorruptFileError:  # verify reports damaged roots; unread versions count as changed
            logger.debug("could not count the versions of %s exactly", self._lake.root, exc_info=True)

    def _changed(self, namespaces: Container[str], version: int) -> bool:
        """Whether a version changed an object of some namespaces, or cannot be compared with the previous version."""
        try:
            before, after = (self._lake.snapshot(number, latest=self._latest) for number in (version - 1, version))
        except (VersionExpiredError, VersionNotFoundError):
            return True
        changes = diff_trees(self._lake.files.nodes, before.root, after.root)
        names = (after.keys.decode(change.key) for change in changes)
        return any(name is None or name.namespace in namespaces for name in names)
