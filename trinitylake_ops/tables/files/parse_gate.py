"""Limits how much metadata the threads of a process parse at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trinitylake_ops.storage.fork import at_fork

#: Metadata of more bytes waits while two threads parse such metadata: they need the same interpreter.
_LARGE_BYTES, _MOST_LARGE_PARSES = 64 << 10, 2
#: Metadata of more bytes is parsed by one thread at a time, because it takes some ten times as much memory.
_HUGE_BYTES = 1 << 20


class ParseGate:
    """Admits threads that parse metadata, by its size.

    While a thread parses huge metadata, the garbage collector is paused: it would visit all objects that were made so
    far several times, and stop all other threads for up to a second each time.
    """

    def __init__(self) -> None:
        self._large = threading.BoundedSemaphore(_MOST_LARGE_PARSES)
        self._huge = threading.Lock()
        self._is_paused = False
        self._of_thread = threading.local()
        at_fork(self)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the turn for huge metadata, if this thread gets one, until the end of the block.

        Otherwise many threads would hold what they parsed, and each run of the garbage collector would visit all of it.
        The block must not wait for other threads that parse metadata.
        """
        with ExitStack() as turn:
            self._of_thread.turn, self._of_thread.has_turn = turn, False
            try:
                yield
            finally:
                del self._of_thread.turn

    @contextmanager
    def admit(self, n_bytes: int) -> Iterator[None]:
        """Wait for a turn to parse so many bytes, and keep it until the end of the block."""
        if n_bytes <= _LARGE_BYTES:
            yield
        elif n_bytes <= _HUGE_BYTES:
            with self._large:
                yield
        else:
            with self._huge_turn(), self._large, self._without_collections():
                yield

    @contextmanager
    def _huge_turn(self) -> Iterator[None]:
        turn: ExitStack | None = getattr(self._of_thread, "turn", None)
        if turn is None:
            with self._huge:
                yield
            return
        if not self._of_thread.has_turn:
            turn.enter_context(self._huge)
            self._of_thread.has_turn = True
        yield

    @contextmanager
    def _without_collections(self) -> Iterator[None]:
        self._is_paused = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        if self._is_paused:
            gc.enable()
        self._is_paused = False

    def forget(self) -> None:
        """Admit the threads of a forked child, where no thread of the parent ends its turn."""
        self._large = threading.BoundedSemaphore(_MOST_LARGE_PARSES)
        self._huge = threading.Lock()
        self._resume()


#: The gate of this process.
PARSE_GATE = ParseGate()
