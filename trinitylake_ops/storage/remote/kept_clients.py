"""Clients that are made once in a process and shared by all storages of equal settings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trinitylake_ops.storage.fork import at_fork

T = TypeVar("T")

#: A process that opens more places than this by turns makes clients anew.
_MOST = 16


class KeptClients(Generic[T]):
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

    def forget(self) -> None:
        """Go on in a forked child, whose thread that held the lock is gone. Clients see to themselves."""
        self._lock = threading.Lock()
