"""Whether a server can do its work now: its lakehouses respond, and requests find threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.server.workers import Workers
from trinitylake_ops.transaction.lakehouse import Lakehouse

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
#: The storage is asked no more often.
_PROBE_AGE_SECONDS = 1.0
#: A pool is saturated if requests wait and none has begun or ended for so long.
STALLED_SECONDS = 5.0


class Readiness:
    """Checks whether a server is ready.

    Args:
        lakes: The lakehouses that it serves.
        workers: Its threads.
        redacted: Removes secrets from a text for the log.
    """

    def __init__(self, lakes: Sequence[Lakehouse], workers: Workers, redacted: Callable[[str], str]):
        self._lakes = lakes
        self._workers = workers
        self._redacted = redacted
        self._probe: asyncio.Task[bool] | None = None
        self._probed_s, self._responds = -_PROBE_AGE_SECONDS, True

    async def failures(self) -> list[str]:
        """Return the reasons why the server is not ready, none if it is. They name no lakehouse."""
        reasons = [f"saturated-{kind}" for kind in self._workers.saturated(STALLED_SECONDS)]
        if not await self._lakehouses_respond():
            reasons.append("storage-unreachable")
        if reasons:
            logger.warning("not ready: %s", ", ".join(reasons))
        return reasons

    async def _lakehouses_respond(self) -> bool:
        if time.monotonic() - self._probed_s >= _PROBE_AGE_SECONDS:
            # One probe at a time: a storage that does not respond holds one thread, however often clients ask.
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._all_respond())
            await asyncio.wait({self._probe}, timeout=_PROBE_SECONDS)
            self._responds = self._probe.done() and self._probe.result()
            self._probed_s = time.monotonic()
        return self._responds

    async def _all_respond(self) -> bool:
        def ask() -> None:
            for lake in self._lakes:
                lake.latest_version()

        try:
            await asyncio.to_thread(ask)
        except TrinityLakeError as error:
            logger.warning("a lakehouse does not respond: %s", self._redacted(error.message))
            return False
        return True
