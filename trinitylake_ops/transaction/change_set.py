"""The changes of a transaction, the objects that it reads or relies on, and the names that it creates.

A change set is a plain value that can be saved, and checked against a later version.

Views are stored as properties of their namespaces. Therefore a commit that creates tables or writes a namespace
definition checks each of its base versions for tables and views with the same name.
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

#: Prefix of the table ids in a footprint. No key has this prefix. Changes that create tables with the same id conflict.
_STAGED_ID = "\0id "


@dataclass(slots=True)
class ChangeSet:
    """The changes that one transaction makes to its base version."""

    #: The new entry of each changed key, or None for a deletion.
    writes: dict[str, Entry | None] = field(default_factory=dict)
    #: The lakehouse definition, if it changes.
    definition: LakehouseDef | None = None
    #: Files that are written in the same round trip as the definitions, by path.
    files: dict[str, bytes] = field(default_factory=dict)
    #: Namespaces that other transactions must not drop, because tables in them changed.
    relied_namespaces: set[str] = field(default_factory=set)
    #: Namespaces that were dropped or replaced, in which other transactions must not create tables.
    replaced_namespaces: set[str] = field(default_factory=set)
    #: Keys that were read. Only checked for serializable transactions.
    read_keys: set[str] = field(default_factory=set)
    #: Prefixes that were listed. Only checked for serializable transactions.
    read_prefixes: set[str] = field(default_factory=set)
    #: Whether the lakehouse definition was read. Only checked for serializable transactions.
    has_read_definition: bool = False
    #: Keys of new tables whose folders already existed, by table id.
    staged_ids: dict[str, str] = field(default_factory=dict)
    #: Encoded definitions of the writes by key, without checksums.
    encoded: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_saved(cls, saved: SavedTransaction, path: str) -> Self:
        """Decode the changes of a saved transaction.

        Args:
            saved: The saved transaction.
            path: The path of its file, for error messages.

        Raises:
            CorruptFileError: A definition cannot be decoded.
        """
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
        """Return a copy of a saved transaction with these changes. Raises InvalidDefinitionError."""
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
        """Return the bytes of the definition file for a written key.

        Args:
            key: The key.
            path: The path of the file, which is part of its checksum.
        """
        if key not in self.encoded:  # the transaction was saved
            entry = self.writes[key]
            assert isinstance(entry, NamespaceDef | TableDef)
            self.encoded[key] = entry.to_bytes()
        return sealed_definition(self.encoded[key], path)

    @property
    def is_empty(self) -> bool:
        """Whether there are no writes."""
        return not self.writes and self.definition is None

    def changes_nothing_on(self, base: Snapshot) -> bool:
        """Whether the writes have no effect on a version, for example a create and a drop of the same object.

        Raises StorageError.
        """
        has_writes = any(entry is not None or base.entry(key) is not None for key, entry in self.writes.items())
        return not has_writes and self.definition in (None, base.definition)

    def footprint(self, keys: KeyCodec, isolation: IsolationLevel) -> Footprint:
        """Return the keys that the transaction touches."""
        relied_keys = {keys.namespace_key(namespace) for namespace in self.relied_namespaces}
        prefixes = {keys.tables_prefix(namespace) for namespace in self.replaced_namespaces}
        if isolation != IsolationLevel.SNAPSHOT:
            relied_keys |= self.read_keys
            prefixes |= self.read_prefixes
        staged = {f"{_STAGED_ID}{table_id}" for table_id in self.staged_ids}
        return Footprint(
            self.writes.keys() | staged if staged else self.writes.keys(), relied_keys, tuple(sorted(prefixes))
        )

    def conflicts(
        self, isolation: IsolationLevel, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]
    ) -> list[str]:
        """Describe each change between two versions that conflicts with a write or a read, one line per conflict.

        The lakehouse definition is merged separately.

        Args:
            isolation: The isolation level.
            base: The version that the transaction is based on.
            latest: The later version.
            changes: The differences between the two versions by key.
        """
        keys = base.keys
        conflicts = written_key_conflicts(keys, changes, self.writes)
        conflicts += self._id_conflicts(latest, changes)
        for namespace in sorted(self.relied_namespaces):
            conflicts += self._namespace_conflicts(namespace, base, latest)
        for namespace in sorted(self.replaced_namespaces):  # includes namespaces that other transactions have recreated
            conflicts += new_table_conflicts(keys, changes, namespace, self.writes)
        if isolation != IsolationLevel.SNAPSHOT:
            conflicts += read_conflicts(keys, changes, self.read_keys, self.read_prefixes)
            if self.has_read_definition and base.definition != latest.definition:
                conflicts.append("settings of the lakehouse: we read them, a concurrent commit changed them")
        return conflicts

    def _id_conflicts(self, latest: Snapshot, changes: Mapping[str, KeyChange]) -> list[str]:
        """Describe each new table whose id another commit has assigned to a table with a different name."""
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
        """Describe a namespace that was dropped or recreated. Changes to its properties do not conflict."""
        key = base.keys.namespace_key(namespace)
        if key in self.writes or base.entry(key) == latest.entry(key):
            return []
        if latest.has_namespace(namespace) and latest.namespace(namespace).id == base.namespace(namespace).id:
            return []
        return [f"{describe_key(base.keys, key)}: we changed its tables, a concurrent commit dropped it"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The keys that a transaction touches, which determine whether it can share a version with other transactions."""

    #: Keys that the transaction sets or deletes.
    writes: Collection[str]
    #: Additional keys: if another transaction changes one of them, this transaction may be affected.
    keys: Collection[str] = ()
    #: Key prefixes: if another transaction changes a key with one of them, this transaction may be affected.
    prefixes: tuple[str, ...] = ()

    def may_conflict(self, other: Footprint) -> bool:
        """Whether one of the two transactions may affect the other."""
        return self.is_touched_by(other.writes) or other.is_touched_by(self.writes)

    def is_touched_by(self, written: Collection[str]) -> bool:
        """Whether writes of these keys may affect this transaction."""
        return any(
            key in self.writes or key in self.keys or (self.prefixes and key.startswith(self.prefixes))
            for key in written
        )


def is_namespace_key(key: str) -> bool:
    """Whether a key belongs to a namespace."""
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


#: Prefix of a namespace property that defines a view, followed by the name of the view.
VIEW_PREFIX = "trinitylake.view."
_LISTED_NAMES = 3


def views_in(properties: Iterable[str]) -> list[str]:
    """Return the sorted names of the views in the properties of a namespace."""
    return sorted(name.removeprefix(VIEW_PREFIX) for name in properties if name.startswith(VIEW_PREFIX))


class NewNames:
    """The names of tables and views that a change creates.

    Names in the base version are not checked, so that existing objects with conflicting names can still be altered.

    Args:
        base: The version that the change is based on.
        writes: Each changed key with its new entry, or None for a deletion.
    """

    def __init__(self, base: Snapshot, writes: Mapping[str, Entry | None]):
        self._base = base
        self._writes = writes
        self._checked_version: int | None = None

    @property
    def has_any(self) -> bool:
        """Whether there are names to check: the change creates a table, or may add a view to a namespace."""
        return bool(self._tables or self._namespaces)

    def check(self, version: Snapshot) -> None:
        """Check the new names against a version. Reads namespace definitions if necessary.

        Raises:
            ObjectExistsError: A new table has the name of a view, or a new view has the name of a table.
            StorageError: The definition of a namespace cannot be read.
        """
        if self._checked_version == version.version:
            return
        names_in_use = [*self._tables_with_views(version), *self._views_with_tables(version)]
        if names_in_use:
            text = "; ".join(names_in_use[:_LISTED_NAMES]) + ("; ..." if len(names_in_use) > _LISTED_NAMES else "")
            raise ObjectExistsError(
                f"{text}; use another name, or drop or rename the existing object first", version=version.version
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
                with contextlib.suppress(InvalidNameError):  # another program wrote a view name that no table can have
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
        """The new entries of namespaces that may contain views, by name."""
        return {
            self._base.object_name(key).namespace: entry
            for key, entry in self._writes.items()
            if entry is not None and key.startswith(NAMESPACE_KEY_PREFIX) and _may_have_views(entry)
        }


def _may_have_views(entry: Entry | None) -> bool:
    return isinstance(entry, str) or (isinstance(entry, NamespaceDef) and bool(views_in(entry.properties)))


def _views(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, set[str]]:
    """Return the names of views by namespace. Namespaces without views are left out."""
    definitions = _definitions(version, entries)
    names = {namespace: set(views_in(definition.properties)) for namespace, definition in definitions.items()}
    return {namespace: views for namespace, views in names.items() if views}


def _definitions(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, NamespaceDef]:
    """Return namespace definitions by name. Definitions that are not in memory are read in parallel."""
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
