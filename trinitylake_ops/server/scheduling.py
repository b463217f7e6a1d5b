"""Request scheduling, and readiness of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.server.responses import busy_error, late_error
from trinitylake_ops.server.settings import Limits
from trinitylake_ops.server.workers import Job, QueueTicket, TableKey, TableQueue, Work, Workers
from trinitylake_ops.transaction.lakehouse import Lakehouse

T = TypeVar("T")

#: A request with a larger body belongs to the class of large requests.
LARGE_BODY_BYTES = 128 << 10


class Scheduler:
    """Decides when requests run.

    Args:
        limits: The request limits.
        is_shared: Whether requests come from different principals.
        ended_late: Called when a job ends after its client has received a timeout error.
    """

    def __init__(self, limits: Limits, *, is_shared: bool, ended_late: Callable[[asyncio.Future[object]], None]):
        max_jobs = limits.threads + limits.waiting
        self._seconds = limits.seconds
        self._ended_late = ended_late
        self.workers = Workers(limits, is_shared=is_shared)
        self.queue = TableQueue(max_jobs, max(1, max_jobs // 2) if is_shared else max_jobs)

    def begin(self, principal: str, request: Request) -> Execution:
        """Begin the execution of a request whose body has arrived. The time limit starts now.

        Args:
            principal: The name of the principal.
            request: The request. Its connection is monitored.
        """
        return Execution(self, principal, request, self._seconds)

    def note_late(self, job: Job) -> None:
        """Report a job when it ends, because its client has received a timeout error."""
        job.ended.add_done_callback(self._ended_late)


class Execution:
    """The execution of one request, in one or more steps. The caller closes it after the response."""

    def __init__(self, scheduler: Scheduler, principal: str, request: Request, seconds: float):
        self._scheduler = scheduler
        self._principal = principal
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + seconds
        self._disconnected = asyncio.ensure_future(_disconnection(request))

    def close(self) -> None:
        """Stop monitoring the connection."""
        self._disconnected.cancel()

    async def run(self, kind: Work, work: Callable[[], T], *, changes: bool, tables: Collection[TableKey] = ()) -> T:
        """Run a step in a thread, and return its result.

        Args:
            kind: The class of work.
            work: The step.
            changes: Whether the step may change a lakehouse.
            tables: The tables that the step changes. The step waits, without occupying a thread, until it is first in
                their queues.

        Raises:
            RejectedError: Status 503 if the step did not begin, 504 if it did not end in time.
            ClientDisconnect: If the client disconnected before the step began.
        """
        ticket = await self._enter_queue(tables) if tables else None
        workers = self._scheduler.workers
        try:
            job = workers.submit(kind, self._principal, work)
        except BaseException:
            self._leave_queue(ticket)
            raise
        job.ended.add_done_callback(lambda _: self._leave_queue(ticket))
        await self._wait(job.ended, or_disconnected=True)
        if not job.ended.done() and workers.cancel(kind, job):
            raise ClientDisconnect if self._disconnected.done() else busy_error()
        if not job.ended.done():  # a step that has begun continues even if the client has disconnected
            await self._wait(job.ended, or_disconnected=False)
        if not job.ended.done():
            self._scheduler.note_late(job)
            raise late_error(changes=changes)
        result: T = job.ended.result()
        return result

    async def _enter_queue(self, tables: Collection[TableKey]) -> QueueTicket:
        ticket = self._scheduler.queue.enter(self._principal, tables)
        try:
            await self._wait(ticket.ready, or_disconnected=True)
            if not ticket.ready.done():
                raise ClientDisconnect if self._disconnected.done() else busy_error()
        except BaseException:
            self._leave_queue(ticket)
            raise
        return ticket

    def _leave_queue(self, ticket: QueueTicket | None) -> None:
        if ticket is not None:
            self._scheduler.queue.leave(ticket)

    async def _wait(self, future: asyncio.Future[T], *, or_disconnected: bool) -> None:
        futures: set[asyncio.Future[T] | asyncio.Future[None]] = {future}
        if or_disconnected:
            futures.add(self._disconnected)
        seconds = max(0.0, self._deadline_s - self._loop.time())
        await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _disconnection(request: Request) -> None:
    """Return when the client has disconnected."""
    with contextlib.suppress(OSError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
#: The minimum interval between probes of the storage.
MAX_PROBE_AGE_S = 1.0
#: A pool is saturated if requests are waiting and no request has begun or ended for this time.
STALLED_SECONDS = 5.0


class Readiness:
    """Checks whether the server is ready for requests.

    Args:
        lakes: The lakehouses that it serves.
        workers: Its threads.
        redact: Removes secrets from a log text.
    """

    def __init__(self, lakes: Sequence[Lakehouse], workers: Workers, redact: Callable[[str], str]):
        self._lakes = lakes
        self._workers = workers
        self._redact = redact
        self._probe: asyncio.Task[bool] | None = None
        self._probed_s, self._responds = -MAX_PROBE_AGE_S, True

    async def failures(self) -> list[str]:
        """Return the reasons why the server is not ready, without lakehouse names. Empty if the server is ready."""
        reasons = [f"saturated-{kind}" for kind in self._workers.saturated(STALLED_SECONDS)]
        if not await self._lakehouses_respond():
            reasons.append("storage-unreachable")
        if reasons:
            logger.warning("not ready: %s", ", ".join(reasons))
        return reasons

    async def _lakehouses_respond(self) -> bool:
        if time.monotonic() - self._probed_s >= MAX_PROBE_AGE_S:
            # Only one probe runs at a time, so that a hanging storage occupies a single thread, however often clients
            # probe.
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._all_respond())
            await asyncio.wait({self._probe}, timeout=PROBE_TIMEOUT_S)
            self._responds = self._probe.done() and self._probe.result()
            self._probed_s = time.monotonic()
        return self._responds

    async def _all_respond(self) -> bool:
        def probe() -> None:
            for lake in self._lakes:
                lake.latest_version()

        try:
            await asyncio.to_thread(probe)
        except TrinityLakeError as error:
            logger.warning("a lakehouse does not respond: %s", self._redact(error.message))
            return False
        return True
