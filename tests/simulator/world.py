"""A world in which several processes use one storage, and everything that can happen is drawn from a seed.

Each thread of a simulated process is a greenlet that runs the real code. It hands over at every request
to the storage, at every pause and whenever it waits for another thread of its process; who goes on, and
what goes wrong meanwhile, the seed decides. So a run is one total order of requests, and the same seed
gives it again.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import greenlet

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage import cache as cache_module
from trinitylake_ops.transaction import commit as commit_module
from trinitylake_ops.transaction import group_commit as group_commit_module

Kind = Literal["read", "stat", "list", "create", "write", "delete"]
Fault = Literal["refused", "answer lost", "late", "twice", "crash before", "crash after", "clock jump"]
KINDS: tuple[Kind, ...] = ("read", "stat", "list", "create", "write", "delete")
FAULTS: tuple[Fault, ...] = ("refused", "answer lost", "late", "twice", "crash before", "crash after", "clock jump")
_NETWORK_FAULTS: tuple[Fault, ...] = ("refused", "answer lost", "late")
_CHANGES = ("create", "write", "delete")
_LONGEST_JUMP_MS = 40_000
_MOST_STEPS = 20_000
START_MS = 1_700_000_000_000


@dataclass(eq=False)
class Process:
    """A simulated process: its threads, and what they share. It dies as a whole and starts again."""

    name: str
    threads: list[Callable[[Process], None]]
    make: Callable[[Storage], Any]
    storage: SimulatedStorage = field(init=False)
    shared: Any = None
    bad_requests: int = 0  # that are still to come


@dataclass(eq=False)
class _Thread:
    """A thread of a process; ``waits_for`` is None while it could go on."""

    process: Process
    body: greenlet.greenlet
    waits_for: SimulatedEvent | None = None


@dataclass(frozen=True)
class _Waits:
    event: SimulatedEvent


class DeadlockError(AssertionError):
    """No thread can go on."""


class World:
    """Everything outside the code under test: storage, clock, network, processes, and chance."""

    def __init__(self, seed: int, fault_rate: float):
        self.random = random.Random(seed)
        self._uuids = random.Random(f"uuids of {seed}")
        self._fault_rate = fault_rate
        self.files: dict[str, tuple[bytes, int]] = {}
        self.clock_ms = START_MS
        self.n_steps = 0
        self.log: list[tuple[str, str, str, str]] = []
        self.injected: Counter[tuple[str, str]] = Counter()
        self.observers: list[Callable[[Process, str, str, bytes], None]] = []
        self._processes: list[Process] = []
        self._threads: list[_Thread] = []
        self._on_their_way: list[tuple[str, Callable[[], object]]] = []  # requests that arrive late, or once more
        self._main = greenlet.getcurrent()

    # Running

    def add(self, process: Process) -> None:
        self._processes.append(process)
        self._start(process)

    def run(self) -> None:
        """Let all threads run to their end. Raises what one of them raised, and DeadlockError."""
        while self._threads:
            runnable = [thread for thread in self._threads if thread.waits_for is None or thread.waits_for.is_set()]
            if not runnable:
                raise DeadlockError(f"all threads wait: {[thread.process.name for thread in self._threads]}")
            self.n_steps += 1
            if self.n_steps > _MOST_STEPS:
                raise DeadlockError(f"no end after {_MOST_STEPS} steps")
            self.clock_ms += self.random.randrange(30)
            if self._on_their_way and self.random.random() < 0.04:
                self._let_arrive(self.random.randrange(len(self._on_their_way)))
            self._resume(self.random.choice(runnable))
        while self._on_their_way:
            self._let_arrive(0)

    def is_simulated_here(self) -> bool:
        """Whether the caller is a simulated thread, and not the test itself."""
        return greenlet.getcurrent() is not self._main

    def hand_over(self, event: SimulatedEvent | None = None) -> None:
        """Let others run; with an event, until it is set."""
        self._main.switch(None if event is None else _Waits(event))

    def request(self, process: Process, kind: Kind, path: str, effect: Callable[[], Any]) -> Any:
        """Send a request: hand over, then let it take effect, or go wrong."""
        if not self.is_simulated_here():
            return effect()
        if process.storage.is_dead:
            raise greenlet.GreenletExit
        fault = self._fault_of(process, kind)
        self.hand_over()
        self.log.append((process.name, kind, path, fault or ""))
        if fault is not None:
            self.injected[kind, fault] += 1
        return self._answered(process, kind, path, effect, fault)

    def _fault_of(self, process: Process, kind: Kind) -> Fault | None:
        """Choose what goes wrong with a request; failures come in spells, too, so that some outcomes stay unknown."""
        if process.bad_requests:
            process.bad_requests -= 1
            return self.random.choice(_NETWORK_FAULTS)
        if self.random.random() >= self._fault_rate:
            return None
        if self.random.random() < (0.5 if kind == "create" else 0.15):
            process.bad_requests = self.random.randrange(12)
            return self.random.choice(_NETWORK_FAULTS)
        return self.random.choice(FAULTS)

    def _answered(self, process: Process, kind: Kind, path: str, effect: Callable[[], Any], fault: Fault | None) -> Any:
        if fault == "crash before":
            self._crash(process)
        if fault == "clock jump":
            self.clock_ms += self.random.randrange(-_LONGEST_JUMP_MS, _LONGEST_JUMP_MS)
        if fault == "refused":
            raise self.random.choice([ThrottledError, TransientError])(f"injected: {kind} refused", path=path)
        if fault == "late":
            if kind in _CHANGES:  # no answer in time; it arrives later, or never
                self._send_later(f"late {kind} {path}", effect)
                raise AmbiguousWriteError(f"injected: {kind} held back", path=path)
            found = _outcome(effect)
            self.hand_over()  # the answer is old when it comes
            return found()
        found = _outcome(effect)
        if fault == "twice":  # repeated on its way: at once, and the answer is the second one's, or later
            if self.random.random() < 0.5:
                return effect()
            self._send_later(f"repeated {kind} {path}", effect)
        if fault == "crash after":
            self._crash(process)
        if fault == "answer lost":
            error = AmbiguousWriteError if kind in _CHANGES else TransientError
            raise error(f"injected: the answer to {kind} is lost", path=path)
        return found()

    def _send_later(self, what: str, effect: Callable[[], object]) -> None:
        if self.random.random() < 0.9:
            self._on_their_way.append((what, effect))

    def _let_arrive(self, index: int) -> None:
        what, effect = self._on_their_way.pop(index)
        self.log.append(("network", "arrives", what, ""))
        _outcome(effect)

    # Threads

    def _start(self, process: Process) -> None:
        process.storage = SimulatedStorage(self, process)
        process.shared = process.make(process.storage)
        for thread in process.threads:
            self._threads.append(_Thread(process, greenlet.greenlet(lambda body=thread: body(process))))

    def _resume(self, thread: _Thread) -> None:
        thread.waits_for = None
        told = thread.body.switch()
        if isinstance(told, _Crashed):
            for other in [other for other in self._threads if other.process is told.process]:
                self._threads.remove(other)
                other.body.throw(greenlet.GreenletExit)
            self.log.append((told.process.name, "starts again", "", ""))
            self._start(told.process)
        elif thread.body.dead:
            self._threads.remove(thread)
        elif isinstance(told, _Waits):
            thread.waits_for = told.event

    def _crash(self, process: Process) -> None:
        process.storage.is_dead = True
        self._main.switch(_Crashed(process))
        raise greenlet.GreenletExit

    # What the code under test would take from the machine

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Let the code under test wait, pause and draw identifiers within this world."""
        threads = _Threads(self)
        with (
            mock.patch.object(uuid, "uuid4", self._uuid),
            mock.patch.object(cache_module, "threading", threads),
            mock.patch.object(group_commit_module, "threading", threads),
            mock.patch.object(commit_module, "time", _Pauses(self)),
        ):
            yield

    def pause(self, seconds: float) -> None:
        del seconds  # how long anything takes is for the seed to decide
        if self.is_simulated_here():
            self.hand_over()

    def _uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._uuids.getrandbits(128), version=4)


@dataclass(frozen=True)
class _Crashed:
    process: Process


class _Pauses:
    """The module ``time`` of a simulated process."""

    def __init__(self, world: World):
        self.sleep = world.pause
        self.monotonic = time.monotonic


class _Threads:
    """The module ``threading`` of a simulated process."""

    Lock = threading.Lock

    def __init__(self, world: World):
        self._world = world

    def Event(self) -> SimulatedEvent:  # noqa: N802 - the name it has in threading
        return SimulatedEvent(self._world)


class SimulatedEvent:
    """An event (threading.Event) on which a simulated thread can wait."""

    def __init__(self, world: World):
        self._world = world
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        del timeout  # nobody is interrupted here
        while not self._is_set:
            self._world.hand_over(self)
        return True


def _outcome(effect: Callable[[], Any]) -> Callable[[], Any]:
    """Let a request take effect now; returns what gives its answer."""
    try:
        found = effect()
    except StorageError as error:
        failure = error

        def fail() -> Any:
            raise failure

        return fail
    return lambda: found


class SimulatedStorage(Storage):
    """The storage of a world as one process reaches it."""

    concurrency = 1

    def __init__(self, world: World, process: Process):
        self.root = "memory://simulated/"
        self.is_dead = False
        self._world = world
        self._process = process

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
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
        world = self._world
        for observe in world.observers:
            observe(self._process, "create", path, data)

        def effect() -> None:
            if path in world.files:
                raise FileExistsAlreadyError(f"a file stands at {path!r}", path=path)
            world.files[path] = (data, world.clock_ms)

        self._send("create", path, effect)

    def write(self, path: str, data: bytes) -> None:
        def effect() -> None:
            self._world.files[path] = (data, self._world.clock_ms)

        self._send("write", path, effect)

    def delete(self, path: str) -> None:
        self._send("delete", path, lambda: self._world.files.pop(path, None) and None)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        def effect() -> list[FileInfo]:
            found = sorted(self._world.files.items())
            return [FileInfo(path, len(data), at) for path, (data, at) in found if path.startswith(prefix)]

        return iter(self._send("list", prefix, effect))

    def now_ms(self) -> int:
        return self._world.clock_ms

    def _find(self, path: str) -> tuple[bytes, int]:
        if path not in self._world.files:
            raise FileMissingError(f"there is no file {path!r}", path=path)
        return self._world.files[path]

    def _send(self, kind: Kind, path: str, effect: Callable[[], Any]) -> Any:
        return self._world.request(self._process, kind, path, effect)


def matrix(injected: Counter[tuple[str, str]]) -> str:
    """Return a table of request kind x fault with how often each was injected."""
    rows = [["request", *FAULTS], *([kind, *(f"{injected[kind, fault]:,}" for fault in FAULTS)] for kind in KINDS)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def empty_cells(injected: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what was never injected."""
    return [cell for cell in itertools.product(KINDS, FAULTS) if not injected[cell]]
