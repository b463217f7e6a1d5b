"""The obstore clients of one root: how long a request may take, and what a fork ends."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from trinitylake_ops.storage.remote.settings import MIN_BYTES_PER_SECOND, Timeouts, longest_seconds

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig

Store = TypeVar("Store")

#: Bodies up to this size share one client. Each doubling has a client of its own, with more time.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)


class Fork:
    """Whether this process was forked after obstore was loaded.

    The runtime of obstore is one per process and has threads, which a forked child does not have. Every request there
    would wait for ever, also through a new client.
    """

    happened = False


def _note_fork() -> None:
    Fork.happened = True


os.register_at_fork(after_in_child=_note_fork)


class ObstoreClients(ABC, Generic[Store]):
    """Clients for the requests of one root. Nothing is read or sent before the first use. Thread-safe.

    A time-out of obstore belongs to a client, not to a request. Its time-out for reading runs while a body is sent,
    too. So uploads take a client whose time-outs allow for the size of the body.
    """

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._by_allowance: dict[int | None, Store] = {}

    def for_body(self, n_bytes: int = 0) -> Store:
        """Return the client for a request with a body of this size, or with a short answer.

        Raises what the library for credentials raises, when there are none or the configuration cannot be used.
        """
        allowance_bytes = _SMALL_BODY_BYTES
        while allowance_bytes < n_bytes:
            allowance_bytes *= 2
        return self._store(allowance_bytes)

    def for_reading(self) -> Store:
        """Return the client for answers of unknown size, which ``body_of`` takes in. Raises as ``for_body`` does."""
        return self._store(None)

    def body_of(self, answer: GetResult) -> bytes:
        """Take in an answer. Its time is bounded here, since only now its size is known. Raises TimeoutError."""
        start, end = answer.range
        deadline = time.monotonic() + longest_seconds(self._timeouts, end - start)
        chunks = []
        for chunk in answer.stream(min_chunk_size=1):
            chunks.append(bytes(chunk))
            if time.monotonic() > deadline:
                raise TimeoutError
        return b"".join(chunks)

    @abstractmethod
    def _new_store(self, limits: ClientConfig, timeout: timedelta) -> Store:
        """Return a client with these limits, which sends each request once, within the time-out."""

    def _store(self, allowance_bytes: int | None) -> Store:
        found = self._by_allowance.get(allowance_bytes)
        if found is not None:
            return found
        with self._lock:
            if allowance_bytes not in self._by_allowance:
                self._by_allowance[allowance_bytes] = self._made(allowance_bytes)
            return self._by_allowance[allowance_bytes]

    def _made(self, allowance_bytes: int | None) -> Store:
        read_timeout, timeout = timedelta(seconds=self._timeouts.read_timeout_seconds), _ONE_DAY
        if allowance_bytes is not None:
            timeout = timedelta(seconds=longest_seconds(self._timeouts, allowance_bytes))
            if allowance_bytes > _SMALL_BODY_BYTES:
                read_timeout += timedelta(seconds=allowance_bytes / MIN_BYTES_PER_SECOND)
        limits: ClientConfig = {
            "connect_timeout": timedelta(seconds=self._timeouts.connect_timeout_seconds),
            "read_timeout": read_timeout,
            "timeout": timeout,
        }
        return self._new_store(limits, timeout)
