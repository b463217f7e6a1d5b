"""Each operation of both S3 clients meets each fault on the wire, without retries around them.

S7: an error says whether the request certainly had no effect, or may have had one. A read or list
never returns a part. No client repeats a request by itself: a repeated create would meet its own file.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.plugin import SERVER_RUN
from tests.servers.s3_server import S3Server
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage

pytestmark = pytest.mark.debian_packages

BODY = bytes(range(256)) * 400
READ_TIMEOUT_S = 0.5
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
    "stat": Operation(lambda storage: storage.stat("f"), "HEAD"),
    "exists": Operation(lambda storage: storage.exists("f"), "HEAD"),
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
        wire.answer(status=500, code="InternalError", is_forwarded=True),
        TransientError,
        AmbiguousWriteError,
    ),
    "503": (wire.answer(status=503, code="SlowDown"), ThrottledError, ThrottledError),
    "503 empty": (wire.answer(status=503), TransientError, AmbiguousWriteError),
    "504 empty": (wire.answer(status=504, is_forwarded=True), TransientError, AmbiguousWriteError),
    "403": (wire.answer(status=403, code="AccessDenied"), StoragePermissionError, StoragePermissionError),
    "403 empty": (wire.answer(status=403), StoragePermissionError, StoragePermissionError),
    "409": (wire.answer(status=409, code="ConditionalRequestConflict"), TransientError, TransientError),
    "409 empty": (wire.answer(status=409), TransientError, AmbiguousWriteError),
}
NO_BODY = {"stat", "exists", "create", "write", "delete"}  # their answers have none that could be cut


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.config.stash[SERVER_RUN].server("radosgw")


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.endpoint) as running:
        yield running


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def root(server: S3Server) -> Iterator[str]:
    made = server.fresh_root()
    yield made
    server.delete_all(made)


def storage_for(fault: WireFault, root: str, server: S3Server, client: str, **options: str) -> Storage:
    """A storage with a short time-out only where the fault is a wait: a slow machine must not look like one."""
    timeout_s = READ_TIMEOUT_S if fault.action in ("hold_request", "delay_answer") else PATIENCE_S
    return bare(root, server, client, read_timeout_seconds=str(timeout_s), **options)


def bare(root: str, server: S3Server, client: str, **options: str) -> Storage:
    """The storage itself, without the retries around it."""
    given = {
        **server.storage_options,
        "client": client,
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
    for hidden in (*secrets, "AWS4-HMAC", "Signature=", "<Error>", "<?xml"):
        assert hidden not in message


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_fault(server: S3Server, proxy: FaultyProxy, client: str, root: str, name: str) -> None:
    operation = OPERATIONS[name]
    storages = {
        action: storage_for(fault, root, server, client, endpoint=proxy.url)
        for action, fault in (("other", wire.drop_request()), ("wait", wire.hold_request()))
    }
    for storage in storages.values():
        assert not RetryStorage(storage).exists("f")  # loads the client, which takes longer than any request
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        server.delete_all(root)
        for path in ("f", "g"):
            _put(server, root, path)
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
            assert _is_stored(server, root, "new") == was_sent, fault_name
        if name != "delete_batch":  # on a connection that was closed unannounced, a retry may be due
            assert RetryStorage(storage).read("g") == BODY, "the next request gets its own answer"


def _is_stored(server: S3Server, root: str, path: str) -> bool:
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    found = server.client.list_objects_v2(Bucket=bucket, Prefix=prefix + path)
    return bool(found["KeyCount"] == 1)


def _put(server: S3Server, root: str, path: str) -> None:
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    server.client.put_object(Bucket=bucket, Key=prefix + path, Body=BODY)


@pytest.fixture(scope="module")
def many(server: S3Server) -> Iterator[str]:
    """A root with more files than one page of a listing holds."""
    root = server.fresh_root()
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    with ThreadPoolExecutor(8) as pool:
        put = server.client.put_object
        list(pool.map(lambda number: put(Bucket=bucket, Key=f"{prefix}{number:04}", Body=b"x"), range(N_MANY)))
    yield root
    server.delete_all(root)


def test_a_list_is_whole_or_raises(server: S3Server, proxy: FaultyProxy, client: str, many: str) -> None:
    """The first page is left to the retries around the storage; a later one only the storage can ask for again."""
    everything = [f"{number:04}" for number in range(N_MANY)]
    for name in ("request dropped", "answer dropped", "request held back", "head cut", "body cut", "500", "503", "403"):
        fault, expected, _ = FAULTS[name]
        storage = storage_for(fault, many, server, client, endpoint=proxy.url)
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


def test_the_clock(server: S3Server, proxy: FaultyProxy, client: str, root: str) -> None:
    for name in ("answer dropped", "head cut", "500", "403"):
        fault, expected, _ = FAULTS[name]
        storage = bare(root, server, client, endpoint=proxy.url)
        proxy.begin(fault)
        kind, found = outcome(storage.now_ms)
        assert kind is expected, (name, found)
        assert len(proxy.log) == 1
        assert abs(storage.now_ms() - time.time() * 1000) < 5_000


def test_reads_that_are_cut_are_repeated_by_the_retries(
    server: S3Server, proxy: FaultyProxy, client: str, root: str
) -> None:
    _put(server, root, "f")
    storage = RetryStorage(bare(root, server, client, endpoint=proxy.url), base_delay_seconds=0.001)
    for fault in (wire.cut_body(times=3), wire.cut_head(times=3), wire.drop_answer(times=3)):
        proxy.begin(fault)
        assert storage.read("f") == BODY
        assert [exchange.fault is not None for exchange in proxy.log] == [True, True, True, False]
        proxy.begin(fault)
        assert storage.read("f", offset=100, length=60_000) == BODY[100:60_100]


@pytest.mark.parametrize("name", CHANGES)
def test_expired_credentials(server: S3Server, proxy: FaultyProxy, client: str, root: str, name: str) -> None:
    token = "session-token-of-this-test"
    storage = bare(root, server, client, endpoint=proxy.url, session_token=token)
    proxy.begin(wire.answer(status=400, code="ExpiredToken", times=None))
    with pytest.raises(StoragePermissionError, match="expired") as caught:
        OPERATIONS[name].call(storage)
    assert_clear(caught.value, token, server.secret_access_key, server.access_key_id)
    with pytest.raises(StoragePermissionError, match="expired"):
        storage.read("f")
    with pytest.raises(StorageError, match="expired"):  # an answer to HEAD has no body that could say more
        storage.stat("f")


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_bucket_and_credentials(server: S3Server, client: str, root: str, name: str) -> None:
    call = OPERATIONS[name].call
    no_bucket = bare("s3://no-such-bucket-of-mine/lake/", server, client)
    if OPERATIONS[name].method == "HEAD":  # no body either: nothing tells a missing bucket from a missing file
        assert outcome(lambda: no_bucket.exists("f")) == (None, False)
    else:
        kind, error = outcome(lambda: call(no_bucket))
        assert kind is StorageError
        assert "bucket 'no-such-bucket-of-mine' does not exist" in str(error)
    wrong: list[dict[str, str]] = [
        {"secret_access_key": "wrong-secret-of-this-test"},
        {"access_key_id": "wrong-key-of-this-test"},
    ]
    for options in wrong:
        kind, error = outcome(lambda options=options: call(bare(root, server, client, **options)))  # type: ignore[misc]
        assert kind is StoragePermissionError, options
        assert_clear(error, *options.values(), server.secret_access_key, server.access_key_id)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_closed_port(server: S3Server, client: str, root: str, name: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        storage = bare(root, server, client, endpoint=endpoint)
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(storage))
    assert kind is UnreachableError, "nothing was sent"
    assert endpoint in str(error)
    assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_never_answers(server: S3Server, client: str, root: str, name: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        storage = bare(root, server, client, endpoint=endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))
        started = time.monotonic()
        kind, error = outcome(lambda: OPERATIONS[name].call(storage))
        elapsed_s = time.monotonic() - started
    assert kind is (AmbiguousWriteError if OPERATIONS[name].changes_files else TransientError)
    assert endpoint in str(error)
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < PATIENCE_S
