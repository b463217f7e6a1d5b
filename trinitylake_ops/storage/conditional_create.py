"""Create-if-absent with read-back: resolves whether a conditional write succeeded (docs/internals/protocol.md, C4).

The response to a write that took effect can be lost, and a proxy can replace it. Therefore only a success is trusted.
After any other response, the file at the path is read to resolve the outcome.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.parallel import run_round_trip

_MAX_SENDS = 5


def create_settled(
    storage: Storage,
    path: str,
    data: bytes,
    *,
    is_ours: Callable[[bytes], bool],
    before_send: Callable[[], None] = lambda: None,
    trusts_refusals: bool = False,
    read_back: Callable[[], bytes] | None = None,
    also: Sequence[Callable[[], None]] = (),
) -> bool:
    """Create a file if absent, and resolve the outcome. Resend the file while it does not exist.

    Args:
        storage: The storage. It sends each create once.
        path: Path of the file.
        data: Content of the file.
        is_ours: Whether the content of an existing file was sent by this call.
        before_send: Called before each send of the file, including resends.
        trusts_refusals: Whether to raise a rejection unchanged if the path cannot be read.
        read_back: Reads the path. Allows a caller to read more files in the same round trip.
        also: Calls to make in the round trip of the first send.

    Returns:
        True if this call created the file, or False if the path contains another writer's file.

    Raises:
        AmbiguousWriteError: The outcome is unknown: a request may have taken effect, or may still do so.
        TrinityLakeError: The file was not created. This includes errors of ``before_send``.
    """
    lost_response: TrinityLakeError | None = None
    # The file of another writer may be larger than ours.
    limit_bytes = max(2 * len(data), storage.whole_file_limit_bytes)
    read_back = read_back or functools.partial(storage.read, path, limit_bytes=limit_bytes)
    for _ in range(_MAX_SENDS):
        rejection, is_sent = _send(storage, path, data, before_send, also)
        also = ()
        if rejection is None:
            return True
        if not is_sent and lost_response is None:
            raise rejection
        if isinstance(rejection, AmbiguousWriteError):
            lost_response = rejection
        try:
            return is_ours(read_back())
        except FileMissingError:
            if isinstance(rejection, AmbiguousWriteError | FileExistsAlreadyError):
                continue  # the file does not exist, so it may be sent again
            if lost_response is None:
                raise rejection from None
            raise _ambiguous(path, rejection) from rejection
        except TrinityLakeError as error:
            is_definite = isinstance(rejection, UnreachableError) or (
                trusts_refusals and not isinstance(rejection, AmbiguousWriteError | FileExistsAlreadyError)
            )
            if is_definite and lost_response is None:
                raise rejection from None
            raise _ambiguous(path, error) from error
    if lost_response is None:
        raise StorageError(f"cannot create {path!r}: the path exists, but is not a file; remove it", path=path)
    raise _ambiguous(path, lost_response)


def create_fresh(storage: Storage, files: Mapping[str, bytes], also: Sequence[Callable[[], None]] = ()) -> None:
    """Create files with fresh names in one round trip. See :func:`create_fresh_file`.

    Args:
        storage: The storage.
        files: Contents by path.
        also: Calls to make in the same round trip.

    Raises:
        StorageError: The first failure, after all requests have ended.
    """
    calls: list[Callable[[], None]] = [
        *(functools.partial(create_fresh_file, storage, path, data) for path, data in files.items()),
        *also,
    ]
    _in_one_round_trip(storage, calls)


def create_fresh_file(storage: Storage, path: str, data: bytes) -> None:
    """Create a file with a name that no other writer can have chosen.

    An existing file with the same content was created by an earlier send. If the path cannot be read after a rejection,
    the rejection is raised unchanged, because nothing refers to the file yet.

    Args:
        storage: The storage.
        path: Path of the file.
        data: Content of the file.

    Raises:
        FileExistsAlreadyError: There is a file with other content.
        AmbiguousWriteError: The outcome is unknown.
        StorageError: The file was not created.
    """
    if not create_settled(storage, path, data, is_ours=lambda content: content == data, trusts_refusals=True):
        raise FileExistsAlreadyError(f"cannot create {path!r}: a file with this new name already exists", path=path)


def _send(
    storage: Storage, path: str, data: bytes, before_send: Callable[[], None], also: Sequence[Callable[[], None]]
) -> tuple[TrinityLakeError | None, bool]:
    """Send a create, and retry failures without effect. Return the error, if any, and whether a request was sent."""
    rejection: TrinityLakeError | None = None
    is_sent = False

    def send() -> None:
        nonlocal is_sent
        if is_sent:
            before_send()
        is_sent = True
        storage.create(path, data)

    def send_with_retries() -> None:
        nonlocal rejection
        try:
            before_send()
            storage.send_with_retries(send)
        except TrinityLakeError as error:
            rejection = error

    if also:
        _in_one_round_trip(storage, [send_with_retries, *also])
    else:
        send_with_retries()
    return rejection, is_sent


def _in_one_round_trip(storage: Storage, calls: Sequence[Callable[[], None]]) -> None:
    """Make calls in parallel. Raise the first failure after all calls have ended."""

    def call(work: Callable[[], None]) -> None:
        work()

    run_round_trip(call, calls, storage.concurrency, storage.serial_create_limit)


def _ambiguous(path: str, cause: TrinityLakeError) -> AmbiguousWriteError:
    return AmbiguousWriteError(f"the outcome of the creation of {path!r} is unknown: {cause.message}", path=path)
