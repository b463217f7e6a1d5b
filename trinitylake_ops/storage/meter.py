"""Storage wrappers that count, observe and pace requests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar
from weakref import WeakSet

from trinitylake_ops.errors import InvalidInputError, StorageError
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.interface import FileInfo, Storage, StorageWrapper
from trinitylake_ops.storage.parallel import RoundTrip, current_round_trip
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import STORAGE_BYTES, STORAGE_REQUESTS


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The requests that a :class:`MeteredStorage` counted during a period."""

    #: Number of requests by kind (``read``, ``stat``, ``create``, ``write``, ``delete``, ``list``), including failed
    #: requests. Kinds that did not occur are omitted.
    requests: Mapping[str, int] = field(default_factory=dict)
    #: Number of sequential round trips.
    rounds: int = 0
    #: Bytes that reads returned.
    bytes_read: int = 0
    #: Bytes of the bodies of successful creates and writes.
    bytes_written: int = 0

    @property
    def total(self) -> int:
        """Number of requests of all kinds."""
        return sum(self.requests.values())

    def __sub__(self, earlier: RequestCounts) -> RequestCounts:
        return RequestCounts(
            requests=dict(Counter(self.requests) - Counter(earlier.requests)),
            rounds=self.rounds - earlier.rounds,
            bytes_read=self.bytes_read - earlier.bytes_read,
            bytes_written=self.bytes_written - earlier.bytes_written,
        )


class Measurement:
    """The counts of a measured block. They are updated while the block runs, and final afterwards."""

    def __init__(self, meter: MeteredStorage):
        self._meter = meter
        self._start = meter.snapshot()
        self._final: RequestCounts | None = None

    @property
    def counts(self) -> RequestCounts:
        return self._meter.snapshot() - self._start if self._final is None else self._final

    def _finish(self) -> None:
        self._final = self.counts


class MeteredStorage(StorageWrapper):
    """Counts requests, the bytes that they transfer, and the round trips that they take.

    A single request is one round trip. All requests of one ``*_many`` call share one round trip, regardless of the
    wrapper on which it was called. A listing counts as one request and one round trip, regardless of its number of
    pages. ``now_ms`` is not counted, because a storage derives the time from earlier responses, unless the last
    response is minutes old. A pickled copy starts at zero. Requests that other threads send through the same meter are
    included, so measure one operation at a time.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.after_fork_in_child()
        self._clear()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it. The counts are kept."""
        self._lock = threading.Lock()

    def snapshot(self) -> RequestCounts:
        """Return the counts so far."""
        with self._lock:
            return RequestCounts(dict(self._requests), self._rounds, self._bytes_read, self._bytes_written)

    def add(self, counts: RequestCounts) -> None:
        """Add requests that a copy of this storage sent in another process, without their round trips."""
        with self._lock:
            self._requests.update(counts.requests)
            self._bytes_read += counts.bytes_read
            self._bytes_written += counts.bytes_written

    def reset(self) -> None:
        """Reset all counts to zero."""
        with self._lock:
            self._clear()

    @contextmanager
    def measure(self) -> Iterator[Measurement]:
        """Measure a block: ``with meter.measure() as measured: ...`` and then ``measured.counts``."""
        measurement = Measurement(self)
        try:
            yield measurement
        finally:
            measurement._finish()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._count("read")
        data = self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        with self._lock:
            self._bytes_read += len(data)
        return data

    def stat(self, path: str) -> FileInfo:
        self._count("stat")
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self._count("create")
        self.inner.create(path, data)
        self._count_written(data)

    def write(self, path: str, data: bytes) -> None:
        self._count("write")
        self.inner.write(path, data)
        self._count_written(data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._count("write")
        self.inner.write_best_effort(path, data)
        self._count_written(data)

    def delete(self, path: str) -> None:
        self._count("delete")
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self._count("delete")
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._count("list")
        return self.inner.list(prefix)

    def __reduce__(self) -> tuple[type[MeteredStorage], tuple[Storage]]:
        return (MeteredStorage, (self.inner,))

    def _clear(self) -> None:
        self._requests: Counter[str] = Counter()
        self._rounds = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._seen_rounds: WeakSet[RoundTrip] = WeakSet()

    def _count(self, kind: str) -> None:
        own_round_trip = current_round_trip()
        with self._lock:
            self._requests[kind] += 1
            if own_round_trip is None:
                self._rounds += 1
            elif own_round_trip not in self._seen_rounds:
                self._seen_rounds.add(own_round_trip)
                self._rounds += 1

    def _count_written(self, data: bytes) -> None:
        with self._lock:
            self._bytes_written += len(data)


T = TypeVar("T")
P = ParamSpec("P")


class ObservedStorage(StorageWrapper):
    """Emits telemetry for each request. Below a RetryStorage, each attempt is a request.

    A request that is the only one in its round trip gets a separate span. Requests that share a round trip share one
    span (``storage/parallel.py``).
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._scheme = inner.root.partition(":")[0]

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = self._observe("read", self.inner.read, path, offset=offset, length=length, limit_bytes=limit_bytes)
        hub.add(STORAGE_BYTES, len(data), storage=self._scheme, way="read")
        return data

    def stat(self, path: str) -> FileInfo:
        return self._observe("stat", self.inner.stat, path)

    def create(self, path: str, data: bytes) -> None:
        self._observe("create", self.inner.create, path, data)
        self._count_written(data)

    def write(self, path: str, data: bytes) -> None:
        self._observe("write", self.inner.write, path, data)
        self._count_written(data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._observe("write", self.inner.write_best_effort, path, data)
        self._count_written(data)

    def delete(self, path: str) -> None:
        self._observe("delete", self.inner.delete, path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self._observe("delete", self.inner.delete_batch, paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._count("list")
        return self.inner.list(prefix)

    def __reduce__(self) -> tuple[type[ObservedStorage], tuple[Storage]]:
        return (ObservedStorage, (self.inner,))

    def _observe(self, kind: str, request: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        self._count(kind)
        own_round_trip = current_round_trip()
        if own_round_trip is not None:
            own_round_trip.requests.append(kind)
            return request(*args, **named)
        if not spans.is_recorded():
            return request(*args, **named)
        begun_ns = time.time_ns()
        try:
            return request(*args, **named)
        finally:
            spans.note(f"storage {kind}", begun_ns, {"trinitylake.requests": 1, "trinitylake.storage": self._scheme})

    def _count(self, kind: str) -> None:
        hub.add(STORAGE_REQUESTS, storage=self._scheme, kind=kind)

    def _count_written(self, data: bytes) -> None:
        hub.add(STORAGE_BYTES, len(data), storage=self._scheme, way="written")


class PacedStorage(StorageWrapper):
    """Limits the rate of requests by delaying each request until it is due.

    A listing counts as one request, regardless of its number of pages. ``now_ms`` is not limited. Below a RetryStorage,
    each attempt counts. The rate of a pickled copy is limited separately.

    Args:
        inner: The storage to send the requests to.
        requests_per_second: Maximum number of requests per second.

    Raises:
        InvalidInputError: The rate is not above 0.
    """

    def __init__(self, inner: Storage, requests_per_second: float):
        if not requests_per_second > 0:
            raise InvalidInputError(f"requests_per_second is {requests_per_second!r}; it must be above 0")
        super().__init__(inner)
        self.requests_per_second = requests_per_second
        self._next_s = 0.0
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._wait()
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self._wait()
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.write(path, data)

    def write_best_effort(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.write_best_effort(path, data)

    def delete(self, path: str) -> None:
        self._wait()
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self._wait()
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._wait()
        return self.inner.list(prefix)

    def __reduce__(self) -> tuple[type[PacedStorage], tuple[Storage, float]]:
        return (PacedStorage, (self.inner, self.requests_per_second))

    def _wait(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            due_s = max(self._next_s, now_s)
            self._next_s = due_s + 1 / self.requests_per_second
        if due_s > now_s:
            time.sleep(due_s - now_s)
