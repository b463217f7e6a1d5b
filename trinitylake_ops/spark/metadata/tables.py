"""The metadata tables: versions, changes, exports, objects and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.format.definitions import METADATA_LOCATION, NamespaceDef, TableDef
from trinitylake_ops.format.file_names import root_of
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.operations.export_records import list_exports
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES, Condition, Row, Wanted, WantedNames, wanted_versions
from trinitylake_ops.spark.metadata.reader import PinnedSnapshot
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.search import KeyRange, NodesInRange, scan_columns, split
from trinitylake_ops.tree.shape import VisitedNode, walk
from trinitylake_ops.versions.history import Change, VersionInfo, change_of, version_infos
from trinitylake_ops.versions.snapshot import Snapshot

_MIN_VERSIONS = 32
_MAX_VERSIONS = 500
_SEARCH_BACK = 16


def _shares(versions: Sequence[int], parallelism: int) -> list[Sequence[int]]:
    """Split versions into one share per task."""
    size = min(max(-(-len(versions) // parallelism), _MIN_VERSIONS), _MAX_VERSIONS)
    return [versions[start : start + size] for start in range(0, len(versions), size)]


@dataclass(frozen=True, slots=True)
class Versions:
    """The log: a row for each version."""

    #: The latest version, which determines the states of all versions.
    latest: PinnedSnapshot
    #: The versions to read.
    versions: Sequence[int]
    #: The number of tasks to aim for.
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
            {"id": member.id, "operation": member.operation, "message": member.message, "run_id": member.run_id}
            for member in info.transactions
        ],
        info.cost.get("requests"),
        info.bytes_written,
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of each live version since the previous live version: a row for each object.

    If versions between the two have expired, their changes are included in the changes of the later version.
    """

    #: The latest version.
    latest: PinnedSnapshot
    #: The versions to read.
    versions: Sequence[int]
    #: The objects to read.
    names: WantedNames = field(default_factory=WantedNames)
    #: The number of tasks to aim for.
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
    """Return the last live version before a version, or None if there is none."""
    for end in range(version - 1, -1, -_SEARCH_BACK):
        infos = version_infos(latest.files, range(end, max(-1, end - _SEARCH_BACK), -1), latest)
        live_version = next((info.version for info in infos if info.state == "live"), None)
        if live_version is not None:
            return _snapshot_at(latest, live_version)
    return None


def _changes(before: Snapshot, after: Snapshot, names: WantedNames) -> Iterator[Change]:
    for keys in names.key_ranges(after.keys):
        with before.reading(), after.reading():
            changes = _diff(before, after, keys)
        for change in changes:
            if names.has(change.namespace, change.table):
                yield change


def _diff(before: Snapshot, after: Snapshot, keys: KeyRange) -> list[Change]:
    nodes = NodesInRange(after.files.nodes, keys)
    changed = diff_trees(nodes, keys.part_of(before.root), keys.part_of(after.root))
    return [change for change in (change_of(after.keys, entry) for entry in changed) if change is not None]


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


@dataclass(frozen=True, slots=True)
class Exports:
    """All exports, complete or not, at the time they are read."""

    latest: PinnedSnapshot

    def limited(self, conditions: Sequence[Condition]) -> Exports:
        return self

    def partitions(self) -> list[None]:
        return [None]

    def rows(self, partition: None) -> Iterator[Row]:
        for info in list_exports(self.latest.lakehouse()):
            row = dataclasses.asdict(info)
            yield tuple(row[column] for column in METADATA_TABLES["exports"])


#: The approximate number of objects in a task's share of a key range.
OBJECTS_PER_RANGE = 5_000

_BATCH = 512
_SMALL_RANGES_PER_TASK = 32
_WITHOUT_DEFINITIONS = frozenset({"kind", "namespace", "table", "definition_location"})


def shared_ranges(snapshot: Snapshot, ranges: Sequence[KeyRange]) -> list[tuple[KeyRange, ...]]:
    """Divide key ranges into one share per task, by splitting large ranges and grouping small ones.

    Args:
        snapshot: The version.
        ranges: The key ranges.
    """
    shares: list[tuple[KeyRange, ...]] = []
    small: list[KeyRange] = []
    for keys in ranges:
        with snapshot.reading():
            parts = split(snapshot.files.nodes, snapshot.root, snapshot.limits.order, keys, OBJECTS_PER_RANGE)
        if len(parts) == 1:
            small += parts
        else:
            shares += [(part,) for part in parts]
    starts = range(0, len(small), _SMALL_RANGES_PER_TASK)
    return [*shares, *(tuple(small[start : start + _SMALL_RANGES_PER_TASK]) for start in starts)]


@dataclass(frozen=True, slots=True)
class Objects:
    """The namespaces and tables of a version."""

    #: The version.
    snapshot: PinnedSnapshot
    #: The requested columns. Definitions are read only if one of these columns needs them.
    columns: Collection[str]
    #: The objects to read.
    names: WantedNames = field(default_factory=WantedNames)

    def limited(self, conditions: Sequence[Condition]) -> Objects:
        return replace(self, names=WantedNames.of(conditions))

    def partitions(self) -> list[tuple[KeyRange, ...]]:
        snapshot = self.snapshot.open()
        return shared_ranges(snapshot, self.names.key_ranges(snapshot.keys))

    def rows(self, partition: tuple[KeyRange, ...]) -> Iterator[Row]:
        snapshot = self.snapshot.open()
        reads_definitions = not _WITHOUT_DEFINITIONS.issuperset(self.columns)
        for keys in partition:
            entries = self._found(snapshot, keys)
            for start in range(0, len(entries), _BATCH):
                batch = entries[start : start + _BATCH]
                definitions = _definitions(snapshot, batch) if reads_definitions else [None] * len(batch)
                for (name, location), definition in zip(batch, definitions, strict=True):
                    yield _object_row(name, location, definition)

    def _found(self, snapshot: Snapshot, keys: KeyRange) -> list[tuple[ObjectName, str]]:
        with snapshot.reading():
            keys_column, locations = scan_columns(snapshot.files.nodes, snapshot.root, keys.lower, keys.upper)
        names = [snapshot.keys.decode(key) for key in keys_column.to_pylist()]
        return [
            (name, location)
            for name, location in zip(names, locations.to_pylist(), strict=True)
            if name is not None and self.names.has(name.namespace, name.table)
        ]


def _definitions(snapshot: Snapshot, batch: Sequence[tuple[ObjectName, str]]) -> list[NamespaceDef | TableDef]:
    """Return the definitions of objects, read in parallel."""
    namespaces = [location for name, location in batch if name.table is None]
    tables = [location for name, location in batch if name.table is not None]
    concurrency = snapshot.files.storage.concurrency
    with snapshot.reading():
        by_location: dict[str, NamespaceDef | TableDef] = dict(
            zip(namespaces, run_parallel(snapshot.files.definitions.namespace, namespaces, concurrency), strict=True)
        )
        by_location.update(zip(tables, snapshot.files.definitions.tables(tables), strict=True))
    return [by_location[location] for _, location in batch]


def _object_row(name: ObjectName, location: str, definition: NamespaceDef | TableDef | None) -> Row:
    kind = "namespace" if name.table is None else "table"
    table = definition if isinstance(definition, TableDef) else None
    return (
        kind,
        name.namespace,
        name.table,
        location,
        definition.id if definition is not None else None,
        (table.table_type or "MANAGED") if table is not None else None,
        table.table_format if table is not None else None,
        table.format_properties.get(METADATA_LOCATION) if table is not None else None,
        list(definition.properties.items()) if definition is not None else [],
        list(table.format_properties.items()) if table is not None else [],
    )


NODE = "node"
DEFINITION = "definition"
LAKEHOUSE_DEFINITION = "lakehouse definition"

_FILES_BATCH = 128


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a version reaches (``docs/internals/protocol.md``), including those of tables that are not
    managed.

    Definitions that newer messages of the tree shadow are included. A file that two tables share has a row for each.
    """

    #: The version.
    snapshot: PinnedSnapshot
    #: The objects whose files are read.
    names: WantedNames = field(default_factory=WantedNames)
    #: The kinds of files to read.
    kinds: Wanted = field(default_factory=Wanted)

    def limited(self, conditions: Sequence[Condition]) -> Files:
        return replace(self, names=WantedNames.of(conditions), kinds=Wanted.of(conditions, "kind"))

    def partitions(self) -> list[tuple[KeyRange, ...]]:
        snapshot = self.snapshot.open()
        # Nodes belong to no namespace, so the unbounded range is needed to find all of them.
        ranges = [KeyRange()] if self._wants_nodes else self.names.key_ranges(snapshot.keys)
        return shared_ranges(snapshot, ranges)

    @property
    def _wants_nodes(self) -> bool:
        is_unnamed = self.names.namespaces.has_null and self.names.tables.has_null
        return is_unnamed and (NODE in self.kinds or LAKEHOUSE_DEFINITION in self.kinds)

    def rows(self, partition: tuple[KeyRange, ...]) -> Iterator[Row]:
        snapshot = self.snapshot.open()
        names = snapshot.files.nodes.external_storages.names
        io = StorageFileIO.on(snapshot.files.storage, self.snapshot.storage_options, read_only=True, names=names)
        for keys in partition:
            # All definitions of an object are processed together, because shadowed definitions share files with newer
            # ones.
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
        """Yield the objects and definition locations in a node."""
        node = visited.node
        for key, location in (*zip(node.keys, node.values, strict=True), *node.buffer.items()):
            name = snapshot.keys.decode(key, visited.location)
            if name is not None and location is not None and self.names.has(name.namespace, name.table):
                yield name, location

    def _object_rows(self, objects: Sequence[tuple[ObjectName, list[str]]], io: StorageFileIO) -> Iterator[Row]:
        wants_table_files = any(kind.value in self.kinds for kind in FileKind)
        if not (wants_table_files or DEFINITION in self.kinds):
            return

        def rows_of(entry: tuple[ObjectName, list[str]]) -> list[Row]:
            name, locations = entry
            files: dict[str, tuple[str, int | None]] = {}
            for location in locations:
                data = io.read_whole(location)
                files[to_location(io.root, location)] = (DEFINITION, len(data))
                if name.table is not None and wants_table_files:
                    files.update(_table_files(_table_definition(data, location), io))
            return [(path, kind, size, name.namespace, name.table) for path, (kind, size) in files.items()]

        for start in range(0, len(objects), _FILES_BATCH):
            for rows in run_parallel(rows_of, objects[start : start + _FILES_BATCH], io.storage.concurrency):
                yield from rows


def _is_of(visited: VisitedNode, keys: KeyRange) -> bool:
    """Whether a node belongs to a range, namely to the range with the smallest key that can be below the node."""
    return visited.lower is not None or keys.lower is None


def _node_rows(snapshot: Snapshot, visited: VisitedNode, io: StorageFileIO) -> Iterator[Row]:
    size_bytes = visited.node.file_size_bytes or io.size_bytes(visited.location)
    yield to_location(io.root, visited.location), NODE, size_bytes, None, None
    if visited.location == snapshot.location:
        location = snapshot.definition_location
        yield to_location(io.root, location), LAKEHOUSE_DEFINITION, io.size_bytes(location), None, None


def _table_definition(data: bytes, location: str) -> TableDef:
    """Return a table definition, with its locations rebased to the root that contains it."""
    definition = TableDef.from_bytes(data, location)
    root = root_of(location) if is_uri(location) else None
    return definition if root is None else definition.rebased(root)


def _table_files(definition: TableDef, io: StorageFileIO) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Yield the path of each file of a table, with its kind and size.

    Missing files of an external table are skipped. A missing metadata file is listed without a size.
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
