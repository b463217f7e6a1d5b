"""Open, create, read and change a lakehouse."""

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
    """A lakehouse at a root URI. All methods are thread-safe.

    Nodes and definitions are read through a cache. ``storage`` is the storage without the cache.

    Args:
        storage: The storage.
        storage_options: Options of the storage and the cache.
        cache: "shared" uses the process cache and the ``cache_folder``, which are shared with all lakehouses with the
            same root and options; "private" uses a separate cache; "off" sends a request for each read.

    Raises:
        InvalidInputError: An option of the cache is invalid.
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
        identity = storage_identity(self.root, self.storage_options) if cache == "shared" else None
        #: This process's transactions on the lakehouse. If the cache is shared, other objects use the same queue.
        self.commit_queue = CommitQueue() if identity is None else shared_queue(identity)

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
        """Create a lakehouse with an empty version 0, and return it.

        Args:
            root_uri: The root.
            storage_options: Options of the storage and the cache.
            storage: Used instead of the storage that the root URI would open.
            **lakehouse_def_fields: Fields of :class:`LakehouseDef`.

        Raises:
            LakehouseExistsError: There is a lakehouse at this root.
            InvalidLocationError: The root is invalid.
            InvalidDefinitionError: A field is invalid.
            StorageError: A request failed.
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

        Args:
            root_uri: The root.
            storage_options: Options of the storage and the cache.
            storage: Used instead of the storage that the root URI would open.

        Raises:
            LakehouseNotFoundError: There is no lakehouse at this root.
            InvalidLocationError: The root is invalid.
            CorruptFileError: The root files follow more than one naming.
            StorageError: A request failed.
        """
        root = normalize_root_uri(root_uri)
        cache: Literal["shared", "private"] = "private" if storage else "shared"
        lake = cls(storage or open_storage(root, storage_options), storage_options, cache=cache)
        open_latest(lake.files)
        return lake

    def on(self, storage: Storage) -> Lakehouse:
        """Return this lakehouse with a wrapper around its storage, for example to count requests. Both share caches."""
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
        """Wait for background work, for example hint updates, before the folder is moved or deleted.

        The lakehouse can still be used afterwards.
        """
        background.drain()

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
        """Return the latest version, or a version by number, export name or time.

        Args:
            version: A version number, the name of an export, or ``parent@N`` for a version of a clone's parent.
            timestamp: An aware datetime or milliseconds since the epoch. Selects the newest version that was created at
                or before this time. In a clone, earlier times select versions of the parent.
            latest: The latest version, if the caller has just read it.

        Raises:
            VersionNotFoundError: There is no such version.
            VersionExpiredError: The version was expired.
            ExportNotFoundError: There is no such export.
            InvalidInputError: Both ``version`` and ``timestamp`` are set, or one of them is invalid.
        """
        return self._lookup.snapshot(version, timestamp, latest)

    def exported(self, name: str, storage_options: Mapping[str, str] | None = None) -> Snapshot:
        """Return the version of an export.

        Args:
            name: The name of the export.
            storage_options: Options for the storage of an export at another root. By default the options of this
                lakehouse, if the scheme is the same.

        Raises:
            ExportNotFoundError: There is no such export.
            VersionNotFoundError: Its version does not exist.
            VersionExpiredError: Its version was expired.
        """
        return self._lookup.exported(name, latest_snapshot(self.files), storage_options)

    def _version_at_root(self, root: str, version: int, storage_options: Mapping[str, str] | None) -> Snapshot:
        """Return a version of the lakehouse at another root, the target of an export."""
        if storage_options is None:  # a caller that passes options trusts the target
            self.external_storages.allowed_roots.check_root(root)
            storage_options = options_for(self, root)
        other = Lakehouse.open(root, storage_options)
        other.external_storages.register_storage(self.storage)  # for files that were not copied
        return other.snapshot(version)

    def _version_of_parent(self, parent: ParentRecord, version: int | None, timestamp_ms: int | None) -> Snapshot:
        """Return a version of this clone's parent that is older than the clone."""
        allowed_roots = self.external_storages.allowed_roots
        allowed_roots.check_root(parent.root)
        other = Lakehouse.open(parent.root, options_for(self, parent.root))
        latest = other.snapshot()
        check_granted(parent, latest.definition, allowed_roots)
        if version is not None:
            return other.snapshot(check_within(parent, version), latest=latest)
        snapshot = other.snapshot(timestamp=timestamp_ms, latest=latest)
        if snapshot.version <= parent.cloned_version:
            return snapshot
        return other.snapshot(parent.cloned_version, latest=latest)

    def history(self, limit: int | None = None, latest: Snapshot | None = None) -> Iterator[VersionInfo]:
        """Yield versions, newest first. Roots are read in parallel batches.

        Versions whose roots were deleted by other programs are left out.

        Args:
            limit: Maximum number of versions. None for all.
            latest: The version to start with. By default the latest.
        """
        return history(self.files, limit, latest)

    def diff(self, before: int | str, after: int | str) -> list[Change]:
        """Return the changed namespaces and tables between two versions. Shared subtrees are not read.

        Args:
            before: The earlier version, like ``version`` of :meth:`snapshot`.
            after: The later version.

        Raises:
            VersionNotFoundError: There is no such version.
            VersionExpiredError: A version was expired.
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
        """Begin a transaction.

        Args:
            isolation: "snapshot" or "serializable". By default the isolation level of the lakehouse.
            message: A message for the log.
            properties: Free-form properties for the log.
            operation: The name of the operation, for the log.
            run_id: The id of a run, for the log.
            transaction_id: A UUID by which the commit can be found later (``saved.version_of``). By default a new UUID.
            base: A version to begin on that was recently the latest. By default the latest version.

        Raises:
            InvalidInputError: The isolation or the id is invalid, or the texts exceed 4 KiB in total.
        """
        if transaction_id is not None:
            transaction_id = checked_id(transaction_id)
        base = base or latest_snapshot(self.files)
        info = CommitInfo(operation, message, run_id or acting_run(), dict(properties or {}))
        return Transaction(base, _isolation(isolation, base.definition), info, self.commit_queue, transaction_id)

    def just_committed(self) -> Snapshot | None:
        """Return the version that this process committed recently, if any.

        Sends no request, so another process may have committed a later version. A transaction that begins on this
        version is rebased like any other. Do not use it for reads that need the latest version.
        """
        return self.commit_queue.recent_commit(self.files)

    def resume_transaction(self, transaction_id: str) -> Transaction:
        """Resume a saved transaction. It is committed at most once, however often it is resumed.

        Raises TransactionNotFoundError, TransactionExpiredError, VersionExpiredError if its base was expired,
        CorruptFileError, StorageError, and InvalidInputError if the id is not a UUID.
        """
        saved = read_saved(self.storage, transaction_id)
        TransactionAge(self.storage, saved.begun_at_millis).check(self.snapshot().definition)
        return Transaction.resumed(saved, self.snapshot(saved.base_version), self.commit_queue)

    def stage_definition(self, namespace: str, table: str, definition: TableDef) -> StagedDefinition:
        """Write a table definition for a transaction of another process, which adds it with ``put_staged``.

        A definition that is never used becomes an orphan.

        Args:
            namespace: The namespace of the table.
            table: The name of the table.
            definition: The definition.

        Raises:
            InvalidNameError: A name cannot be stored.
            InvalidDefinitionError: The definition cannot be stored.
            StorageError: The file cannot be written.
        """
        return stage_definition(self.snapshot(), namespace, table, definition)

    def alter_definition(self, message: str | None = None, **fields: Any) -> int:
        """Change settings of the lakehouse in a separate commit, and return the new version.

        A new ``table_root`` is claimed for this lakehouse.

        Args:
            message: A message for the log.
            **fields: Fields of :class:`LakehouseDef`.

        Raises:
            InvalidDefinitionError: A field is unknown, invalid or fixed at creation.
            InvalidInputError: The table root changes while the current root contains tables.
        """
        with self.transaction(message=message, operation="alter-definition") as txn:
            before = txn.base.definition
            definition = _without_own_root(_replace_fields(before, fields), self.root)
            if definition.table_root != before.table_root:
                if before.table_root:
                    check_no_table_under(txn.base, before.table_root)
                claim_named_root(self.files, definition)
            txn.alter_definition(definition)
        assert txn.committed_version is not None
        return txn.committed_version

    def resolve_commit(self, version: int, commit_id: str, *, fence: bool = False) -> CommitResolution:
        """Return the outcome of a commit that raised CommitOutcomeUnknownError: committed, lost or undecided.

        Args:
            version: The version that the error names.
            commit_id: The commit id that the error names.
            fence: Whether to decide an undecided commit: an empty commit creates the version, unless the other commit
                wins the race.

        Raises:
            InvalidInputError: The version or the id is invalid.
            VersionNotFoundError: No commit can have attempted this version yet.
            CorruptFileError: The root was deleted.
        """
        return resolve_commit(self.files, version, commit_id, self.commit if fence else None)

    @property
    def failed_hint_writes(self) -> int:
        """The number of commits of this object that could not write the hint."""
        return self.files.hint.n_failures

    def commit(
        self,
        change: Committable,
        base: Snapshot,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        *,
        written_since_ms: int | None = None,
    ) -> int:
        """Commit an operation's change, and return the new version, or ``base.version`` if nothing changes.

        Waiting transactions of this process do not join the commit, and the commit does not wait for slots.

        Args:
            change: The change.
            base: The latest version when the change was made.
            max_attempts: The number of attempts after which a conflict fails the commit.
            written_since_ms: When the first file of the change was written, on the storage's clock. The time to live
                starts then. By default it starts with the first file of each attempt.

        Raises:
            CommitConflictError: The change conflicts with another commit.
            CommitAttemptsExhaustedError: All attempts conflicted with other commits.
            TransactionExpiredError: The change is too old.
            CommitOutcomeUnknownError: The change may or may not have been committed.
        """
        files = self.files
        since_ms = written_since_ms
        age_limit = OperationAge(files.storage) if since_ms is None else TransactionAge(files.storage, since_ms)
        return Commit(files, change, age_limit, max_attempts, pace(files)).run(base).version


def options_for(lake: Lakehouse, other_root: str) -> StorageOptions | None:
    """Return the storage options of a lakehouse for another root, or None to use the environment only.

    Roots that the operator allows are also allowed for the other root.
    """
    options = lake.storage_options.beyond(lake.root, other_root)
    if ALLOWED_ROOTS not in lake.storage_options:
        return options
    return StorageOptions({**(options or {}), ALLOWED_ROOTS: lake.storage_options[ALLOWED_ROOTS]})


def _without_own_root(definition: LakehouseDef, root: str) -> LakehouseDef:
    """Return a definition without a ``table_root`` that equals the root of the lakehouse.

    An empty table root means the same. With an explicit one, a copied lakehouse would still point to the original root.
    """
    table_root = definition.table_root
    is_own = table_root != "" and f"{as_uri(table_root).rstrip('/')}/" == root
    return replace(definition, table_root="") if is_own else definition


def _new_definition(fields: Mapping[str, Any]) -> LakehouseDef:
    return validate_lakehouse_def(_replace_fields(LakehouseDef(id=str(uuid.uuid4())), fields))


def _replace_fields(definition: LakehouseDef, fields: Mapping[str, Any]) -> LakehouseDef:
    try:
        changed = replace(definition, **fields)
        # Normalize to the form that is read back: None becomes a default, and a number becomes an enum member.
        return LakehouseDef.from_bytes(changed.to_bytes(), "settings")
    except TypeError as error:
        raise InvalidDefinitionError(f"unknown lakehouse setting: {error}") from error
    except CorruptFileError as error:
        raise InvalidDefinitionError(f"invalid lakehouse setting: {error.message}") from error


def _isolation(name: str | None, definition: LakehouseDef) -> IsolationLevel:
    if name is None:
        return definition.isolation_level
    try:
        return IsolationLevel[str(name).upper()]
    except KeyError:
        raise InvalidInputError(f"isolation is {name!r}; it must be 'snapshot' or 'serializable'") from None
