"""The metadata tables ``versions`` and ``changes``: ranges of versions, a task each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.spark_jobs.metadata.columns import Condition, Row
from trinitylake_ops.spark_jobs.metadata.pinned_snapshot import PinnedSnapshot
from trinitylake_ops.spark_jobs.metadata.wanted import WantedNames, wanted_versions
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.key_ranges import KeyRange, NodesInRange
from trinitylake_ops.versions.changes import Change, change_of
from trinitylake_ops.versions.history import VersionInfo, version_infos
from trinitylake_ops.versions.snapshot import Snapshot

_FEWEST_VERSIONS = 32
_MOST_VERSIONS = 500
_LOOK_BACK = 16


def _shares(versions: Sequence[int], parallelism: int) -> list[Sequence[int]]:
    """Return versions in shares of tasks."""
    size = min(max(-(-len(versions) // parallelism), _FEWEST_VERSIONS), _MOST_VERSIONS)
    return [versions[start : start + size] for start in range(0, len(versions), size)]


@dataclass(frozen=True, slots=True)
class Versions:
    """The log: a row for each of some versions. Their states are as ``latest`` says."""

    latest: PinnedSnapshot
    versions: Sequence[int]
    parallelism: int = 1

    def limited(self, conditions: Sequence[Condition]) -> Versions:
        if not self.versions:
            return self
        return replace(self, versions=wanted_versions(conditions, self.versions[0], self.versions[-1]))

    def partitions(self) -> list[Sequence[int]]:
        return _shares(self.versions, self.parallelism)

    def rows(self, partition: Sequence[int]) -> Iterator[Row]:
        latest = self.latest.open()
        return map(_version_row, version_infos(latest.files, partition, latest))


def _version_row(info: VersionInfo) -> Row:
    return (
        info.version,
        info.created_at,
        info.operation,
        info.message,
        info.commit_id,
        info.run_id,
        info.user,
        info.host,
        info.engine,
        info.state,
        info.rollback_from,
        list(info.counts.items()),
        list(info.properties.items()),
        list(info.members),
        [
            {"id": one.id, "operation": one.operation, "message": one.message, "run_id": one.run_id}
            for one in info.transactions
        ],
        info.cost.get("requests"),
        info.bytes_written,
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of each live version since the live version before it: a row for each object.

    If versions between the two expired, their changes are counted at the later one.
    """

    latest: PinnedSnapshot
    versions: Sequence[int]
    names: WantedNames = field(default_factory=WantedNames)
    parallelism: int = 1

    def limited(self, conditions: Sequence[Condition]) -> Changes:
        names = WantedNames.of(conditions)
        if not self.versions:
            return self
        versions = wanted_versions(conditions, self.versions[0], self.versions[-1])
        return replace(self, versions=versions, names=names)

    def partitions(self) -> list[Sequence[int]]:
        return _shares(self.versions, self.parallelism)

    def rows(self, partition: Sequence[int]) -> Iterator[Row]:
        latest = self.latest.open()
        before: Snapshot | None = None
        sees_all = isinstance(partition, range)
        for info in version_infos(latest.files, partition, latest):
            if info.state != "live":
                continue
            after = _snapshot_at(latest, info.version)
            if before is None or not (sees_all or before.version == info.version - 1):
                before = _live_before(latest, info.version)
            if before is not None:
                for change in _changes(before, after, self.names):
                    yield _change_row(info, before.version, change)
            before = after


def _snapshot_at(latest: Snapshot, version: int) -> Snapshot:
    return latest if version == latest.version else Snapshot.of(latest.files, version)


def _live_before(latest: Snapshot, version: int) -> Snapshot | None:
    """Return the last live version before one, None where there is none."""
    for end in range(version - 1, -1, -_LOOK_BACK):
        infos = version_infos(latest.files, range(end, max(-1, end - _LOOK_BACK), -1), latest)
        found = next((info.version for info in infos if info.state == "live"), None)
        if found is not None:
            return _snapshot_at(latest, found)
    return None


def _changes(before: Snapshot, after: Snapshot, names: WantedNames) -> Iterator[Change]:
    for keys in names.key_ranges(after.keys):
        with before.reading(), after.reading():
            found = _diff(before, after, keys)
        for change in found:
            if names.has(change.namespace, change.table):
                yield change


def _diff(before: Snapshot, after: Snapshot, keys: KeyRange) -> list[Change]:
    nodes = NodesInRange(after.files.nodes, keys)
    changed = diff_trees(nodes, keys.part_of(before.root), keys.part_of(after.root))
    return [change for change in (change_of(after.keys, one) for one in changed) if change is not None]


def _change_row(info: VersionInfo, since: int, change: Change) -> Row:
    return (
        info.version,
        since,
        change.kind,
        change.namespace,
        change.table,
        info.operation,
        info.run_id,
        info.created_at,
    )
