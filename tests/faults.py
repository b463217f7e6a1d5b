"""A storage that fails requests, loses their responses or kills its process at chosen requests.

Crash tests wrap a storage in FaultyStorage with a plan of faults. Requests are numbered from 1 in the order in which
they are sent; ``now_ms`` is not a request. A run without faults shows in its ``log`` how many requests there are, and
one run per request and moment then covers every point at which a process can die.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from trinitylake_ops.errors import AmbiguousWriteError, StorageError
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper

T = TypeVar("T")
Moment = Literal["before", "after"]
#: Kinds of requests that change files.
EFFECTS = ("create", "write", "delete")

#: The random parts of paths: UUIDs, and the folders that are derived from their bits.
_RANDOM = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[01]{4}/[01]{4}/[01]{4}/[01]{8}")


class DeathError(BaseException):
    """The simulated death of the process. No code catches it."""

    def __init__(self, message: str, *, path: str):
        super().__init__(message, path)


@dataclass(frozen=True)
class Request:
    """A request that reached the storage: its number from 1, its kind, and its path or prefix."""

    number: int
    kind: str
    path: str


@dataclass(frozen=True)
class Fault:
    """A fault at the ``at``-th request among the requests of ``kind`` whose path contains ``path_part``.

    ``error`` None means SIGKILL. A fault "before" prevents the effect of the request; a fault "after" happens when the
    request has taken effect, so that its response is lost. A listing fails "after" it returned all its files. ``times``
    is the number of consecutive requests that fail.
    """

    at: int
    moment: Moment
    error: type[StorageError] | None
    kind: str | None = None
    path_part: str = ""
    times: int = 1

    def matches(self, request: Request) -> bool:
        return self.kind in (None, request.kind) and self.path_part in request.path


def fail(
    at: int,
    error: type[StorageError],
    moment: Moment = "before",
    *,
    kind: str | None = None,
    path_part: str = "",
    times: int = 1,
) -> Fault:
    """Fail a request with an error of the given class."""
    return Fault(at, moment, error, kind, path_part, times)


def lose_response(at: int, *, kind: str | None = None, path_part: str = "", times: int = 1) -> Fault:
    """Lose the response of a write that took effect."""
    return Fault(at, "after", AmbiguousWriteError, kind, path_part, times)


def kill(at: int, moment: Moment, *, kind: str | None = None, path_part: str = "") -> Fault:
    """Kill this process with SIGKILL before or after a request takes effect."""
    return Fault(at, moment, None, kind, path_part)


class FaultyStorage(StorageWrapper):
    """Forwards requests to ``inner`` and injects the faults of ``plan``. ``log`` lists all requests.

    With ``concurrency=1``, the methods ``*_many`` of this storage and its wrappers send their requests sequentially, so
    that requests have the same numbers in each run.
    """

    def __init__(self, inner: Storage, plan: Sequence[Fault] = (), *, concurrency: int | None = None):
        super().__init__(inner)
        if concurrency is not None:
            self.concurrency = concurrency
        self.plan = tuple(plan)
        self._lock = threading.Lock()
        self._log: list[Request] = []
        self._effects: list[tuple[str, str]] = []
        self._n_matches = [0] * len(self.plan)

    @property
    def log(self) -> tuple[Request, ...]:
        """All requests so far, in the order in which they were sent."""
        with self._lock:
            return tuple(self._log)

    @property
    def effects(self) -> tuple[tuple[str, str], ...]:
        """Kind and path of all changes of files, in order, without the random parts of names.

        If two interrupted runs on the same files have equal effects, they left the same state.
        """
        with self._lock:
            return tuple((kind, _RANDOM.sub("*", path)) for kind, path in self._effects)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self._send(
            "read", path, lambda: self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        )

    def stat(self, path: str) -> FileInfo:
        return self._send("stat", path, lambda: self.inner.stat(path))

    def create(self, path: str, data: bytes) -> None:
        self._send("create", path, lambda: self.inner.create(path, data))

    def write(self, path: str, data: bytes) -> None:
        self._send("write", path, lambda: self.inner.write(path, data))

    def delete(self, path: str) -> None:
        self._send("delete", path, lambda: self.inner.delete(path))

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self._send("delete", " ".join(paths), lambda: self.inner.delete_batch(paths))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        faults = self._register("list", prefix)
        _inject(faults, "before", prefix)
        return self._listing(self.inner.list(prefix), faults, prefix)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.inner, self.plan, self.concurrency))

    def _listing(self, files: Iterator[FileInfo], faults: Sequence[Fault], prefix: str) -> Iterator[FileInfo]:
        yield from files
        _inject(faults, "after", prefix)

    def _send(self, kind: str, path: str, request: Callable[[], T]) -> T:
        faults = self._register(kind, path)
        _inject(faults, "before", path)
        try:
            response = request()
            if kind in EFFECTS:
                with self._lock:
                    self._effects.append((kind, path))
            return response
        finally:  # the lost response may itself be an error
            _inject(faults, "after", path)

    def _register(self, kind: str, path: str) -> Sequence[Fault]:
        """Log a request and return the faults to inject at it."""
        hits = []
        with self._lock:
            request = Request(len(self._log) + 1, kind, path)
            self._log.append(request)
            for index, fault in enumerate(self.plan):
                if fault.matches(request):
                    self._n_matches[index] += 1
                    if fault.at <= self._n_matches[index] < fault.at + fault.times:
                        hits.append(fault)
        return hits


def _inject(faults: Sequence[Fault], moment: Moment, path: str) -> None:
    for fault in faults:
        if fault.moment == moment:
            if fault.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise fault.error(f"injected {moment} the effect at {path!r}", path=path)


def _rebuild(inner: Storage, plan: Sequence[Fault], concurrency: int) -> FaultyStorage:
    return FaultyStorage(inner, plan, concurrency=concurrency)
