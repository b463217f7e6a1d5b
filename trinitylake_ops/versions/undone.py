"""Find the versions that were undone by a later rollback of the whole lakehouse or of single tables.

A commit record only claims to be a rollback, so each claim is checked: the tree of the rollback must have the same
entries as the tree of the version that it names. The lineage of a state starts at the latest version. At a rollback,
the lineage continues with the version whose content was restored. Versions that the lineage skips are undone. A
rollback that was itself rolled back therefore undoes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import CorruptFileError, FileMissingError, VersionExpiredError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName, text_array
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

#: The property of a rollback's commit that names the version whose content was restored.
ROLLED_BACK_TO = "to_version"
#: The operations that return objects to an earlier version.
_OPERATIONS = ("rollback", "restore")
_PLAIN_MESSAGE = re.compile(r"to version (\d{1,10})(?:: .*)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
#: Rollbacks by other programs name no target. The target is searched for among this number of earlier versions.
_MAX_SEARCHED = 16
#: The root of a rollback and the root of its target.
_ROOTS_OF_A_ROLLBACK = 2
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class VerifiedRollback:
    """A verified rollback: ``version`` restored ``objects``, or everything if None, to the state of version ``to``."""

    version: int
    to: int
    objects: frozenset[ObjectName] | None = None


@dataclass(frozen=True, slots=True)
class Undone:
    """The undone versions among the newest versions, each with the rollback that undid it.

    ``everything`` applies to the lakehouse as a whole. ``objects`` contains the namespaces and tables that were also
    rolled back separately; ``everything`` applies to all other objects.
    """

    everything: Mapping[int, int] = field(default_factory=dict)
    objects: Mapping[ObjectName, Mapping[int, int]] = field(default_factory=dict)

    def by(self, version: int, chosen: Iterable[ObjectName] = ()) -> int | None:
        """Return the rollback that undid a version, or None.

        Args:
            version: The version.
            chosen: Tables, and namespaces with all their tables, to which the query is limited. If empty, a version
                counts as undone if any of its tables is undone, because a rollback to the version would restore that
                table.
        """
        chosen = tuple(chosen)
        marks = [self.objects.get(name, self.everything).get(version) for name in chosen] or [
            self.everything.get(version)
        ]
        within = {name.namespace for name in chosen if name.table is None}
        alone = (name for name in sorted(self.objects, key=str) if not chosen or name.namespace in within)
        marks += [self.objects[name].get(version) for name in alone]
        return next((mark for mark in marks if mark is not None), None)

    def text(self, version: int) -> str:
        """Return a human-readable mark for a version, such as ``undone by 3``; an empty string if it is not undone."""
        whole = self.everything.get(version)
        alone = [(name, self.objects[name].get(version)) for name in sorted(self.objects, key=str)]
        names = [(name, by) for name, by in alone if by is not None and by != whole]
        parts = [] if whole is None else [f"undone by {whole}"]
        parts += [f"{name} undone by {by}" for name, by in names[:_MAX_NAMED]]
        if len(names) > _MAX_NAMED:
            parts.append(f"{len(names) - _MAX_NAMED:,} more objects undone")
        return ", ".join(parts)


def recorded_targets(info: VersionInfo) -> list[int]:
    """Return the versions to which a commit claims to have rolled back, newest first. The claims are not verified."""
    claims = [(info.operation, info.message, info.properties)]
    claims += [(member.operation, member.message, member.properties) for member in info.transactions]
    if info.rollback_from is not None:
        claims.append((_OPERATIONS[0], info.message, info.properties))
    targets = {rolled_back_to(info.version, *claim[1:]) for claim in claims if claim[0] in _OPERATIONS}
    return sorted((target for target in targets if target is not None), reverse=True)


def rolled_back_to(version: int, message: str | None, properties: object) -> int | None:
    """Return the target version of a rollback, None if its writer recorded no valid target."""
    recorded = properties.get(ROLLED_BACK_TO) if isinstance(properties, Mapping) else None
    if not (isinstance(recorded, str) and _NUMBER.fullmatch(recorded)):
        plain = _PLAIN_MESSAGE.fullmatch(message or "")
        recorded = plain[1] if plain else None
    return int(recorded) if recorded is not None and int(recorded) < version else None


def find_undone(
    files: LakehouseFiles, infos: Sequence[VersionInfo], oldest: int | None = None, *, max_requests: int | None = None
) -> Undone:
    """Return the undone versions among the newest versions.

    For each rollback, its root and the root of its target are read. For a rollback of single objects, the root of the
    previous version and the differing nodes are also read.

    Args:
        files: The files of the lakehouse.
        infos: The newest versions without gaps, newest first, as yielded by :func:`history`.
        oldest: The oldest version to mark; by default the last version in ``infos``.
        max_requests: Maximum number of roots to read. If set, only the newest rollbacks of the whole lakehouse are
            considered, and no node is read.

    Raises:
        StorageError: A root or a node temporarily cannot be read.
    """
    if not infos:
        return Undone()
    is_limited = max_requests is not None
    claims = [info for info in infos if recorded_targets(info) or (info.rollback_from is not None and not is_limited)]
    if max_requests is not None:
        whole = [info for info in claims if info.rollback_from is not None]
        claims = whole[: max_requests // _ROOTS_OF_A_ROLLBACK]

    def verified(info: VersionInfo) -> list[VerifiedRollback]:
        return list(_verified_rollbacks(files, info, reads_nodes=not is_limited))

    rollbacks = [rollback for batch in run_parallel(verified, claims, files.storage.concurrency) for rollback in batch]
    return undone_by_rollbacks(rollbacks, infos[0].version, infos[-1].version if oldest is None else oldest)


def undone_by_rollbacks(rollbacks: Sequence[VerifiedRollback], latest: int, oldest: int) -> Undone:
    """Return the versions since ``oldest`` that verified rollbacks undid, from the lineages that end at ``latest``."""
    names = {name for rollback in rollbacks for name in rollback.objects or ()}
    return Undone(
        skipped_versions(_targets(rollbacks, None), latest, oldest),
        {name: skipped_versions(_targets(rollbacks, name), latest, oldest) for name in names},
    )


def _targets(rollbacks: Sequence[VerifiedRollback], name: ObjectName | None) -> dict[int, int]:
    """Return the newest target of each rollback that affects an object, or everything if the object is None."""
    targets: dict[int, int] = {}
    for rollback in rollbacks:
        if rollback.objects is None or name in rollback.objects:
            targets[rollback.version] = max(rollback.to, targets.get(rollback.version, 0))
    return targets


def skipped_versions(targets: Mapping[int, int], latest: int, oldest: int) -> dict[int, int]:
    """Return the versions that the lineage of ``latest`` skips, each with the rollback that skips it.

    Args:
        targets: The target of each rollback, by its version.
        latest: The version at which the lineage ends.
        oldest: The oldest version to return.
    """
    skipped: dict[int, int] = {}
    version = latest
    while version > oldest:
        to = targets.get(version)
        if to is not None:
            skipped |= dict.fromkeys(range(max(to + 1, oldest), version), version)
        version = version - 1 if to is None else to
    return skipped


def _verified_rollbacks(files: LakehouseFiles, info: VersionInfo, *, reads_nodes: bool) -> Iterator[VerifiedRollback]:
    """Yield the verified rollbacks of a commit that claims to be one.

    If the roots to compare were purged, only the commit's record is left, and it is trusted: a false mark only
    discourages users from a good version, but a missing mark can lead them to a bad one.
    """
    version, claims = info.version, recorded_targets(info)
    is_whole = info.rollback_from is not None
    after = readable_version(files, version)
    if after is None:
        yield from (VerifiedRollback(version, to) for to in claims)
        return
    candidates = range(version - 2, max(-1, version - 2 - _MAX_SEARCHED), -1) if is_whole else ()
    for to in (claims or candidates) if is_whole else ():
        before = readable_version(files, to)
        if before is None and claims:
            yield VerifiedRollback(version, to)
            return
        if before is not None and _is_same_tree(after, before, reads_nodes=reads_nodes and bool(claims)):
            yield VerifiedRollback(version, to)
            return
    if reads_nodes:
        yield from _rolled_back_objects(files, after, claims)


def _rolled_back_objects(files: LakehouseFiles, after: Snapshot, targets: Sequence[int]) -> Iterator[VerifiedRollback]:
    """Yield the objects that a version restored to their state at earlier versions."""
    previous = readable_version(files, after.version - 1)
    for to in targets:
        try:
            objects = None if previous is None else _restored_objects(previous, after, readable_version(files, to))
        except (FileMissingError, CorruptFileError, VersionExpiredError):
            objects = None  # only the commit record is left
        if objects is None or objects:
            yield VerifiedRollback(after.version, to, objects)


def _restored_objects(previous: Snapshot, after: Snapshot, target: Snapshot | None) -> frozenset[ObjectName]:
    """Return the objects that were restored since the previous version to their state in the target, if it exists."""
    nodes = after.files.nodes
    changes = {change.key: change.after for change in diff_trees(nodes, previous.root, after.root)}
    if target is None:
        same = [*changes]
    else:
        entries = target.entries([*changes])
        same = [key for key, entry in changes.items() if is_same_state(key, (target, entries[key]), (after, entry))]
    return frozenset(name for name in map(after.keys.decode, same) if name is not None)


def is_same_state(key: str, before: tuple[Snapshot, str | None], after: tuple[Snapshot, str | None]) -> bool:
    """Return whether an object is in the same state in two versions, or one version has a copy restored from an export.

    Args:
        key: The key of the object.
        before: A version, and its entry for the key.
        after: Another version, and its entry.

    Raises:
        FileMissingError, CorruptFileError: A definition cannot be read.
    """
    (earlier, was), (later, now) = before, after
    if was == now or was is None or now is None:
        return was == now
    if not key.startswith(TABLE_KEY_PREFIX):
        return earlier.namespace_at(was) == later.namespace_at(now)
    return _without_location(earlier.table_at(was)) == _without_location(later.table_at(now))


def _without_location(definition: TableDef) -> TableDef:
    """Return a definition in which the metadata location is replaced by the file name, which contains a UUID."""
    location = definition.format_properties.get(METADATA_LOCATION, "")
    name = {METADATA_LOCATION: location.rpartition("/")[2]}
    return replace(definition, format_properties={**definition.format_properties, **name})


def readable_version(files: LakehouseFiles, version: int) -> Snapshot | None:
    """Return a version, even if it is expired; None if its root was sealed or deleted, or is damaged."""
    try:
        snapshot = Snapshot.of(files, version)
    except (FileMissingError, CorruptFileError):
        return None
    return None if snapshot.root.is_sealed else snapshot


def _is_same_tree(after: Snapshot, before: Snapshot, *, reads_nodes: bool) -> bool:
    """Whether two versions have the same content. Without ``reads_nodes``, only the roots are compared."""
    if _rows(after.root) == _rows(before.root):
        return True
    try:
        return reads_nodes and not diff_trees(after.files.nodes, before.root, after.root)
    except (FileMissingError, CorruptFileError):
        return False


def _rows(root: NodeFile) -> tuple[object, ...]:
    columns = (text_array(column).to_pylist() for column in (root.keys, root.values, root.children))
    return (*columns, root.buffer)
