"""How much one step may read to show tables, over all versions that it made."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

#: How many tables of one step get whole pages, and for how long. Beyond, totals are shown alone.
MOST_PAGES = 20
_SECONDS = 20.0
#: Of how many tables of one step the totals are read, and of how many partitions the rows are counted.
MOST_TABLES = 100
MOST_COUNTED_PARTITIONS = 100


@dataclass
class Bounds:
    """What is left of the bounds of one step: whole pages, tables with totals, and partitions that are counted."""

    pages: int = MOST_PAGES
    tables: int = MOST_TABLES
    partitions: int = MOST_COUNTED_PARTITIONS
    _ends_s: float = field(default_factory=lambda: time.monotonic() + _SECONDS)

    def take_page(self) -> bool:
        """Whether one more table may get its whole page."""
        self.pages -= 1
        return self.pages >= 0 and self._has_time

    def take_table(self) -> bool:
        """Whether the totals of one more table may be read."""
        self.tables -= 1
        return self.tables >= 0

    def take_partition(self) -> bool:
        """Whether the rows of one more partition may be counted."""
        self.partitions -= 1
        return self.partitions >= 0 and self._has_time

    @property
    def _has_time(self) -> bool:
        return time.monotonic() <= self._ends_s
