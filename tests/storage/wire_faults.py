"""Effects of wire faults on storages with HTTP servers, without retries (S7).

Each error distinguishes requests that certainly had no effect from requests that may have had one. A read or list never
returns a partial result. No client resends a request on its own, because a resent create would conflict with its file.
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
#: Timeout of requests without a delay fault, which is long so that a slow machine causes no timeouts.
LONG_TIMEOUT_S = 20.0
LONG_TIMEOUTS = {"connect_timeout_seconds": str(LONG_TIMEOUT_S), "read_timeout_seconds": str(LONG_TIMEOUT_S)}

Outcome = type[StorageError] | None
#: A fault, the error of operations that read, and the error of operations that change files.
FaultCase = tuple[WireFault, Outcome, Outcome]
UNKNOWN_OUTCOME = (TransientError, AmbiguousWriteError)
#: Maximum time until a server on a busy machine has stored the file of a create that the client abandoned.
_MAX_STORE_DELAY_S = 60.0
_DELAY_ACTIONS = ("hold_request", "delay_response")


@dataclass(frozen=True)
class Operation:
    """A call of the storage, the HTTP method of its request, and whether it changes files."""

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


def faults_of_any_server(read_timeout_s: float) -> dict[str, FaultCase]:
    """Return the faults with the same meaning for every server: network faults and responses without a body."""
    return {
        "request dropped": (wire.drop_request(), *UNKNOWN_OUTCOME),
        "response dropped": (wire.drop_response(), *UNKNOWN_OUTCOME),
        "request held": (wire.hold_request(), *UNKNOWN_OUTCOME),
        "response delayed": (wire.delay_response(seconds=2 * read_timeout_s), *UNKNOWN_OUTCOME),
        "head truncated": (wire.cut_head(), *UNKNOWN_OUTCOME),
        "body truncated": (wire.cut_body(), *UNKNOWN_OUTCOME),
        "500 empty": (wire.respond(status=500), *UNKNOWN_OUTCOME),
        "504 empty": (wire.respond(status=504, is_forwarded=True), *UNKNOWN_OUTCOME),
    }


def faults_in_xml(codes: Mapping[str, str]) -> dict[str, FaultCase]:
    """Return the error responses that are common to services with XML error documents.

    ``codes`` contains the error codes of the service by the keys ``error``, ``after the effect``, ``throttled`` and
    ``denied``.
    """
    return {
        "500": (wire.respond(status=500, code=codes["error"]), *UNKNOWN_OUTCOME),
        "500 after the effect": (
            wire.respond(status=500, code=codes["after the effect"], is_forwarded=True),
            *UNKNOWN_OUTCOME,
        ),
        "503": (wire.respond(status=503, code=codes["throttled"]), ThrottledError, ThrottledError),
        "503 empty": (wire.respond(status=503), *UNKNOWN_OUTCOME),
        "403": (wire.respond(status=403, code=codes["denied"]), StoragePermissionError, StoragePermissionError),
        "403 empty": (wire.respond(status=403), StoragePermissionError, StoragePermissionError),
        "409 empty": (wire.respond(status=409), *UNKNOWN_OUTCOME),
    }


def is_delay(fault: WireFault) -> bool:
    """Whether a request with this fault ends only by a timeout."""
    return fault.action in _DELAY_ACTIONS


@dataclass(frozen=True)
class ProxiedStorage:
    """A storage behind a proxy that injects faults. ``hidden`` contains texts that no error may show."""

    proxy: FaultyProxy
    long_timeout_storage: Storage
    short_timeout_storage: Storage
    hidden: tuple[str, ...]

    def storage(self, fault: WireFault) -> Storage:
        """Return the storage with a short timeout if the fault is a delay, or else with a long timeout."""
        return self.short_timeout_storage if is_delay(fault) else self.long_timeout_storage

    def check_fault(self, fault: WireFault, operation: Operation, expected: Outcome) -> None:
        """Assert that an operation with a fault sends one request and has the expected outcome, and reset the proxy."""
        self.proxy.begin(fault)
        started = time.monotonic()
        error_type, result = outcome(functools.partial(operation.call, self.storage(fault)), self.hidden)
        assert error_type is expected, result
        assert time.monotonic() - started < LONG_TIMEOUT_S / 2
        assert [exchange.method for exchange in self.proxy.log] == [operation.method], "the request is sent once"
        self.proxy.release()
        self.proxy.begin()

    def check_list(self, fault_case: FaultCase, paths: Sequence[str]) -> None:
        """Assert that a listing of two pages is complete or raises, with a fault at either page.

        The retries around the storage resend the first page. Only the storage itself can resend a later page.
        """
        fault, expected, _ = fault_case
        storage = self.storage(fault)
        is_retried = expected in (TransientError, ThrottledError)
        for page, listed in ((1, RetryStorage(storage, base_delay_seconds=0.001)), (2, storage)):
            self.proxy.begin(replace(fault, at=page))
            error_type, result = outcome(lambda listed=listed: [info.path for info in listed.list()], self.hidden)  # type: ignore[misc]
            assert self.proxy.log[page - 1].fault is not None
            if is_retried:
                assert (error_type, result) == (None, list(paths)), page
                assert len(self.proxy.log) == 3, page
            else:
                assert error_type is expected, (page, result)
                assert len(self.proxy.log) == page, page


def was_sent(fault: WireFault) -> bool:
    """Whether a request with a fault eventually reached the server."""
    return fault.action not in ("drop_request", "respond") or fault.is_forwarded


def assert_stored_if_sent(is_stored: Callable[[], bool], fault: WireFault, message: str) -> None:
    """Assert that a file exists if its request reached the server, possibly after the client timed out."""
    deadline = time.monotonic() + _MAX_STORE_DELAY_S
    while was_sent(fault) and not is_stored() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_stored() == was_sent(fault), message


def outcome(call: Callable[[], Any], hidden: Iterable[str]) -> tuple[Outcome, Any]:
    """Return the class of a call's error and the error, or None and the result. A batch returns failures by file."""
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
    """Assert that an error has a short message and no cause, and shows no secret or server document."""
    message = str(error)
    assert error.__cause__ is None
    assert message
    assert "\n" not in message
    assert len(message) < 600
    for text in hidden:
        assert text not in message


def check_clock(storage: Storage, proxy: FaultyProxy, fault_case: FaultCase, hidden: Iterable[str]) -> None:
    """Assert that a storage requests the server's time once, and again after a fault."""
    fault, expected, _ = fault_case
    proxy.begin(fault)
    error_type, result = outcome(storage.now_ms, hidden)
    assert error_type is expected, result
    assert len(proxy.log) == 1
    assert abs(storage.now_ms() - time.time() * 1000) < 5_000


def check_closed_port(open_at: Callable[[str], Storage], call: Callable[[Storage], Any], hidden: Iterable[str]) -> None:
    """Assert that nothing is sent to a closed port. ``open_at`` opens the storage at an endpoint."""
    with socket.socket() as unused_socket:
        unused_socket.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused_socket.getsockname()[1]}"
        storage = open_at(endpoint)
        started = time.monotonic()
        error_type, error = outcome(lambda: call(storage), hidden)
    assert error_type is UnreachableError, "nothing was sent"
    assert endpoint in str(error)
    assert time.monotonic() - started < LONG_TIMEOUT_S / 2


def check_silent_server(
    open_at: Callable[[str], Storage], operation: Operation, read_timeout_s: float, hidden: Iterable[str]
) -> None:
    """Assert that a server that never responds causes a timeout. ``open_at`` opens the storage at an endpoint."""
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        silent_socket.listen()
        endpoint = f"http://127.0.0.1:{silent_socket.getsockname()[1]}"
        storage = open_at(endpoint)
        started = time.monotonic()
        error_type, error = outcome(lambda: operation.call(storage), hidden)
        elapsed_s = time.monotonic() - started
    assert error_type is (AmbiguousWriteError if operation.changes_files else TransientError)
    assert endpoint in str(error)
    assert read_timeout_s * 0.9 < elapsed_s < LONG_TIMEOUT_S
