"""Wire faults for each operation on DynamoDB, without retries (S7).

Each error distinguishes requests that certainly had no effect from requests that may have had one. A read or list never
returns a partial result. No request is sent twice, because a resent create would conflict with its own item.
"""

from __future__ import annotations

import functools
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.dynalite import DynamoDBServer, error_response_body
from tests.storage.wire_faults import (
    BODY,
    LONG_TIMEOUT_S,
    LONG_TIMEOUTS,
    UNKNOWN_OUTCOME,
    FaultCase,
    assert_stored_if_sent,
    check_clock,
    check_closed_port,
    faults_of_any_server,
    is_delay,
    outcome,
)
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage import RetryStorage, Storage, retry
from trinitylake_ops.storage.dynamodb import items
from trinitylake_ops.storage.dynamodb.storage import DynamoDBStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

LARGE = bytes(range(256)) * 4 * 1024  # three parts
READ_TIMEOUT_S = 0.5
SECRET, TOKEN = "secret-of-this-test", "session-token-of-this-test"
HIDDEN = (SECRET, TOKEN, "AWS4-HMAC", "Signature=", "__type")


@dataclass(frozen=True)
class Operation:
    """A call of the storage, its requests, the number of the request with the fault, and whether that changes files."""

    call: Callable[[Storage], Any]
    requests: tuple[str, ...]
    faulty_request: int = 1
    changes_files: bool = False


OPERATIONS = {
    "read": Operation(lambda storage: storage.read("f"), ("GetItem",)),
    "read of a range": Operation(lambda storage: storage.read("f", offset=7, length=50_000), ("GetItem",)),
    "stat": Operation(lambda storage: storage.stat("f"), ("GetItem",)),
    "exists": Operation(lambda storage: storage.exists("f"), ("GetItem",)),
    "list": Operation(lambda storage: list(storage.list()), ("Query",)),
    "create": Operation(lambda storage: storage.create("new", BODY), ("PutItem",), changes_files=True),
    "write": Operation(lambda storage: storage.write("new", BODY), ("PutItem",), changes_files=True),
    "delete": Operation(lambda storage: storage.delete("f"), ("DeleteItem",), changes_files=True),
    "delete_batch, read": Operation(
        lambda storage: storage.delete_batch(["f", "g"]), ("BatchGetItem", "BatchWriteItem")
    ),
    "delete_batch": Operation(
        lambda storage: storage.delete_batch(["f", "g"]), ("BatchGetItem", "BatchWriteItem"), 2, changes_files=True
    ),
}


def rejection(code: str, status: int = 400, message: str = "injected", **where: Any) -> WireFault:
    return wire.respond(status=status, document=error_response_body(code, message), **where)


#: Faults with the errors of operations that read and of operations that change files.
FAULTS: dict[str, FaultCase] = {
    **faults_of_any_server(READ_TIMEOUT_S),
    "200 of another server": (wire.respond(status=200), *UNKNOWN_OUTCOME),
    "500": (rejection("InternalServerError", 500), *UNKNOWN_OUTCOME),
    "503 empty": (wire.respond(status=503), *UNKNOWN_OUTCOME),
    "capacity exceeded": (rejection("ProvisionedThroughputExceededException"), ThrottledError, ThrottledError),
    "account capacity exceeded": (rejection("RequestLimitExceeded"), ThrottledError, ThrottledError),
    "throttled": (rejection("ThrottlingException"), ThrottledError, ThrottledError),
    "collection full": (rejection("ItemCollectionSizeLimitExceededException"), StorageFullError, StorageFullError),
    "conflict": (rejection("TransactionConflictException"), TransientError, TransientError),
    "denied": (rejection("AccessDeniedException"), StoragePermissionError, StoragePermissionError),
    "wrong key id": (rejection("UnrecognizedClientException"), StoragePermissionError, StoragePermissionError),
    "wrong secret": (rejection("InvalidSignatureException"), StoragePermissionError, StoragePermissionError),
    "expired token": (rejection("ExpiredTokenException"), StoragePermissionError, StoragePermissionError),
    "403 empty": (wire.respond(status=403), StoragePermissionError, StoragePermissionError),
    "missing table": (rejection("ResourceNotFoundException"), StorageError, StorageError),
    "404 of another server": (wire.respond(status=404), StorageError, StorageError),
}
#: Operations that share code with other operations run with one fault of each kind, and without timeouts.
SIMILAR_OPERATIONS = {"read of a range", "stat", "exists", "write", "delete_batch, read"}
REPRESENTATIVE_FAULTS = {
    "request dropped",
    "response dropped",
    "body truncated",
    "500",
    "throttled",
    "denied",
    "missing table",
}


@pytest.fixture
def proxy(dynalite: DynamoDBServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(dynalite.endpoint) as faulty_proxy:
        yield faulty_proxy


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries of the storage."""
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def root(dynalite: DynamoDBServer) -> Iterator[str]:
    new_root = dynalite.fresh_root()
    yield new_root
    dynalite.delete_all(new_root)


def bare_storage(root: str, server: DynamoDBServer, **options: str) -> DynamoDBStorage:
    """Return the storage without its retries, and with no sweep due."""
    storage = DynamoDBStorage(root, {**server.storage_options, **LONG_TIMEOUTS, **options})
    storage.next_sweep_s = math.inf
    return storage


def request_types(proxy: FaultyProxy) -> tuple[str, ...]:
    """Return the operations that reached the proxy."""
    return tuple(exchange.headers["x-amz-target"].rpartition(".")[2] for exchange in proxy.log)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str
) -> None:
    operation, direct_storage = OPERATIONS[name], bare_storage(root, dynalite)
    common_options = {"endpoint": proxy.url, "secret_access_key": SECRET, "session_token": TOKEN}
    long_timeout_storage = bare_storage(root, dynalite, **common_options)
    short_timeout_storage = bare_storage(root, dynalite, **common_options, read_timeout_seconds=str(READ_TIMEOUT_S))
    for storage in (long_timeout_storage, short_timeout_storage):
        assert not RetryStorage(storage).exists("f")  # loads the client and reads the clock
    direct_storage.write("other", b"data")
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if name in SIMILAR_OPERATIONS and fault_name not in REPRESENTATIVE_FAULTS:
            continue
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            direct_storage.delete("new")
            for path in ("f", "g"):
                direct_storage.write(path, BODY)
        storage = short_timeout_storage if is_delay(fault) else long_timeout_storage
        proxy.begin(replace(fault, at=operation.faulty_request))
        started = time.monotonic()
        error_type, result = outcome(functools.partial(operation.call, storage), HIDDEN)
        assert error_type is (when_changing if operation.changes_files else when_reading), (fault_name, result)
        assert time.monotonic() - started < LONG_TIMEOUT_S / 2
        assert request_types(proxy) == operation.requests[: operation.faulty_request], (
            fault_name,
            "the request is sent once",
        )
        proxy.release()
        if name == "create":
            assert_stored_if_sent(functools.partial(direct_storage.exists, "new"), fault, fault_name)
        proxy.begin()
        assert RetryStorage(storage).stat("other").size_bytes == 4, "the next request receives its own response"


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("fault", [wire.drop_response(), wire.drop_request(), rejection("ThrottlingException")])
def test_parts_are_resent(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, at: int, fault: WireFault) -> None:
    storage = bare_storage(root, dynalite, endpoint=proxy.url)
    assert not storage.exists("large")
    proxy.begin(replace(fault, at=at))
    storage.create("large", LARGE)
    assert request_types(proxy) == ("PutItem",) * 6, "a record, three parts and the item, one of which is resent"
    for number in (2, 3, 4):  # the first request reads the item, which only the retries around the storage resend
        proxy.begin(replace(fault, at=number))
        assert storage.read("large") == LARGE
        assert request_types(proxy) == ("GetItem",) * 5
    storage.delete("large")
    assert dynalite.item_keys(root) == []


def test_rejected_large_create_leaves_no_part(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    storage = bare_storage(root, dynalite, endpoint=proxy.url)
    storage.create("large", LARGE)
    keys = dynalite.item_keys(root)
    with pytest.raises(FileExistsAlreadyError):
        storage.create("large", b"other" * len(LARGE))
    for fault in (rejection("AccessDeniedException"), rejection("ThrottlingException")):
        proxy.begin(replace(fault, at=5))
        with pytest.raises((StoragePermissionError, ThrottledError)):
            storage.write("large", LARGE[1:])
    assert dynalite.item_keys(root) == keys
    assert storage.read("large") == LARGE


def test_large_create_with_a_lost_response(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    """The file is either complete or missing, and its parts remain until it is known which."""
    storage = bare_storage(root, dynalite, endpoint=proxy.url)
    assert not storage.exists("large")
    proxy.begin(wire.drop_response(5))
    with pytest.raises(AmbiguousWriteError):
        storage.create("large", LARGE)
    assert storage.read("large") == LARGE
    with pytest.raises(FileExistsAlreadyError):
        storage.create("large", LARGE)
    proxy.begin(wire.drop_request(5))
    with pytest.raises(AmbiguousWriteError):
        storage.create("other", LARGE)
    assert not storage.exists("other")
    assert [info.path for info in storage.list()] == ["large"]


@pytest.mark.parametrize(
    "name", ["request dropped", "response dropped", "head truncated", "body truncated", "500", "throttled"]
)
def test_second_page_of_a_listing_is_resent(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str) -> None:
    storage = bare_storage(root, dynalite, endpoint=proxy.url)
    paths = [f"{number:02}" for number in range(7)]
    storage.create_many(dict.fromkeys(paths, b"x" * 300_000))  # a page contains up to 1 MB
    proxy.begin(replace(FAULTS[name][0], at=2))
    assert [info.path for info in storage.list()] == paths
    assert request_types(proxy) == ("Query",) * 3, "two pages, one of which is requested again"
    proxy.begin(replace(FAULTS["denied"][0], at=2))
    with pytest.raises(StoragePermissionError):
        list(storage.list())


def test_server_time_is_requested_once_and_again_after_a_fault(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str
) -> None:
    for name in ("response dropped", "head truncated", "500", "throttled"):
        check_clock(bare_storage(root, dynalite, endpoint=proxy.url), proxy, FAULTS[name], HIDDEN)
        assert set(request_types(proxy)) == {"GetItem"}


def test_failed_reads_are_retried(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    storage = RetryStorage(bare_storage(root, dynalite, endpoint=proxy.url), base_delay_seconds=0.001)
    storage.create("f", BODY)
    for fault in (wire.cut_body(times=3), wire.cut_head(times=3), wire.drop_response(times=3)):
        proxy.begin(fault)
        assert storage.read("f") == BODY
        assert [exchange.fault is not None for exchange in proxy.log] == [True, True, True, False]


TOO_MANY_CHANGES = "Subscriber limit exceeded: Only 10 tables can be created, updated, or deleted simultaneously"
TOO_MANY_TABLES = "Subscriber limit exceeded: There is a limit of 256 tables per subscriber"


@pytest.mark.parametrize(
    ("message", "error_type"), [(TOO_MANY_CHANGES, ThrottledError), (TOO_MANY_TABLES, StorageFullError)]
)
def test_exceeded_table_quota_maps_to_its_error(
    dynalite: DynamoDBServer, proxy: FaultyProxy, message: str, error_type: type[StorageError]
) -> None:
    table = f"never-{uuid.uuid4().hex}"
    storage = bare_storage(f"dynamodb://{table}/lake/", dynalite, endpoint=proxy.url, create_table="true")
    proxy.begin(rejection("LimitExceededException", message=message, at=3))
    with pytest.raises(error_type) as caught:
        storage.create("f", BODY)
    assert type(caught.value) is error_type
    assert request_types(proxy) == ("GetItem", "PutItem", "CreateTable"), "the first request reads the server time"


THROTTLING_CODES = ("ProvisionedThroughputExceededException", "RequestLimitExceeded", "ThrottlingException")


@pytest.mark.parametrize("code", THROTTLING_CODES)
def test_throttled_commit_is_retried(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary rejections only delay a commit. If they continue, the commit fails and has no visible effect."""
    storage = RetryStorage(bare_storage(root, dynalite, endpoint=proxy.url), sleep=lambda seconds: None)
    lake = Lakehouse.create(root, storage=storage)
    proxy.begin(rejection(code, times=4))
    with lake.transaction() as txn:
        txn.create_namespace("late")
    assert lake.latest_version() == 1
    txn = lake.transaction()
    txn.create_namespace("never")
    proxy.begin(rejection(code, times=None))
    with pytest.raises(ThrottledError, match=code):
        txn.commit()
    proxy.begin()
    lake = Lakehouse.open(root, dynalite.storage_options)
    assert (lake.latest_version(), lake.snapshot().namespaces()) == (1, ["late"])
    assert operations.verify(lake).findings == ()


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(dynalite: DynamoDBServer, root: str, name: str) -> None:
    check_closed_port(lambda endpoint: bare_storage(root, dynalite, endpoint=endpoint), OPERATIONS[name].call, HIDDEN)


@pytest.mark.parametrize("name", ["read", "list", "create", "delete"])
def test_silent_server_times_out(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str) -> None:
    storage = bare_storage(root, dynalite, endpoint=proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    storage.now_ms()
    proxy.begin(wire.hold_request(times=None))
    started = time.monotonic()
    error_type, error = outcome(lambda: OPERATIONS[name].call(storage), HIDDEN)
    elapsed_s = time.monotonic() - started
    assert error_type is (AmbiguousWriteError if OPERATIONS[name].changes_files else TransientError)
    assert proxy.url in str(error)
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < LONG_TIMEOUT_S


def test_large_create_times_out_without_a_response(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further parts are sent after one of them timed out."""
    monkeypatch.setattr(items, "MAX_REPEATED_SECONDS", READ_TIMEOUT_S / 2)
    monkeypatch.setattr(DynamoDBStorage, "concurrency", 2)
    storage = bare_storage(root, dynalite, endpoint=proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    storage.now_ms()
    proxy.begin(wire.hold_request(2, times=None))
    error_type, _ = outcome(lambda: storage.create("large", LARGE * 5), HIDDEN)
    assert error_type is TransientError, "the create certainly had no effect"
    assert request_types(proxy) == ("PutItem",) * 3 + ("BatchWriteItem",), (
        "the record, one part per thread, and the cleanup"
    )


def test_slow_server_times_out(dynalite: DynamoDBServer, root: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        storage = bare_storage(
            root, dynalite, endpoint=endpoint, connect_timeout_seconds="0.2", read_timeout_seconds="0.5"
        )

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b" ")
                        time.sleep(0.05)
                except OSError:
                    return  # the client disconnected, as expected

        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        error_type, error = outcome(lambda: storage.read("f"), HIDDEN)
        elapsed_s = time.monotonic() - started
        thread.join(10)
    assert not thread.is_alive()
    assert (error_type, "timeout" in str(error)) == (TransientError, True)
    assert elapsed_s < LONG_TIMEOUT_S / 2
