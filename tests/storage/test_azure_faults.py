"""Each operation of both clients of Azure meets each fault on the wire, without retries around them.

S7: an error says whether the request certainly had no effect, or may have had one. A read or list never returns a
part. No client repeats a request by itself: a repeated create would meet its own file.
"""

from __future__ import annotations

import base64
import functools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.azurite import ACCOUNT_NAME, AzureServer
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage
from trinitylake_ops.storage.azure import blob_storage

pytestmark = pytest.mark.debian_packages

BODY = bytes(range(256)) * 400
READ_TIMEOUT_S = 0.25
PATIENCE_S = 20.0
Outcome = type[StorageError] | None


@dataclass(frozen=True)
class Operation:
    """A call of the storage, its method on the wire, and whether it may have an effect."""

    call: Callable[[Storage], Any]
    method: str
    changes_files: bool = False


OPERATIONS = {
    "read": Operation(lambda storage: storage.read("f"), "GET"),
    "read of a range": Operation(lambda storage: storage.read("f", offset=7, length=50_000), "GET"),
    "stat": Operation(lambda storage: storage.stat("f"), "HEAD"),
    "list": Operation(lambda storage: sorted(info.path for info in storage.list()), "GET"),
    "create": Operation(lambda storage: storage.create("new", BODY), "PUT", True),
    "write": Operation(lambda storage: storage.write("new", BODY), "PUT", True),
    "delete": Operation(lambda storage: storage.delete("f"), "DELETE", True),
    "delete_batch": Operation(lambda storage: storage.delete_batch(["f", "g"]), "POST", True),
}
CHANGES = [name for name, operation in OPERATIONS.items() if operation.changes_files]
#: Fault -> what a reading operation raises, what a changing one does.
FAULTS: dict[str, tuple[WireFault, Outcome, Outcome]] = {
    "request dropped": (wire.drop_request(), TransientError, AmbiguousWriteError),
    "answer dropped": (wire.drop_answer(), TransientError, AmbiguousWriteError),
    "request held back": (wire.hold_request(), TransientError, AmbiguousWriteError),
    "answer late": (wire.delay_answer(seconds=2 * READ_TIMEOUT_S), TransientError, AmbiguousWriteError),
    "head cut": (wire.cut_head(), TransientError, AmbiguousWriteError),
    "body cut": (wire.cut_body(), TransientError, AmbiguousWriteError),
    "500": (wire.answer(status=500, code="InternalError"), TransientError, AmbiguousWriteError),
    "500 empty": (wire.answer(status=500), TransientError, AmbiguousWriteError),
    "500 after the effect": (
        wire.answer(status=500, code="OperationTimedOut", is_forwarded=True),
        TransientError,
        AmbiguousWriteError,
    ),
    "503": (wire.answer(status=503, code="ServerBusy"), ThrottledError, ThrottledError),
    "503 empty": (wire.answer(status=503), TransientError, AmbiguousWriteError),
    "504 empty": (wire.answer(status=504, is_forwarded=True), TransientError, AmbiguousWriteError),
    "403": (wire.answer(status=403, code="AuthorizationFailure"), StoragePermissionError, StoragePermissionError),
    "403 empty": (wire.answer(status=403), StoragePermissionError, StoragePermissionError),
    "409 empty": (wire.answer(status=409), TransientError, AmbiguousWriteError),
}
NO_BODY = {"stat", "create", "write", "delete"}  # their answers have none that could be cut


@pytest.fixture
def proxy(azurite: AzureServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(azurite.endpoint) as running:
        yield running


@pytest.fixture(params=["azure-storage-blob", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    made = azurite.fresh_root()
    yield made
    azurite.delete_all(made)


def through(proxy: FaultyProxy) -> str:
    return f"{proxy.url}/{ACCOUNT_NAME}"


def storage_for(fault: WireFault, root: str, server: AzureServer, client: str, **options: str) -> Storage:
    """A storage with a short time-out only where the fault is a wait: a slow machine must not look like one."""
    timeout_s = READ_TIMEOUT_S if fault.action in ("hold_request", "delay_answer") else PATIENCE_S
    return bare(root, server, client, read_timeout_seconds=str(timeout_s), **options)


def bare(root: str, server: AzureServer, client: str, **options: str) -> Storage:
    """The storage itself, without the retries around it."""
    given = {
        **server.storage_options,
        "client": client,
        "connect_timeout_seconds": str(PATIENCE_S),
        "read_timeout_seconds": str(PATIENCE_S),
        **options,
    }
    storage = open_storage(root, {name: value for name, value in given.items() if value})
    assert isinstance(storage, RetryStorage)
    return storage.inner


def outcome(call: Callable[[], Any]) -> tuple[Outcome, Any]:
    try:
        found = call()
    except StorageError as error:
        assert_clear(error)
        return type(error), error
    if isinstance(found, dict) and found:  # a batch reports failures by file
        assert set(found) == {"f", "g"}
        return type(found["f"]), found["f"]
    return None, found


def assert_clear(error: Exception, *secrets: str) -> None:
    message = str(error)
    assert message
    assert "\n" not in message
    assert error.__cause__ is None
    for hidden in (*secrets, "SharedKey", "sig=", "<Error>", "<?xml"):
        assert hidden not in message


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_fault(azurite: AzureServer, proxy: FaultyProxy, client: str, root: str, name: str) -> None:
    operation = OPERATIONS[name]
    storages = {
        action: storage_for(fault, root, azurite, client, endpoint=through(proxy))
        for action, fault in (("other", wire.drop_request()), ("wait", wire.hold_request()))
    }
    for storage in storages.values():
        assert not RetryStorage(storage).exists("f")  # loads the client, which takes longer than any request
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            azurite.delete_all(root)
            for path in ("f", "g"):
                azurite.put(root, path, BODY)
        expected = when_changing if operation.changes_files else when_reading
        if expected is ThrottledError and operation.method == "HEAD":
            expected = TransientError  # without a body, nothing says why
        if fault_name == "body cut" and name in NO_BODY:
            expected = None
        storage = storages["wait" if fault.action in ("hold_request", "delay_answer") else "other"]
        proxy.begin(fault)
        started = time.monotonic()
        kind, found = outcome(functools.partial(operation.call, storage))
        assert kind is expected, (fault_name, found)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert [exchange.method for exchange in proxy.log] == [operation.method], (fault_name, "sent once")
        proxy.release()
        proxy.begin()
        if name == "create":
            was_sent = fault.action not in ("drop_request", "answer") or fault.is_forwarded
            assert ("new" in azurite.names(root)) == was_sent, fault_name
        if name != "delete_batch":  # on a connection that was closed unannounced, a retry may be due
            assert RetryStorage(storage).read("g") == BODY, "the next request gets its own answer"


@pytest.mark.parametrize("size_bytes", [0, 1 << 20, 9 << 20])
def test_a_create_is_one_conditional_request_at_any_size(
    azurite: AzureServer, proxy: FaultyProxy, client: str, root: str, size_bytes: int
) -> None:
    storage = bare(root, azurite, client, endpoint=through(proxy))
    storage.create("new", bytes(size_bytes))
    (exchange,) = proxy.log
    assert (exchange.method, exchange.request_body_bytes, "comp=" in exchange.query) == ("PUT", size_bytes, False)
    assert {name.lower(): text for name, text in exchange.headers.items()}["if-none-match"] == "*"


def test_a_list_is_whole_or_raises(
    azurite: AzureServer, proxy: FaultyProxy, client: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first page is left to the retries around the storage; a later one only the storage can ask for again."""
    monkeypatch.setattr(blob_storage, "MAX_NAMES_PER_PAGE", 5)
    everything = [f"{number:02}" for number in range(8)]
    for path in everything:
        azurite.put(root, path, b"x")
    for name in ("request dropped", "answer dropped", "head cut", "body cut", "500", "503", "403"):
        fault, expected, _ = FAULTS[name]
        storage = storage_for(fault, root, azurite, client, endpoint=through(proxy))
        is_passing = expected in (TransientError, ThrottledError)
        for page, tried in ((1, RetryStorage(storage, base_delay_seconds=0.001)), (2, storage)):
            proxy.begin(replace(fault, at=page))
            kind, found = outcome(lambda tried=tried: [info.path for info in tried.list()])  # type: ignore[misc]
            assert proxy.log[page - 1].fault is not None
            if is_passing:
                assert (kind, found) == (None, everything), (name, page)
                assert len(proxy.log) == 3, (name, page)
            else:
                assert kind is expected, (name, page, found)
                assert len(proxy.log) == page, (name, page)


def test_the_clock(azurite: AzureServer, proxy: FaultyProxy, client: str, root: str) -> None:
    for name in ("answer dropped", "head cut", "500", "403"):
        fault, expected, _ = FAULTS[name]
        storage = bare(root, azurite, client, endpoint=through(proxy))
        proxy.begin(fault)
        kind, found = outcome(storage.now_ms)
        assert kind is expected, (name, found)
        assert len(proxy.log) == 1
        assert abs(storage.now_ms() - time.time() * 1000) < 5_000


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_container_and_credentials(azurite: AzureServer, client: str, root: str, name: str) -> None:
    call = OPERATIONS[name].call
    no_container = bare("az://no-such-container/lake/", azurite, client)
    kind, error = outcome(lambda: call(no_container))
    # obstore shows no header of an answer to HEAD, which has no body either.
    if (client, name) == ("obstore", "stat"):
        assert not no_container.exists("f")
    else:
        assert kind is StorageError, error
        assert "container 'no-such-container' does not exist" in str(error)
    wrong_key = base64.b64encode(b"a wrong key of this test").decode()
    wrong: list[dict[str, str]] = [
        {"account_key": wrong_key},
        {"account_key": "", "sas_token": "sv=2024-11-04&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00:00:00Z&sig=d3Jvbmc%3D"},
    ]
    for options in wrong:
        kind, error = outcome(lambda options=options: call(bare(root, azurite, client, **options)))  # type: ignore[misc]
        assert kind is StoragePermissionError, (options, error)
        assert_clear(error, *filter(None, options.values()), azurite.account_key, "d3Jvbmc")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_closed_port(azurite: AzureServer, client: str, root: str, name: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}/{ACCOUNT_NAME}"
        storage = bare(root, azurite, client, endpoint=endpoint)
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(storage))
    assert kind is UnreachableError, "nothing was sent"
    assert endpoint in str(error)
    assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_never_answers(azurite: AzureServer, client: str, root: str, name: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/{ACCOUNT_NAME}"
        storage = bare(root, azurite, client, endpoint=endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(storage))
        elapsed_s = time.monotonic() - started
    assert kind is (AmbiguousWriteError if OPERATIONS[name].changes_files else TransientError)
    assert endpoint in str(error)
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < PATIENCE_S
