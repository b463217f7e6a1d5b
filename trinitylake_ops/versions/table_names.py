"""Names of tables at a version: by id, by dotted name, and one name for each table."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    InvalidNameError,
    TableHasAnotherNameError,
    TableNotFoundError,
)
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.search import prefix_end, scan
from trinitylake_ops.versions.snapshot import CatalogReader, Snapshot

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


#: Returns the keys of tables at a version by an id.
KeysOf = Callable[[Snapshot, str], Collection[str]]


class OneName:
    """A condition of a commit: no table that the change writes has another name then.

    Args:
        ids: The ids of the tables that the change writes, by their keys; None for tables that it drops. Tables that
            keep their id may be left out.
        keys_of: Finds the names that an id has; by default all definitions of the version are read.
    """

    def __init__(self, ids: Mapping[str, str | None], keys_of: KeysOf | None = None):
        self._ids = ids
        self._keys_of = keys_of or TableNames().keys_of

    def __call__(self, latest: Snapshot) -> None:
        """Raise TableHasAnotherNameError if the change would give a table of a version a second name."""
        wanted = {key: table_id for key, table_id in self._ids.items() if table_id}
        if not wanted:
            return
        before = table_ids(latest, {key: latest.entry(key) for key in self._ids})
        gained = {key: table_id for key, table_id in wanted.items() if before.get(key) != table_id}
        twice = Counter(wanted.values())
        for key, table_id in gained.items():
            if twice[table_id] > 1:
                raise _error(latest, key, next(one for one in wanted if one != key and wanted[one] == table_id))
        freed = {table_id for key, table_id in before.items() if self._ids[key] != table_id}
        for key, table_id in gained.items():
            others = () if table_id in freed else sorted(set(self._keys_of(latest, table_id)) - self._ids.keys())
            if others:
                raise _error(latest, key, others[0])


def keys_changed_since(base: Snapshot) -> KeysOf:
    """Return a function that finds names of tables among those that a version has changed since ``base``."""
    changed: dict[int, dict[str, str]] = {}

    def keys_of(latest: Snapshot, table_id: str) -> list[str]:
        if latest.version not in changed:
            changes = {change.key: change.after for change in diff_trees(base.files.nodes, base.root, latest.root)}
            tables = {key: after for key, after in changes.items() if _is_table(latest, key)}
            changed[latest.version] = table_ids(latest, tables)
        return [key for key, known_id in changed[latest.version].items() if known_id == table_id]

    return keys_of


def _is_table(snapshot: Snapshot, key: str) -> bool:
    name = snapshot.keys.decode(key)
    return name is not None and name.table is not None


def _error(latest: Snapshot, key: str, other: str) -> TableHasAnotherNameError:
    name, known = latest.object_name(key), latest.object_name(other)
    return TableHasAnotherNameError(
        f"table {name} would be a second name of table {known}: both would share one id and one folder of files; rename"
        f" {known} to {name}, drop {known} first, or choose both names for this change"
    )


def resolve_table(text: str, *readers: CatalogReader) -> tuple[str, str]:
    """Return the namespace and the table of ``namespace.table``, as any of the readers has them.

    Each dot is tried as the one between namespace and table. Raises TableNotFoundError if there is no such table.
    Raises InvalidInputError for a name without a dot, or one that means several tables.
    """
    splits = [(text[:dot], text[dot + 1 :]) for dot, char in enumerate(text) if char == "."]
    if not splits:
        raise InvalidInputError(f"{text!r} names no table; write NAMESPACE.TABLE")
    found = [split for split in splits if any(_has_table(reader, *split) for reader in readers)]
    if not found:
        raise TableNotFoundError(f"there is no table {text}")
    if len(found) > 1:
        meanings = " or ".join(f"table {table!r} of namespace {namespace!r}" for namespace, table in found)
        raise InvalidInputError(f"{text!r} is ambiguous: {meanings}")
    return found[0]


def _has_table(reader: CatalogReader, namespace: str, table: str) -> bool:
    try:
        return reader.has_table(namespace, table)
    except InvalidNameError:
        return False
