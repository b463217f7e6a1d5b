"""Settable clocks for storages and for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper


class ManualClock:
    """A monotonic clock that advances only by pauses and by ``advance``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        #: The length of each pause, in seconds.
        self.pauses_s: list[float] = []
        #: Called in each pause.
        self.during_pause: Callable[[], object] = lambda: None

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.advance(seconds)
        self.during_pause()

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class TickingClock(ManualClock):
    """A clock that advances by ``tick_s`` seconds with each reading."""

    def __init__(self, tick_s: float = 0.01):
        super().__init__()
        self._tick_s = tick_s

    def now_s(self) -> float:
        self.advance(self._tick_s)
        return super().now_s()


class ClockStorage(StorageWrapper):
    """A storage whose clock shows ``time_ms``."""

    def __init__(self, inner: Storage, time_ms: int):
        super().__init__(inner)
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms


class AgingStorage(ClockStorage):
    """A storage that reports the time of its own clock at the write as the last modification of a file."""

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
        return self._with_age(super().stat(path))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        yield from map(self._with_age, super().list(prefix))

    def _with_age(self, info: FileInfo) -> FileInfo:
        return replace(info, last_modified_ms=self.written_ms.get(info.path, info.last_modified_ms))
