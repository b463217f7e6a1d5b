"""Retries: a wrapper that repeats failed requests, and retries of individual pages inside a storage."""

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

#: Errors which prove that the request had no effect.
_WITHOUT_EFFECT = (ThrottledError, TransientError)
_RETRYABLE = (*_WITHOUT_EFFECT, AmbiguousWriteError)


class RetryStorage(StorageWrapper):
    """Repeats throttled and failed requests, with exponential backoff and jitter, and finally raises the last error.

    A throttled or transient failure proves that the request had no effect, so every operation except ``create`` is
    repeated after it. ``create`` is sent once, because its caller decides whether the file may still be created, and
    repeats it with ``send_with_retries``. After an AmbiguousWriteError only ``write`` and ``delete`` are repeated: a
    repeated create could find its own file and report it as another writer's. A listing is retried only until its first
    file has been yielded; a later failure is raised.

    Args:
        inner: The storage to send the requests to.
        attempts: Maximum number of attempts, including the first.
        base_delay_seconds: The delay before retry k is random, from 0 to ``base_delay_seconds * 2**(k - 1)``.
        max_delay_seconds: Maximum delay.
        sleep: Waits for a delay in seconds.

    Raises:
        InvalidInputError: ``attempts`` is less than 1, or a delay is negative.
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
                f"cannot retry with attempts={attempts}, base_delay_seconds={base_delay_seconds} and"
                f" max_delay_seconds={max_delay_seconds}; use at least 1 attempt and delays of at least 0"
            )
        super().__init__(inner)
        self.attempts = attempts
        self.base_delay_seconds = base_delay_seconds
        self.max_delay_seconds = max_delay_seconds
        self._sleep = sleep
        self._after_no_effect = self._retrying(_WITHOUT_EFFECT)
        self._after_any = self._retrying(_RETRYABLE)

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
        """Delete a batch of files. Only deletes that failed with a retryable error are sent again."""
        failures: dict[str, StorageError] = {}

        def delete_remaining() -> None:
            remaining = list(failures) or list(paths)
            failed = self.inner.delete_batch(remaining)
            for path in remaining:
                failures.pop(path, None)
            permanent.update((path, error) for path, error in failed.items() if not isinstance(error, _RETRYABLE))
            failures.update((path, error) for path, error in failed.items() if path not in permanent)
            if failures:
                raise next(iter(failures.values()))

        permanent: dict[str, StorageError] = {}
        try:
            self._retry_idempotent(delete_remaining)
        except StorageError:
            if not failures:  # the whole request failed, not individual files
                raise
        return failures | permanent

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._retry(self._started_list, prefix)

    def now_ms(self) -> int:
        return self._retry(self.inner.now_ms)

    def __getstate__(self) -> dict[str, object]:
        # Retrying has thread-local statistics, which cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name not in ("_after_no_effect", "_after_any")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._after_no_effect = self._retrying(_WITHOUT_EFFECT)
        self._after_any = self._retrying(_RETRYABLE)

    def _retry(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        try:
            return call(*args, **options)
        except _RETRYABLE as error:
            first = error
        return _retry_after(first, self._after_no_effect, lambda: call(*args, **options), self.root)

    def _retry_idempotent(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except _RETRYABLE as error:
            first = error
        return _retry_after(first, self._after_any, lambda: call(*args), self.root)

    def _started_list(self, prefix: str) -> Iterator[FileInfo]:
        files = self.inner.list(prefix)
        for first in files:
            return chain((first,), files)
        return iter(())

    def _retrying(self, errors: tuple[type[Exception], ...]) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(errors),
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=self.base_delay_seconds, max=self.max_delay_seconds),
            sleep=self._sleep,
            reraise=True,
        )


def without_retries(storage: Storage) -> Storage:
    """Remove all retries from a stack of wrappers, in place, and return the stack."""
    while isinstance(storage, RetryStorage):
        storage = storage.inner
    if isinstance(storage, StorageWrapper):
        storage.inner = without_retries(storage.inner)
    return storage


def _retry_after(first: StorageError, retrying: Retrying, call: Callable[[], T], root: str) -> T:
    """Repeat a call whose first attempt raised ``first``.

    The first attempt is made by the caller, because tenacity's bookkeeping costs about as much as a fast request.
    """
    failure: StorageError | None = first
    _count_retry(root, first)

    def attempt() -> T:
        nonlocal failure
        if failure is not None:
            error, failure = failure, None
            raise error
        try:
            return call()
        except _RETRYABLE as error:
            _count_retry(root, error)
            raise

    return retrying(attempt)


def _count_retry(root: str, error: StorageError) -> None:
    hub.add(STORAGE_RETRIES, storage=root.partition(":")[0], cause=type(error).__name__)


#: Maximum delay before the first retry of a page. The maximum delay doubles with each retry.
FIRST_WAIT_SECONDS = 0.1


def retry_listing(call: Callable[..., T], *arguments: Any, max_s: float = math.inf, **options: Any) -> T:
    """Fetch one page or part, with up to four retries.

    Storages use this function for operations with several pages or parts, because RetryStorage would start again from
    the first page.

    Args:
        call: Sends the request. It must be idempotent.
        arguments: Positional arguments of the call.
        max_s: No retry starts after this many seconds.
        options: Keyword arguments of the call.

    Raises:
        StorageError: The last attempt failed.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(_RETRYABLE),
        stop=stop_after_attempt(5) | stop_after_delay(max_s),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=5),
        reraise=True,
    )
    return retrying(call, *arguments, **options)
