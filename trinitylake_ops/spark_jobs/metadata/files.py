"""The metadata table ``files``: every file that a version reaches, ranges of keys a task each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import root_of
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.spark_jobs.metadata.columns import Condition, Row
from trinitylake_ops.spark_jobs.metadata.objects import shared_ranges
from trinitylake_ops.spark_jobs.metadata.pinned_snapshot import PinnedSnapshot
from trinitylake_ops.spark_jobs.metadata.wanted import Wanted, WantedNames
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.files.reach import FileKind, files_of
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tree.key_ranges import KeyRange, NodesInRange
from trinitylake_ops.tree.walk import VisitedNode, walk
from trinitylake_ops.versions.snapshot import Snapshot

NODE = "node"
DEFINITION = "definition"
LAKEHOUSE_DEFINITION = "lakehouse definition"

_BATCH = 128


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a version reaches (``docs/protocol.md``), also those of tables of other types.

    Definitions that newer messages of the tree shadow are among them. A file that two tables share occurs there once
    for each.
    """

    snapshot: PinnedSnapshot
    names: WantedNames = field(default_factory=WantedNames)
    kinds: Wanted = field(default_factory=Wanted)

    def limited(self, conditions: Sequence[Condition]) -> Files:
        return replace(self, names=WantedNames.of(conditions), kinds=Wanted.of(conditions, "kind"))

    def partitions(self) -> list[tuple[KeyRange, ...]]:
        snapshot = self.snapshot.open()
        # A node belongs to no namespace. The range without bounds has all of them.
        ranges = [KeyRange()] if self._wants_nodes else self.names.key_ranges(snapshot.keys)
        return shared_ranges(snapshot, ranges)

    @property
    def _wants_nodes(self) -> bool:
        is_unnamed = self.names.namespaces.has_null and self.names.tables.has_null
        return is_unnamed and (NODE in self.kinds or LAKEHOUSE_DEFINITION in self.kinds)

    def rows(self, partition: tuple[KeyRange, ...]) -> Iterator[Row]:
        snapshot = self.snapshot.open()
        names = snapshot.files.nodes.elsewhere.names
        io = StorageFileIO.on(snapshot.files.storage, self.snapshot.storage_options, read_only=True, names=names)
        for keys in partition:
            # All definitions of an object are read together, as shadowed ones share files with the others.
            locations: dict[ObjectName, list[str]] = {}
            nodes = NodesInRange(snapshot.files.nodes, keys)
            with snapshot.reading():
                for visited in walk(nodes, keys.part_of(snapshot.root), snapshot.location):
                    if self._wants_nodes and _is_of(visited, keys):
                        yield from _node_rows(snapshot, visited, io)
                    for name, location in self._definitions_in(snapshot, visited):
                        locations.setdefault(name, []).append(location)
                yield from self._object_rows(list(locations.items()), io)

    def _definitions_in(self, snapshot: Snapshot, visited: VisitedNode) -> Iterator[tuple[ObjectName, str]]:
        """Yield the entries to which a node maps keys."""
        node = visited.node
        for key, location in (*zip(node.keys, node.values, strict=True), *node.buffer.items()):
            name = snapshot.keys.decode(key, visited.location)
            if name is not None and location is not None and self.names.has(name.namespace, name.table):
                yield name, location

    def _object_rows(self, found: Sequence[tuple[ObjectName, list[str]]], io: StorageFileIO) -> Iterator[Row]:
        wants_table_files = any(kind.value in self.kinds for kind in FileKind)
        if not (wants_table_files or DEFINITION in self.kinds):
            return

        def rows_of(one: tuple[ObjectName, list[str]]) -> list[Row]:
            name, locations = one
            files: dict[str, tuple[str, int | None]] = {}
            for location in locations:
                data = io.read_whole(location)
                files[to_location(io.root, location)] = (DEFINITION, len(data))
                if name.table is not None and wants_table_files:
                    files.update(_table_files(_table_definition(data, location), io))
            return [(path, kind, size, name.namespace, name.table) for path, (kind, size) in files.items()]

        for start in range(0, len(found), _BATCH):
            for rows in run_parallel(rows_of, found[start : start + _BATCH], io.storage.concurrency):
                yield from rows


def _is_of(visited: VisitedNode, keys: KeyRange) -> bool:
    """Whether a node belongs to this range: the one with the least key that can stand below it."""
    return visited.lower is not None or keys.lower is None


def _node_rows(snapshot: Snapshot, visited: VisitedNode, io: StorageFileIO) -> Iterator[Row]:
    size_bytes = visited.node.file_size_bytes or io.size_bytes(visited.location)
    yield to_location(io.root, visited.location), NODE, size_bytes, None, None
    if visited.location == snapshot.location:
        location = snapshot.definition_location
        yield to_location(io.root, location), LAKEHOUSE_DEFINITION, io.size_bytes(location), None, None


def _table_definition(data: bytes, location: str) -> TableDef:
    """Return a definition in the form in which the lakehouse that points to it has to read it."""
    definition = TableDef.from_bytes(data, location)
    root = root_of(location) if is_uri(location) else None
    return definition if root is None else definition.rebased(root)


def _table_files(definition: TableDef, io: StorageFileIO) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Yield the path of each file of a table with its kind and size.

    Missing files of somebody else's table are left out. Its metadata file has no size then.
    """
    metadata = definition.format_properties.get(METADATA_LOCATION)
    if not (definition.is_iceberg and metadata):
        return
    location = to_location(io.root, metadata)
    if not definition.is_managed and io.size_bytes(location) is None:
        yield location, (FileKind.METADATA.value, None)
        return
    for file in files_of(definition, io, skips_missing=not definition.is_managed):
        if file.live:
            size_bytes = io.size_bytes(file.location) if file.size_bytes is None else file.size_bytes
            yield file.location, (file.kind.value, size_bytes)
