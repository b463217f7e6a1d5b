"""The metadata table ``objects``: namespaces and tables of a version, ranges of keys a task each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.format.definitions import METADATA_LOCATION, NamespaceDef, TableDef
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.spark_jobs.metadata.columns import Condition, Row
from trinitylake_ops.spark_jobs.metadata.pinned_snapshot import PinnedSnapshot
from trinitylake_ops.spark_jobs.metadata.wanted import WantedNames
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tree.key_ranges import KeyRange, split
from trinitylake_ops.tree.search import scan_columns
from trinitylake_ops.versions.snapshot import Snapshot

#: A range of keys that is a task's share holds about so many objects.
OBJECTS_PER_RANGE = 5_000

_BATCH = 512
_SMALL_RANGES_PER_TASK = 32
_WITHOUT_DEFINITIONS = frozenset({"kind", "namespace", "table", "definition_location"})


def shared_ranges(snapshot: Snapshot, ranges: Sequence[KeyRange]) -> list[tuple[KeyRange, ...]]:
    """Return ranges of keys in shares of tasks. Large ranges are split, and small ones put together."""
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
    """The namespaces and tables of a version. Their definitions are read if one of ``columns`` comes from them."""

    snapshot: PinnedSnapshot
    columns: Collection[str]
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
            found = self._found(snapshot, keys)
            for start in range(0, len(found), _BATCH):
                batch = found[start : start + _BATCH]
                definitions = _definitions(snapshot, batch) if reads_definitions else [None] * len(batch)
                for (name, location), definition in zip(batch, definitions, strict=True):
                    yield _object_row(name, location, definition)

    def _found(self, snapshot: Snapshot, keys: KeyRange) -> list[tuple[ObjectName, str]]:
        with snapshot.reading():
            found, locations = scan_columns(snapshot.files.nodes, snapshot.root, keys.lower, keys.upper)
        names = [snapshot.keys.decode(key) for key in found.to_pylist()]
        return [
            (name, location)
            for name, location in zip(names, locations.to_pylist(), strict=True)
            if name is not None and self.names.has(name.namespace, name.table)
        ]


def _definitions(snapshot: Snapshot, batch: Sequence[tuple[ObjectName, str]]) -> list[NamespaceDef | TableDef]:
    """Return the definitions of objects, read many at once."""
    namespaces = [location for name, location in batch if name.table is None]
    tables = [location for name, location in batch if name.table is not None]
    concurrency = snapshot.files.storage.concurrency
    with snapshot.reading():
        found: dict[str, NamespaceDef | TableDef] = dict(
            zip(namespaces, run_parallel(snapshot.files.definitions.namespace, namespaces, concurrency), strict=True)
        )
        found.update(zip(tables, snapshot.files.definitions.tables(tables), strict=True))
    return [found[location] for _, location in batch]


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
