"""A simulated world in which several processes share a storage, and a seed decides every event.

Each thread of a simulated process is a greenlet that runs the real code. It yields at every storage request, at every
pause and when it waits for another thread of its process. The seed decides which thread continues and which faults
occur. A run is therefore one total order of requests, which the same seed reproduces.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import greenlet
from pyiceberg.utils.concurrent import ExecutorFactory

from trinitylake_ops.access import external_files as external_files_module
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.format import node_sections
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    LEASE_PREFIX,
    OPERATIONS_PREFIX,
    ROOT_PREFIX,
    SLOT_REQUEST_PREFIX,
    TABLES_PREFIX,
    parse_root_path,
)
from trinitylake_ops.iceberg.io import file_io as file_io_module
from trinitylake_ops.operations import lease as lease_module
from trinitylake_ops.operations import retention as retention_module
from trinitylake_ops.operations.exports import check as export_check_module
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, RetryStorage, Storage, background, process_clock
from trinitylake_ops.storage.cache import storage as cache_module
from trinitylake_ops.transaction import commit_queue as commit_queue_module
from trinitylake_ops.transaction import group as group_module
from trinitylake_ops.transaction import lakehouse as lakehouse_module
from trinitylake_ops.transaction import pacing as pacing_module
from trinitylake_ops.transaction import time_to_live as time_to_live_module

Kind = Literal["read", "stat", "list", "create", "write", "delete"]
Fault = Literal["rejected", "response lost", "delayed", "duplicated", "crash before", "crash after", "clock jump"]
#: Requests that the seeds must cover: kinds of requests and files. The matrix also lists rarer requests.
REQUESTS = (
    "read hint", "read root", "read node", "read definition", "read saved transaction",
    "stat root", "list roots", "list slot requests",
    "create root", "create node", "create definition",
    "write hint", "write saved transaction", "write slot request",
    "delete node", "delete definition", "delete saved transaction", "delete slot request",
    "list all files", "list leases", "write lease", "create operation file", "read operation file",
    "read table file", "write table file",
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    "rejected",
    "response lost",
    "delayed",
    "duplicated",
    "crash before",
    "crash after",
    "clock jump",
)
_NETWORK_FAULTS: tuple[Fault, ...] = ("rejected", "response lost", "delayed")
_NO_RESPONSE: tuple[Fault, ...] = ("rejected", "response lost")  # a delayed response to a read is a valid response
_CHANGES = ("create", "write", "delete")
#: Clock margin and lease duration. They are minutes in production, but a run only lasts seconds.
CLOCK_MARGIN_MS = 1_000
LEASE_MS = 3_000
_LEASE_FAULT_FACTOR = 3  # leases receive few requests
_SECONDS_PER_STEP = 0.01
_MAX_PAUSE_STEPS = 10
_MAX_STOP_STEPS = 1_500
_MAX_STEPS = 20_000
START_MS = 1_700_000_000_000
ROOT = "memory://simulated/"  # the root of the lakehouse


@dataclass(eq=False)
class Process:
    """A simulated process: its threads and their shared state. It crashes as a whole and restarts."""

    name: str
    threads: list[Callable[[Process], None]]
    make: Callable[[Storage], Any]
    is_interrupted: bool = False  # whether its threads are interrupted randomly
    storage: SimulatedStorage = field(init=False)
    shared: Any = None
    n_bad_requests: int = 0  # the number of following requests that fail
    background_work: list[background.Work] = field(default_factory=list)  # work that has not started


@dataclass(eq=False)
class _Thread:
    """A thread of a process."""

    process: Process
    body: greenlet.greenlet
    waits_for: SimulatedEvent | None = None
    stopped_until: int = 0  # the step at which it continues after a stop
    is_background: bool = False  # background threads are never interrupted


@dataclass(eq=False)
class Folder:
    """The files below one root and their history."""

    root: str
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    created: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # the original content of each file
    sent_by: dict[str, set[str]] = field(default_factory=dict)  # the files that each process tried to create
    deleted: list[tuple[str, str]] = field(default_factory=list)  # the process and the path


@dataclass(frozen=True)
class _Waits:
    event: SimulatedEvent


class DeadlockError(AssertionError):
    """No thread can continue."""


class World:
    """Everything outside the code under test: storage, clock, network, processes and random choices."""

    def __init__(self, seed: int, fault_rate: float, interrupt_rate: float, stop_rate: float | None = None):
        self.random = random.Random(seed)
        self._uuids = random.Random(f"uuids of {seed}")
        #: Whether transactions write their files before they queue (docs/internals/fast-commits.md).
        self._is_remote = random.Random(f"remote {seed}").random() < 0.5
        self.fault_rate = fault_rate
        self._interrupt_rate = interrupt_rate
        chosen_rate = self.random.choice([0, 0.005])
        self._stop_rate = chosen_rate if stop_rate is None else stop_rate  # per step, like SIGSTOP
        self._arrival_rate = self.random.choice([0.04, 0.01])  # of a delayed request, per step
        self.home = Folder(ROOT)
        self.folders = {ROOT: self.home}
        self.clock_ms = START_MS
        self.n_steps = 0
        self.log: list[tuple[str, str, str, str]] = []
        self.injected: Counter[tuple[str, str]] = Counter()
        self.observers: list[Callable[[Process, str, bytes], None]] = []  # called before each create
        self._threads: list[_Thread] = []
        self._in_flight: list[tuple[str, Callable[[], object]]] = []  # delayed and duplicate requests
        self._main = greenlet.getcurrent()

    @property
    def files(self) -> dict[str, tuple[bytes, int]]:
        return self.home.files

    @property
    def created(self) -> dict[str, tuple[bytes, int]]:
        return self.home.created

    def open_storage(self, root: str, options: object = None) -> Storage:
        """Return the storage of a root for the calling process, like ``storage.open_storage``."""
        del options
        current_greenlet = greenlet.getcurrent()
        process = next((thread.process for thread in self._threads if thread.body is current_greenlet), None)
        folder = self.folders.setdefault(root, Folder(root))
        storage = SimulatedStorage(self, process or Process("test", [], lambda storage: None), folder)
        return RetryStorage(storage, attempts=3, sleep=self.pause)

    # Running

    def add(self, process: Process) -> None:
        self._start(process)

    def run(self) -> None:
        """Run all threads until they end. Raises the error of a thread, or DeadlockError."""
        while self._threads:
            runnable = [thread for thread in self._threads if thread.waits_for is None or thread.waits_for.is_set()]
            if not runnable:
                raise DeadlockError(f"all threads wait: {[thread.process.name for thread in self._threads]}")
            self.n_steps += 1
            if self.n_steps > _MAX_STEPS:
                raise DeadlockError(f"the run did not end within {_MAX_STEPS} steps")
            self.clock_ms += self.random.randrange(30)
            if self._in_flight and self.random.random() < self._arrival_rate:
                self._deliver(self.random.randrange(len(self._in_flight)))
            if self.random.random() < self._stop_rate:
                self.random.choice(self._threads).stopped_until = self.n_steps + self.random.randrange(_MAX_STOP_STEPS)
            if self.random.random() < self._interrupt_rate:
                self._interrupt(self.random.choice(self._threads))
            else:
                awake = [thread for thread in runnable if thread.stopped_until <= self.n_steps]
                self._resume(self.random.choice(awake or runnable))
        while self._in_flight:
            self._deliver(0)

    def stop(self) -> None:
        """End all remaining threads, because a thread that is garbage-collected later may end during another test."""
        while self._threads:
            thread = self._threads.pop()
            thread.process.storage.is_dead = True
            thread.body.throw(greenlet.GreenletExit)

    def is_in_simulated_thread(self) -> bool:
        """Whether the caller is a simulated thread, not the test itself or a thread of a library."""
        return greenlet.getcurrent().parent is not None

    def hand_over(self, event: SimulatedEvent | None = None) -> None:
        """Yield to other threads. With an event, wait until it is set."""
        self._main.switch(None if event is None else _Waits(event))

    def request(self, process: Process, kind: Kind, path: str, effect: Callable[[], Any], folder: Folder) -> Any:
        """Send a request: yield to other threads, then apply its effect or a fault."""
        if not self.is_in_simulated_thread():
            return effect()
        if process.storage.is_dead:
            raise greenlet.GreenletExit
        fault = self._choose_fault(process, kind, path)
        try:
            self.hand_over()
        except KeyboardInterrupt:  # the request is in flight: it arrives now, later or never
            if kind in _CHANGES:
                self._delay(f"{kind} {path} of an interrupted process", effect)
                if self._in_flight and self.random.random() < 0.5:
                    self._deliver(-1)
            raise
        location = path if folder is self.home else f"{folder.root}{path}"
        self.log.append((process.name, kind, location, fault or ""))
        if fault is not None:
            self.injected[f"{kind} {file_class(path)}", fault] += 1
        return self._respond(process, kind, path, effect, fault)

    def _choose_fault(self, process: Process, kind: Kind, path: str) -> Fault | None:
        """Choose the fault of a request. Some faults affect several requests, so that some outcomes stay unknown."""
        if process.n_bad_requests:
            process.n_bad_requests -= 1
            return self.random.choice(_NETWORK_FAULTS if kind in _CHANGES else _NO_RESPONSE)
        rate = self.fault_rate * (_LEASE_FAULT_FACTOR if path.startswith(LEASE_PREFIX) else 1)
        if self.random.random() >= rate:
            return None
        if self.random.random() < (0.5 if kind == "create" else 0.15):
            process.n_bad_requests = self.random.randrange(16)
            return self.random.choice(_NETWORK_FAULTS)
        return self.random.choice(FAULTS)

    def _respond(self, process: Process, kind: Kind, path: str, effect: Callable[[], Any], fault: Fault | None) -> Any:
        if fault == "crash before":
            self._crash(process)
        if fault == "clock jump":
            self.clock_ms += self.random.randrange(-CLOCK_MARGIN_MS, CLOCK_MARGIN_MS)
        if fault == "rejected":
            raise self.random.choice([ThrottledError, TransientError])(f"injected: {kind} rejected", path=path)
        if fault == "delayed":
            if kind in _CHANGES:  # no response in time; the request arrives later or never
                self._delay(f"delayed {kind} {path}", effect)
                raise AmbiguousWriteError(f"injected: {kind} delayed", path=path)
            respond = _apply(effect)
            self.hand_over()  # the response is outdated when it arrives
            return respond()
        respond = _apply(effect)
        if fault == "duplicated":  # the copy arrives at once, and its response is returned, or later
            if self.random.random() < 0.5:
                return effect()
            self._delay(f"duplicated {kind} {path}", effect)
        if fault == "crash after":
            self._crash(process)
        if fault == "response lost":
            error = AmbiguousWriteError if kind in _CHANGES else TransientError
            raise error(f"injected: the response to {kind} was lost", path=path)
        return respond()

    def _delay(self, description: str, effect: Callable[[], object]) -> None:
        if self.random.random() < 0.9:
            self._in_flight.append((description, effect))

    def _deliver(self, index: int) -> None:
        description, effect = self._in_flight.pop(index)
        self.log.append(("network", "arrives", description, ""))
        _apply(effect)

    # Threads

    def _start(self, process: Process) -> None:
        process.storage = SimulatedStorage(self, process)
        process.background_work.clear()
        process.shared = process.make(process.storage)
        for thread in process.threads:
            self._threads.append(_Thread(process, greenlet.greenlet(lambda body=thread: body(process))))

    def _interrupt(self, thread: _Thread) -> None:
        """Interrupt a thread that waits for a response, for another thread, or for the end of a pause."""
        if thread.process.is_interrupted and thread.body and not thread.is_background:  # the thread has started
            self.log.append((thread.process.name, "is interrupted", "", ""))
            self._resume(thread, KeyboardInterrupt)

    def _resume(self, thread: _Thread, interrupt: type[BaseException] | None = None) -> None:
        thread.waits_for = None
        message = thread.body.switch() if interrupt is None else thread.body.throw(interrupt)
        if isinstance(message, _Crash):
            for other in [other for other in self._threads if other.process is message.process]:
                self._threads.remove(other)
                other.body.throw(greenlet.GreenletExit)
            self.log.append((message.process.name, "restarts", "", ""))
            self._start(message.process)
        elif thread.body.dead:
            self._threads.remove(thread)
        elif isinstance(message, _Waits):
            thread.waits_for = message.event

    def _crash(self, process: Process) -> None:
        process.storage.is_dead = True
        self._main.switch(_Crash(process))
        raise greenlet.GreenletExit

    # Replacements of the machine's clock, threads and randomness

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch the code under test so that it waits, pauses and creates identifiers within this world."""
        threads = _Threads(self)
        patches = [
            mock.patch.object(uuid, "uuid4", self._uuid),
            mock.patch.object(ExecutorFactory, "get_or_create", return_value=_InlineExecutor()),
            # All processes read the same few files repeatedly, and decoding is a pure function of the bytes.
            mock.patch.object(node_sections, "_read", functools.lru_cache(maxsize=512)(node_sections._read)),
            mock.patch.object(cache_module, "threading", threads),
            mock.patch.object(group_module, "threading", threads),
            mock.patch.object(commit_queue_module, "threading", threads),
            mock.patch.object(Storage, "concurrency", 1),
            mock.patch.object(Storage, "is_remote", self._is_remote),
            background.using(_SimulatedRunner(self)),
            process_clock.using(_SimulatedClock(self)),
            mock.patch.object(lease_module, "DURATION_MS", LEASE_MS),
            mock.patch.object(retention_module, "CLOCK_MARGIN_MS", CLOCK_MARGIN_MS),
            mock.patch.object(time_to_live_module, "YOUNG_MS", CLOCK_MARGIN_MS),
            # Other roots: export targets, and the root of the lakehouse as opened from a target.
            *(
                mock.patch.object(module, "open_storage", self.open_storage)
                for module in (
                    export_module,
                    export_check_module,
                    external_files_module,
                    file_io_module,
                    lakehouse_module,
                )
            ),
            # Runs are short, so that the effects of long contention must begin early.
            mock.patch.object(pacing_module, "CONFLICTS_BEFORE_REQUEST", 1),
            mock.patch.object(pacing_module, "COMMITS_BETWEEN_POLLS", 3),
        ]
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            logging.disable()  # suppress warnings about injected faults
            try:
                yield
            finally:
                logging.disable(logging.NOTSET)

    def run_in_background(self, work: background.Work) -> None:
        """Run work in another thread of the calling process. Equal work that has not started yet runs once."""
        current_greenlet = greenlet.getcurrent()
        process = next((thread.process for thread in self._threads if thread.body is current_greenlet), None)
        if process is None:  # the test itself
            background.run_logged(work)
        elif work not in process.background_work:
            process.background_work.append(work)

            def body() -> None:
                self.hand_over()
                process.background_work.remove(work)
                background.run_logged(work)

            self._threads.append(_Thread(process, greenlet.greenlet(body), is_background=True))

    def pause(self, seconds: float) -> None:
        del seconds  # the seed decides how long a pause takes
        if self.is_in_simulated_thread():
            for _ in range(self.random.randint(1, _MAX_PAUSE_STEPS)):
                self.hand_over()

    def _uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._uuids.getrandbits(128), version=4)


@dataclass(frozen=True)
class _Crash:
    process: Process


class _SimulatedClock:
    """The monotonic clock of all simulated processes."""

    def __init__(self, world: World):
        self._world = world

    def now_s(self) -> float:
        return _SECONDS_PER_STEP * self._world.n_steps

    def sleep(self, seconds: float) -> None:
        self._world.pause(seconds)


class _SimulatedRunner:
    """Runs the background work of all simulated processes."""

    def __init__(self, world: World):
        self._world = world

    def submit(self, work: background.Work) -> None:
        self._world.run_in_background(work)

    def drain(self, timeout_s: float) -> bool:
        del timeout_s  # the seed decides when work runs, and callers must not depend on it
        return True

    def start_thread(self, work: background.Work, name: str) -> None:
        """Do nothing, because a real thread is not simulated. Only attempts renew slot requests."""


class _Threads:
    """A replacement of the module ``threading`` for simulated processes."""

    Lock = threading.Lock

    def __init__(self, world: World):
        self._world = world

    def Event(self) -> SimulatedEvent:  # noqa: N802 - the name in threading
        return SimulatedEvent(self._world)

    def RLock(self) -> SimulatedRLock:  # noqa: N802 - the name in threading
        return SimulatedRLock(self._world)

    def Condition(self, lock: threading.Lock) -> SimulatedCondition:  # noqa: N802 - the name in threading
        return SimulatedCondition(self._world, lock)


class _InlineExecutor(Executor):
    """Runs tasks of pyiceberg inline in the caller's thread, because its threads would not be simulated."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **options))
        except Exception as error:  # noqa: BLE001 - raised by the future's result()
            done.set_exception(error)
        return done


class SimulatedEvent:
    """An event (threading.Event) that a simulated thread can wait for."""

    def __init__(self, world: World):
        self._world = world
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        del timeout  # the timeouts only make waits interruptible, which is not simulated here
        while not self._is_set:
            self._world.hand_over(self)
        return True


class SimulatedCondition:
    """A condition (threading.Condition). The seed decides how long a simulated thread waits for it."""

    def __init__(self, world: World, lock: threading.Lock):
        self._world = world
        self._lock = lock

    def notify_all(self) -> None:
        """Do nothing, because waiting threads poll."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        del timeout
        self._lock.release()
        try:
            for _ in range(self._world.random.randint(1, _MAX_PAUSE_STEPS)):
                if predicate():
                    break
                self._world.hand_over()
        finally:
            self._lock.acquire()
        return predicate()


class SimulatedRLock:
    """A lock (threading.RLock) that a simulated thread can wait for."""

    def __init__(self, world: World):
        self._world = world
        self._owner: greenlet.greenlet | None = None
        self._depth = 0

    def __enter__(self) -> None:
        current = greenlet.getcurrent()
        while self._owner not in (None, current):
            self._world.hand_over()
        self._owner = current
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


def _apply(effect: Callable[[], Any]) -> Callable[[], Any]:
    """Apply the effect of a request, and return a function that returns its result or raises its error."""
    try:
        result = effect()
    except StorageError as error:
        failure = error

        def fail() -> Any:
            raise failure

        return fail
    return lambda: result


class SimulatedStorage(Storage):
    """The storage of the world for one process."""

    concurrency = 1

    def __init__(self, world: World, process: Process, folder: Folder | None = None):
        self._folder = folder or world.home
        self.root = self._folder.root
        self.is_dead = False
        self.world = world
        self._process = process

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        def effect() -> bytes:
            data, _ = self._find(path)
            return data[offset : None if length is None else offset + length]

        return self._send("read", path, effect)

    def stat(self, path: str) -> FileInfo:
        def effect() -> FileInfo:
            data, time_ms = self._find(path)
            return FileInfo(path, len(data), time_ms)

        return self._send("stat", path, effect)

    def create(self, path: str, data: bytes) -> None:
        world, folder = self.world, self._folder
        for observe in world.observers if folder is world.home else ():
            observe(self._process, path, data)
        folder.sent_by.setdefault(self._process.name, set()).add(path)

        def effect() -> None:
            if path in folder.files:
                raise FileExistsAlreadyError(f"{path!r} already exists", path=path)
            folder.files[path] = (data, world.clock_ms)
            folder.created.setdefault(path, folder.files[path])

        self._send("create", path, effect)

    def write(self, path: str, data: bytes) -> None:
        world, folder = self.world, self._folder
        folder.sent_by.setdefault(self._process.name, set()).add(path)

        def effect() -> None:
            folder.files[path] = (data, world.clock_ms)
            folder.created.setdefault(path, folder.files[path])

        self._send("write", path, effect)

    def delete(self, path: str) -> None:
        def effect() -> None:
            if self._folder.files.pop(path, None) is not None:
                self._folder.deleted.append((self._process.name, path))

        self._send("delete", path, effect)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        def effect() -> list[FileInfo]:
            files = sorted(self._folder.files.items())
            return [FileInfo(path, len(data), time_ms) for path, (data, time_ms) in files if path.startswith(prefix)]

        return iter(self._send("list", prefix, effect))

    def now_ms(self) -> int:
        return self.world.clock_ms

    def _find(self, path: str) -> tuple[bytes, int]:
        if path not in self._folder.files:
            raise FileMissingError(f"{path!r} does not exist", path=path)
        return self._folder.files[path]

    def _send(self, kind: Kind, path: str, effect: Callable[[], Any]) -> Any:
        return self.world.request(self._process, kind, path, effect, self._folder)


def file_class(path: str) -> str:
    """Return the kind of file that a path or the prefix of a listing refers to."""
    if parse_root_path(path) is not None:
        return "root"
    if path in (HINT_PATH, ROOT_PREFIX):
        return "hint" if path == HINT_PATH else "roots"
    if path.startswith(SLOT_REQUEST_PREFIX):
        return "slot request" if path != SLOT_REQUEST_PREFIX else "slot requests"
    if path.startswith(LEASE_PREFIX):
        return "lease" if path != LEASE_PREFIX else "leases"
    if path in ("", TEMPORARY_PREFIX):
        return "all files"
    if path.startswith(TABLES_PREFIX):
        return "table file"
    if path.startswith(f"{OPERATIONS_PREFIX}txn-"):
        return "saved transaction"
    if path.startswith((OPERATIONS_PREFIX, "_export_")):
        return "operation file"  # plan, manifest or root of an export
    return "node" if path.endswith(".arrow") else "definition"


def matrix(injected: Counter[tuple[str, str]]) -> str:
    """Return a text table of the number of injections by request and fault."""
    kinds = sorted({kind for kind, _ in injected} | set(REQUESTS), key=lambda kind: (kind not in REQUESTS, kind))
    rows = [["request", *FAULTS], *([kind, *(f"{injected[kind, fault]:,}" for fault in FAULTS)] for kind in kinds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def empty_cells(injected: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of request and fault that were never injected."""
    return [cell for cell in itertools.product(REQUESTS, FAULTS) if not injected[cell]]
