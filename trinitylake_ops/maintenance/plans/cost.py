"""What an operation costs: requests, rounds, bytes, time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.maintenance.plans.budget import Spending, counting
from trinitylake_ops.storage import MeteredStorage, Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an operation asked of its storage: requests by kind, sequential rounds, bytes, and how long it took."""

    requests: Mapping[str, int]
    rounds: int
    bytes_read: int
    bytes_written: int
    duration_ms: int

    @property
    def total_requests(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())


class MeteredLakehouse:
    """A lakehouse whose requests are counted, and the time since it was opened.

    It reads past all caches, unless ``keeps_cache``: then what the lakehouse has read already is asked for no more.
    """

    def __init__(self, lake: Lakehouse, spending: Spending | None = None, *, keeps_cache: bool = False):
        self._storage = MeteredStorage(lake.storage) if spending is None else counting(lake.storage, spending)
        self._others: list[MeteredStorage] = []
        self._begun_s = time.monotonic()
        if keeps_cache:
            self.lake = lake.through(self._storage)
        else:
            self.lake = Lakehouse(self._storage, lake.storage_options, cache="off")

    def also(self, storage: Storage) -> Storage:
        """Return another storage whose requests are counted, too."""
        self._others.append(MeteredStorage(storage))
        return self._others[-1]

    def cost(self) -> Cost:
        """Return what was asked of the storage so far."""
        counted = [storage.snapshot() for storage in (self._storage, *self._others)]
        requests: Counter[str] = Counter()
        for counts in counted:
            requests.update(counts.requests)
        return Cost(
            requests=dict(sorted(requests.items())),
            rounds=sum(counts.rounds for counts in counted),
            bytes_read=sum(counts.bytes_read for counts in counted),
            bytes_written=sum(counts.bytes_written for counts in counted),
            duration_ms=round((time.monotonic() - self._begun_s) * 1000),
        )
