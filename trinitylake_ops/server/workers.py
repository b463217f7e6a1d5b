"""Threads for requests, and a queue of commits for each table.

Each class of work has its own thread pool, so requests of one class never wait for a thread of another class. Within a
pool, principals take turns, and a single principal never occupies all threads. All methods are called on the event
loop.

A commit that waits in a queue occupies no thread. The queues are in the memory of one server, and correctness never
depends on them, because other processes can change the same tables.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from trinitylake_ops.server.responses import busy_error
from trinitylake_ops.server.settings import Limits


class Work(StrEnum):
    """A class of requests that need the same resource most."""

    #: Requests that load or list objects, which wait for the storage and are latency-sensitive.
    READ = "read"
    #: Scan planning, which decodes manifests.
    PLAN = "plan"
    #: Commits and other changes, which wait for the storage and can share a version.
    CHANGE = "change"
    #: Requests with a large body, which keep the interpreter busy.
    LARGE = "large"


#: Classes of work that keep the interpreter busy have few threads, because all other threads wait for the interpreter.
_FEW_THREADS = {Work.PLAN: 8, Work.LARGE: 2}


@dataclass(slots=True, eq=False)
class Job:
    """A request in a pool."""

    #: The name of the principal.
    principal: str
    #: The function to run in a thread.
    work: Callable[[], Any]
    #: Completes with the result or the error; canceled if the job never started.
    ended: asyncio.Future[Any]
    #: Whether the job was handed to a thread.
    has_begun: bool = False


class _Pool:
    """Threads for one class of work.

    Args:
        kind: The class of work.
        n_threads: The maximum number of jobs that run at the same time.
        n_waiting: The maximum number of jobs that wait for a thread.
        is_shared: Whether several principals share the pool, so that each principal may use only a part of it.
    """

    def __init__(self, kind: Work, n_threads: int, n_waiting: int, *, is_shared: bool):
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"request-{kind}")
        self._n_threads = n_threads
        self._max_running = max(1, n_threads - n_threads // 4) if is_shared else n_threads
        self._most = n_threads + n_waiting
        self._max_per_principal = max(1, self._most // 2) if is_shared else self._most
        self._running: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self.n_running = self.n_waiting = 0
        self._progress_s = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """The seconds since a job last began or ended, while jobs wait and all threads are busy; otherwise 0."""
        return time.monotonic() - self._progress_s if self.n_waiting and self.n_running == self._n_threads else 0.0

    @property
    def is_full(self) -> bool:
        """Whether the pool rejects the next job of any principal."""
        return self.n_running + self.n_waiting >= self._most

    def submit(self, principal: str, work: Callable[[], Any]) -> Job:
        """Start a job, or add it to the queue of its principal.

        Args:
            principal: The name of the principal.
            work: The function to run in a thread.

        Raises:
            RejectedError: Status 503 if too many jobs are waiting, in total or for this principal.
        """
        queue = self._queues.get(principal, ())
        if self.is_full or self._running[principal] + len(queue) >= self._max_per_principal:
            raise busy_error()
        job = Job(principal, work, asyncio.get_running_loop().create_future())
        self._queues.setdefault(principal, deque()).append(job)
        self.n_waiting += 1
        self._start_waiting()
        return job

    def cancel(self, job: Job) -> bool:
        """Remove a job from its queue. Return False if it has already begun."""
        if job.has_begun:
            return False
        if not job.ended.done():
            self._removed(job.principal, lambda queue: queue.remove(job))
            job.ended.cancel()
        return True

    def close(self) -> None:
        """Wait until all running jobs have finished."""
        self._executor.shutdown(wait=True)

    def _removed(self, principal: str, remove: Callable[[deque[Job]], Any]) -> Any:
        queue = self._queues[principal]
        removed = remove(queue)
        self.n_waiting -= 1
        if not queue:
            del self._queues[principal]
        return removed

    def _start_waiting(self) -> None:
        while self.n_running < self._n_threads:
            principal = next((name for name in self._queues if self._running[name] < self._max_running), None)
            if principal is None:
                return
            job: Job = self._removed(principal, deque.popleft)
            if principal in self._queues:
                self._queues.move_to_end(principal)
            self._start(job)

    def _start(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        job.has_begun = True
        self.n_running += 1
        self._running[job.principal] += 1
        self._progress_s = time.monotonic()

        def on_done(future: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, job, future)

        self._executor.submit(_without_stop_iteration, job.work).add_done_callback(on_done)

    def _end(self, job: Job, future: Future[Any]) -> None:
        self.n_running -= 1
        self._running[job.principal] -= 1
        if not self._running[job.principal]:
            del self._running[job.principal]
        self._progress_s = time.monotonic()
        try:
            error = future.exception()
            if error is not None:
                job.ended.set_exception(error)
            else:
                job.ended.set_result(future.result())
        finally:
            self._start_waiting()


def _without_stop_iteration(work: Callable[[], Any]) -> Any:
    """Run a job. An asyncio future cannot store StopIteration, so a job that raises it would never complete."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("a request ended with StopIteration") from error


class Workers:
    """The thread pools of a server.

    Args:
        limits: The number of threads, and of requests that may wait for a thread.
        is_shared: Whether requests come from different principals. Without tokens, all requests have the same
            principal.
    """

    def __init__(self, limits: Limits, *, is_shared: bool):
        self._pools = {
            kind: _Pool(
                kind,
                min(limits.threads, _FEW_THREADS.get(kind, limits.threads)),
                limits.waiting,
                is_shared=is_shared,
            )
            for kind in Work
        }

    def submit(self, kind: Work, principal: str, work: Callable[[], Any]) -> Job:
        """Start a job in a pool, or add it to the pool's queue.

        Args:
            kind: The class of work.
            principal: The name of the principal.
            work: The function to run in a thread.

        Raises:
            RejectedError: Status 503 if too many jobs are waiting.
        """
        return self._pools[kind].submit(principal, work)

    def cancel(self, kind: Work, job: Job) -> bool:
        """Remove a job from the queue of a pool. Return False if it has already begun.

        Args:
            kind: The class of work.
            job: The job.
        """
        return self._pools[kind].cancel(job)

    def load(self, kind: Work) -> tuple[int, int]:
        """Return the numbers of running and waiting jobs in a pool."""
        pool = self._pools[kind]
        return pool.n_running, pool.n_waiting

    def saturated(self, max_s: float) -> list[Work]:
        """Return the classes of work that reject all requests, or have made no progress for ``max_s`` seconds."""
        return [kind for kind, pool in self._pools.items() if pool.is_full or pool.stalled_s > max_s]

    def close(self) -> None:
        """Wait until all running jobs have finished."""
        for pool in self._pools.values():
            pool.close()


#: A lakehouse, a namespace and a table.
TableKey: TypeAlias = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class QueueTicket:
    """The position of a commit in the queues of its tables."""

    #: The name of the principal.
    principal: str
    #: The tables that the commit changes.
    tables: frozenset[TableKey]
    #: Completes when the commit is first in all queues.
    ready: asyncio.Future[None]
    #: The number of queues in which the commit is not first.
    n_behind: int = 0


class TableQueue:
    """A queue for each table. A commit enters the queues of all its tables at the same time, which prevents deadlocks.

    All methods are called on the event loop.

    Args:
        most: The maximum number of commits in all queues, including running commits.
        max_per_principal: The maximum number of commits by one principal.
    """

    def __init__(self, most: int, max_per_principal: int):
        self._most = most
        self._max_per_principal = max_per_principal
        self._queues: dict[TableKey, OrderedDict[QueueTicket, None]] = {}
        self._n_places: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of commits in the queues, including running commits."""
        return self._n_places.total()

    def enter(self, principal: str, tables: Iterable[TableKey]) -> QueueTicket:
        """Enter the queues of tables. The caller must leave them when its commit has ended.

        Args:
            principal: The name of the principal.
            tables: The tables that the commit changes.

        Raises:
            RejectedError: Status 503 if too many commits are in the queues, in total or for this principal.
        """
        if len(self) >= self._most or self._n_places[principal] >= self._max_per_principal:
            raise busy_error()
        ticket = QueueTicket(principal, frozenset(tables), asyncio.get_running_loop().create_future())
        self._n_places[principal] += 1
        for table in ticket.tables:
            queue = self._queues.setdefault(table, OrderedDict())
            ticket.n_behind += bool(queue)
            queue[ticket] = None
        if not ticket.n_behind:
            ticket.ready.set_result(None)
        return ticket

    def leave(self, ticket: QueueTicket) -> None:
        """Leave all queues, whether or not the commit was first in them. The next commit of each table moves up."""
        self._n_places -= Counter({ticket.principal: 1})
        for table in ticket.tables:
            queue = self._queues[table]
            was_first = next(iter(queue)) is ticket
            del queue[ticket]
            if not queue:
                del self._queues[table]
            elif was_first:
                self._move_up(next(iter(queue)))

    @staticmethod
    def _move_up(ticket: QueueTicket) -> None:
        ticket.n_behind -= 1
        if not ticket.n_behind and not ticket.ready.done():
            ticket.ready.set_result(None)
