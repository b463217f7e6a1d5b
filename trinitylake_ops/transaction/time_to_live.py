"""The time to live of uncommitted changes (protocol.md, "Orphans").

Uncommitted files that are older than the time to live are removed as orphans. A transaction that began early enough may
have lost files to such a removal. The barrier is the time before which such a transaction began. It is recorded in
the lakehouse definition, and in a file in case another program restores an older definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trinitylake_ops.errors import CorruptFileError, FileMissingError, TransactionExpiredError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import ORPHAN_BARRIER_PATH
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS, Storage

#: Orphans are older than any time to live plus a margin of minutes, so a more recent transaction has lost no files.
YOUNG_MS = 60_000
_FIELD = "orphans_removed_before_millis"


class AgeLimit(Protocol):
    """Limits the age that a change may have when it is committed."""

    def begin_writing(self) -> None:
        """Record that an attempt has not written any files yet."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise the errors of ``check`` if a purge may have deleted files that the base of a lost attempt needs."""

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError or DraftOutdatedError if the newest definition makes the change too old."""


@dataclass(frozen=True, slots=True)
class TransactionAge:
    """Limits the age of a transaction, measured from its beginning, to the lakehouse's time to live."""

    #: The storage of the lakehouse.
    storage: Storage
    #: When the transaction began, on the storage's clock.
    begun_at_ms: int

    def begin_writing(self) -> None:
        """Do nothing: the transaction keeps its age."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError like ``check``, because the transaction is at least as old as its base."""
        self.check(definition)

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError when the transaction is older than its time to live."""
        # read before the clock, because the response may take a while
        barred_ms = removed_before_ms(self.storage, definition, self.begun_at_ms)
        check_age(self.begun_at_ms, self.storage.now_ms(), definition, barred_ms)


class OperationAge:
    """Limits the age of an operation that writes all its files in each attempt, measured from the first file.

    Reads before the first file may take any amount of time. If the root can be created, nothing was committed since the
    version that was read, so all files of that version still exist.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._writing_since_ms: int | None = None

    def begin_writing(self) -> None:
        """Measure the age from now."""
        self._writing_since_ms = self._storage.now_ms()

    def check_base(self, definition: LakehouseDef) -> None:
        """Do nothing: the operation starts from scratch on the latest version."""

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError if the files of this attempt are older than the time to live."""
        if self._writing_since_ms is not None:
            TransactionAge(self._storage, self._writing_since_ms).check(definition)


def check_age(begun_at_ms: int, now_ms: int, definition: LakehouseDef, barred_before_ms: int) -> None:
    """Check the age of a transaction. All times are in milliseconds since the epoch.

    Args:
        begun_at_ms: When the transaction began.
        now_ms: The current time.
        definition: The lakehouse definition, which contains the time to live.
        barred_before_ms: The barrier. The files of transactions that began earlier may have been removed as orphans
            while the time to live was shorter.

    Raises:
        TransactionExpiredError: The transaction is older than its time to live, or began before the barrier.
    """
    if begun_at_ms < barred_before_ms:
        raise TransactionExpiredError(
            "transaction expired: its files may have been removed as orphans; begin a new one"
        )
    age_ms = now_ms - begun_at_ms
    if age_ms > definition.txn_ttl_millis:
        raise TransactionExpiredError(
            f"transaction expired: it began {age_ms} ms ago, more than txn_ttl_millis ({definition.txn_ttl_millis});"
            " begin a new one"
        )


def removed_before_ms(storage: Storage, definition: LakehouseDef, begun_at_ms: int) -> int:
    """Return the barrier in milliseconds since the epoch: transactions that began earlier may have lost files.

    Args:
        storage: The storage of the lakehouse.
        definition: The lakehouse definition.
        begun_at_ms: When the transaction began. The barrier file is only read if that was more than a minute ago.

    Raises:
        CorruptFileError: The barrier cannot be decoded.
        StorageError: The barrier cannot be read.
    """
    now_ms = storage.now_ms()
    known_ms = recorded_barrier_ms(definition, now_ms)
    if is_young(begun_at_ms, now_ms):
        return known_ms
    if known_ms != definition.orphans_removed_before_millis:
        raise _unreadable()
    return max(known_ms, _read(storage))


def recorded_barrier_ms(definition: LakehouseDef, now_ms: int) -> int:
    """Return the barrier in the lakehouse definition, or 0 if it is in the future because a clock was wrong."""
    known_ms = definition.orphans_removed_before_millis
    return known_ms if known_ms <= now_ms + CLOCK_MARGIN_MS else 0


def is_young(begun_at_ms: int, now_ms: int) -> bool:
    """Whether a transaction is too recent to have lost files to orphan removal."""
    return now_ms - begun_at_ms <= YOUNG_MS


def raise_barrier(storage: Storage, before_ms: int) -> None:
    """Raise the barrier to a time, unless it is already later. The caller holds the lease.

    Args:
        storage: The storage of the lakehouse.
        before_ms: The barrier in milliseconds since the epoch.

    Raises:
        StorageError: The barrier cannot be read or written.
    """
    try:
        existing_ms = _read(storage)
    except CorruptFileError:
        existing_ms = 0
    if before_ms > existing_ms:
        storage.write(ORPHAN_BARRIER_PATH, encode_sealed_json({_FIELD: before_ms}, ORPHAN_BARRIER_PATH))


def _read(storage: Storage) -> int:
    try:
        data = storage.read(ORPHAN_BARRIER_PATH, limit_bytes=MAX_NOTE_BYTES)
        barrier_ms = decode_sealed_json(data, ORPHAN_BARRIER_PATH)[_FIELD]
        # the barrier is never raised to a time in the future
        if type(barrier_ms) is not int or not 0 <= barrier_ms <= storage.now_ms():
            raise TypeError(f"{_FIELD} is not a time in the past")
    except FileMissingError:
        return 0
    except (CorruptFileError, KeyError, TypeError) as error:
        raise _unreadable() from error
    return barrier_ms


def _unreadable() -> CorruptFileError:
    return CorruptFileError(
        "the barrier for transactions from before an orphan removal is corrupt; remove orphans again, which rewrites"
        " it, and begin new transactions",
        path=ORPHAN_BARRIER_PATH,
    )
