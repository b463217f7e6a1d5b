"""Did a create land? Settled by reading the name back (docs/internals/protocol.md, C4).

An answer can be lost while the write took effect. A proxy between us and the storage may also send another answer than
the storage gave. So no answer but "created" is trusted: the file under the name decides.
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
    """Create a file if absent. Returns True when the file there is ours, False when it is another writer's.

    All sends of the file are made here; the storage below makes each of them once.

    Args:
        storage: The storage.
        path: The path of the file.
        data: Its bytes.
        is_ours: Whether the bytes of an existing file are ours.
        before_send: Called before every send of the same bytes, including resends.
        trusts_refusals: Whether a rejection is raised unchanged if the name cannot be read.
        read_back: Reads the name, for a caller that reads more in the same round trip.
        also: Calls to make in the round trip of the first send.

    Raises:
        AmbiguousWriteError: The outcome is unknown: a send may have taken effect, or still may.
        TrinityLakeError: Any other error, of ``before_send`` too, means that the file was not created.
    """
    lost_response: TrinityLakeError | None = None
    # The file of another writer may differ a little from ours in size.
    limit_bytes = max(2 * len(data), storage.whole_file_limit_bytes)
    read_back = read_back or functools.partial(storage.read, path, limit_bytes=limit_bytes)
    for _ in range(_MAX_SENDS):
        refusal, is_sent = _send(storage, path, data, before_send, also)
        also = ()
        if refusal is None:
            return True
        if not is_sent and lost_response is None:
            raise refusal
        if isinstance(refusal, AmbiguousWriteError):
            lost_response = refusal
        try:
            return is_ours(read_back())
        except FileMissingError:
            if isinstance(refusal, AmbiguousWriteError | FileExistsAlreadyError):
                continue  # not created so far: the same bytes may be sent again
            if lost_response is None:
                raise refusal from None
            raise _ambiguous(path, refusal) from refusal
        except TrinityLakeError as error:
            is_definite = isinstance(refusal, UnreachableError) or (
                trusts_refusals and not isinstance(refusal, AmbiguousWriteError | FileExistsAlreadyError)
            )
            if is_definite and lost_response is None:
                raise refusal from None
            raise _ambiguous(path, error) from error
    if lost_response is None:
        raise StorageError(f"there is something at {path!r} that is no file; remove it", path=path)
    raise _ambiguous(path, lost_response)


def create_fresh(storage: Storage, files: Mapping[str, bytes], also: Sequence[Callable[[], None]] = ()) -> None:
    """Create files as :func:`create_fresh_file` does, in parallel, and make the calls of ``also`` in the same round.

    Raises the first failure once no create is on its way any more.
    """
    calls: list[Callable[[], None]] = [
        *(functools.partial(create_fresh_file, storage, path, data) for path, data in files.items()),
        *also,
    ]
    _in_one_round_trip(storage, calls)


def create_fresh_file(storage: Storage, path: str, data: bytes) -> None:
    """Create a file under a name that no other writer can have chosen. A file there with these bytes is ours.

    Nothing refers to the file yet, so a refusal is raised as it came if the name cannot be read either. Raises
    FileExistsAlreadyError if there are other bytes, AmbiguousWriteError if the outcome cannot be told, other
    StorageErrors.
    """
    if not create_settled(storage, path, data, is_ours=lambda found: found == data, trusts_refusals=True):
        raise FileExistsAlreadyError(f"another file stands at the fresh name {path!r}", path=path)


def _send(
    storage: Storage, path: str, data: bytes, before_send: Callable[[], None], also: Sequence[Callable[[], None]]
) -> tuple[TrinityLakeError | None, bool]:
    """Send a create, and again after a failure without effect. Returns the error, or None, and whether it was sent."""
    refusal: TrinityLakeError | None = None
    is_sent = False

    def send() -> None:
        nonlocal is_sent
        if is_sent:
            before_send()
        is_sent = True
        storage.create(path, data)

    def send_in_time() -> None:
        nonlocal refusal
        try:
            before_send()
            storage.send_with_retries(send)
        except TrinityLakeError as error:
            refusal = error

    if also:
        _in_one_round_trip(storage, [send_in_time, *also])
    else:
        send_in_time()
    return refusal, is_sent


def _in_one_round_trip(storage: Storage, calls: Sequence[Callable[[], None]]) -> None:
    """Make calls at the same time. Raises the first failure once all have ended."""

    def call(work: Callable[[], None]) -> None:
        work()

    run_round_trip(call, calls, storage.concurrency, storage.serial_create_limit)


def _ambiguous(path: str, cause: TrinityLakeError) -> AmbiguousWriteError:
    return AmbiguousWriteError(f"file {path!r} may or may not have been created: {cause.message}", path=path)
