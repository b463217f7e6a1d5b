"""Check one version after another, with the tree of each version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from trinitylake_ops.errors import CorruptFileError, StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import MAX_VERSION, named_kind
from trinitylake_ops.format.keys import ObjectName, is_clock_reset
from trinitylake_ops.format.limits import IMMUTABLE_SETTINGS
from trinitylake_ops.format.locations import located
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.gc.listing import chain_faults
from trinitylake_ops.operations.gc.survey import SurveyedRoot
from trinitylake_ops.operations.verification.objects import ObjectVerifier
from trinitylake_ops.operations.verification.report import Findings, Report
from trinitylake_ops.operations.verification.storage import KnownFilesStorage
from trinitylake_ops.operations.verification.tables import TableVerifier
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.shape import VisitedNode, check_node, is_damaged_pointer
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot, is_sealed_root, utc_datetime

_BATCH_NODES = 256

#: The depth of a node, and the bounds of the keys below it.
_Position: TypeAlias = tuple[int, str | None, str | None]


class TreeVerifier:
    """Check the tree of one version after another."""

    def __init__(self, files: LakehouseFiles, report: Report):
        self._files = files
        self._report = report
        #: The subtree below each known node; None if it is damaged.
        self._subtrees: dict[str, _Subtree | None] = {}
        self._unsound: set[str] = set()
        self._parents: dict[str, str] = {}
        self._can_follow = True
        self._counted: set[str] = set()
        #: Whether the last checked tree satisfies all invariants.
        self.is_sound = True

    @property
    def nodes(self) -> int:
        """The number of nodes read, excluding roots."""
        return len(self._counted)

    def reset_broken(self) -> None:
        """Check damaged nodes again when a version reaches them, because nodes deleted meanwhile need not exist."""
        self._subtrees = {location: below for location, below in self._subtrees.items() if below is not None}

    def check(self, snapshot: Snapshot, limits: TreeLimits) -> bool:
        """Check all nodes of a version that no earlier version contains. Return whether its tree can be read.

        A node that is reached twice may be its own descendant. Such a tree is not followed, and its nodes are checked
        again if a later version contains them.

        Args:
            snapshot: The version.
            limits: The limits of the version's tree.
        """
        self._can_follow = True
        self._parents = {}
        checked: list[_CheckedNode] = []
        reached: set[str] = set()
        level: Iterable[VisitedNode] = [VisitedNode(snapshot.location, snapshot.root, 0, None, None)]
        while level:
            positions: dict[str, _Position] = {}
            for visited in level:
                for violation in check_node(visited, limits):
                    self._violation(violation.message, violation.location, snapshot.version)
                positions |= self._unknown_below(visited, reached, snapshot.version)
                checked.append(_CheckedNode.of(visited))
            level = self._read_level(positions, snapshot.version) if positions else ()
        for node in reversed(checked):
            self._subtrees[node.location] = self._subtree(node, snapshot.version)
        tree = self._subtrees.pop(snapshot.location)
        if not self._can_follow:
            for node in checked:
                self._subtrees.pop(node.location, None)
        self.is_sound = self._can_follow and tree is not None and tree.is_sound
        return self._can_follow and tree is not None

    def _violation(self, message: str, location: str, version: int) -> None:
        self._report("tree-invariant", message, location, version)
        self._unsound.add(location)

    def _unknown_below(self, parent: VisitedNode, reached: set[str], version: int) -> dict[str, _Position]:
        """Return the positions of the children of a node that no version has reached yet."""
        positions: dict[str, _Position] = {}
        bounds = [parent.lower, *parent.node.keys, parent.upper]
        for index, child in enumerate(parent.node.children):
            if child in reached:
                self._violation("the node is reached twice in one tree", child, version)
                self._can_follow = False
            reached.add(child)
            if child not in self._subtrees:
                self._parents[child] = parent.location
                positions[child] = (parent.depth + 1, bounds[index], bounds[index + 1])
            elif not _fits(self._subtrees[child], bounds[index], bounds[index + 1]):
                message = f"its child {child!r} has keys outside its range"
                self._violation(message, parent.location, version)
        return positions

    def _read_level(self, positions: Mapping[str, _Position], version: int) -> Iterator[VisitedNode]:
        """Yield the nodes of a level that can be read, one batch in memory at a time."""
        self._subtrees.update(dict.fromkeys(positions))
        locations = list(positions)
        for start in range(0, len(locations), _BATCH_NODES):
            batch = locations[start : start + _BATCH_NODES]
            for location, node in zip(batch, self._files.nodes.load_available(batch), strict=True):
                if isinstance(node, CorruptFileError):
                    self._report("node-corrupt", node.message, location, version)
                elif isinstance(node, StorageError) and is_damaged_pointer(node):
                    message = f"its pointer to {location!r} is damaged: the prefix does not match the name"
                    self._report("pointer-damaged", message, self._parents[location], version)
                elif isinstance(node, StorageError):
                    self._report("node-missing", f"a node cannot be read: {node.message}", location, version)
                else:
                    self._counted.add(location)
                    yield VisitedNode(location, node, *positions[location])

    def _subtree(self, node: _CheckedNode, version: int) -> _Subtree | None:
        below = [self._subtrees.get(child) for child in node.children]
        intact = [child for child in below if child is not None]
        if len(intact) < len(below):
            return None
        if len({child.height for child in intact}) > 1:
            self._violation("leaves below the node are on several levels", node.location, version)
        keys = [node.lowest, node.highest, *(key for child in intact for key in (child.lowest, child.highest))]
        bounds = [key for key in keys if key is not None]
        height = 1 + max((child.height for child in intact), default=0)
        is_sound = node.location not in self._unsound and all(child.is_sound for child in intact)
        return _Subtree(height, min(bounds, default=None), max(bounds, default=None), is_sound)


@dataclass(frozen=True, slots=True)
class _CheckedNode:
    """The part of a node that is kept until the nodes below it are checked."""

    location: str
    #: The locations of the child nodes.
    children: tuple[str, ...]
    #: The lowest key of the node.
    lowest: str | None
    #: The highest key of the node.
    highest: str | None

    @classmethod
    def of(cls, visited: VisitedNode) -> _CheckedNode:
        keys = [*visited.node.keys, *visited.node.buffer]
        return cls(visited.location, tuple(visited.node.children), min(keys, default=None), max(keys, default=None))


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A checked subtree."""

    #: The number of levels.
    height: int
    #: The lowest key, including buffered messages; None if there is no key.
    lowest: str | None
    #: The highest key, including buffered messages; None if there is no key.
    highest: str | None
    #: Whether the subtree satisfies all invariants.
    is_sound: bool


def _fits(subtree: _Subtree | None, lower: str | None, upper: str | None) -> bool:
    """Whether all keys of a subtree are strictly between the bounds. Damage in a subtree has already been reported."""
    if subtree is None or subtree.lowest is None or subtree.highest is None:
        return True
    return (lower is None or subtree.lowest > lower) and (upper is None or subtree.highest < upper)


class VersionVerifier:
    """Check all versions in ascending order, then the roots of exports."""

    def __init__(
        self, lake: Lakehouse, known_files: KnownFilesStorage, plain: Storage, tables: TableVerifier, findings: Findings
    ):
        """Prepare to check versions.

        Args:
            lake: The lakehouse, which reads through ``known_files``.
            known_files: Serves files that have already been read.
            plain: The storage without known files.
            tables: Checks tables.
            findings: Receives the findings.
        """
        self._lake = lake
        self._known_files = known_files
        self._plain = plain
        self._findings = findings
        self.tree = TreeVerifier(lake.files, findings.error)
        self.objects = ObjectVerifier(lake, tables, findings)
        #: The number of live versions.
        self.versions = 0
        #: The first unchecked version.
        self.done = 0
        self.acknowledged = VersionRanges()
        #: The newest version at which the clock was set back. Earlier times are settled.
        self.clock_reset: int | None = None
        #: The damaged versions.
        self.damaged: list[int] = []
        #: The damaged objects of the last version with a sound tree.
        self.damaged_objects: tuple[ObjectName, ...] = ()
        #: The roots that can be read, by version.
        self.roots: dict[int, SurveyedRoot] = {}
        #: The root of the last checked version; None if it cannot be read.
        self.last_root: NodeFile | None = None
        self._now_ms = lake.storage.now_ms()
        self._settings: dict[str, object] = {}

    def check(self, latest: int, purged: VersionRanges, batch: int, progress: Callable[[int, int], None]) -> None:
        """Check all versions up to the latest.

        Args:
            latest: The latest version.
            purged: The purged versions, whose roots must be sealed.
            batch: The number of roots to read at once.
            progress: Called with the number of checked versions and their total.
        """
        before_ms = -1
        for start in range(0, latest + 1, batch):
            versions = range(start, min(start + batch, latest + 1))
            contents = self._lake.storage.read_available([self._lake.files.roots.path(version) for version in versions])
            for version, data in zip(versions, contents, strict=True):
                self.last_root = root = self._decode_root(version, data)
                if root is not None:
                    before_ms = self._check_root(version, root, before_ms, purged, latest)
                else:
                    self.damaged.append(version)
                self.done = version + 1
                progress(version + 1, latest + 1)

    def records(self) -> tuple[VersionRecord, ...]:
        """Return the records of the roots of all checked versions, in ascending order."""
        unreadable = {version: VersionRecord(version=version, is_readable=False) for version in range(self.done)}
        return tuple((unreadable | {version: root.record for version, root in self.roots.items()}).values())

    def _decode_root(self, version: int, data: bytes | StorageError) -> NodeFile | None:
        path = self._lake.files.roots.path(version)
        if isinstance(data, StorageError) and not isinstance(data, CorruptFileError):
            message = f"the root of version {version} cannot be read: {data.message}"
            self._findings.error("root-missing", message, path, version)
            return None
        try:
            if isinstance(data, CorruptFileError):
                raise data
            return decode_node(data, path)
        except CorruptFileError as error:
            self._findings.error("root-corrupt", error.message, path, version)
            return None

    def _check_root(self, version: int, root: NodeFile, before_ms: int, purged: VersionRanges, latest: int) -> int:
        """Check one version. Return its time."""
        path = self._lake.files.roots.path(version)
        self._check_chain(version, root, before_ms)
        if root.is_sealed:
            self._known_files.accept(path)
            if version == latest and self._is_still_latest(version):
                self.damaged.append(version)
                message = "the root of the latest version is sealed, although only older versions can be purged"
                self._findings.error("latest-sealed", message, path, version)
        elif version in purged:
            message = "a purged version has a live root, which programs without support for expiration would open"
            self._findings.error("zombie-root", message, path, version)
        else:
            self.versions += 1
            snapshot = Snapshot(self._lake.files, version, path, root)
            self.damaged_objects = ()
            with self._unless_purged(snapshot):
                is_intact = self.check_content(snapshot)
            # If an earlier version had the fault, the version may have been purged although no finding was discarded.
            if not is_intact and not is_sealed_root(self._plain, path):
                self.damaged.append(version)
                self.damaged_objects = self.objects.damaged_names(snapshot) if self.tree.is_sound else ()
        try:
            self.roots[version] = SurveyedRoot.of(version, root, path, located(self._lake.root))
        except TrinityLakeError as error:  # reported with the content
            is_past = root.is_sealed and version in purged  # the entries of a sealed root are not read
            (self._findings.past if is_past else self._findings.error)("root-corrupt", error.message, path, version)
        return root.created_at_ms

    def _is_still_latest(self, version: int) -> bool:
        """Whether no version has been committed since the latest was found. Otherwise, it may have been purged."""
        return version == MAX_VERSION or not self._lake.storage.exists(self._lake.files.roots.path(version + 1))

    def _check_chain(self, version: int, root: NodeFile, before_ms: int) -> None:
        path = self._lake.files.roots.path(version)
        is_past = root.is_sealed or version in self.acknowledged
        for code, message in chain_faults(self._lake.files.roots, version, root, before_ms):
            (self._findings.past if is_past else self._findings.error)(code, message, path, version)
        if root.created_at_ms <= before_ms and is_clock_reset(root.system, version):
            message = (
                f"the clock was set back: created at {utc_datetime(root.created_at_ms):%Y-%m-%d %H:%M:%S} UTC, its"
                f" predecessor at {utc_datetime(before_ms):%Y-%m-%d %H:%M:%S} UTC"
            )
            self._findings.past("clock-set-back", message, path, version)
        if root.created_at_ms > self._now_ms + CLOCK_MARGIN_MS:
            # Reported only once, because a writer with a wrong clock can have committed several versions.
            message = f"created at {utc_datetime(root.created_at_ms):%Y-%m-%d %H:%M:%S} UTC, which is in the future"
            is_settled = root.is_sealed or (self.clock_reset is not None and version < self.clock_reset)
            fix = None if is_settled else "find the clock that is wrong; the next commit resets the time"
            report = self._findings.past_once if is_settled else self._findings.warn_once
            report("time-in-future", message, path, version, fix)

    @contextmanager
    def _unless_purged(self, snapshot: Snapshot) -> Iterator[None]:
        """Discard findings from the block if the version has been purged, because its files may have been deleted."""
        with self._findings.unless(lambda: is_sealed_root(self._plain, snapshot.location)) as are_discarded:
            yield
        if are_discarded():
            self.tree.reset_broken()

    def check_content(self, snapshot: Snapshot) -> bool:
        """Check the files that a root reaches. Return whether all of them are intact."""
        try:
            limits = snapshot.limits
        except TrinityLakeError as error:
            path = error.path or snapshot.location
            self._findings.error("definition-unreadable", error.message, path, snapshot.version)
            return False
        kind = named_kind(snapshot.definition_location)
        if kind not in (None, "lakehouse"):
            message = f"lakehouse_def of the root refers to the definition of a {kind}"
            self._findings.error("definition-unreadable", message, snapshot.definition_location, snapshot.version)
            return False
        self.objects.count_lakehouse_def(snapshot.definition_location)
        has_settings = self._check_settings(snapshot)
        if not self.tree.check(snapshot, limits):
            return False
        is_sound = self.tree.is_sound
        try:
            return self.objects.check(snapshot) and is_sound and has_settings
        except CorruptFileError as error:  # subtrees that are each sound share a node
            self._findings.error("tree-invariant", error.message, error.path, snapshot.version)
            self.tree.is_sound = False
            return False

    def _check_settings(self, snapshot: Snapshot) -> bool:
        """Whether settings that are fixed at creation are the same as in the oldest version."""
        settings = {name: getattr(snapshot.definition, name) for name in IMMUTABLE_SETTINGS}
        self._settings = self._settings or settings
        changed = [name for name, value in settings.items() if value != self._settings[name]]
        if changed:
            message = f"{', '.join(changed)} changed, although it is fixed when a lakehouse is created"
            self._findings.error("definition-changed", message, snapshot.definition_location, snapshot.version)
        return not changed
