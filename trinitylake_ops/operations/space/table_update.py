"""Update the sums of the tables that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trinitylake_ops.iceberg.snapshot_retention import SnapshotRule
from trinitylake_ops.operations.gc.survey import Progress
from trinitylake_ops.operations.space.catalog_update import CatalogUpdate
from trinitylake_ops.operations.space.catalog_walk import OutdatedSummaryError
from trinitylake_ops.operations.space.model import CatalogKind, Summary, TableObjects
from trinitylake_ops.operations.space.presence import Presence, union
from trinitylake_ops.operations.space.tables import TableReading, complete_objects, sums_of

_TABLES_AT_ONCE = 256


class TableUpdate:
    """Updates the sums of tables.

    Args:
        summary: The summary, whose catalog files are up to date.
        catalog: The update of the catalog files.
        target_bytes: The size of data files of tables that do not specify one.
        rule_of: Returns which snapshots a trim retains in a table, by its namespace and name.
        progress: Called with the unit that is counted, the number done, and the total.
    """

    def __init__(
        self,
        summary: Summary,
        catalog: CatalogUpdate,
        target_bytes: int,
        rule_of: Callable[[str, str], SnapshotRule],
        progress: Progress,
    ):
        self._summary = summary
        self._catalog = catalog
        self._target_bytes = target_bytes
        self._rule_of = rule_of
        self._progress = progress
        self._table_root = catalog.table_root
        self._changed = self._find_changed()
        self._definitions = summary.definitions_of(self._changed)
        self._done = 0
        #: The number of tables whose files were read.
        self.n_read = 0

    def changed(self) -> Sequence[int]:
        """Return the tables to update."""
        return self._changed

    def _find_changed(self) -> list[int]:
        summary = self._summary
        files = (summary.catalog.get(number) for number in summary.changed_catalog)
        changed = {file.table for file in files if file is not None and file.kind == CatalogKind.TABLE}
        changed |= self._catalog.renamed
        has_other_target = summary.target_bytes != self._target_bytes
        changed |= {number for number, table in summary.tables.items() if table.damage or has_other_target}
        summary.target_bytes = self._target_bytes
        return sorted(changed & summary.tables.keys())

    def update(self, tables: Sequence[int], objects: dict[int, TableObjects]) -> bool:
        """Update tables of one shard. Return whether the known files changed.

        Args:
            tables: The tables.
            objects: The known files of the tables in the shard, which are updated in place.

        Raises:
            OutdatedSummaryError: The stored summary lacks what is needed to read a table.
            StorageError: The storage failed.
        """
        has_changed = False
        for start in range(0, len(tables), _TABLES_AT_ONCE):
            batch = tables[start : start + _TABLES_AT_ONCE]
            states = {table: self._states_of(table) for table in batch}
            readings = {table: self._reading(table, states[table], objects.get(table, {})) for table in batch}
            complete_objects(list(readings.values()), self._catalog.io, self._table_root)
            for table, reading in readings.items():
                has_changed |= self._store(table, states[table], reading, objects)
            self._done += len(batch)
            self._progress("tables", self._done, len(self._changed))
        return has_changed

    def _states_of(self, table: int) -> dict[int, Presence]:
        """Return the versions that need each metadata file of a table."""
        presences: dict[int, set[Presence]] = {}
        for number in self._definitions[table]:
            file = self._summary.catalog[number]
            if file.metadata:
                presences.setdefault(file.metadata, set()).add(file.presence)
        return {metadata: union(frozenset(ranges)) for metadata, ranges in presences.items()}

    def _reading(self, table: int, states: dict[int, Presence], objects: TableObjects) -> TableReading:
        unread = []
        for metadata in sorted(states.keys() - objects.keys()):
            definition = self._catalog.definitions.get(metadata)
            if definition is None:
                raise OutdatedSummaryError
            unread.append(definition)
        known = self._summary.tables[table]
        return TableReading(dict(objects), self._rule_of(known.namespace, known.name), unread)

    def _store(
        self, number: int, states: dict[int, Presence], reading: TableReading, objects: dict[int, TableObjects]
    ) -> bool:
        table = self._summary.tables[number]
        current = self._summary.catalog.get(table.definition)
        files = {**reading.incomplete, **reading.objects}
        table.groups = sums_of(states, files, 0 if current is None else current.metadata, self._target_bytes)
        table.damage = reading.damage
        table.is_counted = bool(states)
        self.n_read += reading.has_read
        self._summary.changed_tables.add(number)
        known = _reachable(states, reading.objects)
        has_changed = objects.get(number, {}) != known
        objects[number] = known
        self._note_unread(number, known)
        return has_changed

    def _note_unread(self, table: int, known: TableObjects) -> None:
        """Record the locations of definitions whose files cannot all be read, so that the next run reads them again."""
        for number in self._definitions[table]:
            file = self._summary.catalog[number]
            is_unread = bool(file.metadata) and file.metadata not in known
            location = self._catalog.locations.get(number, file.unread_location) if is_unread else None
            if file.unread_location != location:
                file.unread_location = location
                self._summary.changed_catalog.add(number)


def _reachable(states: dict[int, Presence], objects: TableObjects) -> TableObjects:
    """Return the files that the metadata files of a table lead to."""
    reached: TableObjects = {}
    frontier = list(states)
    while frontier:
        new = [number for number in dict.fromkeys(frontier) if number in objects and number not in reached]
        reached |= {number: objects[number] for number in new}
        frontier = [name for number in new for name in objects[number].names]
    return reached
