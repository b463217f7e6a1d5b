"""Storages whose clock a test sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper


class ClockStorage(StorageWrapper):
    """Shows ``time_ms`` as the storage's clock."""

    def __init__(self, inner: Storage, time_ms: int):
        super().__init__(inner)
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms


class AgingStorage(ClockStorage):
    """Shows, beside its clock, the time by that clock at which each file was written."""

    def __init__(self, inner: Storage, time_ms: int):
        super().__init__(inner, time_ms)
        self.written_ms: dict[str, int] = {}

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        self.written_ms[path] = self.time_ms

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data)
        self.written_ms[path] = self.time_ms

    def stat(self, path: str) -> FileInfo:
        return self._aged(super().stat(path))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        yield from map(self._aged, super().list(prefix))

    def _aged(self, info: FileInfo) -> FileInfo:
        return replace(info, last_modified_ms=self.written_ms.get(info.path, info.last_modified_ms))
