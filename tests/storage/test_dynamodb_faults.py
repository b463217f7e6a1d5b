"""Wire faults for each operation on DynamoDB, without retries (S7).

An error says whether the request certainly had no effect, or may have had one. A read or list never returns a partial
result, and no request is sent twice: a repeated create would conflict with its own item.
"""

from __future__ import annotations

import functools
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
from tests.servers.dynalite import DynamoDBServer, refusal_document
from tests.storage.wire_faults import (
    BODY,
    PATIENCE_S,
    PATIENT,
    UNKNOWN,
    Row,
    assert_stored_if_sent,
    check_clock,
    check_closed_port,
    faults_of_any_server,
    is_wait,
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
    """A call of the storage, its requests, the number of the faulty one, and whether that one may have an effect."""

    call: Callable[[Storage], Any]
    requests: tuple[str, ...]
    at: int = 1
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
    "delete_batch, its look": Operation(
        lambda storage: storage.delete_batch(["f", "g"]), ("BatchGetItem", "BatchWriteItem")
    ),
    "delete_batch": Operation(
        lambda storage: storage.delete_batch(["f", "g"]), ("BatchGetItem", "BatchWriteItem"), 2, changes_files=True
    ),
}


def refusal(code: str, status: int = 400, message: str = "injected", **where: Any) -> WireFault:
    return wire.respond(status=status, document=refusal_document(code, message), **where)


#: Fault -> error of a reading operation, error of a changing one.
FAULTS: dict[str, Row] = {
    **faults_of_any_server(READ_TIMEOUT_S),
    "200 of another server": (wire.respond(status=200), *UNKNOWN),
    "500": (refusal("InternalServerError", 500), *UNKNOWN),
    "503 empty": (wire.respond(status=503), *UNKNOWN),
    "over the capacity": (refusal("ProvisionedThroughputExceededException"), ThrottledError, ThrottledError),
    "over the account's capacity": (refusal("RequestLimitExceeded"), ThrottledError, ThrottledError),
    "throttled": (refusal("ThrottlingException"), ThrottledError, ThrottledError),
    "a full collection": (refusal("ItemCollectionSizeLimitExceededException"), StorageFullError, StorageFullError),
    "conflict": (refusal("TransactionConflictException"), TransientError, TransientError),
    "not allowed": (refusal("AccessDeniedException"), StoragePermissionError, StoragePermissionError),
    "wrong key id": (refusal("UnrecognizedClientException"), StoragePermissionError, StoragePermissionError),
    "wrong secret": (refusal("InvalidSignatureException"), StoragePermissionError, StoragePermissionError),
    "expired": (refusal("ExpiredTokenException"), StoragePermissionError, StoragePermissionError),
    "403 empty": (wire.respond(status=403), StoragePermissionError, StoragePermissionError),
    "no table": (refusal("ResourceNotFoundException"), StorageError, StorageError),
    "404 of another server": (wire.respond(status=404), StorageError, StorageError),
}
#: Operations that share code with others run with one fault of each kind, and without timeouts.
LIKE_OTHERS = {"read of a range", "stat", "exists", "write", "delete_batch, its look"}
ONE_OF_EACH_KIND = {"request dropped", "answer dropped", "body cut", "500", "throttled", "not allowed", "no table"}


@pytest.fixture
def proxy(dynalite: DynamoDBServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(dynalite.endpoint) as running:
        yield running


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries of the storage."""
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def root(dynalite: DynamoDBServer) -> Iterator[str]:
    new_root = dynalite.fresh_root()
    yield new_root
    dynalite.delete_all(new_root)


def bare(root: str, server: DynamoDBServer, **options: str) -> DynamoDBStorage:
    """Return the loaded storage without the retries around it, and with no sweep due."""
    storage = DynamoDBStorage(root, {**server.storage_options, **PATIENT, **options})
    storage._next_sweep_s = time.monotonic() + 3600
    return storage


def sent(proxy: FaultyProxy) -> tuple[str, ...]:
    """Return the operations that reached the proxy."""
    return tuple(exchange.headers["x-amz-target"].rpartition(".")[2] for exchange in proxy.log)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str
) -> None:
    operation, direct = OPERATIONS[name], bare(root, dynalite)
    common_options = {"endpoint": proxy.url, "secret_access_key": SECRET, "session_token": TOKEN}
    patient = bare(root, dynalite, **common_options)
    hasty = bare(root, dynalite, **common_options, read_timeout_seconds=str(READ_TIMEOUT_S))
    for storage in (patient, hasty):
        assert not RetryStorage(storage).exists("f")  # loads the client and reads the clock
    direct.write("kept", b"kept")
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if name in LIKE_OTHERS and fault_name not in ONE_OF_EACH_KIND:
            continue
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            direct.delete("new")
            for path in ("f", "g"):
                direct.write(path, BODY)
        storage = hasty if is_wait(fault) else patient
        proxy.begin(replace(fault, at=operation.at))
        started = time.monotonic()
        kind, found = outcome(functools.partial(operation.call, storage), HIDDEN)
        assert kind is (when_changing if operation.changes_files else when_reading), (fault_name, found)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert sent(proxy) == operation.requests[: operation.at], (fault_name, "sent once")
        proxy.release()
        if name == "create":
            assert_stored_if_sent(functools.partial(direct.exists, "new"), fault, fault_name)
        proxy.begin()
        assert RetryStorage(storage).stat("kept").size_bytes == 4, "the next request gets its own answer"


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("fault", [wire.drop_response(), wire.drop_request(), refusal("ThrottlingException")])
def test_parts_are_resent(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, at: int, fault: WireFault) -> None:
    storage = bare(root, dynalite, endpoint=proxy.url)
    assert not storage.exists("large")
    proxy.begin(replace(fault, at=at))
    storage.create("large", LARGE)
    assert sent(proxy) == ("PutItem",) * 6, "a record, three parts, the item, and one of them once more"
    for number in (2, 3, 4):  # the first is the item, which the retries around the storage resend
        proxy.begin(replace(fault, at=number))
        assert storage.read("large") == LARGE
        assert sent(proxy) == ("GetItem",) * 5
    storage.delete("large")
    assert dynalite.items_of(root) == []


def test_rejected_large_create_leaves_no_part(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    storage = bare(root, dynalite, endpoint=proxy.url)
    storage.create("large", LARGE)
    keys = dynalite.items_of(root)
    with pytest.raises(FileExistsAlreadyError):
        storage.create("large", b"other" * len(LARGE))
    for refused in (refusal("AccessDeniedException"), refusal("ThrottlingException")):
        proxy.begin(replace(refused, at=5))
        with pytest.raises((StoragePermissionError, ThrottledError)):
            storage.write("large", LARGE[1:])
    assert dynalite.items_of(root) == keys
    assert storage.read("large") == LARGE


def test_large_create_with_a_lost_response(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    """Whether or not the item exists, the file is complete or missing, and the parts stay until this is known."""
    storage = bare(root, dynalite, endpoint=proxy.url)
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


@pytest.mark.parametrize("name", ["request dropped", "answer dropped", "head cut", "body cut", "500", "throttled"])
def test_second_page_of_a_listing_is_resent(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str) -> None:
    storage = bare(root, dynalite, endpoint=proxy.url)
    everything = [f"{number:02}" for number in range(7)]
    storage.create_many(dict.fromkeys(everything, b"x" * 300_000))  # a page has 1 MB
    proxy.begin(replace(FAULTS[name][0], at=2))
    assert [info.path for info in storage.list()] == everything
    assert sent(proxy) == ("Query",) * 3, "two pages, one of them twice"
    proxy.begin(replace(FAULTS["not allowed"][0], at=2))
    with pytest.raises(StoragePermissionError):
        list(storage.list())


def test_clock_is_requested_once_and_again_after_a_fault(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str
) -> None:
    for name in ("answer dropped", "head cut", "500", "throttled"):
        check_clock(bare(root, dynalite, endpoint=proxy.url), proxy, FAULTS[name], HIDDEN)
        assert set(sent(proxy)) == {"GetItem"}


def test_failed_reads_are_retried(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str) -> None:
    storage = RetryStorage(bare(root, dynalite, endpoint=proxy.url), base_delay_seconds=0.001)
    storage.create("f", BODY)
    for fault in (wire.cut_body(times=3), wire.cut_head(times=3), wire.drop_response(times=3)):
        proxy.begin(fault)
        assert storage.read("f") == BODY
        assert [exchange.fault is not None for exchange in proxy.log] == [True, True, True, False]


TABLES_AT_ONCE = "Subscriber limit exceeded: Only 10 tables can be created, updated, or deleted simultaneously"
TOO_MANY_TABLES = "Subscriber limit exceeded: There is a limit of 256 tables per subscriber"


@pytest.mark.parametrize(("message", "kind"), [(TABLES_AT_ONCE, ThrottledError), (TOO_MANY_TABLES, StorageFullError)])
def test_exceeded_table_quota_maps_to_its_error(
    dynalite: DynamoDBServer, proxy: FaultyProxy, message: str, kind: type[StorageError]
) -> None:
    table = f"never-{uuid.uuid4().hex}"
    storage = bare(f"dynamodb://{table}/lake/", dynalite, endpoint=proxy.url, create_table="true")
    proxy.begin(refusal("LimitExceededException", message=message, at=3))
    with pytest.raises(kind) as caught:
        storage.create("f", BODY)
    assert type(caught.value) is kind
    assert sent(proxy) == ("GetItem", "PutItem", "CreateTable"), "the first asks for the time"


CAPACITY = ("ProvisionedThroughputExceededException", "RequestLimitExceeded", "ThrottlingException")


@pytest.mark.parametrize("code", CAPACITY)
def test_commit_above_the_capacity_is_retried(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary rejections only delay a commit. If they continue, the commit fails and has no visible effect."""
    storage = RetryStorage(bare(root, dynalite, endpoint=proxy.url), sleep=lambda seconds: None)
    lake = Lakehouse.create(root, storage=storage)
    proxy.begin(refusal(code, times=4))
    with lake.transaction() as txn:
        txn.create_namespace("late")
    assert lake.latest_version() == 1
    txn = lake.transaction()
    txn.create_namespace("never")
    proxy.begin(refusal(code, times=None))
    with pytest.raises(ThrottledError, match=code):
        txn.commit()
    proxy.begin()
    lake = Lakehouse.open(root, dynalite.storage_options)
    assert (lake.latest_version(), lake.snapshot().namespaces()) == (1, ["late"])
    assert operations.verify(lake).findings == ()


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(dynalite: DynamoDBServer, root: str, name: str) -> None:
    check_closed_port(lambda endpoint: bare(root, dynalite, endpoint=endpoint), OPERATIONS[name].call, HIDDEN)


@pytest.mark.parametrize("name", ["read", "list", "create", "delete"])
def test_silent_server_times_out(dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, name: str) -> None:
    storage = bare(root, dynalite, endpoint=proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    storage.now_ms()
    proxy.begin(wire.hold_request(times=None))
    started = time.monotonic()
    kind, error = outcome(lambda: OPERATIONS[name].call(storage), HIDDEN)
    elapsed_s = time.monotonic() - started
    assert kind is (AmbiguousWriteError if OPERATIONS[name].changes_files else TransientError)
    assert proxy.url in str(error)
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < PATIENCE_S


def test_large_create_times_out_without_a_response(
    dynalite: DynamoDBServer, proxy: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further parts are sent after one of them timed out."""
    monkeypatch.setattr(items, "_retry_listing", functools.partial(retry.retry_listing, max_s=READ_TIMEOUT_S / 2))
    storage = bare(root, dynalite, endpoint=proxy.url, read_timeout_seconds=str(READ_TIMEOUT_S))
    storage._parts._concurrency = 2
    storage.now_ms()
    proxy.begin(wire.hold_request(2, times=None))
    kind, _ = outcome(lambda: storage.create("large", LARGE * 5), HIDDEN)
    assert kind is TransientError, "certainly without effect"
    assert sent(proxy) == ("PutItem",) * 3 + ("BatchWriteItem",), "the record, a part from each thread, the removal"


def test_slow_server_times_out(dynalite: DynamoDBServer, root: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        storage = bare(root, dynalite, endpoint=endpoint, connect_timeout_seconds="0.2", read_timeout_seconds="0.5")

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
        kind, error = outcome(lambda: storage.read("f"), HIDDEN)
        elapsed_s = time.monotonic() - started
        thread.join(10)
    assert not thread.is_alive()
    assert (kind, "timeout" in str(error)) == (TransientError, True)
    assert elapsed_s < PATIENCE_S / 2
