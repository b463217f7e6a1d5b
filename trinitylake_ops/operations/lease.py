"""The lease that allows only one operation at a time to delete files (docs/internals/protocol.md, "Expiry").

The lease is the file ``_ops/lease-<k>.json`` with the largest k. To acquire it, an operation creates lease k + 1 if
absent once lease k has ended, and deletes the older leases. The holder checks for a larger number before each batch.
The lease only saves work: even if operations overlap because a holder was suspended, they delete no needed file.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError, MaintenanceBlockedError, StorageError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.file_names import LEASE_PREFIX, lease_path, parse_lease_path
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.versions.commit_info import acting_run
from trinitylake_ops.versions.snapshot import utc_of

logger = logging.getLogger(__name__)

DURATION_MS = 10 * 60 * 1000


@dataclass(slots=True)
class Lease:
    """A lease that this process holds."""

    storage: Storage
    number: int
    holder: str
    operation: str
    expires_at_ms: int

    def check(self) -> None:
        """Check that this process still holds the lease, and renew it before it expires.

        Raises MaintenanceBlockedError if another operation has acquired it.
        """
        newest = max(_existing_leases(self.storage), default=0)
        if newest > self.number:
            raise MaintenanceBlockedError(
                f"another operation took over the lease of this {self.operation}, which did not renew it in time;"
                " run it again to continue",
                path=lease_path(newest),
            )
        now_ms = self.storage.now_ms()
        if self.expires_at_ms - now_ms < DURATION_MS // 2:
            self._write(now_ms + DURATION_MS)

    def release(self) -> None:
        """End the lease on a best-effort basis. If this fails, the lease expires later."""
        try:
            self._write(0)
        except StorageError as error:
            logger.warning("the lease of this %s was not released and will expire: %s", self.operation, error)

    def _write(self, expires_at_ms: int) -> None:
        self.expires_at_ms = expires_at_ms
        self.storage.write(
            lease_path(self.number), _content(lease_path(self.number), self.holder, self.operation, expires_at_ms)
        )


@contextmanager
def lease(storage: Storage, operation: str) -> Iterator[Lease]:
    """Hold the lease of a lakehouse while the block runs.

    Args:
        storage: The storage of the lakehouse.
        operation: The name of the operation, for messages.

    Raises:
        MaintenanceBlockedError: Another operation holds the lease.
        StorageError: A storage request failed.
    """
    new_lease = _acquire(storage, operation)
    try:
        yield new_lease
    finally:
        new_lease.release()


def describe_lease(storage: Storage) -> str | None:
    """Return a sentence about the operation that holds the lease, or None. Sends one listing and one read request.

    Raises StorageError.
    """
    existing = _existing_leases(storage)
    if not existing:
        return None
    try:
        _check_ended(storage, existing[max(existing)], storage.now_ms())
    except MaintenanceBlockedError as error:
        return error.message
    return None


def _acquire(storage: Storage, operation: str) -> Lease:
    existing = _existing_leases(storage)
    newest = max(existing, default=0)
    now_ms = storage.now_ms()
    if newest:
        _check_ended(storage, existing[newest], now_ms)
    if parse_lease_path(lease_path(newest + 1)) is None:
        raise MaintenanceBlockedError(
            f"lease {newest} has the largest possible number, and was not written by this package; when no operation"
            " runs, delete the file",
            path=lease_path(newest),
        )
    holder = str(uuid.uuid4())
    new_lease = Lease(storage, newest + 1, holder, operation, now_ms + DURATION_MS)
    data = _content(lease_path(new_lease.number), holder, operation, new_lease.expires_at_ms)
    if not create_settled(storage, lease_path(new_lease.number), data, is_ours=lambda existing: existing == data):
        raise _lease_taken_error(lease_path(new_lease.number))
    storage.delete_many([info.path for info in existing.values()])  # except the newest, so that no number is reused
    return new_lease


def _existing_leases(storage: Storage) -> dict[int, FileInfo]:
    """Return the existing leases by number."""
    infos = {parse_lease_path(info.path): info for info in storage.list(LEASE_PREFIX)}
    return {number: info for number, info in infos.items() if number is not None}


def _check_ended(storage: Storage, info: FileInfo, now_ms: int) -> None:
    """Raise MaintenanceBlockedError unless a lease has ended. The end of an unreadable lease depends on its age."""
    try:
        content = decode_sealed_json(storage.read(info.path, limit_bytes=MAX_NOTE_BYTES), info.path)
        expires_at_ms, operation = int(content["expires_at_ms"]), str(content["operation"])
    except FileMissingError:
        raise _lease_taken_error(info.path) from None  # deleted by the holder of a newer lease
    except (CorruptFileError, ValueError, KeyError, TypeError, OverflowError):
        expires_at_ms, operation = info.last_modified_ms + DURATION_MS, "an operation"
    if expires_at_ms > now_ms + 2 * DURATION_MS:  # longer than any operation requests
        expires_at_ms = info.last_modified_ms + DURATION_MS
    if expires_at_ms > now_ms + 2 * DURATION_MS:
        raise MaintenanceBlockedError(
            f"{operation} holds a lease from the future, because a clock was wrong; when no operation runs, delete the"
            " file",
            path=info.path,
        )
    if now_ms < expires_at_ms:
        raise MaintenanceBlockedError(
            f"{operation} is running; wait until it ends, or until {utc_of(expires_at_ms):%Y-%m-%d %H:%M:%S} UTC if it"
            " was interrupted",
            path=info.path,
        )


def _lease_taken_error(path: str) -> MaintenanceBlockedError:
    return MaintenanceBlockedError("another operation acquired the lease first; wait until it ends", path=path)


def _content(path: str, holder: str, operation: str, expires_at_ms: int) -> bytes:
    content = {"holder": holder, "operation": operation, "run_id": acting_run(), "expires_at_ms": expires_at_ms}
    return encode_sealed_json(content, path)
