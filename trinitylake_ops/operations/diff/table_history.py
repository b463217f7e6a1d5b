"""The history of one table: the versions that changed it, and how they changed its rows, files and columns.

Only definitions and Iceberg metadata are read, no manifests and no data files.
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

_Step = tuple[Snapshot, Snapshot]  # a version, and the next newer version with a different state of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVersion:
    """A version that changed a table."""

    info: VersionInfo
    #: The version that this version is compared with: the newest readable version before it.
    since: int
    change: ChangedObject
    #: The later rollback that undid this version for this table, if any.
    undone_by: int | None = None
    #: For a rollback, the version whose table state was restored.
    returns_to: int | None = None

    @property
    def rows_changed(self) -> int | None:
        """The change in the number of rows, or None if one of the states was not counted."""
        before, after = self.change.before, self.change.after
        if before is None or after is None or before.rows is None or after.rows is None:
            return None
        return after.rows - before.rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The column changes, one line each."""
        return () if self.change.delta is None else self.change.delta.schema


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHistory:
    """The versions that changed a table, newest first."""

    versions: tuple[TableVersion, ...]
    #: The oldest version that was compared.
    looked_back_to: int

    @property
    def before(self) -> int | None:
        """The newest version with an earlier table state that no rollback undid, or None if unknown."""
        effective = (entry for entry in self.versions if entry.undone_by is None and entry.returns_to is None)
        newest = next(effective, None)
        return None if newest is None or newest.change.kind == "added" else newest.since


def table_history(
    lake: Lakehouse, namespace: str, table: str, *, head: Snapshot | None = None, most: int = 10, look_back: int = 50
) -> TableHistory:
    """Find the newest versions that changed a table.

    Unreadable versions are skipped; their changes are attributed to the next readable version.

    Args:
        lake: The lakehouse.
        namespace: The namespace.
        table: The name of the table.
        head: The version to start at; by default, the latest version.
        most: The maximum number of versions to find.
        look_back: The maximum number of versions to search.

    Raises:
        InvalidNameError: A name is invalid.
        CorruptFileError: A file is damaged.
        StorageError: A storage request failed.
    """
    head = head or lake.snapshot()
    steps: list[_Step] = []
    newer, oldest = head, head.version
    entries = {head.version: _entry(head, namespace, table)}
    for older in _readable_before(lake, head, look_back):
        entries[older.version] = _entry(older, namespace, table)
        if _entry(older, namespace, table) != _entry(newer, namespace, table):
            steps.append((older, newer))
            if len(steps) == most:
                oldest = older.version
                break
        newer, oldest = older, older.version
    changes = _changes(TableStates(lake), steps, namespace, table)
    infos = {info.version: info for info in version_infos(lake.files, [new.version for _, new in steps], head)}

    targets = _targets(lake.files, [new for _, new in steps], entries, (head, namespace, table))
    skipped = skipped_versions(targets, head.version, oldest)
    versions = [
        TableVersion(
            info=infos[new.version],
            since=old.version,
            change=change,
            undone_by=skipped.get(new.version),
            returns_to=targets.get(new.version),
        )
        for (old, new), change in zip(steps, changes, strict=True)
        if new.version in infos
    ]
    return TableHistory(versions=tuple(versions), looked_back_to=oldest)


def _readable_before(lake: Lakehouse, head: Snapshot, look_back: int) -> Iterator[Snapshot]:
    for version in range(head.version - 1, max(-1, head.version - 1 - look_back), -1):
        try:
            yield lake.snapshot(version, latest=head)
        except (VersionExpiredError, VersionNotFoundError):
            continue  # its changes appear in the next readable version


def _targets(
    files: LakehouseFiles, changed: Sequence[Snapshot], entries: Mapping[int, str | None], of: tuple[Snapshot, str, str]
) -> dict[int, int]:
    """Return the versions that restored an earlier table state, each with the version that had this state.

    Args:
        files: The files of the lakehouse.
        changed: The versions that changed the table.
        entries: The entry of the table in the compared versions.
        of: The version with the current definition, the namespace, and the name of the table.
    """
    head, namespace, table = of
    key = head.keys.table_key(namespace, table)
    targets: dict[int, int] = {}
    for version in changed:
        for to in recorded_targets(snapshot_info(version, head.definition)):
            entry = entries[version.version]
            if (to in entries and entries[to] == entry) or _has_returned(files, key, version, entry, to):
                targets[version.version] = to
                break
    return targets


def _has_returned(files: LakehouseFiles, key: str, version: Snapshot, entry: str | None, to: int) -> bool:
    """Whether a version restored the state of another version. If that was purged, the commit record decides."""
    try:
        target = readable_version(files, to)
        return target is None or is_same_state(key, (target, target.entry(key)), (version, entry))
    except (FileMissingError, CorruptFileError, VersionExpiredError):
        return True


def _entry(snapshot: Snapshot, namespace: str, table: str) -> str | None:
    return snapshot.entry(snapshot.keys.table_key(namespace, table))


def _changes(states: TableStates, steps: Sequence[_Step], namespace: str, table: str) -> Iterator[ChangedObject]:
    """Yield the change in each step. Each table state is read only once, because consecutive steps share a state.

    An unreadable state does not hide newer states. Verify reports the unreadable file.
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
