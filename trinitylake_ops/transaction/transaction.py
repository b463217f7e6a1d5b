"""Transactions: many changes of the catalog, committed as one version."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import Self

import pyarrow as pa

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    ObjectExistsError,
    TableNotFoundError,
    TransactionExpiredError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import (
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    SavedTransaction,
    TableDef,
)
from trinitylake_ops.format.file_names import (
    saved_transaction_path,
    table_prefix,
)
from trinitylake_ops.format.keys import COMMIT_ID, TABLE_KEY_PREFIX, KeyCodec, check_new_name
from trinitylake_ops.format.limits import validate_changed_settings, validate_properties, validate_table_def
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import TRANSACTIONS
from trinitylake_ops.transaction.change_set import ChangeSet, is_namespace_key
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.commit_queue import CommitQueue
from trinitylake_ops.transaction.draft import Precondition, Submission, check_info
from trinitylake_ops.transaction.saved import (
    CommittedByOtherError,
    StagedDefinition,
    check_staged,
    delete_saved_transaction,
    read_staged,
    write_saved,
)
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import CatalogReader, Entry, Snapshot
from trinitylake_ops.versions.table_names import OneName, table_ids

_LISTED_TABLES = 3


class IdOf(Enum):
    """What is known of the id of a table that is created."""

    #: Nothing: another table may have it.
    ANY_TABLE = "any"
    #: No table has it yet: its folder was made before, and other changes may create a table there.
    STAGED_TABLE = "staged"
    #: It was made for this change, and nothing else knows it.
    NEW_TABLE = "new"


#: How a transaction ended, as telemetry tells it.
_OUTCOMES: Mapping[type[TrinityLakeError], str] = {
    CommitConflictError: "conflict",
    CommitAttemptsExhaustedError: "exhausted",
    CommitOutcomeUnknownError: "unknown",
    TransactionExpiredError: "expired",
}


class Transaction(CatalogReader):
    """Changes on a base version. Only the transaction's own reads see them until they are committed.

    As a context manager, a transaction commits on a normal exit and drops everything on an exception.
    ``committed_version`` is the version that holds the changes, or the base version when there were none. It is None
    before the commit.
    """

    def __init__(
        self,
        base: Snapshot,
        isolation: IsolationLevel,
        info: CommitInfo,
        queue: CommitQueue,
        transaction_id: str | None = None,
    ):
        self.base = base
        self._queue = queue
        self.id = transaction_id or str(uuid.uuid4())
        self.isolation = isolation
        self.committed_version: int | None = None
        self._info = replace(info, members=(self.id,))
        # A message that leaves no room for what the commit adds is refused here, not at the commit.
        check_info(self._info)
        self._changes = ChangeSet()
        self._preconditions: list[Precondition] = []
        self._adopting: set[str] = set()  # keys that may get the id of a table that exists
        self._begun_at_ms = base.read_at_ms
        self._is_open = True
        self._is_saved = False
        self._is_frozen = False

    @classmethod
    def resumed(cls, saved: SavedTransaction, base: Snapshot, queue: CommitQueue) -> Self:
        """Return a transaction as it was when it was saved; ``base`` is the version that it began on.

        Raises CorruptFileError, TransactionExpiredError.
        """
        path = saved_transaction_path(saved.id)
        if base.root.system.get(COMMIT_ID, "") != saved.base_commit_id:
            raise CorruptFileError(
                f"transaction {saved.id} began on another version {base.version} than there is now", path=path
            )
        info = CommitInfo(saved.operation, saved.message, saved.run_id, dict(saved.properties))
        begun = Snapshot(base.files, base.version, base.location, base.root, saved.begun_at_millis)
        txn = cls(begun, saved.isolation_level, info, queue, saved.id)
        txn._is_saved = True
        txn._changes = ChangeSet.of_saved(saved, path)
        txn._adopting = {key for key in txn._changes.writes if key.startswith(TABLE_KEY_PREFIX)}
        return txn

    # Reading, own writes included

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, by the storage's clock, in milliseconds since the epoch."""
        return self._begun_at_ms

    @property
    def definition(self) -> LakehouseDef:
        """The lakehouse definition, with this transaction's changes."""
        self._changes.has_read_definition = True
        if self._changes.definition is not None:
            return self._changes.definition
        with reading_bases(self.base):
            return self.base.definition

    @cached_attribute
    def keys(self) -> KeyCodec:
        """The encoding of this lakehouse's keys, which is fixed at its creation."""
        return self.base.keys

    def entry(self, key: str) -> Entry | None:
        """Return what a key maps to, own writes included."""
        self._changes.read_keys.add(key)
        if key in self._changes.writes:
            return self._changes.writes[key]
        with reading_bases(self.base):
            return self.base.entry(key)

    def prefix_keys(self, prefix: str) -> pa.ChunkedArray:
        """Return all keys with a prefix, own writes included, ascending, as a column of text."""
        self._changes.read_prefixes.add(prefix)
        with reading_bases(self.base):
            keys = self.base.prefix_keys(prefix)
        own = {key: entry for key, entry in self._changes.writes.items() if key.startswith(prefix)}
        if not own:
            return keys
        live = {key for key, entry in own.items() if entry is not None}
        return pa.chunked_array([sorted(set(keys.to_pylist()) - own.keys() | live)], keys.type)

    def namespace_at(self, location: str) -> NamespaceDef:
        with reading_bases(self.base):
            return self.base.namespace_at(location)

    def table_at(self, location: str) -> TableDef:
        with reading_bases(self.base):
            return self.base.table_at(location)

    # Writing

    def create_namespace(self, namespace: str, properties: Mapping[str, str] | None = None) -> NamespaceDef:
        """Create a namespace and return it. Raises ObjectExistsError, InvalidNameError, InvalidDefinitionError."""
        key = self.keys.namespace_key(namespace)
        if self.entry(key) is not None:
            raise ObjectExistsError(f"namespace {namespace!r} exists")
        check_new_name(namespace, "namespace")
        definition = NamespaceDef(id=str(uuid.uuid4()), properties=dict(properties or {}))
        validate_properties(f"namespace {namespace}", definition.properties)
        self._write(key, definition)
        return definition

    def alter_namespace(self, namespace: str, properties: Mapping[str, str]) -> NamespaceDef:
        """Replace a namespace's properties and return it.

        Raises NamespaceNotFoundError, InvalidNameError, InvalidDefinitionError.
        """
        current = self.namespace(namespace)
        definition = replace(current, properties=dict(properties))
        if definition != current:
            validate_properties(f"namespace {namespace}", definition.properties, current.properties)
            self._write(self.keys.namespace_key(namespace), definition)
        return definition

    def drop_namespace(self, namespace: str, cascade: bool = False) -> None:
        """Drop a namespace, with its tables when ``cascade``.

        Raises NamespaceNotFoundError, NamespaceNotEmptyError, InvalidNameError.
        """
        tables = self.tables(namespace)
        if tables and not cascade:
            shown = ", ".join(tables[:_LISTED_TABLES]) + (", ..." if len(tables) > _LISTED_TABLES else "")
            raise NamespaceNotEmptyError(
                f"namespace {namespace!r} holds {len(tables)} tables ({shown}); drop them first, or cascade"
            )
        for table in tables:
            self._write(self.keys.table_key(namespace, table), None)
        self._write(self.keys.namespace_key(namespace), None)

    def create_table(
        self, namespace: str, table: str, definition: TableDef, *, id_of: IdOf = IdOf.ANY_TABLE
    ) -> TableDef:
        """Create a table and return its definition, with an id when it had none.

        The schema's ids and names are checked, the table's files are not. The commit raises TableHasAnotherNameError if
        another table has the id, unless this transaction drops that one, as a rename does.

        Args:
            namespace: The name of a namespace that exists.
            table: The name of the table.
            definition: The definition.
            id_of: What the caller knows of the definition's id. A check of ``ANY_TABLE`` reads all definitions.

        Raises:
            NamespaceNotFoundError: If the namespace does not exist.
            ObjectExistsError: If the table exists.
            InvalidNameError: If a name cannot be stored.
            InvalidDefinitionError: If the definition cannot be stored.
        """
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is not None:
            raise ObjectExistsError(f"table {namespace}.{table} exists")
        check_new_name(table, "table")
        if not definition.id:
            definition, id_of = replace(definition, id=str(uuid.uuid4())), IdOf.NEW_TABLE
        table_prefix(definition.id)
        if id_of is IdOf.STAGED_TABLE and self._changes.staged_ids.get(definition.id, key) != key:
            id_of = IdOf.ANY_TABLE  # which the commit rejects
        validate_properties(f"table {namespace}.{table}", definition.properties)
        self._write(key, validate_table_def(definition))
        if id_of is IdOf.ANY_TABLE:
            self._adopting.add(key)
        elif id_of is IdOf.STAGED_TABLE:
            self._changes.staged_ids[definition.id] = key
        return definition

    def alter_table(self, namespace: str, table: str, definition: TableDef) -> TableDef:
        """Replace a table's definition and return it. Its id stays the same; an empty id is filled in.

        Raises TableNotFoundError, NamespaceNotFoundError, InvalidNameError, InvalidDefinitionError.
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
        """Drop a table. Raises TableNotFoundError, NamespaceNotFoundError, InvalidNameError."""
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is None:
            raise TableNotFoundError(f"there is no table {namespace}.{table}")
        self._write(key, None)

    def restore_entry(self, key: str, location: str | None, *, mirrors: bool = False) -> None:
        """Point a key to a definition of another version, or to nothing.

        A table's namespace must exist, as this transaction leaves it. Unless ``mirrors`` says that the lakehouse is to
        be what another one is, the commit raises TableHasAnotherNameError as for :meth:`create_table`.

        Args:
            key: The key of a namespace or a table.
            location: The location of the definition, None for nothing.
            mirrors: Whether the caller copies all names of another lakehouse.

        Raises:
            NamespaceNotFoundError: If the table's namespace does not exist.
        """
        name = self.keys.decode(key)
        if name is not None and name.table is not None and location is not None:
            self._table_key_in_namespace(name.namespace, name.table)
            if not mirrors:
                self._adopting.add(key)
        self._write(key, location)

    def alter_definition(self, definition: LakehouseDef) -> None:
        """Replace the lakehouse definition. The version that commits it is the first to be written by its settings.

        Raises InvalidDefinitionError for settings fixed at creation, and for those out of their range.
        """
        self._check_changeable()
        self._changes.definition = validate_changed_settings(self.base.definition, definition)

    def put_staged(self, staged: Sequence[StagedDefinition]) -> None:
        """Create or replace tables by definitions that other processes staged since this transaction began.

        Their files are looked at in parallel. Raises NamespaceNotFoundError, InvalidNameError, FileMissingError,
        CorruptFileError. Raises InvalidDefinitionError where a table of that name has another id. Raises
        InvalidInputError for a definition that was staged before, or for another table. Nothing is changed then.
        """
        self._check_changeable()
        check_staged(staged, self.base.definition.file_path_max_size_bytes)
        keys = [self._table_key_in_namespace(one.namespace, one.table) for one in staged]
        definitions = read_staged(self.base, staged)
        for key, one, definition in zip(keys, staged, definitions, strict=True):
            if self.entry(key) is None:
                check_new_name(one.table, "table")
            elif self.table(one.namespace, one.table).id != definition.id:
                raise InvalidDefinitionError(
                    f"table {one.namespace}.{one.table} has another id than the staged definition; stage it with the"
                    " id that the table has"
                )
        for key, one in zip(keys, staged, strict=True):
            if self.entry(key) is None:
                self._adopting.add(key)
            self._write(key, one.location)

    def add_file(self, path: str, data: bytes) -> None:
        """Let the commit write a file under a fresh name, in the round of the definitions that name it.

        A transaction that changes nothing writes no file. Where the commit fails, the file is deleted, best effort.
        """
        self._check_changeable()
        self._changes.files[path] = data

    def added_file(self, path: str) -> bytes | None:
        """Return the bytes of a file that the commit will write, None for another."""
        return self._changes.files.get(path)

    def reset_age(self) -> None:
        """Count the time to live from now, as no file was written until now.

        The base may be old: if the version after it can be created, nothing was committed since. Raises ConflictError
        for a transaction that was saved, since other processes know its age.
        """
        self._check_changeable()
        if self._is_saved:
            raise ConflictError("the transaction was saved, and keeps its age")
        self._begun_at_ms = self.base.files.storage.now_ms()

    def backdate(self, begun_at_ms: int) -> None:
        """Count the time to live from an earlier moment, when the oldest published file was written.

        A removal of orphans spares files that no version reaches for no longer than that time.
        """
        self._check_changeable()
        self._begun_at_ms = min(self._begun_at_ms, begun_at_ms)

    def require(self, precondition: Callable[[Snapshot], None], *, alone: bool = True) -> None:
        """Check a condition on the base now, and again on every newer version of a rebase.

        ``precondition`` raises a typed error when it does not hold. The transaction gets a version to itself, as
        another in its group might change what the condition looks at. With ``alone`` false none can: it looks for this
        transaction's own id.
        """
        precondition(self.base)
        self._preconditions.append(Precondition(precondition, alone))

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
            # The namespace is dropped, or set to a definition of another version, perhaps with another id.
            self._changes.replaced_namespaces.add(self.object_name(key).namespace)

    # Ending

    def commit(self, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> int:
        """Commit and return the version, or the base version when nothing changed.

        Raises CommitConflictError, CommitAttemptsExhaustedError, TransactionExpiredError,
        CommitOutcomeUnknownError, StorageError. Raises ObjectExistsError if a table and a view would have the same name
        (decision 7). The transaction has ended in any case.
        """
        self._check_open()
        if type(max_attempts) is not int or max_attempts < 1:
            raise InvalidInputError(f"max_attempts is {max_attempts!r}, it must be a number, at least 1")
        self._is_open = False
        self._require_one_name()
        if self._changes.is_empty and not self._preconditions:
            self.committed_version = self.base.version
        else:
            self.committed_version = self._commit_with_telemetry(max_attempts)
        if self._is_saved:
            delete_saved_transaction(self.base.files.storage, self.id)
        return self.committed_version

    def _require_one_name(self) -> None:
        """Let the commit check that no table that gets an id here has another name. Raises TableHasAnotherNameError."""
        ids: dict[str, str | None] = {}
        for key, entry in self._changes.writes.items():
            if entry is None:
                ids[key] = None
            elif key in self._adopting:
                ids[key] = entry.id if isinstance(entry, TableDef) else self.table_at(str(entry)).id
        ids |= {key: table_id for table_id, key in self._changes.staged_ids.items() if ids and key not in ids}
        if not any(ids.get(key) for key in self._adopting):
            return
        check = OneName(ids)
        if self._is_rename(ids):
            check(self.base)
        else:
            self.require(check)

    def _is_rename(self, ids: dict[str, str | None]) -> bool:
        """Whether tables only change their names. Other commits cannot use their ids, as they change the old names."""
        dropped = table_ids(self.base, {key: self.base.entry(key) for key, table_id in ids.items() if table_id is None})
        return {table_id for table_id in ids.values() if table_id} <= set(dropped.values())

    def _commit_with_telemetry(self, max_attempts: int) -> int:
        """Commit, and tell telemetry how it ended."""
        with spans.span("transaction", {"trinitylake.transaction": self.id}) as span:
            try:
                version = self._commit_once(max_attempts)
            except TrinityLakeError as error:
                hub.add(TRANSACTIONS, outcome=_OUTCOMES.get(type(error), "failed"))
                raise
            span.set({"trinitylake.version": version})
            hub.add(TRANSACTIONS, outcome="committed")
            return version

    def _commit_once(self, max_attempts: int) -> int:
        """Commit, unless this transaction was saved and another process has resumed and committed it."""
        submission = Submission(
            self.id,
            self.base,
            self._changes,
            self.isolation,
            self._info,
            begun_at_ms=self.begun_at_ms,
            preconditions=self._preconditions,
            was_saved=self._is_saved,
        )
        try:
            return self._queue.commit(submission, max_attempts)
        except CommittedByOtherError as error:
            return error.committed_version

    def save(self) -> str:
        """Save the transaction and return its id, by which another process resumes it. It ends here.

        The transaction keeps its age. It has to be committed within the lakehouse's ``txn_ttl_millis`` of its begin.
        Where saving fails, the file may have landed all the same. The transaction can then be saved again and ended,
        but not be changed. Raises InvalidInputError for a transaction with preconditions of an operation, or with
        files to write. Raises StorageError.
        """
        self._check_open()
        if self._preconditions:
            raise InvalidInputError("a transaction with preconditions of an operation cannot be saved")
        if self._changes.files:
            raise InvalidInputError("a transaction that has files to write cannot be saved; commit it")
        identity = SavedTransaction(
            id=self.id,
            base_version=self.base.version,
            base_commit_id=self.base.root.system.get(COMMIT_ID, ""),
            begun_at_millis=self.begun_at_ms,
            isolation_level=self.isolation,
            operation=self._info.operation,
            message=self._info.message,
            run_id=self._info.run_id,
            properties=self._info.properties,
        )
        saved = self._changes.saved_in(identity)
        # Even if the write fails, the file may have landed or may still land, and be resumed.
        self._is_saved = self._is_frozen = True
        write_saved(self.base.files.storage, saved)
        self._is_open = False
        return self.id

    def rollback(self) -> None:
        """Drop all changes and end the transaction. A saved one can no longer be resumed."""
        self._end()
        if self._is_saved:
            delete_saved_transaction(self.base.files.storage, self.id)

    def _end(self) -> None:
        self._is_open = False
        self._changes.writes.clear()
        self._changes.encoded.clear()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        if kind is None:
            self.commit()
        else:
            self._end()

    def _check_changeable(self) -> None:
        self._check_open()
        if self._is_frozen:
            raise ConflictError("the transaction may have been saved as it is: save it again, or end it")

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConflictError("the transaction has ended; begin a new one")
