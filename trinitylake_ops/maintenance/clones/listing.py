"""Lists the clones of a lakehouse: how old they are, how far both sides went on, and what they take."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial

from trinitylake_ops.errors import (
    CorruptFileError,
    LakehouseNotFoundError,
    TrinityLakeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import ExportRecord, ExportState
from trinitylake_ops.maintenance.clones.records import OtherLakehouseError, foreign_parent, opened_clone
from trinitylake_ops.maintenance.exports.roots import leaves_objects
from trinitylake_ops.maintenance.plans.cost import MeteredLakehouse
from trinitylake_ops.maintenance.reach.survey import is_past
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.history import VersionInfo, version_infos
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

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
