"""Record the requests of the engine and replay them through a bare client library."""

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
    """One recorded request of the engine."""

    kind: str
    path: str
    data: bytes = b""
    offset: int = 0
    length: int | None = None


class BareClient(Protocol):
    """A client library used directly: without typed errors, retries and the storage interface."""

    def send(self, request: Request) -> bytes | None:
        """Send a request and return the bytes that it read, or None if the file does not exist."""

    def close(self) -> None:
        """Close connections that are not closed automatically."""


class SlowClient(BareClient):
    """A client that delays every request by a number of seconds."""

    def __init__(self, inner: BareClient, seconds: float):
        self._inner = inner
        self._seconds = seconds

    def send(self, request: Request) -> bytes | None:
        time.sleep(self._seconds)
        return self._inner.send(request)


class Recorder(StorageWrapper):
    """Records every request, and which requests were sent in the same round trip."""

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
        """Return the requests recorded so far, grouped by round trip, and clear them."""
        rounds: list[list[Request]] = []
        for _, group in itertools.groupby(self.requests, key=lambda entry: entry[0] or object()):
            rounds.append([request for _, request in group])
        self.requests = []
        return rounds


class Replay:
    """Sends recorded requests through a bare client, in the same round trips and with the same number of threads."""

    def __init__(self, client: BareClient, storage: Storage):
        self._client = client
        self._serial_read_limit, self._serial_create_limit = storage.serial_read_limit, storage.serial_create_limit
        self._pool = ThreadPoolExecutor(storage.concurrency)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def send(
        self,
        rounds: Sequence[Sequence[Request]],
        turn: str,
        on_response: Callable[[Request, bytes], object] = lambda request, response: None,
    ) -> None:
        """Send all requests.

        Args:
            rounds: The requests of each round trip.
            turn: A suffix for the names of created files, so that every turn creates new files.
            on_response: Called with each read request and the bytes that it returned.
        """
        for round_requests in rounds:
            requests = [_renamed(request, turn) for request in round_requests]
            for request, response in zip(requests, self._responses(requests), strict=True):
                if response is not None:
                    on_response(request, response)

    def _responses(self, round_requests: Sequence[Request]) -> list[bytes | None]:
        serial_limit = self._serial_read_limit if round_requests[0].kind == "read" else self._serial_create_limit
        if len(round_requests) <= serial_limit:
            return [self._client.send(request) for request in round_requests]
        return list(self._pool.map(self._client.send, round_requests))


def key_prefix(root: str) -> str:
    """Return the prefix of a root's paths in the object names of its bucket, container or table."""
    return root.split("/", 3)[3]


def decode_node_file(request: Request, response: bytes) -> None:
    """Decode a node file that was read completely with pyarrow alone, which is the minimum work of every reader."""
    if request.path.endswith(".arrow") and request.length is None:
        pa.ipc.open_file(response).read_all().to_pydict()


def _renamed(request: Request, turn: str) -> Request:
    if request.kind in ("create", "write"):
        return replace(request, path=f"{request.path}-replayed-{turn}")
    return request
