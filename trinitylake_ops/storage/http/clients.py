"""Clients that a process keeps, and their event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import fsspec.asyn

from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.http.settings import MIN_BYTES_PER_SECOND, Timeouts, longest_seconds

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig

Store = TypeVar("Store")

#: Bodies up to this size share one client. Each doubling has a client of its own, with more time.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)


class Fork:
    """Whether this process was forked from one that had used obstore.

    The runtime of obstore is one per process and has threads, which a forked child does not have. Every request there
    would wait indefinitely, even through a new client. A process that only imported obstore has no such threads.
    """

    happened = False
    #: Whether this process made a client, whose requests start the threads.
    has_clients = False


def _note_fork() -> None:
    Fork.happened = Fork.happened or Fork.has_clients


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

    def body_of(self, response: GetResult) -> bytes:
        """Take in an answer. Its time is bounded here, since only now its size is known. Raises TimeoutError."""
        start, end = response.range
        deadline = time.monotonic() + longest_seconds(self._timeouts, end - start)
        chunks = []
        for chunk in response.stream(min_chunk_size=1):
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
                self._by_allowance[allowance_bytes] = self._create_store(allowance_bytes)
            return self._by_allowance[allowance_bytes]

    def _create_store(self, allowance_bytes: int | None) -> Store:
        Fork.has_clients = True
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


T = TypeVar("T")

#: A process that opens more places than this by turns makes clients anew.
_MOST = 16


class ClientCache(Generic[T]):
    """The clients that were used last, by all that decides how they ask. Thread-safe.

    Making a client takes tens of milliseconds of CPU time: it reads certificates and the descriptions of a service.
    Its connections are kept with it. A key must hold everything that a client reads when it is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        at_fork(self)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the client of a key, made if need be. Making it may not send anything."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
            return self._kept[key]

    def drop(self, client: T) -> None:
        """Hand a client to no further storage: it may have been made without what it needs."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept is client]:
                del self._kept[key]

    def after_fork_in_child(self) -> None:
        """Go on in a forked child, whose thread that held the lock is gone. Clients see to themselves."""
        self._lock = threading.Lock()


_CLOSE_TIMEOUT_SECONDS = 1.0


def run_on_loop(request: Coroutine[Any, Any, T]) -> T:
    """Run a request on the loop and wait for it, in any other thread. Raises what it raises.

    Raises RuntimeError in the thread of the loop, as when an object collected there sends a request: it would wait for
    itself.
    """
    loop = fsspec.asyn.get_loop()
    if _is_own_thread(loop):
        request.close()
        raise RuntimeError("a request was sent from the thread of the event loop, which would wait for itself")
    response = asyncio.run_coroutine_threadsafe(request, loop)
    try:
        return response.result()
    except BaseException:
        response.cancel()  # after an interrupt no request stays behind
        raise


def close_on_loop(close: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Close a client on the loop, for a moment at most. Without a loop that runs, nothing is left to close."""
    loop = fsspec.asyn.get_loop()
    if loop is None or loop.is_closed():
        return
    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    if _is_own_thread(loop):
        return  # garbage collection on the loop's own thread: the client closes when this returns
    try:
        closing.result(_CLOSE_TIMEOUT_SECONDS)
    except TimeoutError:
        closing.cancel()


def _is_own_thread(loop: asyncio.AbstractEventLoop) -> bool:
    return threading.get_ident() == getattr(loop, "_thread_id", None)
