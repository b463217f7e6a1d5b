"""Wire faults for each operation of the Azure client (``wire_faults.py``)."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.proxy import FaultyProxy
from tests.servers.azurite import ACCOUNT_NAME, AzureServer
from tests.storage import wire_faults
from tests.storage.wire_faults import (
    BODY,
    LONG_TIMEOUTS,
    FaultCase,
    ProxiedStorage,
    assert_stored_if_sent,
    check_clock,
    check_closed_port,
    check_silent_server,
    faults_in_xml,
    faults_of_any_server,
    outcome,
)
from trinitylake_ops.errors import StorageError, StoragePermissionError, ThrottledError, TransientError
from trinitylake_ops.storage import RetryStorage, Storage, open_storage
from trinitylake_ops.storage.azure import blob_storage

pytestmark = pytest.mark.debian_packages

READ_TIMEOUT_S = 0.25
HIDDEN = ("SharedKey", "sig=", "<Error>", "<?xml")
OPERATIONS = wire_faults.operations()
CODES = {
    "error": "InternalError",
    "after the effect": "OperationTimedOut",
    "throttled": "ServerBusy",
    "denied": "AuthorizationFailure",
}
FAULTS: dict[str, FaultCase] = {**faults_of_any_server(READ_TIMEOUT_S), **faults_in_xml(CODES)}
#: Operations whose responses have no body to truncate.
WITHOUT_RESPONSE_BODY = {"stat", "create", "write", "delete"}


@pytest.fixture
def proxy(azurite: AzureServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(azurite.endpoint) as faulty_proxy:
        yield faulty_proxy


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    new_root = azurite.fresh_root()
    yield new_root
    azurite.delete_all(new_root)


def proxy_endpoint(proxy: FaultyProxy) -> str:
    return f"{proxy.url}/{ACCOUNT_NAME}"


@pytest.fixture
def proxied(proxy: FaultyProxy, azurite: AzureServer, root: str) -> ProxiedStorage:
    endpoint = proxy_endpoint(proxy)
    short_timeout_storage = bare_storage(root, azurite, endpoint=endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))
    return ProxiedStorage(proxy, bare_storage(root, azurite, endpoint=endpoint), short_timeout_storage, HIDDEN)


def bare_storage(root: str, server: AzureServer, **options: str) -> Storage:
    """Return the storage without its retries."""
    all_options = {
        **server.storage_options,
        **LONG_TIMEOUTS,
        **options,
    }
    storage = open_storage(root, {name: value for name, value in all_options.items() if value})
    assert isinstance(storage, RetryStorage)
    return storage.inner


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(
    azurite: AzureServer, proxied: ProxiedStorage, root: str, name: str
) -> None:
    operation = OPERATIONS[name]
    for storage in (proxied.long_timeout_storage, proxied.short_timeout_storage):
        assert not RetryStorage(storage).exists("f")  # loads the client, which is slower than any request
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            azurite.delete_all(root)
            for path in ("f", "g"):
                azurite.put(root, path, BODY)
        expected = when_changing if operation.changes_files else when_reading
        if expected is ThrottledError and operation.method == "HEAD":
            expected = TransientError  # without a body, the response has no error code
        if fault_name == "body truncated" and name in WITHOUT_RESPONSE_BODY:
            expected = None
        proxied.check_fault(fault, operation, expected)
        if name == "create":
            assert_stored_if_sent(lambda: "new" in azurite.names(root), fault, fault_name)
        if name != "delete_batch":  # may need a retry, on a connection that the server closed without notice
            retrying_storage = RetryStorage(proxied.storage(fault))
            assert retrying_storage.read("g") == BODY, "the next request receives its own response"


@pytest.mark.parametrize("size_bytes", [0, 1 << 20, 9 << 20])
def test_create_sends_one_conditional_request_for_any_size(
    azurite: AzureServer, proxy: FaultyProxy, root: str, size_bytes: int
) -> None:
    storage = bare_storage(root, azurite, endpoint=proxy_endpoint(proxy))
    storage.create("new", bytes(size_bytes))
    (exchange,) = proxy.log
    assert (exchange.method, exchange.request_body_bytes, "comp=" in exchange.query) == ("PUT", size_bytes, False)
    assert {name.lower(): value for name, value in exchange.headers.items()}["if-none-match"] == "*"


def test_listing_is_complete_or_raises(
    azurite: AzureServer, proxied: ProxiedStorage, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_storage, "MAX_NAMES_PER_PAGE", 5)
    paths = [f"{number:02}" for number in range(8)]
    for path in paths:
        azurite.put(root, path, b"x")
    for name in ("request dropped", "response dropped", "head truncated", "body truncated", "500", "503", "403"):
        proxied.check_list(FAULTS[name], paths)


def test_server_time_is_requested_once_and_again_after_a_fault(
    azurite: AzureServer, proxy: FaultyProxy, root: str
) -> None:
    for name in ("response dropped", "head truncated", "500", "403"):
        check_clock(bare_storage(root, azurite, endpoint=proxy_endpoint(proxy)), proxy, FAULTS[name], HIDDEN)


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_container_and_credentials_are_reported(azurite: AzureServer, root: str, name: str) -> None:
    call = OPERATIONS[name].call
    no_container = bare_storage("az://no-such-container/lake/", azurite)
    error_type, error = outcome(lambda: call(no_container), HIDDEN)
    assert error_type is StorageError, error
    assert "container 'no-such-container' does not exist" in str(error)
    wrong_key = base64.b64encode(b"a wrong key of this test").decode()
    wrong_credentials: list[dict[str, str]] = [
        {"account_key": wrong_key},
        {"account_key": "", "sas_token": "sv=2024-11-04&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00:00:00Z&sig=d3Jvbmc%3D"},
    ]
    for options in wrong_credentials:
        hidden = (*HIDDEN, *filter(None, options.values()), azurite.account_key, "d3Jvbmc")
        error_type, error = outcome(lambda options=options: call(bare_storage(root, azurite, **options)), hidden)  # type: ignore[misc]
        assert error_type is StoragePermissionError, (options, error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(azurite: AzureServer, root: str, name: str) -> None:
    check_closed_port(
        lambda endpoint: bare_storage(root, azurite, endpoint=f"{endpoint}/{ACCOUNT_NAME}"),
        OPERATIONS[name].call,
        HIDDEN,
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_silent_server_times_out(azurite: AzureServer, root: str, name: str) -> None:
    def open_at(endpoint: str) -> Storage:
        options = {"endpoint": f"{endpoint}/{ACCOUNT_NAME}", "read_timeout_seconds": str(READ_TIMEOUT_S)}
        return bare_storage(root, azurite, **options)

    check_silent_server(open_at, OPERATIONS[name], READ_TIMEOUT_S, HIDDEN)
