"""Wire faults for each operation of both S3 clients (``wire_faults.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy
from tests.servers.plugin import SERVER_RUN
from tests.servers.s3_server import S3Server
from tests.storage import wire_faults
from tests.storage.wire_faults import (
    BODY,
    LONG_TIMEOUTS,
    FaultCase,
    Operation,
    ProxiedStorage,
    assert_stored_if_sent,
    check_clock,
    check_closed_port,
    check_silent_server,
    faults_in_xml,
    faults_of_any_server,
    outcome,
)
from trinitylake_ops.errors import (
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage

pytestmark = pytest.mark.debian_packages

READ_TIMEOUT_S = 0.5
N_FILES = 1_005  # two pages
HIDDEN = ("AWS4-HMAC", "Signature=", "<Error>", "<?xml")
OPERATIONS = {
    **wire_faults.operations(),
    "exists": Operation(lambda storage: storage.exists("f"), "HEAD"),
}
CHANGING_OPERATIONS = [name for name, operation in OPERATIONS.items() if operation.changes_files]
CODES = {
    "error": "InternalError",
    "after the effect": "InternalError",
    "throttled": "SlowDown",
    "denied": "AccessDenied",
}
FAULTS: dict[str, FaultCase] = {
    **faults_of_any_server(READ_TIMEOUT_S),
    **faults_in_xml(CODES),
    "409": (wire.respond(status=409, code="ConditionalRequestConflict"), TransientError, TransientError),
}
#: Operations whose responses have no body to truncate.
WITHOUT_RESPONSE_BODY = {"stat", "exists", "create", "write", "delete"}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.config.stash[SERVER_RUN].server("radosgw")


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.endpoint) as faulty_proxy:
        yield faulty_proxy


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def root(server: S3Server) -> Iterator[str]:
    new_root = server.fresh_root()
    yield new_root
    server.delete_all(new_root)


@pytest.fixture
def proxied(proxy: FaultyProxy, server: S3Server, client: str, root: str) -> ProxiedStorage:
    return proxied_storage(root, proxy, server, client)


def proxied_storage(root: str, proxy: FaultyProxy, server: S3Server, client: str) -> ProxiedStorage:
    long_timeout_storage = bare_storage(root, server, client, endpoint=proxy.url)
    short_timeout_storage = bare_storage(
        root, server, client, endpoint=proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S)
    )
    return ProxiedStorage(proxy, long_timeout_storage, short_timeout_storage, HIDDEN)


def bare_storage(root: str, server: S3Server, client: str, **options: str) -> Storage:
    """Return the storage without its retries."""
    all_options = {
        **server.storage_options,
        "client": client,
        **LONG_TIMEOUTS,
        **options,
    }
    storage = open_storage(root, all_options)
    assert isinstance(storage, RetryStorage)
    return storage.inner


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(
    server: S3Server, proxied: ProxiedStorage, root: str, name: str
) -> None:
    operation = OPERATIONS[name]
    for storage in (proxied.long_timeout_storage, proxied.short_timeout_storage):
        assert not RetryStorage(storage).exists("f")  # loads the client, which is slower than any request
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        server.delete_all(root)
        for path in ("f", "g"):
            _put(server, root, path)
        expected = when_changing if operation.changes_files else when_reading
        if expected is ThrottledError and operation.method == "HEAD":
            expected = TransientError  # without a body, the response has no error code
        if fault_name == "body truncated" and name in WITHOUT_RESPONSE_BODY:
            expected = None
        proxied.check_fault(fault, operation, expected)
        if name == "create":
            assert_stored_if_sent(lambda: _is_stored(server, root, "new"), fault, fault_name)
        if name != "delete_batch":  # may need a retry, on a connection that the server closed without notice
            retrying_storage = RetryStorage(proxied.storage(fault))
            assert retrying_storage.read("g") == BODY, "the next request receives its own response"


def _is_stored(server: S3Server, root: str, path: str) -> bool:
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    result = server.client.list_objects_v2(Bucket=bucket, Prefix=prefix + path)
    return bool(result["KeyCount"] == 1)


def _put(server: S3Server, root: str, path: str) -> None:
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    server.client.put_object(Bucket=bucket, Key=prefix + path, Body=BODY)


@pytest.fixture(scope="module")
def root_with_many_files(server: S3Server) -> Iterator[str]:
    """A root with more files than fit on one page of a listing."""
    root = server.fresh_root()
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    with ThreadPoolExecutor(8) as pool:
        put = server.client.put_object
        list(pool.map(lambda number: put(Bucket=bucket, Key=f"{prefix}{number:04}", Body=b"x"), range(N_FILES)))
    yield root
    server.delete_all(root)


def test_listing_is_complete_or_raises(
    server: S3Server, proxy: FaultyProxy, client: str, root_with_many_files: str
) -> None:
    proxied = proxied_storage(root_with_many_files, proxy, server, client)
    paths = [f"{number:04}" for number in range(N_FILES)]
    for name in (
        "request dropped",
        "response dropped",
        "request held",
        "head truncated",
        "body truncated",
        "500",
        "503",
        "403",
    ):
        proxied.check_list(FAULTS[name], paths)


def test_server_time_is_requested_once_and_again_after_a_fault(
    server: S3Server, proxy: FaultyProxy, client: str, root: str
) -> None:
    for name in ("response dropped", "head truncated", "500", "403"):
        check_clock(bare_storage(root, server, client, endpoint=proxy.url), proxy, FAULTS[name], HIDDEN)


def test_truncated_reads_are_retried(server: S3Server, proxy: FaultyProxy, client: str, root: str) -> None:
    _put(server, root, "f")
    storage = RetryStorage(bare_storage(root, server, client, endpoint=proxy.url), base_delay_seconds=0.001)
    for fault in (wire.cut_body(times=3), wire.cut_head(times=3), wire.drop_response(times=3)):
        proxy.begin(fault)
        assert storage.read("f") == BODY
        assert [exchange.fault is not None for exchange in proxy.log] == [True, True, True, False]
        proxy.begin(fault)
        assert storage.read("f", offset=100, length=60_000) == BODY[100:60_100]


@pytest.mark.parametrize("name", CHANGING_OPERATIONS)
def test_expired_credentials_are_reported(
    server: S3Server, proxy: FaultyProxy, client: str, root: str, name: str
) -> None:
    token = "session-token-of-this-test"
    storage = bare_storage(root, server, client, endpoint=proxy.url, session_token=token)
    proxy.begin(wire.respond(status=400, code="ExpiredToken", times=None))
    with pytest.raises(StoragePermissionError) as caught:
        OPERATIONS[name].call(storage)
    wire_faults.assert_clear(caught.value, (*HIDDEN, token, server.secret_access_key, server.access_key_id))
    with pytest.raises(StoragePermissionError):
        storage.read("f")
    with pytest.raises(StorageError):  # a response to HEAD has no body with details
        storage.stat("f")


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_bucket_and_credentials_are_reported(server: S3Server, client: str, root: str, name: str) -> None:
    call = OPERATIONS[name].call
    no_bucket = bare_storage("s3://no-such-bucket-of-mine/lake/", server, client)
    if OPERATIONS[name].method == "HEAD":  # without a body, a missing bucket is reported as a missing file
        assert outcome(lambda: no_bucket.exists("f"), HIDDEN) == (None, False)
    else:
        error_type, error = outcome(lambda: call(no_bucket), HIDDEN)
        assert error_type is StorageError
        assert "bucket 'no-such-bucket-of-mine' does not exist" in str(error)
    wrong_credentials: list[dict[str, str]] = [
        {"secret_access_key": "wrong-secret-of-this-test"},
        {"access_key_id": "wrong-key-of-this-test"},
    ]
    for options in wrong_credentials:
        hidden = (*HIDDEN, *options.values(), server.secret_access_key, server.access_key_id)
        error_type, _ = outcome(lambda options=options: call(bare_storage(root, server, client, **options)), hidden)  # type: ignore[misc]
        assert error_type is StoragePermissionError, options


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(server: S3Server, client: str, root: str, name: str) -> None:
    check_closed_port(
        lambda endpoint: bare_storage(root, server, client, endpoint=endpoint), OPERATIONS[name].call, HIDDEN
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_silent_server_times_out(server: S3Server, client: str, root: str, name: str) -> None:
    def open_at(endpoint: str) -> Storage:
        return bare_storage(root, server, client, endpoint=endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))

    check_silent_server(open_at, OPERATIONS[name], READ_TIMEOUT_S, HIDDEN)
