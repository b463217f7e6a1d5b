"""Lists the clones of a lakehouse: how old they are, how far both sides went on, and what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.definitions import ExportRecord, ExportState
from trinitylake_ops.maintenance.clones.records import OtherLakehouseError, clones_of, opened_clone
from trinitylake_ops.maintenance.plans.cost import MeteredLakehouse
from trinitylake_ops.maintenance.reach.survey import is_past
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, utc_of


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

    ``cloned_version`` is the version of which it was made, and ``version`` that with which both sides are compared.
    ``versions`` counts what was committed there since it was made, ``parent_versions`` what was committed here since
    ``version``. ``own_bytes`` are those of all files below its root. ``reason`` says why it cannot be read.
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
    now_ms = lake.storage.now_ms()
    return [_info(metered, record, latest, now_ms, target_options) for record in clones_of(latest.definition)]


def overdue_clones(lake: Lakehouse) -> list[str]:
    """Return the names of the clones whose time is past, by the records of the parent alone. Raises StorageError."""
    definition, now_ms = lake.snapshot().definition, lake.storage.now_ms()
    return [one.name for one in clones_of(definition) if is_past(one, now_ms)]


def _info(
    metered: MeteredLakehouse,
    record: ExportRecord,
    latest: Snapshot,
    now_ms: int,
    target_options: Mapping[str, str] | None,
) -> CloneInfo:
    state, reason = CloneState.STANDING, None
    version, own = record.version, None
    if record.state == ExportState.COPYING:
        state = CloneState.CUT_OFF
    else:
        try:
            clone = opened_clone(metered, record, target_options)
            version = clone.parent.version
            sizes_bytes = [info.size_bytes for info in clone.lake.storage.list()]
            own = (clone.latest.version, len(sizes_bytes), sum(sizes_bytes))
            state = CloneState.OVERDUE if is_past(record, now_ms) else CloneState.STANDING
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
        parent_versions=latest.version - version,
        versions=versions,
        own_files=own_files,
        own_bytes=own_bytes,
        reason=reason,
    )
