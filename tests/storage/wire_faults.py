"""Effects of wire faults on storages with HTTP servers, without retries (S7).

An error says whether the request certainly had no effect, or may have had one. A read or list never returns a partial
result. No client repeats a request by itself, because a repeated create would conflict with its own file.
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
#: Timeout of requests without a delaying fault. It is long, so that a slow machine causes no timeouts.
PATIENCE_S = 20.0
PATIENT = {"connect_timeout_seconds": str(PATIENCE_S), "read_timeout_seconds": str(PATIENCE_S)}

Outcome = type[StorageError] | None
#: A fault, the error of a reading operation, and the error of a changing one.
Row = tuple[WireFault, Outcome, Outcome]
UNKNOWN = (TransientError, AmbiguousWriteError)
#: Time for a server on a busy machine to store the file of a create that the client abandoned.
_SETTLED_S = 60.0
_WAITS = ("hold_request", "delay_response")


@dataclass(frozen=True)
class Operation:
    """A call of the storage, its HTTP method, and whether it may have an effect."""

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
    """Return the faults that mean the same for every server: network faults, and responses without a body."""
    return {
        "request dropped": (wire.drop_request(), *UNKNOWN),
        "answer dropped": (wire.drop_response(), *UNKNOWN),
        "request held back": (wire.hold_request(), *UNKNOWN),
        "answer late": (wire.delay_response(seconds=2 * read_timeout_s), *UNKNOWN),
        "head cut": (wire.cut_head(), *UNKNOWN),
        "body cut": (wire.cut_body(), *UNKNOWN),
        "500 empty": (wire.respond(status=500), *UNKNOWN),
        "504 empty": (wire.respond(status=504, is_forwarded=True), *UNKNOWN),
    }


def faults_in_xml(codes: Mapping[str, str]) -> dict[str, Row]:
    """Return the error responses that services with XML documents share, with the codes of a service.

    ``codes`` are those of ``error``, ``after the effect``, ``slower`` and ``denied``.
    """
    return {
        "500": (wire.respond(status=500, code=codes["error"]), *UNKNOWN),
        "500 after the effect": (
            wire.respond(status=500, code=codes["after the effect"], is_forwarded=True),
            *UNKNOWN,
        ),
        "503": (wire.respond(status=503, code=codes["slower"]), ThrottledError, ThrottledError),
        "503 empty": (wire.respond(status=503), *UNKNOWN),
        "403": (wire.respond(status=403, code=codes["denied"]), StoragePermissionError, StoragePermissionError),
        "403 empty": (wire.respond(status=403), StoragePermissionError, StoragePermissionError),
        "409 empty": (wire.respond(status=409), *UNKNOWN),
    }


def is_wait(fault: WireFault) -> bool:
    """Whether only a timeout ends a fault."""
    return fault.action in _WAITS


@dataclass(frozen=True)
class Wire:
    """A storage behind a proxy that injects faults. ``hidden`` are texts that no error may show."""

    proxy: FaultyProxy
    patient: Storage
    hasty: Storage
    hidden: tuple[str, ...]

    def storage(self, fault: WireFault) -> Storage:
        """Return the storage, with a short timeout only if the fault is a delay."""
        return self.hasty if is_wait(fault) else self.patient

    def check_fault(self, fault: WireFault, operation: Operation, expected: Outcome) -> None:
        """Assert that an operation with a fault sends one request and has the expected outcome. Reset the proxy."""
        self.proxy.begin(fault)
        started = time.monotonic()
        kind, result = outcome(functools.partial(operation.call, self.storage(fault)), self.hidden)
        assert kind is expected, result
        assert time.monotonic() - started < PATIENCE_S / 2
        assert [exchange.method for exchange in self.proxy.log] == [operation.method], "sent once"
        self.proxy.release()
        self.proxy.begin()

    def check_list(self, row: Row, everything: Sequence[str]) -> None:
        """Assert that a listing of two pages is complete or raises, with a fault at either page.

        The retries around the storage resend the first page; only the storage can resend a later one.
        """
        fault, expected, _ = row
        storage = self.storage(fault)
        is_passing = expected in (TransientError, ThrottledError)
        for page, tried in ((1, RetryStorage(storage, base_delay_seconds=0.001)), (2, storage)):
            self.proxy.begin(replace(fault, at=page))
            kind, result = outcome(lambda tried=tried: [info.path for info in tried.list()], self.hidden)  # type: ignore[misc]
            assert self.proxy.log[page - 1].fault is not None
            if is_passing:
                assert (kind, result) == (None, list(everything)), page
                assert len(self.proxy.log) == 3, page
            else:
                assert kind is expected, (page, result)
                assert len(self.proxy.log) == page, page


def was_sent(fault: WireFault) -> bool:
    """Whether a request with a fault eventually reached the server."""
    return fault.action not in ("drop_request", "respond") or fault.is_forwarded


def assert_stored_if_sent(is_stored: Callable[[], bool], fault: WireFault, message: str) -> None:
    """Assert that a file exists if its request reached the server, possibly after the client gave up."""
    until = time.monotonic() + _SETTLED_S
    while was_sent(fault) and not is_stored() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_stored() == was_sent(fault), message


def outcome(call: Callable[[], Any], hidden: Iterable[str]) -> tuple[Outcome, Any]:
    """Return the error class and error of a call, or None and its result. A batch reports failures by file."""
    try:
        result = call()
    except StorageError as error:
        assert_clear(error, hidden)
        return type(error), error
    if isinstance(result, dict) and result:
        assert set(result) == {"f", "g"}
        return type(result["f"]), result["f"]
    return None, result


def assert_clear(error: Exception, hidden: Iterable[str]) -> None:
    """Assert that an error and its causes are short, without secrets or server documents."""
    message = str(error)
    assert error.__cause__ is None
    assert message
    assert "\n" not in message
    assert len(message) < 600
    for text in hidden:
        assert text not in message


def check_clock(storage: Storage, proxy: FaultyProxy, row: Row, hidden: Iterable[str]) -> None:
    """Assert that a storage without a known time requests it once, and again after a fault."""
    fault, expected, _ = row
    proxy.begin(fault)
    kind, result = outcome(storage.now_ms, hidden)
    assert kind is expected, result
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
    """Assert that a server that never responds causes a timeout. ``opened`` opens the storage at an address."""
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
