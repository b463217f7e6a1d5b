"""Did a create land? Settled by reading the name back (docs/protocol.md, C4).

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
from trinitylake_ops.storage.retry import checked_resends

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

    ``is_ours`` tells from a file's bytes whether it is ours. ``before_send`` runs before every send of the same bytes,
    also before repetitions of RetryStorage. Raises AmbiguousWriteError when the outcome cannot be told now: a send may
    have taken effect, or still may. Any other error, of ``before_send`` too, means that the file was not created.

    ``trusts_refusals`` says that a refusal is raised as it came if the name cannot be read. ``read_back`` reads the
    name for callers who read more in the same round. The calls of ``also`` are made in the round of the first send.
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
    """Send a create. Returns the refusal, or None, and whether anything was sent."""
    refusals: list[TrinityLakeError] = []
    is_sent = False

    def send() -> None:
        nonlocal is_sent
        try:
            before_send()
            is_sent = True
            with checked_resends(before_send):
                storage.create(path, data)
        except TrinityLakeError as error:
            refusals.append(error)

    if also:
        _in_one_round_trip(storage, [send, *also])
    else:
        send()
    return (refusals[0] if refusals else None), is_sent


def _in_one_round_trip(storage: Storage, calls: Sequence[Callable[[], None]]) -> None:
    """Make calls at the same time. Raises the first failure once all have ended."""

    def call(work: Callable[[], None]) -> None:
        work()

    run_round_trip(call, calls, storage.concurrency, storage.serial_create_limit)


def _ambiguous(path: str, cause: TrinityLakeError) -> AmbiguousWriteError:
    return AmbiguousWriteError(f"file {path!r} may or may not have been created: {cause.message}", path=path)
