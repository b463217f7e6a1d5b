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
    PATIENT,
    Row,
    Wire,
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
    "slower": "ServerBusy",
    "denied": "AuthorizationFailure",
}
FAULTS: dict[str, Row] = {**faults_of_any_server(READ_TIMEOUT_S), **faults_in_xml(CODES)}
NO_BODY = {"stat", "create", "write", "delete"}  # their responses have no body to truncate


@pytest.fixture
def proxy(azurite: AzureServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(azurite.endpoint) as running:
        yield running


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    new_root = azurite.fresh_root()
    yield new_root
    azurite.delete_all(new_root)


def through(proxy: FaultyProxy) -> str:
    return f"{proxy.url}/{ACCOUNT_NAME}"


@pytest.fixture
def behind(proxy: FaultyProxy, azurite: AzureServer, root: str) -> Wire:
    endpoint = through(proxy)
    hasty = bare(root, azurite, endpoint=endpoint, read_timeout_seconds=str(READ_TIMEOUT_S))
    return Wire(proxy, bare(root, azurite, endpoint=endpoint), hasty, HIDDEN)


def bare(root: str, server: AzureServer, **options: str) -> Storage:
    """Return the storage without the retries around it."""
    all_options = {
        **server.storage_options,
        **PATIENT,
        **options,
    }
    storage = open_storage(root, {name: value for name, value in all_options.items() if value})
    assert isinstance(storage, RetryStorage)
    return storage.inner


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_wire_fault_has_its_documented_effect(azurite: AzureServer, behind: Wire, root: str, name: str) -> None:
    operation = OPERATIONS[name]
    for storage in (behind.patient, behind.hasty):
        assert not RetryStorage(storage).exists("f")  # loads the client, which is slower than any request
    for fault_name, (fault, when_reading, when_changing) in FAULTS.items():
        if operation.changes_files or fault_name == next(iter(FAULTS)):
            azurite.delete_all(root)
            for path in ("f", "g"):
                azurite.put(root, path, BODY)
        expected = when_changing if operation.changes_files else when_reading
        if expected is ThrottledError and operation.method == "HEAD":
            expected = TransientError  # without a body there is no reason
        if fault_name == "body cut" and name in NO_BODY:
            expected = None
        behind.check_fault(fault, operation, expected)
        if name == "create":
            assert_stored_if_sent(lambda: "new" in azurite.names(root), fault, fault_name)
        if name != "delete_batch":  # on a connection that was closed unannounced, a retry may be due
            again = RetryStorage(behind.storage(fault))
            assert again.read("g") == BODY, "the next request gets its own answer"


@pytest.mark.parametrize("size_bytes", [0, 1 << 20, 9 << 20])
def test_create_sends_one_conditional_request_for_any_size(
    azurite: AzureServer, proxy: FaultyProxy, root: str, size_bytes: int
) -> None:
    storage = bare(root, azurite, endpoint=through(proxy))
    storage.create("new", bytes(size_bytes))
    (exchange,) = proxy.log
    assert (exchange.method, exchange.request_body_bytes, "comp=" in exchange.query) == ("PUT", size_bytes, False)
    assert {name.lower(): text for name, text in exchange.headers.items()}["if-none-match"] == "*"


def test_listing_is_complete_or_raises(
    azurite: AzureServer, behind: Wire, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_storage, "MAX_NAMES_PER_PAGE", 5)
    everything = [f"{number:02}" for number in range(8)]
    for path in everything:
        azurite.put(root, path, b"x")
    for name in ("request dropped", "answer dropped", "head cut", "body cut", "500", "503", "403"):
        behind.check_list(FAULTS[name], everything)


def test_clock_is_requested_once_and_again_after_a_fault(azurite: AzureServer, proxy: FaultyProxy, root: str) -> None:
    for name in ("answer dropped", "head cut", "500", "403"):
        check_clock(bare(root, azurite, endpoint=through(proxy)), proxy, FAULTS[name], HIDDEN)


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_container_and_credentials_are_reported(azurite: AzureServer, root: str, name: str) -> None:
    call = OPERATIONS[name].call
    no_container = bare("az://no-such-container/lake/", azurite)
    kind, error = outcome(lambda: call(no_container), HIDDEN)
    assert kind is StorageError, error
    assert "container 'no-such-container' does not exist" in str(error)
    wrong_key = base64.b64encode(b"a wrong key of this test").decode()
    wrong: list[dict[str, str]] = [
        {"account_key": wrong_key},
        {"account_key": "", "sas_token": "sv=2024-11-04&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00:00:00Z&sig=d3Jvbmc%3D"},
    ]
    for options in wrong:
        hidden = (*HIDDEN, *filter(None, options.values()), azurite.account_key, "d3Jvbmc")
        kind, error = outcome(lambda options=options: call(bare(root, azurite, **options)), hidden)  # type: ignore[misc]
        assert kind is StoragePermissionError, (options, error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_port_is_unreachable(azurite: AzureServer, root: str, name: str) -> None:
    check_closed_port(
        lambda endpoint: bare(root, azurite, endpoint=f"{endpoint}/{ACCOUNT_NAME}"),
        OPERATIONS[name].call,
        HIDDEN,
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_silent_server_times_out(azurite: AzureServer, root: str, name: str) -> None:
    def opened(endpoint: str) -> Storage:
        own = {"endpoint": f"{endpoint}/{ACCOUNT_NAME}", "read_timeout_seconds": str(READ_TIMEOUT_S)}
        return bare(root, azurite, **own)

    check_silent_server(opened, OPERATIONS[name], READ_TIMEOUT_S, HIDDEN)
