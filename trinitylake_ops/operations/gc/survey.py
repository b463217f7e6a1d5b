"""Reads all roots of a lakehouse in one pass. Every deletion starts with this survey.

The roots show which versions exist, when each was created and superseded, and which are sealed. They also show whether
another program restored an older lakehouse definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from trinitylake_ops.errors import CorruptFileError, FileMissingError, MaintenanceBlockedError, VersionNotFoundError
from trinitylake_ops.format.definitions import (
    ExpirationBatch,
    ExpirationState,
    ExportLevel,
    ExportRecord,
    ExportState,
    LakehouseDef,
)
from trinitylake_ops.format.file_names import ROOT_PREFIX, parse_root_path, root_naming
from trinitylake_ops.format.keys import LAKEHOUSE_DEF, TABLE_KEY_PREFIX, clock_reset
from trinitylake_ops.format.locations import located, to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.retention import RetentionPolicy, Verdict, VersionAge, judge
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.root_files import one_naming
from trinitylake_ops.versions.roots import Roots, read_roots, versions_beyond_gap
from trinitylake_ops.versions.snapshot import Snapshot

RECONCILE = "reconcile"
_MAX_PROBES = 10

T = TypeVar("T")

#: Called with the unit that is counted, the number done, and the total.
Progress = Callable[[str, int, int], None]


def no_progress(_what: str, _done: int, _all: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Pointers:
    """The locations in one node: its child nodes, and the definitions in sections 2 and 3, including shadowed ones.

    Locations are relative paths, or URIs of external files.
    """

    nodes: tuple[str, ...]
    tables: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, node: NodeFile, place: Callable[[str], str]) -> Pointers:
        """Return the pointers of a node.

        Args:
            node: The node.
            place: Converts names in the node to locations.

        Raises:
            InvalidLocationError: A name is not a valid location.
        """
        tables: list[str] = []
        others: list[str] = []
        for keys, locations in ((node.keys, node.values), (node.buffer, node.buffer.values())):
            for key, location in zip(keys, locations, strict=True):
                if location is not None:
                    (tables if key.startswith(TABLE_KEY_PREFIX) else others).append(place(location))
        return cls(tuple(map(place, node.children)), tuple(tables), tuple(others))


@dataclass(frozen=True, slots=True)
class SurveyedRoot:
    """A root: its pointers, and its record of the version."""

    version: int
    created_at_ms: int
    lakehouse_def: str
    pointers: Pointers
    record: VersionRecord

    @property
    def commit_id(self) -> str | None:
        """The id of the commit; None if another program wrote the root."""
        return self.record.commit_id

    @property
    def operation(self) -> str | None:
        """The operation that committed the version, if it was recorded."""
        return self.record.operation

    @property
    def is_sealed(self) -> bool:
        """Whether a purge replaced the root with a sealed root."""
        return self.record.is_sealed

    @classmethod
    def of(cls, version: int, root: NodeFile, path: str, place: Callable[[str], str]) -> SurveyedRoot:
        """Read a root.

        Args:
            version: The number of the version.
            root: The decoded root.
            path: The path of the root, for errors.
            place: Converts names in the root to locations.

        Raises:
            CorruptFileError: The root does not refer to a lakehouse definition.
        """
        definition = root.system.get(LAKEHOUSE_DEF)
        if definition is None and not root.is_sealed:
            raise CorruptFileError("the root names no lakehouse definition", path=path, version=version)
        return cls(
            version,
            root.created_at_ms,
            "" if definition is None else place(definition),
            Pointers.of(root, place),
            VersionRecord.of(version, root.system),
        )


@dataclass(frozen=True)
class Survey:
    """The versions up to ``base``, according to the lakehouse definition of ``base``."""

    lake: Lakehouse
    base: Snapshot
    #: All versions except versions that were purged, or deleted by other programs.
    roots: Mapping[int, SurveyedRoot]
    #: When each root file was last written, including purged versions, in milliseconds by the storage's clock.
    written_ms: Mapping[int, int]
    #: Reads additional files.
    executor: Executor = LOCAL
    _interned: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def definition(self) -> LakehouseDef:
        """The lakehouse definition of ``base``."""
        return self.base.definition

    def live(self) -> list[int]:
        """Return the versions that are neither expired nor sealed, in ascending order."""
        expired = expired_versions(self.definition)
        return [
            version for version, root in sorted(self.roots.items()) if not root.is_sealed and version not in expired
        ]

    def expired(self, state: ExpirationState) -> list[int]:
        """Return the unsealed versions in batches of a state, in ascending order."""
        listed = expired_versions(self.definition, (state,))
        return [version for version, root in sorted(self.roots.items()) if version in listed and not root.is_sealed]

    def ages(self, now_ms: int) -> list[VersionAge]:
        """Return the facts that decide whether each live version is kept.

        ``now_ms`` is the storage's time, in milliseconds since the epoch.
        """
        pins = pinned_versions(self, now_ms)
        ages = [
            VersionAge(
                version=version,
                created_at_ms=self.roots[version].created_at_ms,
                superseded_at_ms=self._superseded_at_ms(version),
                pins=tuple(pins.get(version, ())),
            )
            for version in self.live()
        ]
        reset = clock_reset(self.base.root.system, self.base.version)
        if reset is None or reset not in self.roots:
            return ages
        reset_ms = self._committed_at_ms(reset)
        return [age.settled(reset_ms, now_ms) if age.version < reset else age for age in ages]

    def records(self) -> tuple[VersionRecord, ...]:
        """Return the records of all listed versions, in ascending order. Records of unread roots are empty."""
        unread = (VersionRecord(version=version, is_sealed=True) for version in self.written_ms.keys() - self.roots)
        read = (root.record for root in self.roots.values())
        return tuple(sorted((*read, *unread), key=lambda record: record.version))

    def _superseded_at_ms(self, version: int) -> int | None:
        """Return when the next version was committed, but not before this version was created; None for the latest
        version.

        After a clock reset, the time of the next version may be earlier than the time of this version.
        """
        if version == self.base.version:
            return None
        return max(self._committed_at_ms(version + 1), self.roots[version].created_at_ms)

    def _committed_at_ms(self, version: int) -> int:
        """Return the later of the time in a version's root and the time when its file was written."""
        root, written_ms = self.roots.get(version), self.written_ms.get(version, 0)
        if root is None:
            return written_ms
        return root.created_at_ms if root.is_sealed else max(root.created_at_ms, written_ms)

    def verdicts(self, policy: RetentionPolicy, now_ms: int) -> tuple[Verdict, ...]:
        """Apply a policy to each live version.

        Args:
            policy: The policy.
            now_ms: The storage's time, in milliseconds since the epoch.

        Raises:
            InvalidInputError: The policy is empty.
        """
        return judge(self.ages(now_ms), policy, now_ms)

    def foreign_steps(self) -> list[int]:
        """Return the versions in which another program replaced the lakehouse definition, since the last reconcile.

        Another program does not know exports and expirations, and may have restored a definition without them. A root
        is foreign if it has no ``commit_id``, or has the ``commit_id`` of an earlier version. Steps before a known
        expiration are settled, because nothing expires before a reconcile; the reconcile may have been purged since.
        """
        settled = max((batch.expired_at_version for batch in self.definition.expirations), default=-1)
        commit_ids: set[str] = set()
        steps: list[int] = []
        for version, root in sorted(self.roots.items()):
            is_ours = root.commit_id is not None and root.commit_id not in commit_ids
            commit_ids.add(root.commit_id or "")
            before = self.roots.get(version - 1)
            if is_ours and root.operation == RECONCILE:
                steps.clear()
            elif version < settled:
                continue
            elif not is_ours and before is not None and before.lakehouse_def != root.lakehouse_def:
                steps += [version] if before.lakehouse_def and root.lakehouse_def else []  # not sealed
        return steps

    def check_reconciled(self) -> None:
        """Raise MaintenanceBlockedError if another program's change to the definition requires a reconcile."""
        if steps := self.foreign_steps():
            raise MaintenanceBlockedError(
                f"version {steps[0]} was written by another program with another lakehouse definition, which may lack"
                " exports and expirations; nothing is deleted before you run: trinitylake reconcile",
                version=steps[0],
            )

    def extended(self, latest: Snapshot) -> Survey:
        """Return the survey up to a later version. Reads only newer roots."""
        return _survey(self.lake, latest, dict(self.roots), self._interned, executor=self.executor)


def on_latest(lake: Lakehouse, work: Callable[[Snapshot], T]) -> T:
    """Work on the latest version, and repeat the work if a file was deleted and the version is no longer the latest.

    Files that other operations have deleted meanwhile were not needed by the versions known to these operations.

    Args:
        lake: The lakehouse.
        work: Works on a version. Its errors are raised.

    Raises:
        FileMissingError: A file that the latest version needs is missing.
    """
    base = lake.snapshot()
    for _ in range(_MAX_PROBES):
        try:
            return work(base)
        except FileMissingError:
            latest = lake.snapshot()
            if latest.version == base.version:
                raise
            base = latest
    return work(base)


def survey_versions(
    lake: Lakehouse, base: Snapshot | None = None, progress: Progress = no_progress, *, executor: Executor = LOCAL
) -> Survey:
    """Read all unpurged roots up to ``base``.

    Args:
        lake: The lakehouse.
        base: The last version to read; by default the latest.
        progress: Called with the unit that is counted, the number done, and the total.
        executor: Reads the roots.

    Raises:
        CorruptFileError: A root is missing or damaged, or roots have different naming schemes.
        LakehouseNotFoundError: There is no lakehouse at the root.
        StorageError: A storage request failed.
    """
    return _survey(lake, base or lake.snapshot(), {}, {}, progress, executor=executor)


def _survey(
    lake: Lakehouse,
    base: Snapshot,
    roots: dict[int, SurveyedRoot],
    interned: dict[str, str],
    progress: Progress = no_progress,
    *,
    executor: Executor,
) -> Survey:
    written_ms = _listed_roots(lake, base)
    purged = expired_versions(base.definition, (ExpirationState.PURGED,))
    # Purged versions are read only if they follow an unpurged one, because they show when it was superseded.
    needed = (version for version in written_ms if version not in purged or version - 1 not in purged)
    wanted = [version for version in needed if version not in roots]
    read = executor.map(RootWalk(lake.files.roots), wanted)
    for done, (version, root) in enumerate(zip(wanted, read, strict=True), 1):
        roots[version] = _with_shared_text(root, interned)
        progress("versions", done, len(wanted))
    return Survey(lake, base, roots, written_ms, executor, interned)


@dataclass(frozen=True, slots=True)
class RootWalk:
    """Work that reads the roots of versions."""

    weight: ClassVar[Weight] = Weight.ROOT

    roots: Roots

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.roots.storage,)

    def __call__(self, versions: Sequence[int]) -> list[SurveyedRoot]:
        """Return the roots. Raises StorageError, and CorruptFileError for a missing or damaged root."""
        surveyed, place = [], located(self.roots.storage.root)
        for version, data in read_roots(self.roots, versions, len(versions)):
            path = self.roots.path(version)
            if data is None:
                raise CorruptFileError(f"the root of version {version} was deleted by another program", path=path)
            surveyed.append(SurveyedRoot.of(version, decode_node(data, path), path, place))
        return surveyed


def _with_shared_text(root: SurveyedRoot, interned: dict[str, str]) -> SurveyedRoot:
    """Return a root that shares location strings with other roots, because successive roots differ in few locations."""

    def shared(locations: Iterable[str]) -> tuple[str, ...]:
        return tuple(interned.setdefault(location, location) for location in locations)

    pointers = Pointers(shared(root.pointers.nodes), shared(root.pointers.tables), shared(root.pointers.others))
    definition = interned.setdefault(root.lakehouse_def, root.lakehouse_def)
    return replace(root, lakehouse_def=definition, pointers=pointers)


def _listed_roots(lake: Lakehouse, base: Snapshot) -> dict[int, int]:
    """Return when the root of each version up to ``base`` was written, in ascending order of versions.

    The oldest roots may be missing, because another program deleted them. Raises CorruptFileError if a root between
    other roots is missing, because the files that it reaches are unknown.
    """
    infos = {info.path: info for info in lake.storage.list(ROOT_PREFIX) if root_naming(info.path) is not None}
    one_naming(lake.root, infos)
    versions = sorted(_versions(lake, infos, base))
    expected = base.version
    for version, _ in reversed(versions):
        if version != expected:
            break
        expected -= 1
    first = versions[0][0] if versions else base.version
    if expected >= first:
        raise CorruptFileError(
            f"the root of version {expected} is missing, though version {first} exists; restore it first, nothing is"
            " deleted before",
            path=lake.files.roots.path(expected),
            version=expected,
        )
    return {version: info.last_modified_ms for version, info in versions}


def _versions(lake: Lakehouse, infos: Mapping[str, FileInfo], base: Snapshot) -> list[tuple[int, FileInfo]]:
    """Return the versions up to ``base`` with their files. Raises CorruptFileError for a gap above ``base``."""
    roots = {version: info for path, info in infos.items() if (version := parse_root_path(path)) is not None}
    beyond = [version for version in roots if version > base.version]
    if versions_beyond_gap(lake.files.roots, base.version, beyond):  # versions may be committed during the listing
        raise CorruptFileError(
            f"a root between version {base.version} and version {max(beyond)} is missing; restore it first",
            version=max(beyond),
        )
    return [(version, info) for version, info in roots.items() if version <= base.version]


def expired_versions(
    definition: LakehouseDef, states: Collection[ExpirationState] = tuple(ExpirationState)
) -> VersionRanges:
    """Return the versions in batches of certain states. Raises CorruptFileError.

    Args:
        definition: The lakehouse definition.
        states: The states; by default, all states.
    """
    return versions_in(definition.expirations, states)


def versions_in(
    batches: Iterable[ExpirationBatch], states: Collection[ExpirationState] = tuple(ExpirationState)
) -> VersionRanges:
    """Return the versions in the batches that have certain states. Raises CorruptFileError.

    Args:
        batches: The batches.
        states: The states; by default, all states.
    """
    versions = VersionRanges()
    for batch in batches:
        if batch.state in states:
            versions |= batch.ranges()
    return versions


def is_lapsed(record: ExportRecord, now_ms: int) -> bool:
    """Whether the retention of an export has ended. Clones never lapse, because only a drop ends their retention.

    Args:
        record: The record of the export.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    return not record.clone_id and is_past(record, now_ms)


def is_past(record: ExportRecord, now_ms: int) -> bool:
    """Whether the retention period of an export or a clone has ended.

    Args:
        record: The record of the export or clone.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    until_ms = record.retain_until_millis
    return record.state == ExportState.COMPLETE and until_ms is not None and until_ms <= now_ms


def pinned_versions(survey: Survey, now_ms: int) -> dict[int, list[str]]:
    """Return human-readable pins of versions: unfinished exports, and exports that need files of their version.

    Args:
        survey: The survey of all versions.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    pins: dict[int, list[str]] = {}
    definition = survey.definition
    for record in definition.exports:
        needs_source = record.state == ExportState.COPYING or record.level in (ExportLevel.MINIMAL, ExportLevel.PARTIAL)
        if needs_source and not is_lapsed(record, now_ms):
            pins.setdefault(record.version, []).append(_label(record))
    labels = {record.name: _label(record) for record in definition.exports}
    lapsed_names = {record.name for record in definition.exports if is_lapsed(record, now_ms)}
    for name, location in definition.exported_snapshots.items():
        version = _version_at(to_location(survey.lake.root, location))
        label = labels.get(name, f"export {name!r}")
        if version is not None and name not in lapsed_names and label not in pins.get(version, ()):
            pins.setdefault(version, []).append(label)
    return pins


def _label(record: ExportRecord) -> str:
    return f"{'clone' if record.clone_id else 'export'} {record.name!r}"


def _version_at(location: str) -> int | None:
    try:
        return parse_root_path(location)
    except VersionNotFoundError:
        return None
