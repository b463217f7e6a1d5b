"""The state of each lakehouse of a server, for its page and its metrics.

It is read when somebody asks for it, and not more often than every few seconds, whoever asks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.maintenance.status.gauges import tell_status
from trinitylake_ops.maintenance.status.state import Status, lakehouse_status
from trinitylake_ops.pages.status import status_page
from trinitylake_ops.transaction.lakehouse import Lakehouse

logger = logging.getLogger(__name__)

#: How old a state may be on the page, and in metrics.
PAGE_SECONDS, METRICS_SECONDS = 5.0, 60.0
_REFRESH_SECONDS = 30


class States:
    """The states of lakehouses, by the names that the server's settings give them."""

    def __init__(self, lakes: Mapping[str, Lakehouse]):
        self._lakes = lakes
        self._locks = {name: threading.Lock() for name in lakes}
        self._known: dict[str, tuple[float, Status | None]] = {}

    def page(self, names: Collection[str]) -> bytes:
        """Return the page of those of the lakehouses that are named. One that does not answer is told as such."""
        states = {name: self._of(name, PAGE_SECONDS) for name in self._lakes if name in names}
        answering = [(name, status) for name, status in states.items() if status is not None]
        silent = [name for name, status in states.items() if status is None]
        return status_page(answering, silent=silent, refresh_seconds=_REFRESH_SECONDS).encode("utf-8", "replace")

    def tell(self) -> None:
        """Set the gauges of all lakehouses that answer."""
        for name in self._lakes:
            status = self._of(name, METRICS_SECONDS)
            if status is not None:
                tell_status(status, name)

    def _of(self, name: str, newest_s: float) -> Status | None:
        with self._locks[name]:
            read_s, status = self._known.get(name, (-newest_s, None))
            if time.monotonic() - read_s < newest_s and name in self._known:
                return status
            try:
                status = lakehouse_status(self._lakes[name])
            except TrinityLakeError as error:
                logger.warning("the state of lakehouse %s cannot be read: %s", name, error.message)
                status = None
            self._known[name] = (time.monotonic(), status)
            return status
