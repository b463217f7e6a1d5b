"""The changes of a transaction, and what it relied on and read.

A plain value: it can be saved, and checked on a newer version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from trinitylake_ops.format.definitions import (
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    SavedTransaction,
    SavedWrite,
    TableDef,
    sealed_definition,
)
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, KeyCodec
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

    def meets(self, other: Footprint) -> bool:
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
