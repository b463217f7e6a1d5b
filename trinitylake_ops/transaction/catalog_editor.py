"""Read and change the catalog on a base version, in memory.

A transaction is an editor that can also be committed or saved (transaction.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

import pyarrow as pa

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import (
    ConflictError,
    InvalidDefinitionError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    ObjectExistsError,
    TableNotFoundError,
)
from trinitylake_ops.format.definitions import LakehouseDef, NamespaceDef, TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.keys import KeyCodec, check_new_name
from trinitylake_ops.format.limits import validate_changed_settings, validate_properties, validate_table_def
from trinitylake_ops.transaction.change_set import ChangeSet, is_namespace_key
from trinitylake_ops.transaction.saved import StagedDefinition, check_staged, read_staged
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import CatalogReader, Entry, Snapshot

_LISTED_TABLES = 3


class IdOf(Enum):
    """Where the id of a new table comes from."""

    #: The origin is unknown: another table may already have the id.
    ANY_TABLE = "any"
    #: No table has the id yet, but its folder exists, so concurrent changes may also create a table with it.
    STAGED_TABLE = "staged"
    #: The id was generated for this change.
    NEW_TABLE = "new"


class CatalogEditor(CatalogReader):
    """Changes to a base version, visible only to reads through this editor."""

    def __init__(self, base: Snapshot):
        self.base = base
        self._changes = ChangeSet()
        self._adopting: set[str] = set()  # keys of tables that may receive the id of an existing table
        self._is_open = True
        self._is_frozen = False

    # Reads, including uncommitted writes

    @property
    def definition(self) -> LakehouseDef:
        """The lakehouse definition, including uncommitted changes."""
        self._changes.has_read_definition = True
        if self._changes.definition is not None:
            return self._changes.definition
        with reading_bases(self.base):
            return self.base.definition

    @cached_attribute
    def keys(self) -> KeyCodec:
        """The encoding of the lakehouse's keys, which is fixed at creation."""
        return self.base.keys

    def entry(self, key: str) -> Entry | None:
        """Return the entry of a key, including uncommitted writes."""
        self._changes.read_keys.add(key)
        if key in self._changes.writes:
            return self._changes.writes[key]
        with reading_bases(self.base):
            return self.base.entry(key)

    def prefix_keys(self, prefix: str) -> pa.ChunkedArray:
        """Return all keys with a prefix as a string column in ascending order, including uncommitted writes."""
        self._changes.read_prefixes.add(prefix)
        with reading_bases(self.base):
            keys = self.base.prefix_keys(prefix)
        written = {key: entry for key, entry in self._changes.writes.items() if key.startswith(prefix)}
        if not written:
            return keys
        live = {key for key, entry in written.items() if entry is not None}
        return pa.chunked_array([sorted(set(keys.to_pylist()) - written.keys() | live)], keys.type)

    def namespace_at(self, location: str) -> NamespaceDef:
        with reading_bases(self.base):
            return self.base.namespace_at(location)

    def table_at(self, location: str) -> TableDef:
        with reading_bases(self.base):
            return self.base.table_at(location)

    # Writes

    def create_namespace(self, namespace: str, properties: Mapping[str, str] | None = None) -> NamespaceDef:
        """Create a namespace and return it.

        Args:
            namespace: The name.
            properties: The properties.

        Raises:
            ObjectExistsError: The namespace exists.
            InvalidNameError: The name cannot be stored.
            InvalidDefinitionError: A property cannot be stored.
        """
        key = self.keys.namespace_key(namespace)
        if self.entry(key) is not None:
            raise ObjectExistsError(f"namespace {namespace!r} already exists")
        check_new_name(namespace, "namespace")
        definition = NamespaceDef(id=str(uuid.uuid4()), properties=dict(properties or {}))
        validate_properties(f"namespace {namespace}", definition.properties)
        self._write(key, definition)
        return definition

    def alter_namespace(self, namespace: str, properties: Mapping[str, str]) -> NamespaceDef:
        """Replace the properties of a namespace and return it.

        Args:
            namespace: The name.
            properties: The new properties.

        Raises:
            NamespaceNotFoundError: The namespace does not exist.
            InvalidNameError: The name cannot be stored.
            InvalidDefinitionError: A property cannot be stored.
        """
        current = self.namespace(namespace)
        definition = replace(current, properties=dict(properties))
        if definition != current:
            validate_properties(f"namespace {namespace}", definition.properties, current.properties)
            self._write(self.keys.namespace_key(namespace), definition)
        return definition

    def drop_namespace(self, namespace: str, cascade: bool = False) -> None:
        """Drop a namespace.

        Args:
            namespace: The name.
            cascade: Whether to also drop its tables.

        Raises:
            NamespaceNotFoundError: The namespace does not exist.
            NamespaceNotEmptyError: The namespace contains tables, and ``cascade`` is not set.
            InvalidNameError: The name cannot be stored.
        """
        tables = self.tables(namespace)
        if tables and not cascade:
            listed = ", ".join(tables[:_LISTED_TABLES]) + (", ..." if len(tables) > _LISTED_TABLES else "")
            raise NamespaceNotEmptyError(
                f"namespace {namespace!r} contains {len(tables)} tables ({listed}); drop them first, or set cascade"
            )
        for table in tables:
            self._write(self.keys.table_key(namespace, table), None)
        self._write(self.keys.namespace_key(namespace), None)

    def create_table(
        self, namespace: str, table: str, definition: TableDef, *, id_of: IdOf = IdOf.ANY_TABLE
    ) -> TableDef:
        """Create a table and return its definition. An empty id is filled in.

        The ids and names of the schema are validated; the table's files are not. The commit raises
        TableHasAnotherNameError if another table has the same id, unless this transaction drops it, as a rename does.

        Args:
            namespace: The name of an existing namespace.
            table: The name of the table.
            definition: The definition.
            id_of: The origin of the definition's id. ``ANY_TABLE`` makes the commit read all definitions.

        Raises:
            NamespaceNotFoundError: The namespace does not exist.
            ObjectExistsError: The table exists.
            InvalidNameError: A name cannot be stored.
            InvalidDefinitionError: The definition cannot be stored.
        """
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is not None:
            raise ObjectExistsError(f"table {namespace}.{table} already exists")
        check_new_name(table, "table")
        if not definition.id:
            definition, id_of = replace(definition, id=str(uuid.uuid4())), IdOf.NEW_TABLE
        table_prefix(definition.id)
        if id_of is IdOf.STAGED_TABLE and self._changes.staged_ids.get(definition.id, key) != key:
            id_of = IdOf.ANY_TABLE  # the commit rejects it
        validate_properties(f"table {namespace}.{table}", definition.properties)
        self._write(key, validate_table_def(definition))
        if id_of is IdOf.ANY_TABLE:
            self._adopting.add(key)
        elif id_of is IdOf.STAGED_TABLE:
            self._changes.staged_ids[definition.id] = key
        return definition

    def alter_table(self, namespace: str, table: str, definition: TableDef) -> TableDef:
        """Replace the definition of a table and return it. The id cannot change; an empty id is filled in.

        Args:
            namespace: The namespace of the table.
            table: The name of the table.
            definition: The new definition.

        Raises:
            TableNotFoundError: The table does not exist.
            NamespaceNotFoundError: The namespace does not exist.
            InvalidNameError: A name cannot be stored.
            InvalidDefinitionError: The definition cannot be stored, or has another id.
        """
        key = self._table_key_in_namespace(namespace, table)
        current = self.table(namespace, table)
        if definition.id not in ("", current.id):
            raise InvalidDefinitionError(
                f"table {namespace}.{table} has the id {current.id!r}; an id cannot be changed to {definition.id!r}"
            )
        definition = replace(definition, id=current.id)
        if definition.properties != current.properties:
            validate_properties(f"table {namespace}.{table}", definition.properties, current.properties)
        if definition != current:
            self._write(key, validate_table_def(definition))
        return definition

    def drop_table(self, namespace: str, table: str) -> None:
        """Drop a table.

        Args:
            namespace: The namespace of the table.
            table: The name of the table.

        Raises:
            TableNotFoundError: The table does not exist.
            NamespaceNotFoundError: The namespace does not exist.
            InvalidNameError: A name cannot be stored.
        """
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is None:
            raise TableNotFoundError(f"there is no table {namespace}.{table}")
        self._write(key, None)

    def restore_entry(self, key: str, location: str | None, *, mirrors: bool = False) -> None:
        """Point a key to a definition from another version, or delete the key.

        The namespace of a table must exist in this transaction. Unless ``mirrors`` is set, the commit raises
        TableHasAnotherNameError like :meth:`create_table`.

        Args:
            key: The key of a namespace or a table.
            location: The location of the definition, or None to delete the key.
            mirrors: Whether the caller copies all names from another lakehouse.

        Raises:
            NamespaceNotFoundError: The namespace of the table does not exist.
        """
        name = self.keys.decode(key)
        if name is not None and name.table is not None and location is not None:
            self._table_key_in_namespace(name.namespace, name.table)
            if not mirrors:
                self._adopting.add(key)
        self._write(key, location)

    def alter_definition(self, definition: LakehouseDef) -> None:
        """Replace the lakehouse definition. The new settings already apply to the version that the commit creates.

        Raises InvalidDefinitionError for settings that are fixed at creation or out of range.
        """
        self._check_changeable()
        self._changes.definition = validate_changed_settings(self.base.definition, definition)

    def put_staged(self, staged: Sequence[StagedDefinition]) -> None:
        """Create or replace tables with definitions that other processes have staged since this transaction began.

        Reads their files in parallel. If an error occurs, nothing is changed. Raises NamespaceNotFoundError,
        InvalidNameError, FileMissingError, CorruptFileError, InvalidDefinitionError if a table of the same name has
        another id, and InvalidInputError for a definition that was staged earlier or for another table.
        """
        self._check_changeable()
        check_staged(staged, self.base.definition.file_path_max_size_bytes)
        keys = [self._table_key_in_namespace(item.namespace, item.table) for item in staged]
        definitions = read_staged(self.base, staged)
        for key, item, definition in zip(keys, staged, definitions, strict=True):
            if self.entry(key) is None:
                check_new_name(item.table, "table")
            elif self.table(item.namespace, item.table).id != definition.id:
                raise InvalidDefinitionError(
                    f"the staged definition of table {item.namespace}.{item.table} has a different id than the table;"
                    " stage it with the table's id"
                )
        for key, item in zip(keys, staged, strict=True):
            if self.entry(key) is None:
                self._adopting.add(key)
            self._write(key, item.location)

    def add_file(self, path: str, data: bytes) -> None:
        """Add a file that the commit writes in the same round trip as its definitions.

        A transaction that changes nothing writes no file. If the commit fails, the file is deleted, best effort.

        Args:
            path: A path that was never used.
            data: The bytes of the file.
        """
        self._check_changeable()
        self._changes.files[path] = data

    def added_file(self, path: str) -> bytes | None:
        """Return the bytes of a file that the commit will write, or None if there is no such file."""
        return self._changes.files.get(path)

    def _table_key_in_namespace(self, namespace: str, table: str) -> str:
        key = self.keys.table_key(namespace, table)
        if not self.has_namespace(namespace):
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r}; create it first")
        self._changes.relied_namespaces.add(namespace)
        return key

    def _write(self, key: str, entry: Entry | None) -> None:
        self._check_changeable()
        self._changes.write(key, entry)
        if not isinstance(entry, NamespaceDef | TableDef) and is_namespace_key(key):
            # The namespace is dropped, or replaced by one from another version, which may have a different id.
            self._changes.replaced_namespaces.add(self.object_name(key).namespace)

    def _check_changeable(self) -> None:
        self._check_open()
        if self._is_frozen:
            raise ConflictError("the transaction cannot be changed: it may have been saved; save it again or end it")

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConflictError("the transaction has ended; begin a new one")
