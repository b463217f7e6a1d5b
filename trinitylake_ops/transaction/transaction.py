"""Transactions: many changes of the catalog, committed as one version."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import NoReturn, Self

import pyarrow as pa

from trinitylake_ops.errors import (
    CommitConflictError,
    ConflictError,
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    ObjectExistsError,
    TableNotFoundError,
    TransactionExpiredError,
)
from trinitylake_ops.format.definitions import (
    IsolationLevel,
    LakehouseDef,
    NamespaceDef,
    SavedTransaction,
    SavedWrite,
    TableDef,
)
from trinitylake_ops.format.file_names import (
    is_table_definition_path,
    new_lakehouse_def_path,
    new_namespace_path,
    new_table_path,
    saved_transaction_path,
    table_prefix,
)
from trinitylake_ops.format.limits import validate_changed_settings, validate_table_def
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX, KeyCodec, ObjectName
from trinitylake_ops.format.nodes.system_rows import COMMIT_ID
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.conflicts import (
    describe_key,
    merge_lakehouse_defs,
    new_table_conflicts,
    read_conflicts,
    written_key_conflicts,
)
from trinitylake_ops.transaction.draft import Writes
from trinitylake_ops.transaction.group_commit import CommitQueue, Footprint
from trinitylake_ops.transaction.saved import (
    CommittedElsewhereError,
    StagedDefinition,
    forget_saved,
    version_of,
    write_saved,
)
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import CatalogReader, Entry, Snapshot

_LISTED_TABLES = 3
_LONGEST_OPERATION = "alter-definition"
_LONGEST_SUMMARY_CHARS = 200
_LARGEST_COUNTS = {"set": 10**9, "deleted": 10**9}


class Transaction(CatalogReader):
    """Changes on a base version, seen by its own reads and by nobody else until they are committed.

    As a context manager it commits on a normal exit and drops everything on an exception.
    ``committed_version`` is the version that holds the changes, or the base version when there
    were none; None before the commit.
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
        # Refused here, not at the commit: a message that leaves no room for what the commit adds.
        self._largest_info("\N{LARGE BLUE CIRCLE}" * _LONGEST_SUMMARY_CHARS).largest()
        self._definition: LakehouseDef | None = None
        self._writes: dict[str, Entry | None] = {}
        self._paths: dict[str, str] = {}
        self._definition_path: str | None = None
        self._relied_namespaces: set[str] = set()
        self._replaced_namespaces: set[str] = set()
        self._preconditions: list[Callable[[Snapshot], None]] = []
        self._read_keys: set[str] = set()
        self._read_prefixes: set[str] = set()
        self._begun_at_ms = base.read_at_ms
        self._is_open = True
        self._is_saved = False
        self._is_frozen = False
        self._has_read_definition = False

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
        for write in saved.writes:
            kind = NamespaceDef if write.key.startswith(NAMESPACE_KEY_PREFIX) else TableDef
            content = write.definition
            txn._writes[write.key] = write.location if content is None else kind.from_bytes(content, path)
        if saved.lakehouse_def is not None:
            txn._definition = LakehouseDef.from_bytes(saved.lakehouse_def, path)
        txn._relied_namespaces = set(saved.relied_namespaces)
        txn._replaced_namespaces = set(saved.replaced_namespaces)
        txn._read_keys, txn._read_prefixes = set(saved.read_keys), set(saved.read_prefixes)
        txn._has_read_definition = saved.has_read_definition
        return txn

    # Reading, own writes included

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, by the storage's clock, in milliseconds since the epoch."""
        return self._begun_at_ms

    @property
    def definition(self) -> LakehouseDef:
        """The lakehouse definition, with this transaction's changes."""
        self._has_read_definition = True
        if self._definition is not None:
            return self._definition
        with reading_bases(self.base):
            return self.base.definition

    @cached_property
    def keys(self) -> KeyCodec:
        """The encoding of this lakehouse's keys, which is fixed at its creation."""
        return self.base.keys

    def entry(self, key: str) -> Entry | None:
        """Return what a key maps to, own writes included."""
        self._read_keys.add(key)
        if key in self._writes:
            return self._writes[key]
        with reading_bases(self.base):
            return self.base.entry(key)

    def prefix_keys(self, prefix: str) -> pa.StringArray:
        """Return all keys with a prefix, own writes included, ascending, as a column of text."""
        self._read_prefixes.add(prefix)
        with reading_bases(self.base):
            keys = self.base.prefix_keys(prefix)
        own = {key for key in self._writes if key.startswith(prefix)}
        if not own:
            return keys
        live = {key for key in own if self._writes[key] is not None}
        return pa.array(sorted(set(keys.to_pylist()) - own | live), keys.type)

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
        definition = NamespaceDef(id=str(uuid.uuid4()), properties=dict(properties or {}))
        self._write(key, definition)
        return definition

    def alter_namespace(self, namespace: str, properties: Mapping[str, str]) -> NamespaceDef:
        """Replace a namespace's properties and return it.

        Raises NamespaceNotFoundError, InvalidNameError, InvalidDefinitionError.
        """
        current = self.namespace(namespace)
        definition = replace(current, properties=dict(properties))
        if definition != current:
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

    def create_table(self, namespace: str, table: str, definition: TableDef) -> TableDef:
        """Create a table and return its definition, with an id when it had none.

        The schema's ids and names are checked, the table's files are not. Raises
        NamespaceNotFoundError, ObjectExistsError, InvalidNameError, InvalidDefinitionError.
        """
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is not None:
            raise ObjectExistsError(f"table {namespace}.{table} exists")
        if not definition.id:
            definition = replace(definition, id=str(uuid.uuid4()))
        table_prefix(definition.id)
        self._write(key, validate_table_def(definition))
        return definition

    def alter_table(self, namespace: str, table: str, definition: TableDef) -> TableDef:
        """Replace a table's definition and return it; its id stays the same, an empty one is filled in.

        Raises TableNotFoundError, NamespaceNotFoundError, InvalidNameError, InvalidDefinitionError.
        """
        key = self._table_key_in_namespace(namespace, table)
        current = self.table(namespace, table)
        if definition.id not in ("", current.id):
            raise InvalidDefinitionError(
                f"table {namespace}.{table} has the id {current.id!r}; an id cannot be changed to {definition.id!r}"
            )
        definition = replace(definition, id=current.id)
        if definition != current:
            self._write(key, validate_table_def(definition))
        return definition

    def drop_table(self, namespace: str, table: str) -> None:
        """Drop a table. Raises TableNotFoundError, NamespaceNotFoundError, InvalidNameError."""
        key = self._table_key_in_namespace(namespace, table)
        if self.entry(key) is None:
            raise TableNotFoundError(f"there is no table {namespace}.{table}")
        self._write(key, None)

    def restore_entry(self, key: str, location: str | None) -> None:
        """Let a key point to a definition that another version holds, at its location, or to nothing.

        A table's namespace must exist, as this transaction leaves it. Raises NamespaceNotFoundError.
        """
        name = self.keys.decode(key)
        if name is not None and name.table is not None and location is not None:
            self._table_key_in_namespace(name.namespace, name.table)
        self._write(key, location)

    def alter_definition(self, definition: LakehouseDef) -> None:
        """Replace the lakehouse definition; the version that commits it is the first to be written by its settings.

        Raises InvalidDefinitionError for settings fixed at creation, and for those out of their range.
        """
        self._check_changeable()
        self._definition = validate_changed_settings(self.base.definition, definition)

    def put_staged(self, staged: Sequence[StagedDefinition]) -> None:
        """Create or replace tables by definitions that other processes staged since this transaction began.

        Their files are looked at in parallel. Raises NamespaceNotFoundError, InvalidNameError, InvalidDefinitionError
        where a table of that name has another id, InvalidInputError for one that was staged before or for
        another table, FileMissingError, CorruptFileError; nothing is changed then.
        """
        self._check_changeable()
        untyped: Sequence[object] = staged
        if not all(isinstance(one, StagedDefinition) and type(one.location) is str for one in untyped):
            raise InvalidInputError("put_staged takes what stage_definition returned")
        for named in ({(one.namespace, one.table) for one in staged}, {one.location for one in staged}):
            if len(named) < len(staged):
                raise InvalidInputError("two of the staged definitions are of one table, or one file; take one of them")
        limit_bytes = self.base.definition.file_path_max_size_bytes
        for one in staged:
            if not is_table_definition_path(one.location, one.namespace, one.table, limit_bytes):
                raise InvalidInputError(f"{one.location!r} was not staged for table {one.namespace}.{one.table}")
        storage, oldest_ms = self.base.files.storage, self.base.read_at_ms - CLOCK_MARGIN_MS
        keys = [self._table_key_in_namespace(one.namespace, one.table) for one in staged]

        def load(one: StagedDefinition) -> TableDef:
            if storage.stat(one.location).last_modified_ms < oldest_ms:
                raise InvalidInputError(
                    f"table {one.namespace}.{one.table} was staged before this transaction began; its file may be"
                    " removed as an orphan, stage it again"
                )
            storage.drop_cached(one.location)  # what counts is what stands there
            definition = validate_table_def(TableDef.from_bytes(storage.read(one.location), one.location))
            table_prefix(definition.id)
            return definition

        definitions = run_parallel(in_one_round(load), staged, storage.concurrency)
        for key, one, definition in zip(keys, staged, definitions, strict=True):
            if self.entry(key) is not None and self.table(one.namespace, one.table).id != definition.id:
                raise InvalidDefinitionError(
                    f"table {one.namespace}.{one.table} has another id than the staged definition; stage it with the"
                    " id that the table has"
                )
        for key, one in zip(keys, staged, strict=True):
            self._write(key, one.location)

    def date_forward(self) -> None:
        """Count the time to live from now, where what took until now has written nothing.

        The base may be old: nothing was committed since where the version after it can be created. Raises
        ConflictError for a transaction that was saved: others know its age.
        """
        self._check_changeable()
        if self._is_saved:
            raise ConflictError("the transaction was saved, and keeps its age")
        self._begun_at_ms = self.base.files.storage.now_ms()

    def date_back(self, begun_at_ms: int) -> None:
        """Count the time to live from an earlier moment, when the oldest file was written that this publishes.

        Orphan removal spares files that no version reaches for no longer than that time.
        """
        self._check_changeable()
        self._begun_at_ms = min(self._begun_at_ms, begun_at_ms)

    def require(self, precondition: Callable[[Snapshot], None]) -> None:
        """Check something on the base now, and again on every newer version the commit is rebased on.

        ``precondition`` raises a typed error when it does not hold.
        """
        precondition(self.base)
        self._preconditions.append(precondition)

    def _table_key_in_namespace(self, namespace: str, table: str) -> str:
        key = self.keys.table_key(namespace, table)
        if not self.has_namespace(namespace):
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r}; create it first")
        self._relied_namespaces.add(namespace)
        return key

    def _write(self, key: str, entry: Entry | None) -> None:
        self._check_changeable()
        if isinstance(entry, NamespaceDef | TableDef):
            entry.to_bytes()  # refuses here, not at the commit, what cannot be stored
        elif key.startswith(NAMESPACE_KEY_PREFIX):
            # Dropped, or set to a definition of another version: it may be a namespace of another id.
            self._replaced_namespaces.add(self._named(key).namespace)
        self._writes[key] = entry
        self._paths.pop(key, None)

    # Ending

    def commit(self, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> int:
        """Commit and return the version, or the base version when nothing changed.

        Raises CommitConflictError, CommitAttemptsExhaustedError, TransactionExpiredError,
        CommitOutcomeUnknownError, StorageError. The transaction has ended in any case.
        """
        self._check_open()
        if type(max_attempts) is not int or max_attempts < 1:
            raise InvalidInputError(f"max_attempts is {max_attempts!r}, it must be a number, at least 1")
        self._is_open = False
        if not self._writes and self._definition is None and not self._preconditions:
            self.committed_version = self.base.version
        else:
            self.committed_version = self._commit_once(max_attempts)
        if self._is_saved:
            forget_saved(self.base.files.storage, self.id)
        return self.committed_version

    def _commit_once(self, max_attempts: int) -> int:
        """Commit, unless this transaction was saved and another process has resumed and committed it."""
        try:
            return self._queue.commit(self, self.base, max_attempts)
        except CommittedElsewhereError as error:
            return error.committed_version

    def save(self) -> str:
        """Save the transaction for another process, which resumes it by the id that this returns; it ends here.

        It keeps its age: it has to be committed within the lakehouse's ``txn_ttl_millis`` of its begin. Where saving
        fails, it may have landed all the same: the transaction can be saved again and ended, but not be changed.
        Raises InvalidInputError for one with preconditions of an operation, StorageError.
        """
        self._check_open()
        if self._preconditions:
            raise InvalidInputError("a transaction with preconditions of an operation cannot be saved")
        definition = None if self._definition is None else self._definition.to_bytes()
        saved = SavedTransaction(
            id=self.id,
            base_version=self.base.version,
            base_commit_id=self.base.root.system.get(COMMIT_ID, ""),
            begun_at_millis=self.begun_at_ms,
            isolation_level=self.isolation,
            operation=self._info.operation,
            message=self._info.message,
            run_id=self._info.run_id,
            properties=self._info.properties,
            writes=tuple(_saved_write(key, entry) for key, entry in self._writes.items()),
            lakehouse_def=definition,
            relied_namespaces=tuple(sorted(self._relied_namespaces)),
            replaced_namespaces=tuple(sorted(self._replaced_namespaces)),
            read_keys=tuple(sorted(self._read_keys)),
            read_prefixes=tuple(sorted(self._read_prefixes)),
            has_read_definition=self._has_read_definition,
        )
        # Also where the write fails: it may have landed, or still land, and be resumed.
        self._is_saved = self._is_frozen = True
        write_saved(self.base.files.storage, saved)
        self._is_open = False
        return self.id

    def rollback(self) -> None:
        """Drop all changes and end the transaction, for ever also one that was saved."""
        self._end()
        if self._is_saved:
            forget_saved(self.base.files.storage, self.id)

    def _end(self) -> None:
        self._is_open = False
        self._writes.clear()

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

    # Committing (transaction.group_commit.Groupable)

    @property
    def changes_nothing(self) -> bool:
        """Whether this transaction changes nothing in the version that it began on: all that it made it dropped again.

        Raises StorageError.
        """
        has_writes = any(entry is not None or self.base.entry(key) is not None for key, entry in self._writes.items())
        return not has_writes and self._definition in (None, self.base.definition)

    def footprint(self) -> Footprint:
        """Return what this transaction touches; one that changes the lakehouse definition goes alone."""
        keys = {self.keys.namespace_key(namespace) for namespace in self._relied_namespaces}
        prefixes = {self.keys.tables_prefix(namespace) for namespace in self._replaced_namespaces}
        if self.isolation != IsolationLevel.SNAPSHOT:
            keys |= self._read_keys
            prefixes |= self._read_prefixes
        is_alone = self._definition is not None or bool(self._preconditions)
        return Footprint(self._writes.keys(), keys, tuple(sorted(prefixes)), is_alone)

    def largest_info(self) -> CommitInfo:
        """Return what this transaction will say about itself, with the most that its numbers may take."""
        return self._largest_info(self._summary())

    def _largest_info(self, summary: str | None) -> CommitInfo:
        operation, message = self._info.operation or _LONGEST_OPERATION, self._info.message or summary
        return replace(self._info, operation=operation, message=message, counts=_LARGEST_COUNTS)

    def writes_on(self, base: Snapshot) -> Writes | None:
        """Return what this transaction would write on ``base``, or None when nothing would change."""
        messages: dict[str, str | None] = {}
        files: dict[str, bytes] = {}
        for key, entry in self._writes.items():
            if entry is None:
                if base.entry(key) is not None:
                    messages[key] = None
            elif isinstance(entry, str):
                messages[key] = entry
            else:
                path = self._paths.setdefault(key, self._new_path(key))
                messages[key] = path
                files[path] = entry.to_bytes(path)
        lakehouse_def, definition = None, None
        if self._definition is not None and self._definition != base.definition:
            definition = self._definition
            lakehouse_def = self._definition_path = self._definition_path or new_lakehouse_def_path()
            files[lakehouse_def] = definition.to_bytes(lakehouse_def)
        if not messages and lakehouse_def is None:
            return None
        counts = {
            "set": sum(1 for value in messages.values() if value is not None),
            "deleted": sum(1 for value in messages.values() if value is None),
        }
        operation, message = self._info.operation or self._operation_on(base), self._info.message or self._summary()
        info = replace(self._info, operation=operation, message=message, counts=counts)
        return Writes(messages, files, info, lakehouse_def, definition)

    def rename_files(self) -> None:
        """Give all files that this transaction would write new names."""
        self._paths.clear()
        self._definition_path = None

    def check(self, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]) -> None:
        """Check what this transaction wrote and relied on against ``latest``; merge the lakehouse definition.

        Raises CommitConflictError, what its preconditions raise, and CommittedElsewhereError for one that was saved
        and is in one of the versions between, as it is here.
        """
        if self._is_saved and (version := version_of(base.files, self.id, base.version, latest.version)) is not None:
            self._check_committed_as(Snapshot.of(base.files, version), base)
        conflicts = written_key_conflicts(self.keys, changes, self._writes)
        for namespace in sorted(self._relied_namespaces):
            conflicts += self._namespace_conflicts(namespace, base, latest)
        for namespace in sorted(self._replaced_namespaces):  # those created anew since, too
            conflicts += new_table_conflicts(self.keys, changes, namespace, self._writes)
        if self.isolation != IsolationLevel.SNAPSHOT:
            conflicts += read_conflicts(self.keys, changes, self._read_keys, self._read_prefixes)
            if self._has_read_definition and base.definition != latest.definition:
                conflicts.append("settings of the lakehouse: we read them, a concurrent commit changed them")
        conflicts += self._merge_definition(base, latest)
        if conflicts:
            raise CommitConflictError(
                f"version {latest.version} conflicts with this transaction, based on version {base.version}: "
                + "; ".join(conflicts),
                conflicts=tuple(conflicts),
                base_version=base.version,
                latest_version=latest.version,
            )
        for precondition in self._preconditions:
            precondition(latest)

    def _check_committed_as(self, committed: Snapshot, base: Snapshot) -> NoReturn:
        """Tell that another process committed this transaction.

        Raises CommitConflictError where it has changed since, TransactionExpiredError where the version was purged.
        """
        if committed.root.is_sealed:
            raise TransactionExpiredError(
                f"transaction {self.id} was committed as version {committed.version} by another process; the version"
                " was purged since, and nobody can tell whether with these changes",
                path=committed.location,
                version=committed.version,
            )
        for key, entry in self._writes.items():
            location = committed.entry(key)
            if entry is None or isinstance(entry, str) or location is None:
                is_same = location == entry
            elif isinstance(entry, NamespaceDef):
                is_same = committed.namespace_at(location) == entry
            else:
                is_same = committed.table_at(location) == entry
            if not is_same:
                self._raise_changed(committed, base, describe_key(self.keys, key))
        if self._definition is not None:
            merged, conflicts = merge_lakehouse_defs(base.definition, self._definition, committed.definition)
            if conflicts or merged != committed.definition:
                self._raise_changed(committed, base, "settings of the lakehouse")
        raise CommittedElsewhereError(
            f"transaction {self.id} was committed by another process", committed_version=committed.version
        )

    def _raise_changed(self, committed: Snapshot, base: Snapshot, what: str) -> NoReturn:
        raise CommitConflictError(
            f"transaction {self.id} was committed as version {committed.version} by another process, which resumed it,"
            f" with another {what}; begin a new one for what is missing",
            conflicts=(f"{what}: we changed it since",),
            base_version=base.version,
            latest_version=committed.version,
        )

    def _merge_definition(self, base: Snapshot, latest: Snapshot) -> list[str]:
        """Take over what others changed in the lakehouse definition; returns the conflicts."""
        if self._definition is None or latest.definition_location == base.definition_location:
            return []
        self._definition, conflicts = merge_lakehouse_defs(base.definition, self._definition, latest.definition)
        self._definition_path = None
        return conflicts

    def _namespace_conflicts(self, namespace: str, base: Snapshot, latest: Snapshot) -> list[str]:
        """A table's namespace must still be the one that was read, though its properties may have changed."""
        key = self.keys.namespace_key(namespace)
        if key in self._writes or base.entry(key) == latest.entry(key):
            return []
        if latest.has_namespace(namespace) and latest.namespace(namespace).id == base.namespace(namespace).id:
            return []
        return [f"{describe_key(self.keys, key)}: we changed its tables, a concurrent commit dropped it"]

    def _operation_on(self, base: Snapshot) -> str:
        """Name what a transaction without a name of its own does, when it is one thing."""
        if not self._writes:
            return "alter-definition"
        if len(self._writes) > 1 or self._definition is not None:
            return "transaction"
        (key, write), kind = next(iter(self._writes.items())), "table"
        if key.startswith(NAMESPACE_KEY_PREFIX):
            kind = "namespace"
        if write is None:
            return f"drop-{kind}"
        return f"{'create' if base.entry(key) is None else 'alter'}-{kind}"

    def _summary(self) -> str | None:
        """Name the object of a transaction that has no message, when it is one."""
        if len(self._writes) != 1:
            return None
        return str(self._named(next(iter(self._writes))))[:_LONGEST_SUMMARY_CHARS]

    def _new_path(self, key: str) -> str:
        name = self._named(key)
        limit_bytes = self.base.definition.file_path_max_size_bytes
        if name.table is None:
            return new_namespace_path(name.namespace, limit_bytes)
        return new_table_path(name.namespace, name.table, limit_bytes)

    def _named(self, key: str) -> ObjectName:
        return self._name(key)


def _saved_write(key: str, entry: Entry | None) -> SavedWrite:
    if entry is None or isinstance(entry, str):
        return SavedWrite(key=key, location=entry)
    return SavedWrite(key=key, definition=entry.to_bytes())
