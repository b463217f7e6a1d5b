"""Did a create land? Settled by reading the name back (docs/protocol.md, C4).

An answer can be lost while the write took effect, and whatever stands between us and the storage
may send another answer than the storage gave. So no answer but "created" is taken at its word:
what stands under the name decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.parallel import in_one_round, run_parallel

_MAX_SENDS = 5


def create_settled(
    storage: Storage,
    path: str,
    data: bytes,
    *,
    is_ours: Callable[[bytes], bool] | None = None,
    before_send: Callable[[], None] = lambda: None,
) -> bool:
    """Create a file if absent and say whose stands there: True when it is ours, False when another's.

    ``is_ours`` tells from its bytes whose a file is; by default ours is the one with equal bytes.
    ``before_send`` runs before every send of the same bytes. Raises AmbiguousWriteError when nobody
    can tell now: a send may have taken effect, or still may. Any other error, of ``before_send``
    too, means that the file was not created.
    """
    own = is_ours or (lambda found: found == data)
    lost_answer: StorageError | None = None
    for _ in range(_MAX_SENDS):
        try:
            before_send()
        except TrinityLakeError as error:
            if lost_answer is None:
                raise
            raise _ambiguous(path, error) from error
        refusal = _send(storage, path, data)
        if refusal is None:
            return True
        if isinstance(refusal, AmbiguousWriteError):
            lost_answer = refusal
        try:
            return own(storage.read(path))
        except FileMissingError:
            if isinstance(refusal, AmbiguousWriteError | FileExistsAlreadyError):
                continue  # not created so far: the same bytes may be sent again
            if lost_answer is None:
                raise refusal from None
            raise _ambiguous(path, refusal) from refusal
        except StorageError as error:
            if isinstance(refusal, TransientError) and isinstance(error, TransientError) and lost_answer is None:
                raise refusal from None  # no connection was made, neither for the create nor now
            raise _ambiguous(path, error) from error
    if lost_answer is None:
        raise StorageError(f"something that is no file stands at {path!r}; remove it", path=path)
    raise _ambiguous(path, lost_answer)


def _send(storage: Storage, path: str, data: bytes) -> StorageError | None:
    try:
        storage.create(path, data)
    except StorageError as error:
        return error
    return None


def create_fresh(storage: Storage, files: Mapping[str, bytes]) -> None:
    """Create files under names that nobody else can have chosen, in parallel; a file with these bytes is ours.

    Raises the first failure once none is on its way any more: FileExistsAlreadyError where other bytes stand,
    AmbiguousWriteError where nobody can tell, other StorageErrors.
    """

    def create_one(path: str) -> None:
        if not create_settled(storage, path, files[path]):
            raise FileExistsAlreadyError(f"another file stands at the fresh name {path!r}", path=path)

    run_parallel(in_one_round(create_one), list(files), storage.concurrency)


def _ambiguous(path: str, cause: TrinityLakeError) -> AmbiguousWriteError:
    return AmbiguousWriteError(f"file {path!r} may or may not have been created: {cause.message}", path=path)
