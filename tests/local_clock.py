"""A settable clock of local storages, for tests of programs that open their storage themselves."""

from __future__ import annotations

import time

import pytest

from trinitylake_ops.storage import LocalStorage

HOUR_MS = 3_600_000


class LocalClock:
    """The clock of all local storages. It advances only by ``forward``; files keep their real modification times."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._now_ms = time.time_ns() // 1_000_000
        patch.setattr(LocalStorage, "now_ms", lambda _storage: self._now_ms)

    def forward(self, hours: int = 1) -> None:
        self._now_ms += hours * HOUR_MS
