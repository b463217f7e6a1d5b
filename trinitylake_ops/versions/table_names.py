"""Find the names of a version's tables by id or dotted name, and reject a second name for a table."""

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

_BATCH = 1_000  # number of definitions that are read at a time


class TableNames:
    """The keys of all tables by id, in the last requested version. Thread-safe.

    The first version is scanned, which reads the definition of every table. For another version, only the definitions
    that differ are read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: Snapshot | None = None
        self._ids: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}

    def keys_of(self, snapshot: Snapshot, table_id: str) -> frozenset[str]:
        """Return the keys of a version's tables that have a given id. Ignores missing and corrupt definitions.

        Args:
            snapshot: The version.
            table_id: The id of the table.

        Raises:
            StorageError: A node or a definition cannot be read.
        """
        with self._lock:
            self._follow(snapshot)
            return frozenset(self._keys.get(table_id, ()))

    def names_of(self, snapshot: Snapshot, table_id: str) -> list[ObjectName]:
        """Return the sorted names of a version's tables that have a given id.

        Args:
            snapshot: The version.
            table_id: The id of the table.

        Raises:
            StorageError: A node or a definition cannot be read.
        """
        return sorted((snapshot.object_name(key) for key in self.keys_of(snapshot, table_id)), key=str)

    def shared(self, snapshot: Snapshot) -> list[list[ObjectName]]:
        """Return the names of each table that has several names in a version. Raises StorageError."""
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
        self._at = None  # until all changes are applied
        for key in located:
            self._note(key, ids.get(key))
        self._at = snapshot

    def _note(self, key: str, table_id: str | None) -> None:
        old_id = self._ids.pop(key, None)
        if old_id is not None:
            self._keys[old_id].discard(key)
            if not self._keys[old_id]:
                del self._keys[old_id]
        if table_id is not None:
            self._ids[key] = table_id
            self._keys.setdefault(table_id, set()).add(key)


def table_ids(snapshot: Snapshot, located: Mapping[str, str | None]) -> dict[str, str]:
    """Return the ids of tables by key. Missing and corrupt definitions are left out.

    Args:
        snapshot: A version of the lakehouse.
        located: The location of each definition by key; None if there is no table.

    Raises:
        StorageError: A definition cannot be read.
    """
    locations = [(key, location) for key, location in located.items() if location is not None]
    ids: dict[str, str] = {}
    for first in range(0, len(locations), _BATCH):
        ids |= _ids_of(snapshot, locations[first : first + _BATCH])
    return ids


def _ids_of(snapshot: Snapshot, located: Iterable[tuple[str, str]]) -> dict[str, str]:
    located = list(located)
    try:
        definitions = snapshot.files.definitions.tables([location for _, location in located])
    except (CorruptFileError, FileMissingError):
        if len(located) == 1:
            return {}
        half = len(located) // 2
        return {**_ids_of(snapshot, located[:half]), **_ids_of(snapshot, located[half:])}
    return {key: definition.id for (key, _), definition in zip(located, definitions, strict=True)}


#: Returns the keys of a version's tables that have a given id.
KeysOf = Callable[[Snapshot, str], Collection[str]]


class OneName:
    """A precondition of a commit: no table that the change writes has another name.

    Args:
        ids: The ids of written tables by key; None for dropped tables. Tables that keep their id may be omitted.
        keys_of: Finds the keys of an id. By default all definitions of the version are read.
    """

    def __init__(self, ids: Mapping[str, str | None], keys_of: KeysOf | None = None):
        self._ids = ids
        self._keys_of = keys_of or TableNames().keys_of

    def __call__(self, latest: Snapshot) -> None:
        """Raise TableHasAnotherNameError if the change would give a table of the version a second name."""
        written = {key: table_id for key, table_id in self._ids.items() if table_id}
        if not written:
            return
        before = table_ids(latest, {key: latest.entry(key) for key in self._ids})
        new_ids = {key: table_id for key, table_id in written.items() if before.get(key) != table_id}
        counts = Counter(written.values())
        for key, table_id in new_ids.items():
            if counts[table_id] > 1:
                other = next(other for other in written if other != key and written[other] == table_id)
                raise _error(latest, key, other)
        released = {table_id for key, table_id in before.items() if self._ids[key] != table_id}
        for key, table_id in new_ids.items():
            others = () if table_id in released else sorted(set(self._keys_of(latest, table_id)) - self._ids.keys())
            if others:
                raise _error(latest, key, others[0])


def keys_changed_since(base: Snapshot) -> KeysOf:
    """Return a function that finds keys by table id among the keys that changed since ``base``."""
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
    name, existing = latest.object_name(key), latest.object_name(other)
    return TableHasAnotherNameError(
        f"table {name} would be a second name of table {existing}: both would share one id and one folder of files;"
        f" rename {existing} to {name}, drop {existing} first, or choose both names for this change"
    )


def resolve_table(text: str, *readers: CatalogReader) -> tuple[str, str]:
    """Split ``namespace.table`` into the names of an existing table. Each dot is tried as the separator.

    Args:
        text: The dotted name.
        *readers: The versions or transactions to search.

    Raises:
        TableNotFoundError: There is no such table.
        InvalidInputError: The name contains no dot, or is ambiguous.
    """
    splits = [(text[:dot], text[dot + 1 :]) for dot, char in enumerate(text) if char == "."]
    if not splits:
        raise InvalidInputError(f"invalid table name {text!r}; it must be NAMESPACE.TABLE")
    matches = [split for split in splits if any(_has_table(reader, *split) for reader in readers)]
    if not matches:
        raise TableNotFoundError(f"there is no table {text}")
    if len(matches) > 1:
        meanings = " or ".join(f"table {table!r} of namespace {namespace!r}" for namespace, table in matches)
        raise InvalidInputError(f"{text!r} is ambiguous: {meanings}")
    return matches[0]


def _has_table(reader: CatalogReader, namespace: str, table: str) -> bool:
    try:
        return reader.has_table(namespace, table)
    except InvalidNameError:
        return False
