"""Check versions one after another, and each of their trees."""

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

_BATCH = 256

#: A node's depth, and the bounds of the keys below it.
_Place: TypeAlias = tuple[int, str | None, str | None]


class TreeVerifier:
    """Checks the tree of one version after the other."""

    def __init__(self, files: LakehouseFiles, report: Report):
        self._files = files
        self._report = report
        #: The subtree below each known node, None where something is broken.
        self._known: dict[str, _Subtree | None] = {}
        self._unsound: set[str] = set()
        self._parents: dict[str, str] = {}
        self._is_followable = True
        self._counted: set[str] = set()
        #: Whether the tree checked last keeps all invariants.
        self.is_sound = True

    @property
    def nodes(self) -> int:
        """Files read, roots left out."""
        return len(self._counted)

    def reset_broken(self) -> None:
        """Check broken nodes again when they are met again: nodes deleted meanwhile need not exist."""
        self._known = {location: below for location, below in self._known.items() if below is not None}

    def check(self, snapshot: Snapshot, limits: TreeLimits) -> bool:
        """Check all nodes of a version that were not met before. Returns whether its tree can be read.

        A node that is reached twice may be below itself. Such a tree is not followed, and is checked again if a later
        version has parts of it.
        """
        self._is_followable = True
        self._parents = {}
        checked: list[_CheckedNode] = []
        met: set[str] = set()
        level: Iterable[VisitedNode] = [VisitedNode(snapshot.location, snapshot.root, 0, None, None)]
        while level:
            places: dict[str, _Place] = {}
            for visited in level:
                for violation in check_node(visited, limits):
                    self._violation(violation.message, violation.location, snapshot.version)
                places |= self._unknown_below(visited, met, snapshot.version)
                checked.append(_CheckedNode.of(visited))
            level = self._read_level(places, snapshot.version) if places else ()
        for node in reversed(checked):
            self._known[node.location] = self._subtree(node, snapshot.version)
        tree = self._known.pop(snapshot.location)
        if not self._is_followable:
            for node in checked:
                self._known.pop(node.location, None)
        self.is_sound = self._is_followable and tree is not None and tree.is_sound
        return self._is_followable and tree is not None

    def _violation(self, message: str, location: str, version: int) -> None:
        self._report("tree-invariant", message, location, version)
        self._unsound.add(location)

    def _unknown_below(self, parent: VisitedNode, met: set[str], version: int) -> dict[str, _Place]:
        """Return the places of the children of a node that were not met in any version."""
        places: dict[str, _Place] = {}
        bounds = [parent.lower, *parent.node.keys, parent.upper]
        for position, child in enumerate(parent.node.children):
            if child in met:
                self._violation("the node is reached twice in one tree", child, version)
                self._is_followable = False
            met.add(child)
            if child not in self._known:
                self._parents[child] = parent.location
                places[child] = (parent.depth + 1, bounds[position], bounds[position + 1])
            elif not _fits(self._known[child], bounds[position], bounds[position + 1]):
                message = f"its child {child!r} holds keys outside the range that it gives this child"
                self._violation(message, parent.location, version)
        return places

    def _read_level(self, places: Mapping[str, _Place], version: int) -> Iterator[VisitedNode]:
        """Yield the nodes of a level that can be read, holding a batch of them at a time."""
        self._known.update(dict.fromkeys(places))
        locations = list(places)
        for start in range(0, len(locations), _BATCH):
            batch = locations[start : start + _BATCH]
            for location, node in zip(batch, self._files.nodes.load_available(batch), strict=True):
                if isinstance(node, CorruptFileError):
                    self._report("node-corrupt", node.message, location, version)
                elif isinstance(node, StorageError) and is_damaged_pointer(node):
                    message = f"its pointer to {location!r} is damaged: the prefix is not that of the name"
                    self._report("pointer-damaged", message, self._parents[location], version)
                elif isinstance(node, StorageError):
                    self._report("node-missing", f"a node cannot be read: {node.message}", location, version)
                else:
                    self._counted.add(location)
                    yield VisitedNode(location, node, *places[location])

    def _subtree(self, node: _CheckedNode, version: int) -> _Subtree | None:
        below = [self._known.get(child) for child in node.children]
        known = [child for child in below if child is not None]
        if len(known) < len(below):
            return None
        if len({child.height for child in known}) > 1:
            self._violation("leaves below the node are on several levels", node.location, version)
        keys = [node.lowest, node.highest, *(key for child in known for key in (child.lowest, child.highest))]
        own = [key for key in keys if key is not None]
        height = 1 + max((child.height for child in known), default=0)
        is_sound = node.location not in self._unsound and all(child.is_sound for child in known)
        return _Subtree(height, min(own, default=None), max(own, default=None), is_sound)


@dataclass(frozen=True, slots=True)
class _CheckedNode:
    """The part of a node that is kept until those below it are checked: its children and its outermost keys."""

    location: str
    children: tuple[str, ...]
    lowest: str | None
    highest: str | None

    @classmethod
    def of(cls, visited: VisitedNode) -> _CheckedNode:
        keys = [*visited.node.keys, *visited.node.buffer]
        return cls(visited.location, tuple(visited.node.children), min(keys, default=None), max(keys, default=None))


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Levels of a subtree, and its lowest and highest key, messages included. None if it has no key.

    ``is_sound`` says that it keeps all invariants.
    """

    height: int
    lowest: str | None
    highest: str | None
    is_sound: bool


def _fits(subtree: _Subtree | None, lower: str | None, upper: str | None) -> bool:
    """Whether all keys of a subtree lie strictly between the bounds. A broken subtree was reported already."""
    if subtree is None or subtree.lowest is None or subtree.highest is None:
        return True
    return (lower is None or subtree.lowest > lower) and (upper is None or subtree.highest < upper)


class VersionVerifier:
    """Checks versions in their order, and then roots of exports.

    ``lake`` reads through ``known``, and ``plain`` past all known files. ``versions`` counts the live ones, and
    ``done`` is the first unchecked version. ``roots`` are those that can be read. ``damaged`` are the versions that are
    not whole. ``damaged_objects`` are the damaged objects of the last one with a sound tree. ``last_root`` is that of
    the last version that was checked, None if it cannot be read.
    """

    def __init__(
        self, lake: Lakehouse, known: KnownFilesStorage, plain: Storage, tables: TableVerifier, findings: Findings
    ):
        self._lake = lake
        self._known = known
        self._plain = plain
        self._findings = findings
        self.tree = TreeVerifier(lake.files, findings.error)
        self.objects = ObjectVerifier(lake, tables, findings)
        self.versions = 0
        self.done = 0
        self.acknowledged = VersionRanges()
        #: The newest version at which the clock was set back; earlier times are settled.
        self.clock_reset: int | None = None
        self.damaged: list[int] = []
        self.damaged_objects: tuple[ObjectName, ...] = ()
        self.roots: dict[int, SurveyedRoot] = {}
        self.last_root: NodeFile | None = None
        self._now_ms = lake.storage.now_ms()
        self._settings: dict[str, object] = {}

    def check(self, latest: int, purged: VersionRanges, batch: int, progress: Callable[[int, int], None]) -> None:
        """Check all versions up to the latest, reading so many roots at once. Versions in ``purged`` must be sealed."""
        before_ms = -1
        for start in range(0, latest + 1, batch):
            versions = range(start, min(start + batch, latest + 1))
            contents = self._lake.storage.read_available([self._lake.files.roots.path(version) for version in versions])
            for version, data in zip(versions, contents, strict=True):
                self.last_root = root = self._decoded_root(version, data)
                if root is not None:
                    before_ms = self._check_root(version, root, before_ms, purged, latest)
                else:
                    self.damaged.append(version)
                self.done = version + 1
                progress(version + 1, latest + 1)

    def records(self) -> tuple[VersionRecord, ...]:
        """Return the records of the roots of all versions that were looked at, ascending."""
        unreadable = {version: VersionRecord(version=version, is_readable=False) for version in range(self.done)}
        return tuple((unreadable | {version: root.record for version, root in self.roots.items()}).values())

    def _decoded_root(self, version: int, data: bytes | StorageError) -> NodeFile | None:
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
        """Check one version. Returns its time."""
        path = self._lake.files.roots.path(version)
        self._check_chain(version, root, before_ms)
        if root.is_sealed:
            self._known.accept(path)
            if version == latest and self._is_still_latest(version):
                self.damaged.append(version)
                message = "the root of the latest version is sealed, though only versions before it are purged"
                self._findings.error("latest-sealed", message, path, version)
        elif version in purged:
            message = "a live root stands where the version was purged; programs that know of no expiry would open it"
            self._findings.error("zombie-root", message, path, version)
        else:
            self.versions += 1
            snapshot = Snapshot(self._lake.files, version, path, root)
            self.damaged_objects = ()
            with self._unless_purged(snapshot):
                is_whole = self.check_content(snapshot)
            # This is asked again, as a fault may have been found with an earlier version, and forgotten with it.
            if not is_whole and not is_sealed_root(self._plain, path):
                self.damaged.append(version)
                self.damaged_objects = self.objects.damaged_names(snapshot) if self.tree.is_sound else ()
        try:
            self.roots[version] = SurveyedRoot.of(version, root, path, located(self._lake.root))
        except TrinityLakeError as error:  # reported with the content
            is_past = root.is_sealed and version in purged  # readers only see that it is sealed
            (self._findings.past if is_past else self._findings.error)("root-corrupt", error.message, path, version)
        return root.created_at_ms

    def _is_still_latest(self, version: int) -> bool:
        """Whether no version was committed since it was found. Otherwise it may have been purged since."""
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
            # This is reported once: several versions of a writer whose clock was wrong may follow each other.
            message = f"created at {utc_datetime(root.created_at_ms):%Y-%m-%d %H:%M:%S} UTC, which is still to come"
            is_settled = root.is_sealed or (self.clock_reset is not None and version < self.clock_reset)
            repair = None if is_settled else "find the clock that is wrong; the next commit sets the time right"
            report = self._findings.past_once if is_settled else self._findings.warn_once
            report("time-in-future", message, path, version, repair)

    @contextmanager
    def _unless_purged(self, snapshot: Snapshot) -> Iterator[None]:
        """Forget findings of the block if the version was purged meanwhile, as its files may be gone."""
        with self._findings.unless(lambda: is_sealed_root(self._plain, snapshot.location)) as has_forgotten:
            yield
        if has_forgotten():
            self.tree.reset_broken()

    def check_content(self, snapshot: Snapshot) -> bool:
        """Check the files that a root reaches. Returns whether all of it is whole."""
        try:
            limits = snapshot.limits
        except TrinityLakeError as error:
            path = error.path or snapshot.location
            self._findings.error("definition-unreadable", error.message, path, snapshot.version)
            return False
        kind = named_kind(snapshot.definition_location)
        if kind not in (None, "lakehouse"):
            message = f"lakehouse_def of the root points to the definition of a {kind}"
            self._findings.error("definition-unreadable", message, snapshot.definition_location, snapshot.version)
            return False
        self.objects.count_lakehouse_def(snapshot.definition_location)
        has_settings = self._check_settings(snapshot)
        if not self.tree.check(snapshot, limits):
            return False
        is_sound = self.tree.is_sound
        try:
            return self.objects.check(snapshot) and is_sound and has_settings
        except CorruptFileError as error:  # parts that are sound each for itself share a node
            self._findings.error("tree-invariant", error.message, error.path, snapshot.version)
            self.tree.is_sound = False
            return False

    def _check_settings(self, snapshot: Snapshot) -> bool:
        """Whether settings that are fixed at creation are those of the oldest version."""
        settings = {name: getattr(snapshot.definition, name) for name in IMMUTABLE_SETTINGS}
        self._settings = self._settings or settings
        changed = [name for name, value in settings.items() if value != self._settings[name]]
        if changed:
            message = f"{', '.join(changed)} of the lakehouse changed, which is fixed at creation"
            self._findings.error("definition-changed", message, snapshot.definition_location, snapshot.version)
        return not changed
