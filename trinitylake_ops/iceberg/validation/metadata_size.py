"""Limit the size of a table's Iceberg metadata, and how much of it the threads of a process parse at a time.

Parsing holds the interpreter lock, so that all requests to a server have to wait. Maintenance reads larger files.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trinitylake_ops.errors import MetadataTooLargeError
from trinitylake_ops.storage.background import at_fork

#: Maximum size of metadata that a server reads, as JSON. 10,000 snapshots take up to 10 MB, a schema of 5,000 columns
#: 0.5 MB.
MAX_METADATA_BYTES = 32 << 20
#: Maximum number of JSON objects in metadata. A snapshot consists of two objects, a column of one. Parsing an object
#: takes about 10 microseconds.
MAX_METADATA_OBJECTS = 250_000
_OBJECT = b"{"
#: Number of bytes that checksums and later format changes may add to the JSON of a commit.
_RESERVED_BYTES = 4_096


def metadata_too_large(uri: str, n_bytes: int, limit_bytes: int) -> MetadataTooLargeError:
    """Return the error for a metadata file that is too large for a server.

    Args:
        uri: The metadata file.
        n_bytes: The size of the file, or of the JSON in it.
        limit_bytes: Maximum size that is read.
    """
    return MetadataTooLargeError(
        f"{uri!r} is too large for the server: the metadata has {n_bytes} bytes, more than {limit_bytes}; ask its"
        " operator to drop snapshots with 'trinitylake trim', or to roll the table back to an earlier version",
        path=uri,
    )


def check_served_size(text: bytes, uri: str, limit_bytes: int) -> None:
    """Check that a server may parse metadata JSON.

    Args:
        text: The JSON.
        uri: The metadata file.
        limit_bytes: Maximum size that is read.

    Raises:
        MetadataTooLargeError: The JSON has more bytes, or more objects than :data:`MAX_METADATA_OBJECTS`.
    """
    if len(text) > limit_bytes:
        raise metadata_too_large(uri, len(text), limit_bytes)
    n_objects = text.count(_OBJECT)
    if n_objects > MAX_METADATA_OBJECTS:
        raise MetadataTooLargeError(
            f"{uri!r} is too large for the server: the metadata has {n_objects} JSON objects, more than"
            f" {MAX_METADATA_OBJECTS}; ask its operator to drop snapshots with 'trinitylake trim', or to roll the table"
            " back to an earlier version",
            path=uri,
        )


def excess_of(text: bytes) -> str | None:
    """Describe how metadata JSON exceeds the limits for commits. Return None if it is within the limits."""
    if len(text) > MAX_METADATA_BYTES - _RESERVED_BYTES:
        return f"{len(text)} bytes, more than {MAX_METADATA_BYTES - _RESERVED_BYTES}"
    n_objects = text.count(_OBJECT)
    return f"{n_objects} JSON objects, more than {MAX_METADATA_OBJECTS}" if n_objects > MAX_METADATA_OBJECTS else None


def is_smaller(text: bytes, before: bytes) -> bool:
    """Whether metadata has shrunk, so that a commit may write it although it is too large.

    Args:
        text: The new JSON.
        before: The previous JSON.
    """
    return len(text) < len(before) and text.count(_OBJECT) <= before.count(_OBJECT)


#: At most two threads at a time parse metadata larger than this, because they compete for the interpreter lock.
_LARGE_BYTES, _MAX_LARGE_PARSES = 64 << 10, 2
#: Only one thread at a time parses metadata larger than this, because it takes about ten times as much memory.
_HUGE_BYTES = 1 << 20


class ParseGate:
    """Limits the threads that parse metadata, by its size.

    While a thread parses huge metadata, garbage collection is paused, because it would repeatedly traverse all new
    objects and stop all other threads for up to a second each time.
    """

    def __init__(self) -> None:
        self._large = threading.BoundedSemaphore(_MAX_LARGE_PARSES)
        self._large_parses = threading.Lock()
        self._is_paused = False
        self._thread_state = threading.local()
        at_fork(self)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the slot for huge metadata, if this thread acquires it, until the end of the block.

        Otherwise many threads would keep parsed metadata in memory, and each garbage collection would traverse all of
        it. The block must not wait for other threads that parse metadata.
        """
        with ExitStack() as slot:
            self._thread_state.slot, self._thread_state.has_slot = slot, False
            try:
                yield
            finally:
                del self._thread_state.slot

    @contextmanager
    def admit(self, n_bytes: int) -> Iterator[None]:
        """Wait for a slot to parse ``n_bytes``, and keep it until the end of the block."""
        if n_bytes <= _LARGE_BYTES:
            yield
        elif n_bytes <= _HUGE_BYTES:
            with self._large:
                yield
        else:
            with self._large_parse_slot(), self._large, self._garbage_collection_paused():
                yield

    @contextmanager
    def _large_parse_slot(self) -> Iterator[None]:
        slot: ExitStack | None = getattr(self._thread_state, "slot", None)
        if slot is None:
            with self._large_parses:
                yield
            return
        if not self._thread_state.has_slot:
            slot.enter_context(self._large_parses)
            self._thread_state.has_slot = True
        yield

    @contextmanager
    def _garbage_collection_paused(self) -> Iterator[None]:
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
        """Release all slots in a forked child, where the parent's threads do not exist."""
        self._large = threading.BoundedSemaphore(_MAX_LARGE_PARSES)
        self._large_parses = threading.Lock()
        self._resume()


#: The gate of this process.
PARSE_GATE = ParseGate()
