"""Process-wide client caches, and the event loop of asynchronous clients."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

import fsspec.asyn

from trinitylake_ops.storage.background import at_fork

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
        """Return the client for a key.

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
    the call would wait indefinitely.
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
    future = asyncio.run_coroutine_threadsafe(close(), loop)
    if _is_own_thread(loop):
        return  # called by a destructor on the loop's thread: the client closes after this returns
    try:
        future.result(_CLOSE_TIMEOUT_SECONDS)
    except TimeoutError:
        future.cancel()


def _is_own_thread(loop: asyncio.AbstractEventLoop) -> bool:
    return threading.get_ident() == getattr(loop, "_thread_id", None)
