"""The names that a table has at a version, by its id. A rename keeps the id, and one id has one folder of files."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.nodes.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.search import prefix_end, scan
from trinitylake_ops.versions.snapshot import Snapshot

_READ_TOGETHER = 1_000


class TableNames:
    """The keys of all tables by their ids, at the version that was asked for last.

    The first version is scanned, which reads the definition of every table. For another version only the definitions
    that differ are read. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: Snapshot | None = None
        self._ids: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}

    def keys_of(self, snapshot: Snapshot, table_id: str) -> frozenset[str]:
        """Return the keys of the tables of a version that have an id.

        A table whose definition cannot be read has no id here.

        Args:
            snapshot: The version.
            table_id: The id of the table.

        Raises:
            StorageError: If a node or a definition cannot be read for now.
        """
        with self._lock:
            self._follow(snapshot)
            return frozenset(self._keys.get(table_id, ()))

    def names_of(self, snapshot: Snapshot, table_id: str) -> list[ObjectName]:
        """Return the names of the tables of a version that have an id, ascending. Raises as :meth:`keys_of`."""
        return sorted((snapshot.object_name(key) for key in self.keys_of(snapshot, table_id)), key=str)

    def shared(self, snapshot: Snapshot) -> list[list[ObjectName]]:
        """Return the names of each table of a version that has several. Raises as :meth:`keys_of`."""
        with self._lock:
            self._follow(snapshot)
            several = [sorted(keys) for keys in self._keys.values() if len(keys) > 1]
        return [[snapshot.object_name(key) for key in keys] for keys in sorted(several)]

    def _follow(self, snapshot: Snapshot) -> None:
        known = self._at
        if known is not None and known.root.system == snapshot.root.system:
            return
        nodes, changes = snapshot.files.nodes, None
        if known is not None:
            try:
                changes = {change.key: change.after for change in diff_trees(nodes, known.root, snapshot.root)}
            except FileMissingError:  # the known version was purged
                changes = None
        located: dict[str, str | None]
        if changes is None:
            with snapshot.reading():
                located = dict(scan(nodes, snapshot.root, TABLE_KEY_PREFIX, prefix_end(TABLE_KEY_PREFIX)))
            located |= dict.fromkeys(self._ids.keys() - located.keys())
        else:
            located = {key: after for key, after in changes.items() if key.startswith(TABLE_KEY_PREFIX)}
        ids = table_ids(snapshot, located)
        self._at = None  # until all changes are noted
        for key in located:
            self._note(key, ids.get(key))
        self._at = snapshot

    def _note(self, key: str, table_id: str | None) -> None:
        former = self._ids.pop(key, None)
        if former is not None:
            self._keys[former].discard(key)
            if not self._keys[former]:
                del self._keys[former]
        if table_id is not None:
            self._ids[key] = table_id
            self._keys.setdefault(table_id, set()).add(key)


def table_ids(snapshot: Snapshot, located: Mapping[str, str | None]) -> dict[str, str]:
    """Return the ids of tables by their keys. Definitions that are missing or damaged are left out.

    Args:
        snapshot: A version of the lakehouse that has the definitions.
        located: The locations of definitions by keys, None for no table.

    Raises:
        StorageError: If a definition cannot be read for now.
    """
    places = [(key, location) for key, location in located.items() if location is not None]
    found: dict[str, str] = {}
    for first in range(0, len(places), _READ_TOGETHER):
        found |= _ids_of(snapshot, places[first : first + _READ_TOGETHER])
    return found


def _ids_of(snapshot: Snapshot, places: Iterable[tuple[str, str]]) -> dict[str, str]:
    places = list(places)
    try:
        definitions = snapshot.files.definitions.tables([location for _, location in places])
    except (CorruptFileError, FileMissingError):
        if len(places) == 1:
            return {}
        half = len(places) // 2
        return {**_ids_of(snapshot, places[:half]), **_ids_of(snapshot, places[half:])}
    return {key: definition.id for (key, _), definition in zip(places, definitions, strict=True)}
