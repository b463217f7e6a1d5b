"""Requests of the engine, noted and sent once more through a client library alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper
from trinitylake_ops.storage.parallel import RoundTrip, current_round_trip


@dataclass(frozen=True)
class Request:
    """One request of the engine, as it is replayed."""

    kind: str
    path: str
    data: bytes = b""
    offset: int = 0
    length: int | None = None


class BareClient(Protocol):
    """A client library alone: no typed errors, no retries, no interface."""

    def send(self, request: Request) -> bytes | None:
        """Send a request; returns what it read, None for a file that is not there."""

    def close(self) -> None:
        """End connections that do not end by themselves."""


class SlowClient(BareClient):
    """A client on which every request takes so many seconds more."""

    def __init__(self, inner: BareClient, seconds: float):
        self._inner = inner
        self._seconds = seconds

    def send(self, request: Request) -> bytes | None:
        time.sleep(self._seconds)
        return self._inner.send(request)


class Recorder(StorageWrapper):
    """Notes every request and which ones were in flight together."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.requests: list[tuple[RoundTrip | None, Request]] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.requests.append((current_round_trip(), Request("read", path, b"", offset, length)))
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self.requests.append((current_round_trip(), Request("stat", path)))
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self.requests.append((current_round_trip(), Request("create", path, data)))
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self.requests.append((current_round_trip(), Request("write", path, data)))
        self.inner.write(path, data)

    def rounds(self) -> list[list[Request]]:
        """Return the requests so far by round, in order, and forget them."""
        found: list[list[Request]] = []
        for _, group in itertools.groupby(self.requests, key=lambda entry: entry[0] or object()):
            found.append([request for _, request in group])
        self.requests = []
        return found


class Replay:
    """Sends recorded requests through a bare client, those of a round together, with the threads that a storage has."""

    def __init__(self, client: BareClient, storage: Storage):
        self._client = client
        self._few_reads, self._few_creates = storage.serial_read_limit, storage.serial_create_limit
        self._pool = ThreadPoolExecutor(storage.concurrency)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def send(
        self,
        rounds: Sequence[Sequence[Request]],
        turn: str,
        on_response: Callable[[Request, bytes], object] = lambda request, answer: None,
    ) -> None:
        """Send all requests; what was created gets a name of its own. ``on_response`` gets each that read something."""
        for together in rounds:
            own = [_renamed(request, turn) for request in together]
            for request, answer in zip(own, self._answers(own), strict=True):
                if answer is not None:
                    on_response(request, answer)

    def _answers(self, together: Sequence[Request]) -> list[bytes | None]:
        few = self._few_reads if together[0].kind == "read" else self._few_creates
        if len(together) <= few:
            return [self._client.send(request) for request in together]
        return list(self._pool.map(self._client.send, together))


def key_prefix(root: str) -> str:
    """Return what stands before the paths of a root in the names of a bucket, a container or a table."""
    return root.split("/", 3)[3]


def decoded(request: Request, answer: bytes) -> None:
    """Open and decode a node file that was read whole, by pyarrow alone, as any reader has to."""
    if request.path.endswith(".arrow") and request.length is None:
        pa.ipc.open_file(answer).read_all().to_pydict()


def _renamed(request: Request, turn: str) -> Request:
    if request.kind in ("create", "write"):
        return replace(request, path=f"{request.path}-replayed-{turn}")
    return request
