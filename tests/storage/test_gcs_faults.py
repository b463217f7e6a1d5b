"""Each operation on Google Cloud Storage meets each fault on the wire, without retries around it.

S7: an error says whether the request certainly had no effect, or may have had one. A read or list never returns a
part. Nothing repeats a request by itself: a repeated create would meet its own file. The emulator refuses nobody and
is never too busy, so such answers come from the proxy.
"""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.gcs import GcsServer
from tests.servers.plugin import SERVER_RUN
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage

BODY = bytes(range(256)) * 400
READ_TIMEOUT_S = 0.3
PATIENCE_S = 20.0
N_MANY = 1_005  # two pages
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
    "stat": Operation(lambda storage: storage.stat("f"), "GET"),
    "list": Operation(lambda storage: sorted(info.path for info in storage.list()), "GET"),
    "create": Operation(lambda storage: storage.create("new", BODY), "POST", True),
    "write": Operation(lambda storage: storage.write("new", BODY), "POST", True),
    "delete": Operation(lambda storage: storage.delete("f"), "DELETE", True),
    "delete_batch": Operation(lambda storage: storage.delete_batch(["f", "g"]), "POST", True),
}


def refusal(status: int, reason: str, message: str = "as the test says") -> bytes:
    details = [{"domain": "global", "reason": reason, "message": message}]
    return json.dumps({"error": {"code": status, "message": message, "errors": details}}).encode()


def told(status: int, reason: str) -> WireFault:
    return wire.answer(status=status, document=refusal(status, reason))


#: Fault -> what a reading operation raises, what a changing one does.
FAULTS: dict[str, tuple[WireFault, Outcome, Outcome]] = {
    "request dropped": (wire.drop_request(), TransientError, AmbiguousWriteError),
    "answer dropped": (wire.drop_answer(), TransientError, AmbiguousWriteError),
    "request held back": (wire.hold_request(), TransientError, AmbiguousWriteError),
    "answer late": (wire.delay_answer(seconds=2 * READ_TIMEOUT_S), TransientError, AmbiguousWriteError),
    "head cut": (wire.cut_head(), TransientError, AmbiguousWriteError),
    "body cut": (wire.cut_body(), TransientError, AmbiguousWriteError),
    "500": (told(500, "internalError"), TransientError, AmbiguousWriteError),
    "500 empty": (wire.answer(status=500), TransientError, AmbiguousWriteError),
    "503 after the effect": (
        wire.answer(status=503, document=refusal(503, "backendError"), is_forwarded=True),
        TransientError,
        AmbiguousWriteError,
    ),
    "504 empty": (wire.answer(status=504, is_forwarded=True), TransientError, AmbiguousWriteError),
    "408": (told(408, "uploadBrokenConnection"), TransientError, AmbiguousWriteError),
    "429": (told(429, "rateLimitExceeded"), ThrottledError, ThrottledError),
    "429 empty": (wire.answer(status=429), ThrottledError, AmbiguousWriteError),
    "403 slower": (told(403, "userRateLimitExceeded"), ThrottledError, ThrottledError),
    "403 full": (told(403, "quotaExceeded"), StorageFullError, StorageFullError),
    "403": (told(403, "forbidden"), StoragePermissionError, StoragePermissionError),
    "403 held": (told(403, "retentionPolicyNotMet"), StoragePermissionError, StoragePermissionError),
    "401": (told(401, "authError"), StoragePermissionError, StoragePermissionError),
    "409": (told(409, "conflict"), TransientError, TransientError),
    "409 empty": (wire.answer(status=409), TransientError, AmbiguousWriteError),
    "400 who pays": (told(400, "userProjectMissing"), StoragePermissionError, StoragePermissionError),
    "400": (told(400, "invalid"), StorageError, StorageError),
    "413": (told(413, "uploadTooLarge"), StorageError, StorageError),
    "501": (wire.answer(status=501), StorageError, StorageError),
    "302": (wire.answer(status=302), StorageError, StorageError),
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> GcsServer:
    found: GcsServer = request.config.stash[SERVER_RUN].server("fake_gcs")
    return found


@pytest.fixture
def proxy(server: GcsServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.endpoint) as running:
        yield running


@pytest.fixture
def root(server: GcsServer) -> Iterator[str]:
    made = server.fresh_root()
    yield made
    server.delete_all(made)


def bare(root: str, endpoint: str, **options: str) -> Storage:
    """The storage itself, without the retries around it."""
    given = {
        "endpoint": endpoint,
        "credentials": "anonymous",
        "connect_timeout_seconds": str(PATIENCE_S),
        "read_timeout_seconds": str(PATIENCE_S),
        **options,
    }
    storage = open_storage(root, given)
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
    assert len(message) < 600
    for hidden in (*secrets, "Bearer", '{"error"', "<"):
        assert hidden not in message


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_fault(server: GcsServer, proxy: FaultyProxy, root: str, name: str) -> None:
    operation = OPERATIONS[name]
    waits = ("hold_request", "delay_answer")
    patient = bare(root, proxy.url)
    # A short time-out only where the fault is a wait: a slow machine must not look like one.
    hasty = bare(root, proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            server.delete_all(root)
            for path in ("f", "g"):
                server.put(root, path, BODY)
        expected = when_changing if operation.changes_files else when_reading
        storage = hasty if fault.action in waits else patient
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
            assert ("new" in server.names(root)) == was_sent, fault_name
        if name != "delete_batch":  # on a connection that was closed unannounced, a retry may be due
            assert RetryStorage(patient).read("g") == BODY, "the next request gets its own answer"


def test_a_create_is_one_conditional_upload_of_any_size(server: GcsServer, proxy: FaultyProxy, root: str) -> None:
    storage = bare(root, proxy.url)
    for size_bytes in (0, 1, 9 << 20, 60 << 20):  # gcsfs itself makes a resumable upload from 50 MiB on
        proxy.begin()
        storage.create(f"{size_bytes}", b"x" * size_bytes)
        with pytest.raises(FileExistsAlreadyError):
            storage.create(f"{size_bytes}", b"y")
        storage.write(f"{size_bytes}", b"z")
        assert [exchange.status for exchange in proxy.log] == [200, 412, 200]
        for exchange in proxy.log:
            assert "uploadType=multipart" in exchange.query
        assert ["ifGenerationMatch=0" in exchange.query for exchange in proxy.log] == [True, True, False]
        assert server.metadata(root, f"{size_bytes}")["size"] == "1"


def test_objects_of_public_buckets_are_not_cached(server: GcsServer, root: str) -> None:
    bare(root, server.endpoint).create("f", BODY)
    assert server.metadata(root, "f")["cacheControl"] == "no-store"


def test_no_content_ends_an_upload_early(server: GcsServer, root: str) -> None:
    storage = bare(root, server.endpoint)
    for number, data in enumerate((b"\r\n--==0==--", b"\n--==0==\n\n", b"--\r\n--\r\n\r\n", b"\r\n", b"\r\n--")):
        storage.create(str(number), data)
        assert storage.read(str(number)) == data


def test_a_lost_answer_is_told_and_not_repeated_by_the_retries(
    server: GcsServer, proxy: FaultyProxy, root: str
) -> None:
    storage = RetryStorage(bare(root, proxy.url), base_delay_seconds=0.001)
    proxy.begin(wire.drop_answer())
    with pytest.raises(AmbiguousWriteError, match="read the name to see"):
        storage.create("new", BODY)
    assert len(proxy.log) == 1
    assert storage.read("new") == BODY
    proxy.begin(told(429, "rateLimitExceeded"))
    storage.create("other", BODY)
    assert [exchange.status for exchange in proxy.log] == [429, 200]
    proxy.begin(wire.drop_answer(times=2))
    storage.write("new", b"z")
    assert len(proxy.log) == 3


@pytest.fixture(scope="module")
def many(server: GcsServer) -> Iterator[str]:
    """A root with more files than one page of a listing holds."""
    root = server.fresh_root()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: server.put(root, f"{number:04}", b"x"), range(N_MANY)))
    yield root
    server.delete_all(root)


def test_a_list_is_whole_or_raises(proxy: FaultyProxy, many: str) -> None:
    """The first page is left to the retries around the storage; a later one only the storage can ask for again."""
    everything = [f"{number:04}" for number in range(N_MANY)]
    storage = bare(many, proxy.url)
    for name in ("request dropped", "answer dropped", "head cut", "body cut", "500", "429", "403"):
        fault, expected, _ = FAULTS[name]
        is_passing = expected in (TransientError, ThrottledError)
        for page, tried in ((1, RetryStorage(storage, base_delay_seconds=0.001)), (2, storage)):
            proxy.begin(replace(fault, at=page))
            kind, found = outcome(lambda tried=tried: [info.path for info in tried.list()])  # type: ignore[misc]
            if is_passing:
                assert (kind, found) == (None, everything), (name, page)
                assert len(proxy.log) == 3, (name, page)
            else:
                assert kind is expected, (name, page, found)
                assert len(proxy.log) == page, (name, page)


def test_the_clock(proxy: FaultyProxy, root: str) -> None:
    for name in ("answer dropped", "head cut", "500", "403"):
        fault, expected, _ = FAULTS[name]
        storage = bare(root, proxy.url)
        proxy.begin(fault)
        kind, found = outcome(storage.now_ms)
        assert kind is expected, (name, found)
        assert len(proxy.log) == 1
        assert abs(storage.now_ms() - time.time() * 1000) < 5_000


def test_a_missing_bucket(server: GcsServer) -> None:
    storage = bare("gs://no-such-bucket-of-mine/lake/", server.endpoint)
    for name in ("list", "create", "write"):
        kind, error = outcome(lambda name=name: OPERATIONS[name].call(storage))  # type: ignore[misc]
        assert kind is StorageError
        assert "bucket 'no-such-bucket-of-mine' does not exist" in str(error)
    # The emulator says "Not Found" of both; the service names the bucket.
    with pytest.raises(FileMissingError):
        storage.read("f")


def test_a_missing_bucket_as_the_service_tells_it(proxy: FaultyProxy, root: str) -> None:
    gone = "The specified bucket does not exist."
    for document in (refusal(404, "notFound", gone), gone.encode()):  # a download is refused by plain text
        for name in ("read", "stat", "delete"):
            proxy.begin(wire.answer(status=404, document=document))
            kind, error = outcome(lambda name=name: OPERATIONS[name].call(bare(root, proxy.url)))  # type: ignore[misc]
            assert kind is StorageError
            assert "bucket 'tests' does not exist" in str(error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_closed_port(root: str, name: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(bare(root, endpoint)))
    assert kind is UnreachableError, "nothing was sent"
    assert endpoint in str(error)
    assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_never_answers(root: str, name: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        storage = bare(root, endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(storage))
        elapsed_s = time.monotonic() - started
    assert kind is (AmbiguousWriteError if OPERATIONS[name].changes_files else TransientError)
    assert endpoint in str(error)
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < PATIENCE_S


def test_a_host_that_has_no_address(root: str) -> None:
    with pytest.raises(UnreachableError, match="no connection"):
        bare(root, "http://no-such-host.invalid").read("f")


def test_no_tls(server: GcsServer, root: str) -> None:
    with pytest.raises(StorageError, match="TLS handshake failed"):
        bare(root, server.endpoint.replace("http://", "https://")).create("f", b"x")
