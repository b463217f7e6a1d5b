"""Client caches of a process, and the event loop of asynchronous clients."""

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

#: Requests with bodies up to this size share one client. Each doubling has a separate client with longer timeouts.
_SMALL_BODY_BYTES = 4 * 1024 * 1024
_ONE_DAY = timedelta(days=1)


class Fork:
    """Tracks whether this process was forked from a process that had used obstore.

    obstore has one runtime per process, whose threads do not exist in a forked child. Every request of the child would
    hang, even of a new client. A process that imported obstore without using it has no such threads.
    """

    happened = False
    #: Whether this process created a client. Requests of clients start the threads.
    has_clients = False


def _note_fork() -> None:
    Fork.happened = Fork.happened or Fork.has_clients


os.register_at_fork(after_in_child=_note_fork)


class ObstoreClients(ABC, Generic[Store]):
    """The obstore clients of one root, created on first use. Thread-safe.

    obstore's timeouts belong to a client, not to a request, and its read timeout also runs while a body is sent.
    Uploads therefore use a client whose timeouts allow for the size of the body.
    """

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._by_allowance: dict[int | None, Store] = {}

    def for_body(self, n_bytes: int = 0) -> Store:
        """Return the client for a request with a body of this size, and a short response.

        Errors of the credentials library, for example for missing credentials, are raised unchanged.
        """
        allowance_bytes = _SMALL_BODY_BYTES
        while allowance_bytes < n_bytes:
            allowance_bytes *= 2
        return self._store(allowance_bytes)

    def for_reading(self) -> Store:
        """Return the client for responses of unknown size. Read them with ``body_of``."""
        return self._store(None)

    def body_of(self, response: GetResult) -> bytes:
        """Read the body of a response. Raise TimeoutError if it takes too long for its size."""
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
        """Create a client with these limits that sends each request once."""

    def _store(self, allowance_bytes: int | None) -> Store:
        store = self._by_allowance.get(allowance_bytes)
        if store is not None:
            return store
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

#: Maximum number of cached clients.
MAX_CLIENTS = 16


class ClientCache(Generic[T]):
    """A thread-safe LRU cache of clients and their connections.

    Creating a client takes tens of milliseconds of CPU time, because it reads certificates and service descriptions.
    The key of a client must contain everything that the client reads when it is created.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[Hashable, T] = OrderedDict()
        at_fork(self)

    def get(self, key: Hashable, create: Callable[[], T]) -> T:
        """Return the client of a key.

        Args:
            key: All settings of the client.
            create: Creates the client without sending a request.
        """
        with self._lock:
            if key not in self._clients:
                self._clients[key] = create()
            self._clients.move_to_end(key)
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            return self._clients[key]

    def drop(self, client: T) -> None:
        """Remove a client, for example because it was created before there were credentials."""
        with self._lock:
            for key in [key for key, cached in self._clients.items() if cached is client]:
                del self._clients[key]

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it. Clients handle forks themselves."""
        self._lock = threading.Lock()


_CLOSE_TIMEOUT_SECONDS = 1.0


def run_on_loop(request: Coroutine[Any, Any, T]) -> T:
    """Run a request on the event loop and wait for its result. Its errors are raised.

    Raise RuntimeError in the thread of the loop, for example if a destructor that runs there sends a request, because
    it would wait indefinitely.
    """
    loop = fsspec.asyn.get_loop()
    if _is_own_thread(loop):
        request.close()
        raise RuntimeError("cannot send a request from the thread of the event loop: it would wait for itself")
    response = asyncio.run_coroutine_threadsafe(request, loop)
    try:
        return response.result()
    except BaseException:
        response.cancel()  # so that an interrupt leaves no request behind
        raise


def close_on_loop(close: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Close a client on the event loop, and wait up to a second. Do nothing if there is no running loop."""
    loop = fsspec.asyn.get_loop()
    if loop is None or loop.is_closed():
        return
    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    if _is_own_thread(loop):
        return  # called by a destructor on the loop's thread: the client closes after this returns
    try:
        closing.result(_CLOSE_TIMEOUT_SECONDS)
    except TimeoutError:
        closing.cancel()


def _is_own_thread(loop: asyncio.AbstractEventLoop) -> bool:
    return threading.get_ident() == getattr(loop, "_thread_id", None)
