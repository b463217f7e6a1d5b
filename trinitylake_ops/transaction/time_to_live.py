"""How old a change may be when it is committed (docs/internals/protocol.md, "Orphans").

The files of a change are removed as orphans once they are older than the time to live. Transactions that began before a
certain moment may have lost files so. The lakehouse definition records that moment, and so does a file. Another program
that goes back to an older definition forgets the former, but not the file.
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

#: Orphans are older than any time to live and a margin of minutes. A younger transaction has lost nothing.
YOUNG_MS = 60_000
_FIELD = "orphans_removed_before_millis"


class AgeLimit(Protocol):
    """Tells whether a change may still be committed."""

    def begin_writing(self) -> None:
        """Note that all files of an attempt are still to be written."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise as ``check`` does where a purge may have deleted what the base of a lost attempt reaches."""

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError or DraftOutdatedError for a change too old by the newest definition read."""


@dataclass(frozen=True, slots=True)
class TransactionAge:
    """The age of a transaction, from its begin by the storage's clock.

    It must not outlive the lakehouse's time to live.
    """

    storage: Storage
    begun_at_ms: int

    def begin_writing(self) -> None:
        """Do nothing: the transaction keeps its age."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError as ``check`` does, since the transaction has known its base since it began."""
        self.check(definition)

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError when the transaction is older than its time to live."""
        # asked first, as the answer may take a while
        barred_ms = removed_before_ms(self.storage, definition, self.begun_at_ms)
        check_age(self.begun_at_ms, self.storage.now_ms(), definition, barred_ms)


class OperationAge:
    """The age of an operation that writes all its files in each attempt: it is as old as the first of these.

    Its reads before the first file may take any time. They still hold where its root can be created: nothing was
    committed since the version that it looked at. So all that this version reaches is there.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._writing_since_ms: int | None = None

    def begin_writing(self) -> None:
        """Count from now."""
        self._writing_since_ms = self._storage.now_ms()

    def check_base(self, definition: LakehouseDef) -> None:
        """Do nothing: the operation does all anew on the latest version."""

    def check(self, definition: LakehouseDef) -> None:
        """Raise TransactionExpiredError when the files of this attempt are older than the time to live."""
        if self._writing_since_ms is not None:
            TransactionAge(self._storage, self._writing_since_ms).check(definition)


def check_age(begun_at_ms: int, now_ms: int, definition: LakehouseDef, barred_before_ms: int) -> None:
    """Raise TransactionExpiredError for a transaction that is older than its time to live.

    Raises it also for a transaction that began before ``barred_before_ms``. Its files may have been removed as orphans,
    when the time to live was shorter.
    """
    if begun_at_ms < barred_before_ms:
        raise TransactionExpiredError(
            "orphans from before the transaction began were removed since, perhaps files of its own; begin a new one"
        )
    age_ms = now_ms - begun_at_ms
    if age_ms > definition.txn_ttl_millis:
        raise TransactionExpiredError(
            f"the transaction began {age_ms} ms ago, more than txn_ttl_millis ({definition.txn_ttl_millis});"
            " begin a new one"
        )


def removed_before_ms(storage: Storage, definition: LakehouseDef, begun_at_ms: int) -> int:
    """Return the moment before which a transaction may have lost files, in milliseconds since the epoch.

    The file is read only for a transaction that began longer than a minute ago. Raises CorruptFileError, StorageError.
    """
    now_ms = storage.now_ms()
    known_ms = recorded_barrier_ms(definition, now_ms)
    if is_young(begun_at_ms, now_ms):
        return known_ms
    if known_ms != definition.orphans_removed_before_millis:
        raise _unreadable()
    return max(known_ms, _read(storage))


def recorded_barrier_ms(definition: LakehouseDef, now_ms: int) -> int:
    """Return the moment in the definition before which transactions may have lost files.

    It is 0 if it is still to come: no barrier is raised beyond its own time, so a clock was wrong.
    """
    known_ms = definition.orphans_removed_before_millis
    return known_ms if known_ms <= now_ms + CLOCK_MARGIN_MS else 0


def is_young(begun_at_ms: int, now_ms: int) -> bool:
    """Whether a transaction began so short a time ago that it has lost nothing as an orphan."""
    return now_ms - begun_at_ms <= YOUNG_MS


def raise_barrier(storage: Storage, before_ms: int) -> None:
    """Bar transactions that began before a moment.

    The caller holds the lease. A later moment in the file stays. Raises StorageError.
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
        found = decode_sealed_json(data, ORPHAN_BARRIER_PATH)[_FIELD]
        # no barrier was ever raised beyond its own time
        if type(found) is not int or not 0 <= found <= storage.now_ms():
            raise TypeError(f"{_FIELD} is no moment in the past")
    except FileMissingError:
        return 0
    except (CorruptFileError, KeyError, TypeError) as error:
        raise _unreadable() from error
    return found


def _unreadable() -> CorruptFileError:
    return CorruptFileError(
        "the barrier for transactions from before a removal of orphans cannot be read; remove orphans once more,"
        " which writes it anew, and begin new transactions",
        path=ORPHAN_BARRIER_PATH,
    )
