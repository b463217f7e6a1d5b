"""Threads for requests, and the queue of commits of one table.

A request of one class never waits for a thread of another one. Within a pool principals take turns, and one principal
never occupies all threads. All methods are called on the event loop.

A commit in the queue occupies no thread. The queue is in the memory of one server and no commit depends on it: other
processes change the same tables.
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
    """A class of requests, by what they need most."""

    #: Loads and lists: they wait for the storage, and clients wait for them.
    READ = "read"
    #: Scan planning: it decodes manifests.
    PLAN = "plan"
    #: Commits and other changes: they wait for the storage, and share versions.
    CHANGE = "change"
    #: Requests with a large body, which occupy the interpreter.
    LARGE = "large"


#: Classes that occupy the interpreter have few threads, because the others wait for it.
_FEW_THREADS = {Work.PLAN: 8, Work.LARGE: 2}


@dataclass(slots=True, eq=False)
class Job:
    """A request in a pool. ``ended`` gets the result, or the error; it is cancelled if the job never started."""

    principal: str
    work: Callable[[], Any]
    ended: asyncio.Future[Any]
    has_begun: bool = False


class _Pool:
    """Threads for one class of work.

    Args:
        kind: The class of work.
        n_threads: The number of jobs that run at a time.
        n_waiting: The number of jobs that may wait for a thread.
        is_shared: Whether principals share the pool, so that each one gets only a part of it.
    """

    def __init__(self, kind: Work, n_threads: int, n_waiting: int, *, is_shared: bool):
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"request-{kind}")
        self._n_threads = n_threads
        self._most_running = max(1, n_threads - n_threads // 4) if is_shared else n_threads
        self._most = n_threads + n_waiting
        self._most_of_one = max(1, self._most // 2) if is_shared else self._most
        self._running: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self.n_running = self.n_waiting = 0
        self._progress_s = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """The seconds since a job began or ended while others wait for a thread that is free for none of them."""
        return time.monotonic() - self._progress_s if self.n_waiting and self.n_running == self._n_threads else 0.0

    @property
    def is_full(self) -> bool:
        """Whether the next job is rejected, whatever its principal."""
        return self.n_running + self.n_waiting >= self._most

    def submit(self, principal: str, work: Callable[[], Any]) -> Job:
        """Start a job, or put it into the queue of its principal.

        Args:
            principal: The name of the principal.
            work: The function to run in a thread.

        Raises:
            RefusedError: 503 if too many jobs wait already, in all or of this principal.
        """
        queue = self._queues.get(principal, ())
        if self.is_full or self._running[principal] + len(queue) >= self._most_of_one:
            raise busy_error()
        job = Job(principal, work, asyncio.get_running_loop().create_future())
        self._queues.setdefault(principal, deque()).append(job)
        self.n_waiting += 1
        self._start_waiting()
        return job

    def cancel(self, job: Job) -> bool:
        """Remove a job from its queue. Return False if it has begun already."""
        if job.has_begun:
            return False
        if not job.ended.done():
            self._removed(job.principal, lambda queue: queue.remove(job))
            job.ended.cancel()
        return True

    def close(self) -> None:
        """Wait until all jobs that began have ended."""
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
            principal = next((one for one in self._queues if self._running[one] < self._most_running), None)
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

        def done(future: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, job, future)

        self._executor.submit(_without_stop_iteration, job.work).add_done_callback(done)

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
    """Run a job. No asyncio future can hold a StopIteration, so a job that raises one would never end."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("a request ended with StopIteration") from error


class Workers:
    """The pools of a server.

    Args:
        limits: The number of threads, and of requests that may wait for one.
        is_shared: Whether requests have different principals. Without tokens all have the same one.
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
        """Start a job in a pool, or queue it there.

        Args:
            kind: The class of work.
            principal: The name of the principal.
            work: The function to run in a thread.

        Raises:
            RefusedError: 503 if too many jobs wait already.
        """
        return self._pools[kind].submit(principal, work)

    def cancel(self, kind: Work, job: Job) -> bool:
        """Remove a job from the queue of a pool. Return False if it has begun already.

        Args:
            kind: The class of work.
            job: The job.
        """
        return self._pools[kind].cancel(job)

    def saturated(self, longest_s: float) -> list[Work]:
        """Return the classes of work that reject all requests, or have started none for ``longest_s`` seconds."""
        return [kind for kind, pool in self._pools.items() if pool.is_full or pool.stalled_s > longest_s]

    def close(self) -> None:
        """Wait until all jobs that began have ended."""
        for pool in self._pools.values():
            pool.close()


#: A lakehouse, a namespace and a table.
TableKey: TypeAlias = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class QueueTicket:
    """The place of a commit in the queues of its tables. ``ready`` is done when it is the first in all of them."""

    principal: str
    tables: frozenset[TableKey]
    ready: asyncio.Future[None]
    n_behind: int = 0


class TableQueue:
    """A queue for each table. A commit enters those of all its tables at once, so that none waits for a later one.

    All methods are called on the event loop.

    Args:
        most: The number of commits in all queues, including those that run.
        most_of_one: The number of commits of one principal.
    """

    def __init__(self, most: int, most_of_one: int):
        self._most = most
        self._most_of_one = most_of_one
        self._queues: dict[TableKey, OrderedDict[QueueTicket, None]] = {}
        self._n_places: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of commits in the queues, including those whose turn it is."""
        return self._n_places.total()

    def enter(self, principal: str, tables: Iterable[TableKey]) -> QueueTicket:
        """Enter the queues of tables. The caller leaves them when its commit has ended.

        Args:
            principal: The name of the principal.
            tables: The tables that the commit changes.

        Raises:
            RefusedError: 503 if too many commits are there already, in all or of this principal.
        """
        if len(self) >= self._most or self._n_places[principal] >= self._most_of_one:
            raise busy_error()
        place = QueueTicket(principal, frozenset(tables), asyncio.get_running_loop().create_future())
        self._n_places[principal] += 1
        for table in place.tables:
            queue = self._queues.setdefault(table, OrderedDict())
            place.n_behind += bool(queue)
            queue[place] = None
        if not place.n_behind:
            place.ready.set_result(None)
        return place

    def leave(self, place: QueueTicket) -> None:
        """Leave all queues, also before the turn has come. The next commit of each table moves up."""
        self._n_places -= Counter({place.principal: 1})
        for table in place.tables:
            queue = self._queues[table]
            was_first = next(iter(queue)) is place
            del queue[place]
            if not queue:
                del self._queues[table]
            elif was_first:
                self._move_up(next(iter(queue)))

    @staticmethod
    def _move_up(place: QueueTicket) -> None:
        place.n_behind -= 1
        if not place.n_behind and not place.ready.done():
            place.ready.set_result(None)
