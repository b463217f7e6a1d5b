"""Bounds of the Iceberg metadata of one table, and how much of it the threads of a process parse at a time.

A parser occupies the interpreter, so that all requests of a server wait for it. Maintenance reads larger files.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trinitylake_ops.errors import MetadataTooLargeError
from trinitylake_ops.storage.background import at_fork

#: The largest metadata that a server reads, as JSON. 10,000 snapshots take up to 10 MB, and a schema of 5,000 columns
#: 0.5 MB.
MAX_METADATA_BYTES = 32 << 20
#: The most JSON objects in it. A snapshot is two, and a column is one. Each takes some 10 microseconds to parse.
MAX_METADATA_OBJECTS = 250_000
_OBJECT = b"{"
#: What the seals of a file and later changes of its form may add to the JSON of a commit.
_ROOM_BYTES = 4_096


def metadata_too_large(uri: str, n_bytes: int, limit_bytes: int) -> MetadataTooLargeError:
    """Return the error for a metadata file of which a server reads no more than ``limit_bytes``.

    Args:
        uri: The metadata file.
        n_bytes: Its size, or that of the JSON in it.
        limit_bytes: The largest size that is read.
    """
    return MetadataTooLargeError(
        f"{uri!r} is not read by the server: the metadata has {n_bytes} bytes, more than {limit_bytes}; its operator"
        " drops snapshots with 'trinitylake trim', or rolls the table back to an older version",
        path=uri,
    )


def check_served_size(text: bytes, uri: str, limit_bytes: int) -> None:
    """Check that a server may parse the JSON of metadata.

    Args:
        text: The JSON.
        uri: The metadata file.
        limit_bytes: The largest size that is read.

    Raises:
        MetadataTooLargeError: If it has more bytes, or more than :data:`MAX_METADATA_OBJECTS`.
    """
    if len(text) > limit_bytes:
        raise metadata_too_large(uri, len(text), limit_bytes)
    n_objects = text.count(_OBJECT)
    if n_objects > MAX_METADATA_OBJECTS:
        raise MetadataTooLargeError(
            f"{uri!r} is not read by the server: the metadata has {n_objects} JSON objects, more than"
            f" {MAX_METADATA_OBJECTS}; its operator drops snapshots with 'trinitylake trim', or rolls the table back to"
            " an older version",
            path=uri,
        )


def excess_of(text: bytes) -> str | None:
    """Return by what the JSON of metadata exceeds what a commit may write, None if it does not."""
    if len(text) > MAX_METADATA_BYTES - _ROOM_BYTES:
        return f"{len(text)} bytes, more than {MAX_METADATA_BYTES - _ROOM_BYTES}"
    n_objects = text.count(_OBJECT)
    return f"{n_objects} JSON objects, more than {MAX_METADATA_OBJECTS}" if n_objects > MAX_METADATA_OBJECTS else None


def is_smaller(text: bytes, before: bytes) -> bool:
    """Whether metadata has become smaller, so that a commit may write it although it is too large.

    Args:
        text: The JSON of the new metadata.
        before: The JSON of the metadata so far.
    """
    return len(text) < len(before) and text.count(_OBJECT) <= before.count(_OBJECT)


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
        self._large_parses = threading.Lock()
        self._is_paused = False
        self._of_thread = threading.local()
        at_fork(self)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the turn for huge metadata, if this thread gets one, until the end of the block.

        Otherwise many threads would hold what they parsed, and each run of the garbage collector would visit all of it.
        The block must not wait for other threads that parse metadata.
        """
        with ExitStack() as slot:
            self._of_thread.slot, self._of_thread.has_slot = slot, False
            try:
                yield
            finally:
                del self._of_thread.slot

    @contextmanager
    def admit(self, n_bytes: int) -> Iterator[None]:
        """Wait for a turn to parse so many bytes, and keep it until the end of the block."""
        if n_bytes <= _LARGE_BYTES:
            yield
        elif n_bytes <= _HUGE_BYTES:
            with self._large:
                yield
        else:
            with self._large_parse_slot(), self._large, self._without_collections():
                yield

    @contextmanager
    def _large_parse_slot(self) -> Iterator[None]:
        slot: ExitStack | None = getattr(self._of_thread, "slot", None)
        if slot is None:
            with self._large_parses:
                yield
            return
        if not self._of_thread.has_slot:
            slot.enter_context(self._large_parses)
            self._of_thread.has_slot = True
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

    def after_fork_in_child(self) -> None:
        """Admit the threads of a forked child, where no thread of the parent ends its turn."""
        self._large = threading.BoundedSemaphore(_MOST_LARGE_PARSES)
        self._large_parses = threading.Lock()
        self._resume()


#: The gate of this process.
PARSE_GATE = ParseGate()
