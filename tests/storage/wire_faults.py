"""Effects of wire faults on storages with HTTP servers, without retries (S7).

An error says whether the request certainly had no effect, or may have had one. A read or list never returns a part. No
client repeats a request by itself: a repeated create would meet its own file.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage

BODY = bytes(range(256)) * 400
#: How long requests may take where no fault makes them wait: a slow machine must not cause timeouts.
PATIENCE_S = 20.0
PATIENT = {"connect_timeout_seconds": str(PATIENCE_S), "read_timeout_seconds": str(PATIENCE_S)}

Outcome = type[StorageError] | None
#: A fault, what a reading operation raises, and what a changing one does.
Row = tuple[WireFault, Outcome, Outcome]
UNKNOWN = (TransientError, AmbiguousWriteError)
#: How long a server on a busy machine may take to store what a client gave up.
_SETTLED_S = 60.0
_WAITS = ("hold_request", "delay_answer")


@dataclass(frozen=True)
class Operation:
    """A call of the storage, its method on the wire, and whether it may have an effect."""

    call: Callable[[Storage], Any]
    method: str
    changes_files: bool = False


def operations(stat_method: str = "HEAD", write_method: str = "PUT") -> dict[str, Operation]:
    """Return the operations of each storage on the existing files ``f`` and ``g`` and on the missing file ``new``."""
    return {
        "read": Operation(lambda storage: storage.read("f"), "GET"),
        "read of a range": Operation(lambda storage: storage.read("f", offset=7, length=50_000), "GET"),
        "stat": Operation(lambda storage: storage.stat("f"), stat_method),
        "list": Operation(lambda storage: sorted(info.path for info in storage.list()), "GET"),
        "create": Operation(lambda storage: storage.create("new", BODY), write_method, True),
        "write": Operation(lambda storage: storage.write("new", BODY), write_method, True),
        "delete": Operation(lambda storage: storage.delete("f"), "DELETE", True),
        "delete_batch": Operation(lambda storage: storage.delete_batch(["f", "g"]), "POST", True),
    }


def faults_of_any_server(read_timeout_s: float) -> dict[str, Row]:
    """Return the faults that mean the same of every server: those of the wire, and answers without a word."""
    return {
        "request dropped": (wire.drop_request(), *UNKNOWN),
        "answer dropped": (wire.drop_answer(), *UNKNOWN),
        "request held back": (wire.hold_request(), *UNKNOWN),
        "answer late": (wire.delay_answer(seconds=2 * read_timeout_s), *UNKNOWN),
        "head cut": (wire.cut_head(), *UNKNOWN),
        "body cut": (wire.cut_body(), *UNKNOWN),
        "500 empty": (wire.answer(status=500), *UNKNOWN),
        "504 empty": (wire.answer(status=504, is_forwarded=True), *UNKNOWN),
    }


def faults_in_xml(codes: Mapping[str, str]) -> dict[str, Row]:
    """Return the answers that services with documents in XML share, by the code that each has for them.

    ``codes`` are those of ``error``, ``after the effect``, ``slower`` and ``denied``.
    """
    return {
        "500": (wire.answer(status=500, code=codes["error"]), *UNKNOWN),
        "500 after the effect": (
            wire.answer(status=500, code=codes["after the effect"], is_forwarded=True),
            *UNKNOWN,
        ),
        "503": (wire.answer(status=503, code=codes["slower"]), ThrottledError, ThrottledError),
        "503 empty": (wire.answer(status=503), *UNKNOWN),
        "403": (wire.answer(status=403, code=codes["denied"]), StoragePermissionError, StoragePermissionError),
        "403 empty": (wire.answer(status=403), StoragePermissionError, StoragePermissionError),
        "409 empty": (wire.answer(status=409), *UNKNOWN),
    }


def is_wait(fault: WireFault) -> bool:
    """Whether a fault is one that only a time-out ends."""
    return fault.action in _WAITS


@dataclass(frozen=True)
class Wire:
    """A storage behind a proxy, at which faults happen. ``hidden`` are texts that no error may show."""

    proxy: FaultyProxy
    patient: Storage
    hasty: Storage
    hidden: tuple[str, ...]

    def storage(self, fault: WireFault) -> Storage:
        """Return the storage with a short time-out only where the fault is a wait."""
        return self.hasty if is_wait(fault) else self.patient

    def check_fault(self, fault: WireFault, operation: Operation, expected: Outcome) -> None:
        """Assert that an operation meets a fault with one request, and that the proxy is itself again."""
        self.proxy.begin(fault)
        started = time.monotonic()
        kind, found = outcome(functools.partial(operation.call, self.storage(fault)), self.hidden)
        assert kind is expected, found
        assert time.monotonic() - started < PATIENCE_S / 2
        assert [exchange.method for exchange in self.proxy.log] == [operation.method], "sent once"
        self.proxy.release()
        self.proxy.begin()

    def check_list(self, row: Row, everything: Sequence[str]) -> None:
        """Assert that a list of two pages is whole or raises, at a fault of its first and of its second page.

        The first page is left to the retries around the storage; a later one only the storage can ask for again.
        """
        fault, expected, _ = row
        storage = self.storage(fault)
        is_passing = expected in (TransientError, ThrottledError)
        for page, tried in ((1, RetryStorage(storage, base_delay_seconds=0.001)), (2, storage)):
            self.proxy.begin(replace(fault, at=page))
            kind, found = outcome(lambda tried=tried: [info.path for info in tried.list()], self.hidden)  # type: ignore[misc]
            assert self.proxy.log[page - 1].fault is not None
            if is_passing:
                assert (kind, found) == (None, list(everything)), page
                assert len(self.proxy.log) == 3, page
            else:
                assert kind is expected, (page, found)
                assert len(self.proxy.log) == page, page


def was_sent(fault: WireFault) -> bool:
    """Whether a request that met a fault reached the server at last."""
    return fault.action not in ("drop_request", "answer") or fault.is_forwarded


def assert_stored_if_sent(is_stored: Callable[[], bool], fault: WireFault, message: str) -> None:
    """Assert that a file exists if its request reached the server, which may store it after the client gave up."""
    until = time.monotonic() + _SETTLED_S
    while was_sent(fault) and not is_stored() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_stored() == was_sent(fault), message


def outcome(call: Callable[[], Any], hidden: Iterable[str]) -> tuple[Outcome, Any]:
    """Return what a call raised, with its error, or None and what it returned. A batch reports failures by file."""
    try:
        found = call()
    except StorageError as error:
        assert_clear(error, hidden)
        return type(error), error
    if isinstance(found, dict) and found:
        assert set(found) == {"f", "g"}
        return type(found["f"]), found["f"]
    return None, found


def assert_clear(error: Exception, hidden: Iterable[str]) -> None:
    """Assert that an error is one short line without secrets and documents of the server, and has no cause that has."""
    message = str(error)
    assert error.__cause__ is None
    assert message
    assert "\n" not in message
    assert len(message) < 600
    for text in hidden:
        assert text not in message


def check_clock(storage: Storage, proxy: FaultyProxy, row: Row, hidden: Iterable[str]) -> None:
    """Assert that a storage that has seen no time yet asks once for it, and again after a fault."""
    fault, expected, _ = row
    proxy.begin(fault)
    kind, found = outcome(storage.now_ms, hidden)
    assert kind is expected, found
    assert len(proxy.log) == 1
    assert abs(storage.now_ms() - time.time() * 1000) < 5_000


def check_closed_port(opened: Callable[[str], Storage], call: Callable[[Storage], Any], hidden: Iterable[str]) -> None:
    """Assert that nothing is sent to a closed port. ``opened`` opens the storage at an address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        storage = opened(endpoint)
        started = time.monotonic()
        kind, error = outcome(lambda: call(storage), hidden)
    assert kind is UnreachableError, "nothing was sent"
    assert endpoint in str(error)
    assert time.monotonic() - started < PATIENCE_S / 2


def check_silent_server(
    opened: Callable[[str], Storage], operation: Operation, read_timeout_s: float, hidden: Iterable[str]
) -> None:
    """Assert that a server that never answers costs the time-out. ``opened`` opens the storage at an address."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        storage = opened(endpoint)
        started = time.monotonic()
        kind, error = outcome(lambda: operation.call(storage), hidden)
        elapsed_s = time.monotonic() - started
    assert kind is (AmbiguousWriteError if operation.changes_files else TransientError)
    assert endpoint in str(error)
    assert read_timeout_s * 0.9 < elapsed_s < PATIENCE_S
