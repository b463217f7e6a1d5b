"""Requests as telemetry hears of them: by kind and kind of storage, with their bytes, and a span for each round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.parallel import current_round
from trinitylake_ops.storage.wrappers.base import StorageWrapper
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.instruments import STORAGE_BYTES, STORAGE_REQUESTS

T = TypeVar("T")
P = ParamSpec("P")


class ObservedStorage(StorageWrapper):
    """Tells of each request that passes. Under a RetryStorage each attempt counts.

    A request that is alone in its round gets a span; others get one together (``storage/parallel.py``).
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._scheme = inner.root.partition(":")[0]

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = self._told("read", self.inner.read, path, offset=offset, length=length, limit_bytes=limit_bytes)
        hub.add(STORAGE_BYTES, len(data), storage=self._scheme, way="read")
        return data

    def stat(self, path: str) -> FileInfo:
        return self._told("stat", self.inner.stat, path)

    def create(self, path: str, data: bytes) -> None:
        self._told("create", self.inner.create, path, data)
        self._count_written(data)

    def write(self, path: str, data: bytes) -> None:
        self._told("write", self.inner.write, path, data)
        self._count_written(data)

    def jot(self, path: str, data: bytes) -> None:
        self._told("write", self.inner.jot, path, data)
        self._count_written(data)

    def delete(self, path: str) -> None:
        self._told("delete", self.inner.delete, path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self._told("delete", self.inner.delete_batch, paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._count("list")
        return self.inner.list(prefix)

    def __reduce__(self) -> tuple[type[ObservedStorage], tuple[Storage]]:
        return (ObservedStorage, (self.inner,))

    def _told(self, kind: str, request: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        self._count(kind)
        own_round = current_round()
        if own_round is not None:
            own_round.requests.append(kind)
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
