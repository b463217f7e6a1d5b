"""The front door: opening, creating, reading and changing a lakehouse."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import (
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
)
from trinitylake_ops.format.definitions import IsolationLevel, LakehouseDef, ParentRecord, TableDef
from trinitylake_ops.format.file_names import is_immutable_path
from trinitylake_ops.format.limits import validate_lakehouse_def
from trinitylake_ops.format.locations import as_uri, normalize_root_uri
from trinitylake_ops.storage import Storage, background, open_storage
from trinitylake_ops.storage.cache.memory import storage_identity
from trinitylake_ops.storage.cache.storage import CacheStorage, private_cache_view, shared_cache_view
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS, Commit, Committable
from trinitylake_ops.transaction.commit_queue import CommitQueue, shared_queue
from trinitylake_ops.transaction.creation import check_no_table_under, claim_named_root, create_lakehouse
from trinitylake_ops.transaction.pacing import pace
from trinitylake_ops.transaction.publish import CommitResolution, resolve_commit
from trinitylake_ops.transaction.saved import StagedDefinition, checked_id, read_saved, stage_definition
from trinitylake_ops.transaction.time_to_live import OperationAge, TransactionAge
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.store import NodeStore
from trinitylake_ops.versions.commit_info import CommitInfo, acting_run
from trinitylake_ops.versions.definition_store import DefinitionStore
from trinitylake_ops.versions.history import Change, VersionInfo, diff_snapshots, history
from trinitylake_ops.versions.latest import latest_snapshot, open_latest
from trinitylake_ops.versions.lookup import VersionLookup, check_granted, check_within
from trinitylake_ops.versions.root_files import HintWriter
from trinitylake_ops.versions.roots import Roots, find_latest
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


class Lakehouse:
    """A lakehouse at a root URI. All methods are safe to call from several threads.

    ``storage`` is the storage as it is. Nodes and definitions are read through a cache. A lakehouse that is opened by
    its root uses the cache of the process, and its ``cache_folder``. It shares them with all that have the same root
    and options. A lakehouse on a given storage has a cache to itself, unless ``cache`` says otherwise. With "off" each
    read asks the storage. Raises InvalidInputError for options of the cache that make no sense.
    """

    def __init__(
        self,
        storage: Storage,
        storage_options: Mapping[str, str] | None = None,
        *,
        cache: Literal["shared", "private", "off"] = "private",
    ):
        self.storage = storage
        self.storage_options = StorageOptions(storage_options)
        files = storage
        if cache == "shared":
            files = shared_cache_view(storage, is_immutable_path, self.storage_options)
        elif cache == "private":
            files = private_cache_view(storage, is_immutable_path, self.storage_options)
        load_definition = self._latest_definition
        self.external_storages = external_storages = ExternalStorages(
            self.root, self.storage_options, load_definition=load_definition, follows_moves=False
        )
        roots = Roots(storage, keeps_newest=cache != "off")
        nodes, definitions = (
            NodeStore(files, external_storages=external_storages),
            DefinitionStore(files, external_storages=external_storages),
        )
        self.files = LakehouseFiles(files, nodes, definitions, HintWriter(storage), roots)
        self._lookup = VersionLookup(self.files, self._version_at_root, self._version_of_parent)
        is_shared = cache == "shared"
        self._queue = shared_queue(storage_identity(self.root, self.storage_options)) if is_shared else CommitQueue()

    def __repr__(self) -> str:
        return f"Lakehouse({self.root!r})"

    @property
    def root(self) -> str:
        """The normalized root URI."""
        return self.storage.root

    @classmethod
    def create(
        cls,
        root_uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        storage: Storage | None = None,
        **lakehouse_def_fields: Any,
    ) -> Lakehouse:
        """Create a lakehouse with version 0, empty, and return it.

        ``lakehouse_def_fields`` are fields of :class:`LakehouseDef`. ``storage`` replaces the storage
        that the root URI would open. Raises LakehouseExistsError, InvalidLocationError,
        InvalidDefinitionError, StorageError.
        """
        root = normalize_root_uri(root_uri)
        definition = _without_own_root(_new_definition(lakehouse_def_fields), root)
        cache: Literal["shared", "private"] = "private" if storage else "shared"
        lake = cls(storage or open_storage(root, storage_options), storage_options, cache=cache)
        create_lakehouse(lake.files, definition)
        return lake

    @classmethod
    def open(
        cls,
        root_uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        storage: Storage | None = None,
    ) -> Lakehouse:
        """Open a lakehouse.

        Raises LakehouseNotFoundError, InvalidLocationError, StorageError, and CorruptFileError when roots of several
        namings are there.
        """
        root = normalize_root_uri(root_uri)
        cache: Literal["shared", "private"] = "private" if storage else "shared"
        lake = cls(storage or open_storage(root, storage_options), storage_options, cache=cache)
        open_latest(lake.files)
        return lake

    def on(self, storage: Storage) -> Lakehouse:
        """Return the lakehouse on a storage that wraps its own, such as one that counts; both share what they keep."""
        other = Lakehouse(storage, self.storage_options, cache="off")
        files = self.files.storage.on(storage) if isinstance(self.files.storage, CacheStorage) else storage
        other.files = replace(
            other.files,
            storage=files,
            nodes=self.files.nodes.on(files, other.external_storages),
            definitions=self.files.definitions.on(files, other.external_storages),
        )
        other.files.roots.known_naming = self.files.roots.known_naming
        other._lookup = VersionLookup(other.files, other._version_at_root, other._version_of_parent)
        return other

    def _latest_definition(self) -> LakehouseDef | None:
        return latest_snapshot(self.files).definition

    def close(self) -> None:
        """Wait until what follows commits beside is done, such as the hint; for who then removes or moves the folder.

        The lakehouse can still be used.
        """
        background.flush()

    # Versions

    def latest_version(self) -> int:
        """Return the number of the latest version."""
        return find_latest(self.files.roots)[0]

    def snapshot(
        self,
        version: int | str | None = None,
        timestamp: datetime | int | None = None,
        *,
        latest: Snapshot | None = None,
    ) -> Snapshot:
        """Return the latest version, or a version by its number, by an export's name, or by a time.

        ``timestamp`` is an aware datetime or milliseconds since the epoch; the newest version created at or before it
        is returned. In a clone, times before it began lead to the parent's versions, and ``parent@N`` is one of them.
        ``latest`` is the latest version, if the caller has just found it. Raises VersionNotFoundError,
        VersionExpiredError, ExportNotFoundError, InvalidInputError when both are given.
        """
        return self._lookup.snapshot(version, timestamp, latest)

    def exported(self, name: str, storage_options: Mapping[str, str] | None = None) -> Snapshot:
        """Return what an export holds. ``storage_options`` are for the storage of an export at another root.

        By default they are this lakehouse's options if the scheme is the same. Raises what ``snapshot`` raises.
        """
        return self._lookup.exported(name, latest_snapshot(self.files), storage_options)

    def _version_at_root(self, root: str, version: int, storage_options: Mapping[str, str] | None) -> Snapshot:
        """Return a version of the lakehouse at another root, the target of an export of this one."""
        if storage_options is None:  # otherwise the caller knows the target
            self.external_storages.allowed_roots.check_root(root)
            storage_options = options_for(self, root)
        other = Lakehouse.open(root, storage_options)
        other.external_storages.register_storage(self.storage)  # files that were not copied
        return other.snapshot(version)

    def _version_of_parent(self, parent: ParentRecord, version: int | None, timestamp_ms: int | None) -> Snapshot:
        """Return a version of the lakehouse of which this one is a clone, from before it began."""
        places = self.external_storages.allowed_roots
        places.check_root(parent.root)
        other = Lakehouse.open(parent.root, options_for(self, parent.root))
        latest = other.snapshot()
        check_granted(parent, latest.definition, places)
        if version is not None:
            return other.snapshot(check_within(parent, version), latest=latest)
        found = other.snapshot(timestamp=timestamp_ms, latest=latest)
        if found.version <= parent.cloned_version:
            return found
        return other.snapshot(parent.cloned_version, latest=latest)

    def history(self, limit: int | None = None, latest: Snapshot | None = None) -> Iterator[VersionInfo]:
        """Yield versions, newest first, at most ``limit``; roots are read in parallel batches.

        They begin at the latest version, or at ``latest`` if the caller has found it. Versions whose roots other
        programs deleted are left out.
        """
        return history(self.files, limit, latest)

    def diff(self, before: int | str, after: int | str) -> list[Change]:
        """Return what changed between two versions, by namespace and table.

        Subtrees that both share are not read. Raises what ``snapshot`` raises.
        """
        return diff_snapshots(self.snapshot(before), self.snapshot(after), self.files)

    # Changes

    def transaction(
        self,
        isolation: str | None = None,
        message: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        operation: str = "",
        run_id: str | None = None,
        transaction_id: str | None = None,
        base: Snapshot | None = None,
    ) -> Transaction:
        """Begin a transaction on the latest version, or on ``base``, which was the latest a moment ago.

        ``isolation`` is "snapshot" or "serializable"; by default it is the lakehouse's own. The log records the
        message, free-form properties, a name for the operation, and the id of a run. It also records
        ``transaction_id``, a UUID, new by default. By it a caller finds the commit again (``saved.version_of``). Raises
        InvalidInputError for another isolation, for an id in another form, or when these texts take more than 4 KiB.
        """
        if transaction_id is not None:
            transaction_id = checked_id(transaction_id)
        base = base or latest_snapshot(self.files)
        info = CommitInfo(operation, message, run_id or acting_run(), dict(properties or {}))
        return Transaction(base, _isolation(isolation, base.definition), info, self._queue, transaction_id)

    def just_committed(self) -> Snapshot | None:
        """Return the version that this process committed a moment ago, if there is one.

        The storage is not asked: another process may have committed since. A transaction that begins on it is rebased
        like any other. Its reads are not answers to whoever needs the latest version.
        """
        return self._queue.recent_commit(self.files)

    def resume_transaction(self, transaction_id: str) -> Transaction:
        """Return a saved transaction, to go on with it and commit it.

        The transaction is committed once, however often it is resumed. Raises InvalidInputError,
        TransactionNotFoundError, CorruptFileError, StorageError. Raises TransactionExpiredError when the transaction is
        too old, VersionExpiredError when its base version was expired.
        """
        saved = read_saved(self.storage, transaction_id)
        TransactionAge(self.storage, saved.begun_at_millis).check(self.snapshot().definition)
        return Transaction.resumed(saved, self.snapshot(saved.base_version), self._queue)

    def stage_definition(self, namespace: str, table: str, definition: TableDef) -> StagedDefinition:
        """Write a table's definition for a transaction of another process, which takes it by ``put_staged``.

        A definition that is never taken is an orphan. Raises InvalidNameError, InvalidDefinitionError, StorageError.
        """
        return stage_definition(self.snapshot(), namespace, table, definition)

    def alter_definition(self, message: str | None = None, **fields: Any) -> int:
        """Change settings of the lakehouse in a commit of its own; returns the version.

        A new ``table_root`` is made that of this lakehouse. Raises InvalidDefinitionError for unknown fields and for
        those fixed at creation, InvalidInputError for a new table root while tables stand under the former one.
        """
        with self.transaction(message=message, operation="alter-definition") as txn:
            before = txn.base.definition
            definition = _without_own_root(_replaced(before, fields), self.root)
            if definition.table_root != before.table_root:
                if before.table_root:
                    check_no_table_under(txn.base, before.table_root)
                claim_named_root(self.files, definition)
            txn.alter_definition(definition)
        assert txn.committed_version is not None
        return txn.committed_version

    def resolve_commit(self, version: int, commit_id: str, *, fence: bool = False) -> CommitResolution:
        """Say what became of a commit that ended with CommitOutcomeUnknownError: committed, lost or undecided.

        ``fence`` decides an undecided commit: an empty commit takes the version, unless the other commit lands first.
        Raises what :func:`publish.resolve_commit` raises.
        """
        return resolve_commit(self.files, version, commit_id, self.commit if fence else None)

    @property
    def failed_hint_writes(self) -> int:
        """How many of this object's commits could not write the hint."""
        return self.files.hint.n_failures

    def commit(
        self,
        change: Committable,
        base: Snapshot,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        *,
        written_since_ms: int | None = None,
    ) -> int:
        """Commit a change of any kind, as operations do, and return its version.

        Transactions of this process that wait do not join it, and it waits for no slot. It returns ``base.version`` if
        nothing changes there.

        Args:
            change: The change.
            base: The version that was the latest.
            max_attempts: The number of attempts after which a conflict fails the commit.
            written_since_ms: When the first file was written that the change names, by the storage's clock. The time to
                live counts from it. By default it counts from the first file of each attempt.

        Raises:
            CommitConflictError: The change conflicts with another commit.
            CommitAttemptsExhaustedError: All attempts were lost to other commits.
            TransactionExpiredError: The change is too old.
            CommitOutcomeUnknownError: The change may or may not have been committed.
        """
        files = self.files
        since_ms = written_since_ms
        age_limit = OperationAge(files.storage) if since_ms is None else TransactionAge(files.storage, since_ms)
        return Commit(files, change, age_limit, max_attempts, pace(files)).run(base).version


def options_for(lake: Lakehouse, other_root: str) -> StorageOptions | None:
    """Return a lakehouse's options for another root. None: those of the environment.

    Roots that the operator allows are allowed there, too.
    """
    options = lake.storage_options.beyond(lake.root, other_root)
    if ALLOWED_ROOTS not in lake.storage_options:
        return options
    return StorageOptions({**(options or {}), ALLOWED_ROOTS: lake.storage_options[ALLOWED_ROOTS]})


def _without_own_root(definition: LakehouseDef, root: str) -> LakehouseDef:
    """Return a definition without a ``table_root`` that is the lakehouse's own root.

    None says the same, and a copy would keep the name.
    """
    table_root = definition.table_root
    is_own = table_root != "" and f"{as_uri(table_root).rstrip('/')}/" == root
    return replace(definition, table_root="") if is_own else definition


def _new_definition(fields: Mapping[str, Any]) -> LakehouseDef:
    return validate_lakehouse_def(_replaced(LakehouseDef(id=str(uuid.uuid4())), fields))


def _replaced(definition: LakehouseDef, fields: Mapping[str, Any]) -> LakehouseDef:
    try:
        changed = replace(definition, **fields)
        # In the form in which it will be read again: None becomes a default, a number its enum.
        return LakehouseDef.from_bytes(changed.to_bytes(), "settings")
    except TypeError as error:
        raise InvalidDefinitionError(f"these settings do not exist: {error}") from error
    except CorruptFileError as error:
        raise InvalidDefinitionError(f"these settings could not be read again: {error.message}") from error


def _isolation(name: str | None, definition: LakehouseDef) -> IsolationLevel:
    if name is None:
        return definition.isolation_level
    try:
        return IsolationLevel[str(name).upper()]
    except KeyError:
        raise InvalidInputError(f"isolation {name!r} is neither 'snapshot' nor 'serializable'") from None
