"""The client of one root: made at first use, and anew after a request without an answer or a broken connection."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

from hdfs_native import Client

from trinitylake_ops.storage.fork import at_fork, keep_for_ever
from trinitylake_ops.storage.hdfs.calls import call_within
from trinitylake_ops.storage.hdfs.failures import FAILURES, Request, is_connection_lost, typed_error
from trinitylake_ops.storage.hdfs.settings import HdfsLocation, HdfsSettings
from trinitylake_ops.storage.remote.settings import MIN_BYTES_PER_SECOND

T = TypeVar("T")


class HdfsClient:
    """Makes calls to HDFS, each with a limit of time. Thread-safe."""

    def __init__(self, location: HdfsLocation, settings: HdfsSettings):
        self._location = location
        self._settings = settings
        self._client: Client | None = None
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()
        if self._client is not None:
            # A client that is destroyed waits for its threads, which a child does not have.
            keep_for_ever(self._client)

    def ask(self, request: Request, work: Callable[[Client], T], n_bytes: int = 0) -> T:
        """Make a call that transfers so many bytes. Raises the typed error of its failure."""
        limit_seconds = self._limit_seconds(n_bytes)
        try:
            return self.call(work, n_bytes)
        except FAILURES as error:
            failure = typed_error(request, error, limit_seconds)
        # This is raised outside the handler: the client's error holds the server's stack trace.
        raise failure

    def call(self, work: Callable[[Client], T], n_bytes: int = 0, most_seconds: float = math.inf) -> T:
        """Make a call that transfers so many bytes. Raises one of ``FAILURES``."""
        client = self._current()
        try:
            most_seconds = min(self._limit_seconds(n_bytes), most_seconds)
            return call_within(most_seconds, lambda: work(client))  # noqa: F821 - it is deleted after the call
        except FAILURES as error:
            if is_connection_lost(error):
                self._drop(client)
            raise
        finally:
            del client  # a traceback keeps this frame: with it, a forked child would destroy the client, and wait

    def typed(self, request: Request, error: BaseException) -> Exception:
        """Return the typed error for one of ``FAILURES`` that ``call`` raised."""
        return typed_error(request, error, self._settings.read_timeout_seconds)

    def _limit_seconds(self, n_bytes: int) -> float:
        return self._settings.read_timeout_seconds + n_bytes / MIN_BYTES_PER_SECOND

    def _current(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client(self._location.url, dict(self._settings.configuration(self._location)))
            return self._client

    def _drop(self, client: Client) -> None:
        """Let the next call make a new connection: this one may never answer, or tell of its end to each call."""
        with self._lock:
            if self._client is client:
                self._client = None
