"""Follow the nodes and definitions of a lakehouse from version to version, reading only what is new.

Each version's tree is compared with the one before it. A file is reached from the version in which the first pointer to
it appears, until the last pointer disappears. Values that newer messages shadow count, because a purge keeps their
files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, StorageError
from trinitylake_ops.format.keys import LAKEHOUSE_DEF, TABLE_KEY_PREFIX
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.operations.space.model import NOT_COUNTED, CatalogFile, CatalogKind, Summary, location_hash
from trinitylake_ops.operations.space.presence import Presence, ended, is_open, started, with_export
from trinitylake_ops.tree.store import MAX_LEVELS, NodeStore, repeated_node_error

_NODES_AT_ONCE = 256


class OutdatedSummaryError(Exception):
    """The summary contradicts the lakehouse, so it must be made from scratch."""


@dataclass(frozen=True, slots=True)
class NodePointers:
    """The locations that a node contains."""

    nodes: tuple[str, ...]
    #: The definitions of tables, with their keys.
    tables: tuple[tuple[str, str], ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, node: NodeFile, place: Callable[[str], str]) -> NodePointers:
        """Return the pointers of a node, and of a root its lakehouse definition.

        Args:
            node: The node.
            place: Converts names in the node to locations.

        Raises:
            InvalidLocationError: A name is not a valid location.
        """
        tables: list[tuple[str, str]] = []
        others: list[str] = []
        for keys, locations in ((node.keys, node.values), (node.buffer, node.buffer.values())):
            for key, location in zip(keys, locations, strict=True):
                if location is None:
                    continue
                if key.startswith(TABLE_KEY_PREFIX):
                    tables.append((key, place(location)))
                else:
                    others.append(place(location))
        definition = node.system.get(LAKEHOUSE_DEF)
        return cls(
            tuple(map(place, node.children)),
            tuple(tables),
            tuple(others) if definition is None else (*others, place(definition)),
        )

    def references(self) -> Counter[tuple[CatalogKind, str]]:
        """Return how often the node names each file."""
        references: Counter[tuple[CatalogKind, str]] = Counter((CatalogKind.NODE, path) for path in self.nodes)
        references.update((CatalogKind.TABLE, location) for _, location in self.tables)
        references.update((CatalogKind.OTHER, location) for location in self.others)
        return references


class CatalogWalk:
    """Updates the catalog files of a summary, version by version.

    Args:
        summary: The summary, which is changed in place.
        nodes: Reads nodes.
        place: Converts names in nodes to locations.
    """

    def __init__(self, summary: Summary, nodes: NodeStore, place: Callable[[str], str]):
        self._summary = summary
        self._nodes = nodes
        self._place = place
        self._pointers: dict[str, NodePointers] = {}
        self._sizes_bytes: dict[str, int] = {}
        #: The presence and the references of touched files before the walk.
        self._before: dict[int, tuple[Presence, int]] = {}
        #: The keys of table definitions that were met, by location.
        self.keys: dict[str, str] = {}
        #: The locations of definitions that are new in the summary.
        self.new_tables: dict[int, str] = {}
        self.new_others: dict[int, str] = {}

    def prefetch(self, roots: Iterable[NodePointers]) -> None:
        """Read the new nodes below several roots together, level by level. Raises StorageError."""
        frontier = [path for root in roots for path in root.nodes]
        for _ in range(MAX_LEVELS):
            unread = [path for path in dict.fromkeys(frontier) if not self._is_reached(path)]
            if not unread:
                return
            frontier = [path for pointers in self._load(unread) for path in pointers.nodes]

    def _is_reached(self, path: str) -> bool:
        file = self._summary.catalog.get(location_hash(path))
        return path in self._pointers or (file is not None and is_open(file.presence))

    def advance(self, version: int, root: NodePointers, previous: int, previous_root: NodePointers | None) -> None:
        """Add the next version.

        Args:
            version: The version.
            root: The pointers of its root.
            previous: The version before it in the summary; -1 if it is the first.
            previous_root: The pointers of the previous version's root; None if it cannot be read. Then the whole tree
                of the version is read.

        Raises:
            OutdatedSummaryError: The summary contradicts the previous version.
            CorruptFileError: A node is damaged, or pointers form a cycle.
            StorageError: A node cannot be read.
        """
        if previous_root is None:
            self._replace(version, root, previous)
            return
        references = root.references()
        references.subtract(previous_root.references())
        self._add({file: count for file, count in references.items() if count > 0}, version)
        self._subtract({file: -count for file, count in references.items() if count < 0}, previous)

    def _add(self, references: Mapping[tuple[CatalogKind, str], int], version: int) -> None:
        for _ in range(MAX_LEVELS):
            new_nodes = []
            for (kind, location), count in references.items():
                file = self._file(kind, location)
                if file.references == 0:
                    file.presence = started(file.presence, version)
                    if kind == CatalogKind.NODE:
                        new_nodes.append(location)
                file.references += count
            if not new_nodes:
                return
            references = self._references_in(new_nodes)
        raise repeated_node_error(next(location for _, location in references))

    def _subtract(self, references: Mapping[tuple[CatalogKind, str], int], last: int) -> None:
        for _ in range(MAX_LEVELS):
            dropped_nodes = []
            for (kind, location), count in references.items():
                file = self._file(kind, location)
                if file.references < count:
                    raise OutdatedSummaryError
                file.references -= count
                if file.references == 0:
                    file.presence = ended(file.presence, last)
                    if kind == CatalogKind.NODE:
                        dropped_nodes.append(location)
            if not dropped_nodes:
                return
            references = self._references_in(dropped_nodes)
            for path in dropped_nodes:
                self._pointers.pop(path, None)
        raise repeated_node_error(next(location for _, location in references))

    def _replace(self, version: int, root: NodePointers, previous: int) -> None:
        """Add a version without a comparison: read its whole tree."""
        counts = self._reached(root)
        reached = {location_hash(location) for _, location in counts}
        for number, file in self._summary.catalog.items():
            if is_open(file.presence) and number not in reached:
                self._touch(number, file)
                file.presence, file.references = ended(file.presence, previous), 0
        for (kind, location), count in counts.items():
            file = self._file(kind, location)
            file.references = count
            if not is_open(file.presence):
                file.presence = started(file.presence, version)

    def add_export(self, number: int, root: NodePointers) -> None:
        """Add the whole tree of an export, which is not that of a version. Raises the errors of :meth:`advance`.

        Args:
            number: The number of the export in presences.
            root: The pointers of its root.
        """
        known_keys = dict(self.keys)
        reached = self._reached(root)
        self.keys.update(known_keys)  # the names of versions take precedence
        for kind, location in reached:
            file = self._file(kind, location)
            file.presence = with_export(file.presence, number)

    def _reached(self, root: NodePointers) -> Counter[tuple[CatalogKind, str]]:
        """Return how often a tree names each file."""
        counts = root.references()
        frontier = list(root.nodes)
        for _ in range(MAX_LEVELS):
            if not frontier:
                return counts
            below = self._references_in(frontier)
            nodes = [location for kind, location in below if kind == CatalogKind.NODE]
            frontier = [location for location in nodes if (CatalogKind.NODE, location) not in counts]
            counts.update(below)
        raise repeated_node_error(frontier[0])

    def _references_in(self, paths: Sequence[str]) -> Counter[tuple[CatalogKind, str]]:
        references: Counter[tuple[CatalogKind, str]] = Counter()
        for pointers in self._load(paths):
            references.update(pointers.references())
        return references

    def _load(self, paths: Sequence[str]) -> Iterator[NodePointers]:
        """Return the pointers of nodes, in any order."""
        unread = [path for path in dict.fromkeys(paths) if path not in self._pointers]
        for start in range(0, len(unread), _NODES_AT_ONCE):
            batch = unread[start : start + _NODES_AT_ONCE]
            for path, node in zip(batch, self._nodes.load_available(batch), strict=True):
                if isinstance(node, StorageError):
                    raise node
                if node.is_sealed:
                    raise CorruptFileError(f"{path!r} is a sealed root, not a node", path=path)
                self._pointers[path] = NodePointers.of(node, self._place)
                self._sizes_bytes[path] = NOT_COUNTED if is_uri(path) else node.file_size_bytes
                file = self._summary.catalog.get(location_hash(path))
                if file is not None:
                    file.size_bytes = self._sizes_bytes[path]
        for path in dict.fromkeys(paths):
            pointers = self._pointers[path]
            self.keys.update((location, key) for key, location in pointers.tables)
            yield pointers

    def note_keys(self, root: NodePointers) -> None:
        """Record the keys of the tables that a root names."""
        self.keys.update((location, key) for key, location in root.tables)

    def finish(self) -> None:
        """Record which files changed. A file that several steps left as it was has not."""
        for number, before in self._before.items():
            file = self._summary.catalog[number]
            if before != (file.presence, file.references):
                self._summary.changed_catalog.add(number)

    def _touch(self, number: int, file: CatalogFile) -> None:
        self._before.setdefault(number, (file.presence, file.references))

    def _file(self, kind: CatalogKind, location: str) -> CatalogFile:
        number = location_hash(location)
        file = self._summary.catalog.get(number)
        if file is None:
            file = self._summary.catalog[number] = CatalogFile(kind, self._sizes_bytes.get(location, 0))
            if kind == CatalogKind.TABLE:
                self.new_tables[number] = location
            elif kind == CatalogKind.OTHER:
                self.new_others[number] = location
        self._touch(number, file)
        return file
