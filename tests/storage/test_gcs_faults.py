"""Wire faults for each operation on Google Cloud Storage (``wire_faults.py``).

The emulator accepts every client and never throttles requests, so the proxy sends these responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.gcs import GcsServer
from tests.servers.plugin import SERVER_RUN
from tests.storage import wire_faults
from tests.storage.wire_faults import (
    BODY,
    LONG_TIMEOUTS,
    UNKNOWN_OUTCOME,
    FaultCase,
    ProxiedStorage,
    check_clock,
    check_closed_port,
    check_silent_server,
    faults_of_any_server,
    outcome,
    was_sent,
)
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
from trinitylake_ops.storage.conditional_create import create_fresh

pytestmark = pytest.mark.usefixtures("fixed_requests")

READ_TIMEOUT_S = 0.3
N_FILES = 1_005  # two pages
HIDDEN = ("Bearer", '{"error"', "<")
OPERATIONS = wire_faults.operations(stat_method="GET", write_method="POST")


def error_document(status: int, reason: str, message: str = "injected") -> bytes:
    details = [{"domain": "global", "reason": reason, "message": message}]
    return json.dumps({"error": {"code": status, "message": message, "errors": details}}).encode()


def error_response(status: int, reason: str) -> WireFault:
    return wire.respond(status=status, document=error_document(status, reason))


FAULTS: dict[str, FaultCase] = {
    **faults_of_any_server(READ_TIMEOUT_S),
    "500": (error_response(500, "internalError"), *UNKNOWN_OUTCOME),
    "503 after the effect": (
        wire.respond(status=503, document=error_document(503, "backendError"), is_forwarded=True),
        *UNKNOWN_OUTCOME,
    ),
    "408": (error_response(408, "uploadBrokenConnection"), *UNKNOWN_OUTCOME),
    "429": (error_response(429, "rateLimitExceeded"), ThrottledError, ThrottledError),
    "429 empty": (wire.respond(status=429), ThrottledError, AmbiguousWriteError),
    "403 throttled": (error_response(403, "userRateLimitExceeded"), ThrottledError, ThrottledError),
    "403 full": (error_response(403, "quotaExceeded"), StorageFullError, StorageFullError),
    "403": (error_response(403, "forbidden"), StoragePermissionError, StoragePermissionError),
    "403 retained": (error_response(403, "retentionPolicyNotMet"), StoragePermissionError, StoragePermissionError),
    "401": (error_response(401, "authError"), StoragePermissionError, StoragePermissionError),
    "409": (error_response(409, "conflict"), TransientError, TransientError),
    "409 empty": (wire.respond(status=409), *UNKNOWN_OUTCOME),
    "400 no billing project": (
        error_response(400, "userProjectMissing"),
        StoragePermissionError,
        StoragePermissionError,
    ),
    "400": (error_response(400, "invalid"), StorageError, StorageError),
    "413": (error_response(413, "uploadTooLarge"), StorageError, StorageError),
    "501": (wire.respond(status=501), StorageError, StorageError),
    "302": (wire.respond(status=302), StorageError, StorageError),
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> GcsServer:
    result: GcsServer = request.config.stash[SERVER_RUN].server("fake_gcs")
    return result


@pytest.fixture
def proxy(server: GcsServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.endpoint) as faulty_proxy:
        yield faulty_proxy


@pytest.fixture
def root(server: GcsServer) -> Iterator[str]:
    new_root = server.fresh_root()
    yield new_root
    server.delete_all(new_root)


def bare_storage(root: str, endpoint: str, **options: str) -> Storage:
    """Return the storage without its retries."""
    storage_options = {
        "endpoint": endpoint,
        "credentials": "anonymous",
        **LONG_TIMEOUTS,
        **options,
    }
    storage = open_storage(root, storage_options)
    assert isinstance(storage, RetryStorage)
    return storage.inner


def proxied_storage(root: str, proxy: FaultyProxy) -> ProxiedStorage:
    short_timeout_storage = bare_storage(root, proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    return ProxiedStorage(proxy, bare_storage(root, proxy.url), short_timeout_storage, HIDDEN)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(
    server: GcsServer, proxy: FaultyProxy, root: str, name: str
) -> None:
    operation, proxied = OPERATIONS[name], proxied_storage(root, proxy)
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            server.delete_all(root)
            for path in ("f", "g"):
                server.put(root, path, BODY)
        proxied.check_fault(fault, operation, when_changing if operation.changes_files else when_reading)
        if name == "create":
            assert ("new" in server.names(root)) == was_sent(fault), fault_name
        if name != "delete_batch":  # may need a retry, on a connection that the server closed without notice
            assert RetryStorage(proxied.long_timeout_storage).read("g") == BODY, (
                "the next request receives its own response"
            )


def test_create_sends_one_conditional_upload_for_any_size(server: GcsServer, proxy: FaultyProxy, root: str) -> None:
    storage = bare_storage(root, proxy.url)
    for size_bytes in (0, 1, 9 << 20, 60 << 20):  # gcsfs itself would use resumable uploads from 50 MiB on
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
    bare_storage(root, server.endpoint).create("f", BODY)
    assert server.metadata(root, "f")["cacheControl"] == "no-store"


def test_content_cannot_contain_the_upload_boundary(server: GcsServer, root: str) -> None:
    storage = bare_storage(root, server.endpoint)
    for number, data in enumerate((b"\r\n--==0==--", b"\n--==0==\n\n", b"--\r\n--\r\n\r\n", b"\r\n", b"\r\n--")):
        storage.create(str(number), data)
        assert storage.read(str(number)) == data


def test_create_with_a_lost_response_is_ambiguous_and_not_retried(
    server: GcsServer, proxy: FaultyProxy, root: str
) -> None:
    storage = RetryStorage(bare_storage(root, proxy.url), base_delay_seconds=0.001)
    proxy.begin(wire.drop_response())
    with pytest.raises(AmbiguousWriteError):
        storage.create("new", BODY)
    assert len(proxy.log) == 1
    assert storage.read("new") == BODY
    proxy.begin(error_response(429, "rateLimitExceeded"))
    create_fresh(storage, {"other": BODY})
    assert [exchange.status for exchange in proxy.log] == [429, 200]
    proxy.begin(wire.drop_response(times=2))
    storage.write("new", b"z")
    assert len(proxy.log) == 3


@pytest.fixture(scope="module")
def root_with_many_files(server: GcsServer) -> Iterator[str]:
    """A root with more files than fit on one page of a listing."""
    root = server.fresh_root()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: server.put(root, f"{number:04}", b"x"), range(N_FILES)))
    yield root
    server.delete_all(root)


def test_listing_is_complete_or_raises(proxy: FaultyProxy, root_with_many_files: str) -> None:
    proxied = proxied_storage(root_with_many_files, proxy)
    paths = [f"{number:04}" for number in range(N_FILES)]
    for name in ("request dropped", "response dropped", "head truncated", "body truncated", "500", "429", "403"):
        proxied.check_list(FAULTS[name], paths)


def test_server_time_is_requested_once_and_again_after_a_fault(proxy: FaultyProxy, root: str) -> None:
    for name in ("response dropped", "head truncated", "500", "403"):
        check_clock(bare_storage(root, proxy.url), proxy, FAULTS[name], HIDDEN)


def test_missing_bucket_is_reported(server: GcsServer) -> None:
    storage = bare_storage("gs://no-such-bucket-of-mine/lake/", server.endpoint)
    for name in ("list", "create", "write"):
        error_type, error = outcome(lambda name=name: OPERATIONS[name].call(storage), HIDDEN)  # type: ignore[misc]
        assert error_type is StorageError
        assert "bucket 'no-such-bucket-of-mine' does not exist" in str(error)
    # The emulator responds "Not Found" to any missing name. The service names the missing bucket.
    with pytest.raises(FileMissingError):
        storage.read("f")


def test_missing_bucket_of_the_service_is_reported(proxy: FaultyProxy, root: str) -> None:
    missing_bucket_message = "The specified bucket does not exist."
    # A rejected download has a plain text body.
    for document in (error_document(404, "notFound", missing_bucket_message), missing_bucket_message.encode()):
        for name in ("read", "stat", "delete"):
            proxy.begin(wire.respond(status=404, document=document))
            call = OPERATIONS[name].call
            error_type, error = outcome(lambda call=call: call(bare_storage(root, proxy.url)), HIDDEN)  # type: ignore[misc]
            assert error_type is StorageError
            assert "bucket 'tests' does not exist" in str(error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(root: str, name: str) -> None:
    check_closed_port(lambda endpoint: bare_storage(root, endpoint), OPERATIONS[name].call, HIDDEN)


@pytest.mark.parametrize("name", OPERATIONS)
def test_silent_server_times_out(root: str, name: str) -> None:
    def open_at(endpoint: str) -> Storage:
        return bare_storage(root, endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))

    check_silent_server(open_at, OPERATIONS[name], READ_TIMEOUT_S, HIDDEN)


def test_unknown_host_is_unreachable(root: str) -> None:
    with pytest.raises(UnreachableError):
        bare_storage(root, "http://no-such-host.invalid").read("f")


def test_failed_tls_handshake_is_reported(server: GcsServer, root: str) -> None:
    with pytest.raises(StorageError):
        bare_storage(root, server.endpoint.replace("http://", "https://")).create("f", b"x")
