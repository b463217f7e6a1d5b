"""The history of one table: the versions that changed it, and what each did to its rows, files and columns.

Nothing but definitions and Iceberg metadata is read, no manifest and no data file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trinitylake_ops.errors import CorruptFileError, FileMissingError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.operations.diff.versions import ChangedObject, TableStates, changed_table
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.history import Change, VersionInfo, snapshot_info, version_infos
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.versions.undone import is_same_state, readable_version, recorded_targets, skipped_versions

_Step = tuple[Snapshot, Snapshot]  # a version, and the next newer one that has another state of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVersion:
    """A version that changed a table, and what it did to it.

    ``since`` is the version that it is compared with: the one before it, as far as that can still be read.
    ``undone_by`` is the later rollback that undid it for this table, if there is one. ``returns_to`` is the version
    whose state of the table came back, if the version is a rollback.
    """

    info: VersionInfo
    since: int
    change: ChangedObject
    undone_by: int | None = None
    returns_to: int | None = None

    @property
    def rows_changed(self) -> int | None:
        """How many rows more the table has than before, None where one of both was not counted."""
        before, after = self.change.before, self.change.after
        if before is None or after is None or before.rows is None or after.rows is None:
            return None
        return after.rows - before.rows

    @property
    def columns(self) -> tuple[str, ...]:
        """What changed in its columns, one line each."""
        return () if self.change.delta is None else self.change.delta.schema


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHistory:
    """The versions that changed a table, newest first. ``looked_back_to`` is the oldest one that was compared."""

    versions: tuple[TableVersion, ...]
    looked_back_to: int

    @property
    def before(self) -> int | None:
        """The newest version with an earlier state of the table that no rollback undid, None if none is known."""
        kept = (one for one in self.versions if one.undone_by is None and one.returns_to is None)
        newest = next(kept, None)
        return None if newest is None or newest.change.kind == "added" else newest.since


def table_history(
    lake: Lakehouse, namespace: str, table: str, *, head: Snapshot | None = None, most: int = 10, look_back: int = 50
) -> TableHistory:
    """Return the newest versions that changed a table, at most ``most``, among the last ``look_back`` ones.

    Versions that cannot be read any more are passed over: what they did counts for the next one. ``head`` is the
    version to begin at, by default the latest. Raises InvalidNameError, CorruptFileError, StorageError.
    """
    head = head or lake.snapshot()
    found: list[_Step] = []
    newer, oldest = head, head.version
    entries = {head.version: _entry(head, namespace, table)}
    for older in _readable_before(lake, head, look_back):
        entries[older.version] = _entry(older, namespace, table)
        if _entry(older, namespace, table) != _entry(newer, namespace, table):
            found.append((older, newer))
            if len(found) == most:
                oldest = older.version
                break
        newer, oldest = older, older.version
    changes = _changes(TableStates(lake), found, namespace, table)
    infos = {info.version: info for info in version_infos(lake.files, [new.version for _, new in found], head)}

    targets = _targets(lake.files, [new for _, new in found], entries, (head, namespace, table))
    skipped = skipped_versions(targets, head.version, oldest)
    versions = [
        TableVersion(
            info=infos[new.version],
            since=old.version,
            change=change,
            undone_by=skipped.get(new.version),
            returns_to=targets.get(new.version),
        )
        for (old, new), change in zip(found, changes, strict=True)
        if new.version in infos
    ]
    return TableHistory(versions=tuple(versions), looked_back_to=oldest)


def _readable_before(lake: Lakehouse, head: Snapshot, look_back: int) -> Iterator[Snapshot]:
    for version in range(head.version - 1, max(-1, head.version - 1 - look_back), -1):
        try:
            yield lake.snapshot(version, latest=head)
        except (VersionExpiredError, VersionNotFoundError):
            continue  # what it did shows in the next one that can be read


def _targets(
    files: LakehouseFiles, changed: Sequence[Snapshot], entries: Mapping[int, str | None], of: tuple[Snapshot, str, str]
) -> dict[int, int]:
    """Return the versions that brought an earlier state of the table back, with the version that has that state.

    Args:
        files: The files of the lakehouse.
        changed: The versions that changed the table.
        entries: The table's entry at the versions that were compared.
        of: The version whose definition is valid, the namespace, and the table.
    """
    head, namespace, table = of
    key = head.keys.table_key(namespace, table)
    found: dict[int, int] = {}
    for version in changed:
        for to in recorded_targets(snapshot_info(version, head.definition)):
            entry = entries[version.version]
            if (to in entries and entries[to] == entry) or _has_returned(files, key, version, entry, to):
                found[version.version] = to
                break
    return found


def _has_returned(files: LakehouseFiles, key: str, version: Snapshot, entry: str | None, to: int) -> bool:
    """Whether a version has the state that the table had at another one; its claim counts if that one was purged."""
    try:
        target = readable_version(files, to)
        return target is None or is_same_state(key, (target, target.entry(key)), (version, entry))
    except (FileMissingError, CorruptFileError, VersionExpiredError):
        return True


def _entry(snapshot: Snapshot, namespace: str, table: str) -> str | None:
    return snapshot.entry(snapshot.keys.table_key(namespace, table))


def _changes(states: TableStates, steps: Sequence[_Step], namespace: str, table: str) -> Iterator[ChangedObject]:
    """Yield what each step did. Each state of the table is read once: the one before a step ends the step before it.

    A state that cannot be read need not hide the newer ones: verify names its file.
    """
    now = states.of(steps[0][1], namespace, table) if steps else None
    for older, newer in steps:
        was = states.of(older, namespace, table)
        yield changed_table(Change(_kind(older, newer, namespace, table), namespace, table), was, now)
        now = was


def _kind(older: Snapshot, newer: Snapshot, namespace: str, table: str) -> Literal["added", "changed", "removed"]:
    if _entry(older, namespace, table) is None:
        return "added"
    return "removed" if _entry(newer, namespace, table) is None else "changed"
