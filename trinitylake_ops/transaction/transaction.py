"""Transactions: changes to the catalog that are committed as one version."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptFileError,
    InvalidInputError,
    TransactionExpiredError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import IsolationLevel, SavedTransaction, TableDef
from trinitylake_ops.format.file_names import saved_transaction_path
from trinitylake_ops.format.keys import COMMIT_ID, TABLE_KEY_PREFIX
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import TRANSACTIONS
from trinitylake_ops.transaction.catalog_editor import CatalogEditor
from trinitylake_ops.transaction.change_set import ChangeSet
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.commit_queue import CommitQueue
from trinitylake_ops.transaction.saved import CommittedByOtherError, delete_saved_transaction, write_saved
from trinitylake_ops.transaction.submission import Precondition, Submission, check_info
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import OneName, table_ids

#: Outcomes reported in telemetry, by error class.
_OUTCOMES: Mapping[type[TrinityLakeError], str] = {
    CommitConflictError: "conflict",
    CommitAttemptsExhaustedError: "exhausted",
    CommitOutcomeUnknownError: "unknown",
    TransactionExpiredError: "expired",
}


class Transaction(CatalogEditor):
    """Changes to a base version. Until they are committed, they are visible only to reads through the transaction.

    As a context manager, a transaction commits on a normal exit and discards its changes on an exception.

    Args:
        base: The version that the transaction begins on.
        isolation: The isolation level.
        info: The commit info: message, operation, run and properties.
        queue: The commit queue of the process.
        transaction_id: The transaction id, a UUID. By default a new UUID.

    Raises:
        InvalidInputError: The commit info is too long.
    """

    def __init__(
        self,
        base: Snapshot,
        isolation: IsolationLevel,
        info: CommitInfo,
        queue: CommitQueue,
        transaction_id: str | None = None,
    ):
        super().__init__(base)
        self._queue = queue
        self.id = transaction_id or str(uuid.uuid4())
        self.isolation = isolation
        #: The version that contains the changes, or the base version if there are none. None before the commit.
        self.committed_version: int | None = None
        self._info = replace(info, members=(self.id,))
        # Reject a message that leaves no room for the commit's own entries now, instead of at the commit.
        check_info(self._info)
        self._preconditions: list[Precondition] = []
        self._begun_at_ms = base.read_at_ms
        self._is_saved = False

    @classmethod
    def resumed(cls, saved: SavedTransaction, base: Snapshot, queue: CommitQueue) -> Self:
        """Return a transaction in the state in which it was saved.

        Args:
            saved: The saved transaction.
            base: The version that it began on.
            queue: The commit queue of the process.

        Raises:
            CorruptFileError: The transaction began on a different version, or cannot be decoded.
        """
        path = saved_transaction_path(saved.id)
        if base.root.system.get(COMMIT_ID, "") != saved.base_commit_id:
            raise CorruptFileError(
                f"transaction {saved.id} cannot be resumed: version {base.version}, which it began on, was replaced by"
                " a different version",
                path=path,
            )
        info = CommitInfo(saved.operation, saved.message, saved.run_id, dict(saved.properties))
        begun = Snapshot(base.files, base.version, base.location, base.root, saved.begun_at_millis)
        txn = cls(begun, saved.isolation_level, info, queue, saved.id)
        txn._is_saved = True
        txn._changes = ChangeSet.of_saved(saved, path)
        txn._adopting = {key for key in txn._changes.writes if key.startswith(TABLE_KEY_PREFIX)}
        return txn

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, on the storage's clock, in milliseconds since the epoch."""
        return self._begun_at_ms

    def reset_age(self) -> None:
        """Measure the time to live from now, because no file has been written yet.

        The base may be old: if the next version can be created, nothing was committed since. Raises ConflictError for a
        transaction that was saved, because other processes know its age.
        """
        self._check_changeable()
        if self._is_saved:
            raise ConflictError("the age of a saved transaction cannot be reset")
        self._begun_at_ms = self.base.files.storage.now_ms()

    def backdate(self, begun_at_ms: int) -> None:
        """Measure the time to live from an earlier time, when the oldest published file was written.

        Orphan removal keeps unreferenced files only for the time to live.
        """
        self._check_changeable()
        self._begun_at_ms = min(self._begun_at_ms, begun_at_ms)

    def require(self, precondition: Callable[[Snapshot], None], *, alone: bool = True) -> None:
        """Check a condition on the base now, and again on each later version of a rebase.

        Args:
            precondition: Raises a typed error if the condition is not satisfied.
            alone: Whether another transaction of the same group could affect the condition. The transaction then gets a
                separate version.
        """
        precondition(self.base)
        self._preconditions.append(Precondition(precondition, alone))

    # Ending

    def commit(self, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> int:
        """Commit and return the version, or the base version if nothing changed. The transaction ends in any case.

        Args:
            max_attempts: The number of conflicts with other commits after which the commit fails.

        Raises:
            CommitConflictError: A change conflicts with another commit.
            CommitAttemptsExhaustedError: All attempts conflicted with other commits.
            TransactionExpiredError: The transaction is older than its time to live.
            CommitOutcomeUnknownError: The transaction may or may not have been committed.
            ObjectExistsError: A table and a view would have the same name.
            StorageError: Nothing was committed.
        """
        self._check_open()
        if type(max_attempts) is not int or max_attempts < 1:
            raise InvalidInputError(f"max_attempts is {max_attempts!r}; it must be an integer of at least 1")
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
        """Require that no table whose id is assigned here exists under another name.

        Raises TableHasAnotherNameError, now or at the commit.
        """
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
        """Whether all assigned ids come from tables that are dropped here.

        No other commit can then assign these ids, because it would change the old names.
        """
        dropped = table_ids(self.base, {key: self.base.entry(key) for key, table_id in ids.items() if table_id is None})
        return {table_id for table_id in ids.values() if table_id} <= set(dropped.values())

    def _commit_with_telemetry(self, max_attempts: int) -> int:
        """Commit, and emit the outcome as telemetry."""
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
        """Commit, unless another process has resumed and committed this transaction."""
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
        """Save the transaction, end it in this process, and return its id, with which another process can resume it.

        The transaction keeps its age: it must be committed within the lakehouse's ``txn_ttl_millis`` after it began. If
        saving fails, the file may still have been written. The transaction can then be saved again or ended, but
        not changed. Raises StorageError, and InvalidInputError for a transaction with preconditions of an operation or
        with files to write.
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
        # Even if the write fails, the file may exist now or later, and another process may resume it.
        self._is_saved = self._is_frozen = True
        write_saved(self.base.files.storage, saved)
        self._is_open = False
        return self.id

    def rollback(self) -> None:
        """Discard all changes and end the transaction. If it was saved, it can no longer be resumed."""
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
