"""The changes of a transaction, what it relied on and read, and the names that it creates.

A plain value: it can be saved, and checked on a newer version.

A view is a property of its namespace. So a commit that creates tables, or that writes the definition of a namespace, is
checked on each version that it is based on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidNameError, ObjectExistsError
from trinitylake_ops.format.definitions import (
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    SavedTransaction,
    SavedWrite,
    TableDef,
    sealed_definition,
)
from trinitylake_ops.format.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, KeyCodec
from trinitylake_ops.transaction.conflicts import (
    describe_key,
    new_table_conflicts,
    read_conflicts,
    written_key_conflicts,
)
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.versions.snapshot import Entry, Snapshot
from trinitylake_ops.versions.table_names import table_ids

#: Begins a name in a footprint that no key has: two changes that create tables with one id touch each other.
_STAGED_ID = "\0id "


@dataclass(slots=True)
class ChangeSet:
    """The changes of one transaction, on the version that it began on.

    ``writes`` maps each key to its new entry, None for a deletion. ``definition`` is the lakehouse definition where it
    changes. ``files`` are written with the definitions that name them. ``relied_namespaces`` have to stay, as tables in
    them were changed. ``replaced_namespaces`` were dropped or set, so no new table may be in them. Keys, prefixes and
    settings that were read count for a serializable transaction. ``staged_ids`` are ids of new tables that the caller
    chose, because their folders were made before.
    """

    writes: dict[str, Entry | None] = field(default_factory=dict)
    definition: LakehouseDef | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    relied_namespaces: set[str] = field(default_factory=set)
    replaced_namespaces: set[str] = field(default_factory=set)
    read_keys: set[str] = field(default_factory=set)
    read_prefixes: set[str] = field(default_factory=set)
    has_read_definition: bool = False
    staged_ids: dict[str, str] = field(default_factory=dict)  # of new tables whose place was made before: id -> key
    encoded: dict[str, bytes] = field(default_factory=dict)  # definitions among the writes, without their seals

    @classmethod
    def of_saved(cls, saved: SavedTransaction, path: str) -> Self:
        """Return the changes that a saved transaction holds; ``path`` is its file. Raises CorruptFileError."""
        definition = None if saved.lakehouse_def is None else LakehouseDef.from_bytes(saved.lakehouse_def, path)
        return cls(
            writes={write.key: _entry(write, path) for write in saved.writes},
            definition=definition,
            relied_namespaces=set(saved.relied_namespaces),
            replaced_namespaces=set(saved.replaced_namespaces),
            read_keys=set(saved.read_keys),
            read_prefixes=set(saved.read_prefixes),
            has_read_definition=saved.has_read_definition,
        )

    def saved_in(self, saved: SavedTransaction) -> SavedTransaction:
        """Return a saved transaction with these changes. Raises InvalidDefinitionError."""
        return replace(
            saved,
            writes=tuple(_saved_write(key, entry) for key, entry in self.writes.items()),
            lakehouse_def=None if self.definition is None else self.definition.to_bytes(),
            relied_namespaces=tuple(sorted(self.relied_namespaces)),
            replaced_namespaces=tuple(sorted(self.replaced_namespaces)),
            read_keys=tuple(sorted(self.read_keys)),
            read_prefixes=tuple(sorted(self.read_prefixes)),
            has_read_definition=self.has_read_definition,
        )

    def write(self, key: str, entry: Entry | None) -> None:
        """Set or delete a key. Raises InvalidDefinitionError for a definition that cannot be stored."""
        if isinstance(entry, NamespaceDef | TableDef):
            self.encoded[key] = entry.to_bytes()
        self.writes[key] = entry

    def definition_file(self, key: str, path: str) -> bytes:
        """Return the file of a definition among the writes."""
        if key not in self.encoded:  # of a saved transaction
            entry = self.writes[key]
            assert isinstance(entry, NamespaceDef | TableDef)
            self.encoded[key] = entry.to_bytes()
        return sealed_definition(self.encoded[key], path)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be written."""
        return not self.writes and self.definition is None

    def changes_nothing_on(self, base: Snapshot) -> bool:
        """Whether a version stays as it is, as all objects that were made were dropped again. Raises StorageError."""
        has_writes = any(entry is not None or base.entry(key) is not None for key, entry in self.writes.items())
        return not has_writes and self.definition in (None, base.definition)

    def footprint(self, keys: KeyCodec, isolation: IsolationLevel) -> Footprint:
        """Return what the transaction touches."""
        relied = {keys.namespace_key(namespace) for namespace in self.relied_namespaces}
        prefixes = {keys.tables_prefix(namespace) for namespace in self.replaced_namespaces}
        if isolation != IsolationLevel.SNAPSHOT:
            relied |= self.read_keys
            prefixes |= self.read_prefixes
        staged = {f"{_STAGED_ID}{table_id}" for table_id in self.staged_ids}
        return Footprint(self.writes.keys() | staged if staged else self.writes.keys(), relied, tuple(sorted(prefixes)))

    def conflicts(
        self, isolation: IsolationLevel, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]
    ) -> list[str]:
        """Return a line for each change between ``base`` and ``latest`` that conflicts with a write or a read.

        ``changes`` is the difference of the two versions by key. The lakehouse definition is merged elsewhere.
        """
        keys = base.keys
        found = written_key_conflicts(keys, changes, self.writes)
        found += self._id_conflicts(latest, changes)
        for namespace in sorted(self.relied_namespaces):
            found += self._namespace_conflicts(namespace, base, latest)
        for namespace in sorted(self.replaced_namespaces):  # also namespaces that were created anew since
            found += new_table_conflicts(keys, changes, namespace, self.writes)
        if isolation != IsolationLevel.SNAPSHOT:
            found += read_conflicts(keys, changes, self.read_keys, self.read_prefixes)
            if self.has_read_definition and base.definition != latest.definition:
                found.append("settings of the lakehouse: we read them, a concurrent commit changed them")
        return found

    def _id_conflicts(self, latest: Snapshot, changes: Mapping[str, KeyChange]) -> list[str]:
        """Return a line for each new table whose place another commit has used for a table of another name."""
        if not self.staged_ids:
            return []
        tables = {key: change.after for key, change in changes.items() if key.startswith(TABLE_KEY_PREFIX)}
        return [
            f"{describe_key(latest.keys, self.staged_ids[table_id])}: a concurrent commit created"
            f" {describe_key(latest.keys, key)} with the same id"
            for key, table_id in table_ids(latest, tables).items()
            if self.staged_ids.get(table_id, key) != key
        ]

    def _namespace_conflicts(self, namespace: str, base: Snapshot, latest: Snapshot) -> list[str]:
        """A table's namespace must still be the one that was read, though its properties may have changed."""
        key = base.keys.namespace_key(namespace)
        if key in self.writes or base.entry(key) == latest.entry(key):
            return []
        if latest.has_namespace(namespace) and latest.namespace(namespace).id == base.namespace(namespace).id:
            return []
        return [f"{describe_key(base.keys, key)}: we changed its tables, a concurrent commit dropped it"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The keys that a transaction touches. They tell whether it may follow others within one version.

    ``writes`` are the keys that it sets or deletes. ``keys`` and ``prefixes`` are those where a change by another
    transaction may matter to it.
    """

    writes: Collection[str]
    keys: Collection[str] = ()
    prefixes: tuple[str, ...] = ()

    def may_conflict(self, other: Footprint) -> bool:
        """Whether one of the two transactions may matter to the other."""
        return self.is_touched_by(other.writes) or other.is_touched_by(self.writes)

    def is_touched_by(self, written: Collection[str]) -> bool:
        """Whether a write of these keys matters to this transaction, or may."""
        return any(
            key in self.writes or key in self.keys or (self.prefixes and key.startswith(self.prefixes))
            for key in written
        )


def is_namespace_key(key: str) -> bool:
    """Whether a key is that of a namespace."""
    return key.startswith(NAMESPACE_KEY_PREFIX)


def _entry(write: SavedWrite, path: str) -> Entry | None:
    if write.definition is None:
        return write.location
    kind = NamespaceDef if is_namespace_key(write.key) else TableDef
    return kind.from_bytes(write.definition, path)


def _saved_write(key: str, entry: Entry | None) -> SavedWrite:
    if entry is None or isinstance(entry, str):
        return SavedWrite(key=key, location=entry)
    return SavedWrite(key=key, definition=entry.to_bytes())


#: The beginning of the name of a property that is a view. The rest is the name of the view.
VIEW_PREFIX = "trinitylake.view."
_LISTED_NAMES = 3


def views_in(properties: Iterable[str]) -> list[str]:
    """Return the names of the views among the properties of a namespace, in order."""
    return sorted(name.removeprefix(VIEW_PREFIX) for name in properties if name.startswith(VIEW_PREFIX))


class NewNames:
    """The tables and views that a change creates.

    Names that the base version already has do not count: an object of a name that was taken before the change can
    still be altered.

    Args:
        base: The version that the change was made on.
        writes: Each changed key with its new entry, None for a deletion.
    """

    def __init__(self, base: Snapshot, writes: Mapping[str, Entry | None]):
        self._base = base
        self._writes = writes
        self._checked_version: int | None = None

    @property
    def has_any(self) -> bool:
        """Whether a name has to be checked: the change creates a table, or a namespace may get a view."""
        return bool(self._tables or self._namespaces)

    def check(self, version: Snapshot) -> None:
        """Check the new names on a version. Definitions of namespaces are read where the change needs them.

        Raises:
            ObjectExistsError: A new table has the name of a view, or a new view the name of a table.
            StorageError: The definition of a namespace cannot be read.
        """
        if self._checked_version == version.version:
            return
        taken = [*self._tables_with_views(version), *self._views_with_tables(version)]
        if taken:
            shown = "; ".join(taken[:_LISTED_NAMES]) + ("; ..." if len(taken) > _LISTED_NAMES else "")
            raise ObjectExistsError(
                f"{shown}; use another name, or drop or rename the existing object first", version=version.version
            )
        self._checked_version = version.version

    def _tables_with_views(self, version: Snapshot) -> list[str]:
        entries = {namespace: self._entry(version, version.keys.namespace_key(namespace)) for namespace in self._tables}
        existing = {namespace: entry for namespace, entry in entries.items() if entry is not None}
        return [
            f"table {namespace}.{table} cannot be created: a view has its name"
            for namespace, views in _views(version, existing).items()
            for table in sorted(self._tables[namespace] & views)
        ]

    def _views_with_tables(self, version: Snapshot) -> list[str]:
        return [
            f"view {version.object_name(key)} cannot be created: a table has its name"
            for key in self.view_keys
            if self._entry(version, key) is not None
        ]

    def _entry(self, version: Snapshot, key: str) -> Entry | None:
        return self._writes[key] if key in self._writes else version.entry(key)

    @cached_attribute
    def _tables(self) -> dict[str, set[str]]:
        """The names of new tables, by namespace."""
        tables: dict[str, set[str]] = {}
        for key, entry in self._writes.items():
            name = None if entry is None else self._base.keys.decode(key)
            if name is not None and name.table is not None and self._base.entry(key) is None:
                tables.setdefault(name.namespace, set()).add(name.table)
        return tables

    @cached_attribute
    def view_keys(self) -> list[str]:
        """The keys that tables with the names of new views would have."""
        keys: list[str] = []
        for namespace, views in self._views.items():
            for view in views:
                with contextlib.suppress(InvalidNameError):  # no table can have the name, which another program wrote
                    keys.append(self._base.keys.table_key(namespace, view))
        return keys

    @cached_attribute
    def _views(self) -> dict[str, list[str]]:
        """The names of new views, by namespace."""
        if not self._namespaces:
            return {}
        after = _views(self._base, self._namespaces)
        entries = {namespace: self._base.entry(self._base.keys.namespace_key(namespace)) for namespace in after}
        before = _views(self._base, {namespace: entry for namespace, entry in entries.items() if entry is not None})
        return {namespace: sorted(views - before.get(namespace, set())) for namespace, views in after.items()}

    @cached_attribute
    def _namespaces(self) -> dict[str, Entry]:
        """The new entries of namespaces that may have views, by name."""
        return {
            self._base.object_name(key).namespace: entry
            for key, entry in self._writes.items()
            if entry is not None and key.startswith(NAMESPACE_KEY_PREFIX) and _may_have_views(entry)
        }


def _may_have_views(entry: Entry | None) -> bool:
    return isinstance(entry, str) or (isinstance(entry, NamespaceDef) and bool(views_in(entry.properties)))


def _views(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, set[str]]:
    """Return the names of views by namespace, of those namespaces that have views."""
    definitions = _definitions(version, entries)
    names = {namespace: set(views_in(definition.properties)) for namespace, definition in definitions.items()}
    return {namespace: views for namespace, views in names.items() if views}


def _definitions(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, NamespaceDef]:
    """Return definitions of namespaces by name. Those that are not in memory are read in parallel."""
    locations, read = [entry for entry in entries.values() if isinstance(entry, str)], dict[str, NamespaceDef]()
    if locations:
        with version.reading():
            read = dict(zip(locations, version.files.definitions.namespaces(locations), strict=True))
    definitions: dict[str, NamespaceDef] = {}
    for namespace, entry in entries.items():
        definition = read[entry] if isinstance(entry, str) else entry
        if isinstance(definition, NamespaceDef):
            definitions[namespace] = definition
    return definitions
