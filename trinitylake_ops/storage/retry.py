"""Retry failed requests of a storage, and requests that only a storage itself can repeat."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_random_exponential

from trinitylake_ops.errors import AmbiguousWriteError, InvalidInputError, StorageError, ThrottledError, TransientError
from trinitylake_ops.storage.interface import FileInfo, Storage, StorageWrapper
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry.hub import STORAGE_RETRIES

T = TypeVar("T")

_WITHOUT_EFFECT = (ThrottledError, TransientError)
_PASSING = (*_WITHOUT_EFFECT, AmbiguousWriteError)


class RetryStorage(StorageWrapper):
    """Repeats a request that was throttled or failed in passing, then gives up with the last error.

    Throttled and transient requests certainly had no effect. So every operation is repeated after them, except
    ``create``. It is sent once, because its caller decides whether the file may still be created, and repeats it with
    ``send_with_retries``. After an AmbiguousWriteError only ``write`` and ``delete`` are repeated. A repeated create
    could meet its own file and report it as another writer's. A listing is repeated until its first file arrived. A
    later failure is raised, because files were handed out.

    ``attempts`` counts the first try; the wait before retry k is random in
    ``[0, min(max_delay_seconds, base_delay_seconds * 2**(k - 1))]``. Raises InvalidInputError for
    fewer than one attempt or a negative delay.
    """

    def __init__(
        self,
        inner: Storage,
        attempts: int = 5,
        *,
        base_delay_seconds: float = 0.1,
        max_delay_seconds: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if attempts < 1 or base_delay_seconds < 0 or max_delay_seconds < 0:
            raise InvalidInputError(
                f"retry needs at least 1 attempt and no negative delay, not {attempts} attempts, "
                f"{base_delay_seconds} s and {max_delay_seconds} s"
            )
        super().__init__(inner)
        self.attempts = attempts
        self.base_delay_seconds = base_delay_seconds
        self.max_delay_seconds = max_delay_seconds
        self._sleep = sleep
        self._after_no_effect = self._retrying(_WITHOUT_EFFECT)
        self._after_any = self._retrying(_PASSING)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self._retry(self.inner.read, path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        return self._retry(self.inner.stat, path)

    def send_with_retries(self, send: Callable[[], None]) -> None:
        self._retry(functools.partial(self.inner.send_with_retries, send))

    def write(self, path: str, data: bytes) -> None:
        self._retry_idempotent(self.inner.write, path, data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._retry_idempotent(self.inner.write_best_effort, path, data)

    def delete(self, path: str) -> None:
        self._retry_idempotent(self.inner.delete, path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete a batch. Only its files that failed in passing are tried again."""
        failures: dict[str, StorageError] = {}

        def delete_remaining() -> None:
            remaining = list(failures) or list(paths)
            failed = self.inner.delete_batch(remaining)
            for path in remaining:
                failures.pop(path, None)
            lasting.update((path, error) for path, error in failed.items() if not isinstance(error, _PASSING))
            failures.update((path, error) for path, error in failed.items() if path not in lasting)
            if failures:
                raise next(iter(failures.values()))

        lasting: dict[str, StorageError] = {}
        try:
            self._retry_idempotent(delete_remaining)
        except StorageError:
            if not failures:  # the request as a whole failed, so each of its files did
                raise
        return failures | lasting

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._retry(self._started_list, prefix)

    def now_ms(self) -> int:
        return self._retry(self.inner.now_ms)

    def __getstate__(self) -> dict[str, object]:
        # Retrying holds thread-local figures, which do not pickle.
        return {name: value for name, value in self.__dict__.items() if name not in ("_after_no_effect", "_after_any")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._after_no_effect = self._retrying(_WITHOUT_EFFECT)
        self._after_any = self._retrying(_PASSING)

    def _retry(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return call(*args, **options)
        except _PASSING as error:
            first = error
        return _retry_after(first, self._after_no_effect, lambda: call(*args, **options), self.root)

    def _retry_idempotent(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except _PASSING as error:
            first = error
        return _retry_after(first, self._after_any, lambda: call(*args), self.root)

    def _started_list(self, prefix: str) -> Iterator[FileInfo]:
        files = self.inner.list(prefix)
        for first in files:
            return chain((first,), files)
        return iter(())

    def _retrying(self, kinds: tuple[type[Exception], ...]) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(kinds),
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=self.base_delay_seconds, max=self.max_delay_seconds),
            sleep=self._sleep,
            reraise=True,
        )


def without_retries(storage: Storage) -> Storage:
    """Take the retries out of a stack of wrappers that nobody else uses, and return it."""
    while isinstance(storage, RetryStorage):
        storage = storage.inner
    if isinstance(storage, StorageWrapper):
        storage.inner = without_retries(storage.inner)
    return storage


def _retry_after(first: StorageError, retrying: Retrying, call: Callable[[], T], root: str) -> T:
    """Repeat a call whose first attempt raised ``first``. A call that succeeds at once costs no bookkeeping."""
    failure: StorageError | None = first
    _count_retry(root, first)

    def attempt() -> T:
        nonlocal failure
        if failure is not None:
            error, failure = failure, None
            raise error
        try:
            return call()
        except _PASSING as error:
            _count_retry(root, error)
            raise

    return retrying(attempt)


def _count_retry(root: str, error: StorageError) -> None:
    hub.add(STORAGE_RETRIES, storage=root.partition(":")[0], cause=type(error).__name__)


#: A repeated request waits so long at most the first time, and then up to twice as long each time.
FIRST_WAIT_SECONDS = 0.1


def retry_listing(call: Callable[..., T], *arguments: Any, longest_s: float = math.inf, **options: Any) -> T:
    """Make a call that may be repeated, and repeat it while it fails in passing, but not after ``longest_s``.

    The retries around the storage would begin with all pages or parts anew.
    """
    retrying = Retrying(
        retry=retry_if_exception_type((AmbiguousWriteError, ThrottledError, TransientError)),
        stop=stop_after_attempt(5) | stop_after_delay(longest_s),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=5),
        reraise=True,
    )
    return retrying(call, *arguments, **options)
