"""Requests to Google Cloud Storage and its token service on the wire, and invalid responses.

The servers are scripted, because the emulator requires no token and sends no invalid responses.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.processes import fork
from tests.servers.gcs import GcsServer
from tests.storage.scripted_server import DropConnection, NoResponse, RecordedRequest, ScriptedResponse, ScriptedServer
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    StorageError,
    StoragePermissionError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage

ROOT = "gs://bucket/lake/"
TOKEN = "ya29.token-of-this-test"
MAX_DURATION_S = 20.0
Script = Callable[[int, RecordedRequest], ScriptedResponse | DropConnection | NoResponse]


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    no_encryption = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_encryption).decode()


def service_account(private_key: str, token_uri: str) -> str:
    return json.dumps(
        {
            "type": "service_account",
            "client_email": "tests@project.example",
            "private_key": private_key,
            "private_key_id": "private-key-id-of-this-test",
            "token_uri": token_uri,
        }
    )


def bare_storage(endpoint: str, root: str = ROOT, **options: str) -> Storage:
    storage_options = {
        "endpoint": endpoint,
        "credentials": "anonymous",
        "read_timeout_seconds": str(MAX_DURATION_S),
        **options,
    }
    storage = open_storage(root, storage_options)
    assert isinstance(storage, RetryStorage)
    return storage.inner


def authorization(request: RecordedRequest) -> str | None:
    return {name.lower(): value for name, value in request.headers.items()}.get("authorization")


def always(response: ScriptedResponse) -> Script:
    return lambda number, request: response


def json_response(document: object, status: int = 200) -> ScriptedResponse:
    return ScriptedResponse(status, json.dumps(document).encode(), {"Content-Type": "application/json"})


def token_response(number: int, request: RecordedRequest) -> ScriptedResponse:
    assert parse_qs(request.body.decode())["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
    return json_response({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})


def assert_no_secrets(error: BaseException, *secrets: str) -> None:
    cause: BaseException | None = error
    assert "\n" not in str(error)
    while cause is not None:
        for secret in (TOKEN, "private-key-id-of-this-test", "PRIVATE KEY", *secrets):
            assert secret not in str(cause)
        cause = None if cause.__suppress_context__ else cause.__context__


# --- credentials ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["option", "file", "environment"])
def test_service_account_requests_one_token(
    private_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    token_server, storage_server = ScriptedServer(token_response), ScriptedServer(always(json_response({"items": []})))
    with token_server.running(), storage_server.running():
        key_json = service_account(private_key, f"{token_server.endpoint}/token")
        file = tmp_path / "key.json"
        file.write_text(key_json)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        credentials = {"option": {"credentials": key_json}, "file": {"credentials": str(file)}, "environment": {}}[
            source
        ]
        storage = open_storage(ROOT, {"endpoint": storage_server.endpoint, **credentials})
        for _ in range(3):
            assert list(storage.list()) == []
        assert len(token_server.requests) == 1
        assert [authorization(request) for request in storage_server.requests] == [f"Bearer {TOKEN}"] * 3


def test_secrets_quoted_by_a_server_are_redacted() -> None:
    secrets = {"client_id": "id", "client_secret": "client-secret-of-this-test", "refresh_token": "1//refresh-of-this"}
    user = json.dumps({"type": "authorized_user", **secrets, "token": TOKEN, "expiry": "2099-01-01T00:00:00Z"})
    message = f"no {secrets['client_secret']} and {secrets['refresh_token']} with Bearer {TOKEN} are valid"
    server = ScriptedServer(always(json_response({"error": {"code": 400, "message": message}}, 400)))
    with server.running():
        with pytest.raises(StorageError) as caught:
            bare_storage(server.endpoint, credentials=user).write("f", b"x")
        assert authorization(server.requests[0]) == f"Bearer {TOKEN}"
    assert_no_secrets(caught.value, *list(secrets.values())[1:])


def test_anonymous_requests_carry_no_token() -> None:
    server = ScriptedServer(always(json_response({})))
    with server.running():
        assert list(bare_storage(server.endpoint).list()) == []
        assert authorization(server.requests[0]) is None


def test_rejected_token_is_a_permission_error(private_key: str) -> None:
    """Either the token service rejects the account, or the storage service rejects its token."""
    rejection = json_response({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}, 400)
    token_server = ScriptedServer(always(rejection))
    server = ScriptedServer(
        always(json_response({"error": {"code": 401, "message": f"Invalid Credentials {TOKEN}"}}, 401))
    )
    with token_server.running(), server.running():
        storage = bare_storage(server.endpoint, credentials=service_account(private_key, token_server.endpoint))
        for call in (lambda: storage.create("f", b"x"), lambda: storage.read("f"), storage.now_ms):
            with pytest.raises(StoragePermissionError, match="'credentials'") as caught:
                call()
            assert_no_secrets(caught.value, private_key)
        assert server.requests == []
        token_server.script = token_response
        with pytest.raises(StoragePermissionError) as caught:
            storage.create("f", b"x")
        assert_no_secrets(caught.value, private_key)
        assert len(server.requests) == 1


def test_unreachable_token_service_is_transient(private_key: str) -> None:
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        storage = bare_storage(
            "http://127.0.0.1:1",
            credentials=service_account(private_key, f"http://127.0.0.1:{silent_socket.getsockname()[1]}"),
            read_timeout_seconds="0.2",
            connect_timeout_seconds="0.2",
        )
        start_s = time.monotonic()
        with pytest.raises(UnreachableError) as caught:
            storage.create("f", b"x")
    assert_no_secrets(caught.value)
    assert time.monotonic() - start_s < MAX_DURATION_S


def test_silent_token_service_times_out(private_key: str) -> None:
    token_server = ScriptedServer(lambda number, request: NoResponse())
    with token_server.running():
        storage = bare_storage(
            "http://127.0.0.1:1",
            credentials=service_account(private_key, token_server.endpoint),
            read_timeout_seconds="0.2",
            connect_timeout_seconds="0.2",
        )
        start_s = time.monotonic()
        with pytest.raises(UnreachableError):
            storage.create("f", b"x")
        assert time.monotonic() - start_s < MAX_DURATION_S


@pytest.mark.parametrize(
    "content", [None, "hush-hush-hush", '{"type": "external_account", "a": "hush-hush-hush"}', "[]"]
)
def test_invalid_credentials_file_is_rejected(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "key.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StoragePermissionError, match="'credentials'") as caught:
        bare_storage("http://127.0.0.1:1", credentials=str(file)).read("f")
    assert_no_secrets(caught.value, "hush", str(tmp_path))


def test_invalid_account_key_is_rejected() -> None:
    with pytest.raises(StoragePermissionError, match="'credentials'") as caught:
        bare_storage("http://127.0.0.1:1", credentials=service_account("hush-hush-hush", "http://127.0.0.1:1")).read(
            "f"
        )
    assert_no_secrets(caught.value, "hush")


def test_missing_credentials_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gcsfs would fall back to anonymous requests, but the storage sends them only if an option allows them."""
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    server = ScriptedServer(always(json_response({})))
    with server.running():
        with pytest.raises(StoragePermissionError):
            next(open_storage(ROOT, {"endpoint": server.endpoint}).list())
        assert server.requests == []


def test_every_request_names_the_billing_project() -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        if request.path.startswith("/batch/"):
            return batch_response(request, [204] * request.body.count(b"DELETE "))
        return json_response({"name": "lake/f", "size": "1", "updated": "2026-11-24T12:00:00.123Z"})

    server = ScriptedServer(script)
    with server.running():
        storage = bare_storage(server.endpoint, project="payer-1")
        storage.create("f", b"x")
        storage.write("f", b"x")
        assert storage.stat("f").last_modified_ms % 1000 == 0
        assert list(storage.list()) == []
        storage.delete("f")
        assert storage.delete_batch(["f", "g?"]) == {}
        for request in server.requests[:-1]:
            assert parse_qs(urlsplit(request.path).query)["userProject"] == ["payer-1"]
        assert b"/o/lake%2Fg%3F?userProject=payer-1 HTTP/1.1" in server.requests[-1].body


# --- batches ----------------------------------------------------------------------------------------


def batch_response(
    request: RecordedRequest, statuses: list[int | None], reason: str = "backendError"
) -> ScriptedResponse:
    """Return a batch response like that of the service, with one part per call. A status of None omits the part."""
    boundary = request.headers["Content-Type"].partition("boundary=")[2]
    parts = []
    for number, status in enumerate(statuses):
        if status is not None:
            body = "" if status < 300 else json.dumps({"error": {"code": status, "errors": [{"reason": reason}]}})
            parts.append(
                f"--batch_of_this_test\r\nContent-Type: application/http\r\nContent-ID: <response-{boundary}+{number}>"
                f"\r\n\r\nHTTP/1.1 {status} injected\r\nContent-Type: application/json\r\n\r\n{body}\r\n\r\n"
            )
    body_text = "".join([*reversed(parts), "--batch_of_this_test--\r\n"])
    return ScriptedResponse(200, body_text.encode(), {"Content-Type": "multipart/mixed; boundary=batch_of_this_test"})


def test_delete_batch_reports_each_file() -> None:
    statuses: list[int | None] = [204, 404, 403, 503, None, 200]
    server = ScriptedServer(lambda number, request: batch_response(request, statuses, "forbidden"))
    with server.running():
        failures = bare_storage(server.endpoint).delete_batch([f"f{number}" for number in range(6)])
    assert {path: type(error) for path, error in failures.items()} == {
        "f2": StoragePermissionError,
        "f3": AmbiguousWriteError,
        "f4": AmbiguousWriteError,
    }
    assert [error.path for error in failures.values()] == list(failures)


def test_delete_batch_retries_only_transient_failures() -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        return batch_response(request, [204, 503, 204] if number == 0 else [204])

    server = ScriptedServer(script)
    with server.running():
        storage = RetryStorage(bare_storage(server.endpoint), base_delay_seconds=0.001)
        assert storage.delete_many(["a", "b", "c"]) == {}
        assert [request.body.count(b"DELETE /storage/v1/b/bucket/o/lake%2F") for request in server.requests] == [3, 1]


def test_many_deletes_are_batches_of_a_hundred() -> None:
    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        return batch_response(request, [204] * request.body.count(b"DELETE "))

    server = ScriptedServer(script)
    with server.running():
        assert bare_storage(server.endpoint).delete_many([f"{number}" for number in range(250)]) == {}
        assert sorted(request.body.count(b"DELETE ") for request in server.requests) == [50, 100, 100]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"--x\r\n\r\n--x--"])
def test_invalid_batch_response_is_ambiguous(body: bytes) -> None:
    server = ScriptedServer(always(ScriptedResponse(200, body, {"Content-Type": "multipart/mixed; boundary=x"})))
    with server.running():
        failures = bare_storage(server.endpoint).delete_batch(["a", "b"])
    assert {path: type(error) for path, error in failures.items()} == dict.fromkeys("ab", AmbiguousWriteError)


# --- invalid responses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b"[]", b'{"items": [{}]}', b'{"items": [1]}', b'{"items": {}}', b'{"items": [{"name": 1}]}',
     b'{"items": [{"name": "lake/f", "size": "1"}]}',
     b'{"items": [{"name": "lake/f", "size": "1", "updated": "2026-11-24T12:00:00"}]}',
     b'{"items": [{"name": "lake/f", "size": "x", "updated": "2026-11-24T12:00:00Z"}]}'],
)  # fmt: skip
def test_invalid_listing_is_rejected(body: bytes) -> None:
    server = ScriptedServer(always(ScriptedResponse(200, body)))
    with server.running(), pytest.raises(StorageError, match="'endpoint'"):
        list(bare_storage(server.endpoint).list())


def test_repeated_page_of_a_listing_is_rejected() -> None:
    server = ScriptedServer(always(json_response({"nextPageToken": "same"})))
    with server.running(), pytest.raises(StorageError):
        list(bare_storage(server.endpoint).list())


def test_listing_continues_after_an_empty_page() -> None:
    file = {"name": "lake/a", "size": "3", "updated": "2026-11-24T12:00:00.999Z"}
    folder = {**file, "name": "lake/a/"}

    def script(number: int, request: RecordedRequest) -> ScriptedResponse:
        position = parse_qs(urlsplit(request.path).query).get("pageToken")
        return json_response({"nextPageToken": "more"} if position is None else {"items": [file, folder]})

    server = ScriptedServer(script)
    with server.running():
        assert [file.path for file in bare_storage(server.endpoint).list("a")] == ["a"]
        assert parse_qs(urlsplit(server.requests[0].path).query)["prefix"] == ["lake/a"]


def test_read_does_not_load_a_file_above_the_limit() -> None:
    """Reject a file by its declared length or, without one, as soon as too many bytes have arrived."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20)) for _ in range(3)) + b"0\r\n\r\n"
    for response in (
        ScriptedResponse(200, b"x" * 1000, content_length=10**12),
        ScriptedResponse(200, chunks, {"Transfer-Encoding": "chunked"}),
    ):
        server = ScriptedServer(always(response))
        with server.running(), pytest.raises(CorruptFileError, match="1000000"):
            bare_storage(server.endpoint).read("f", limit_bytes=10**6)


@pytest.mark.parametrize(
    "response",
    [
        ScriptedResponse(200, b"short", content_length=10),
        ScriptedResponse(206, b"23", {"Content-Range": "bytes 2-3/10"}),
        ScriptedResponse(206, b"234", {"Content-Range": "bytes 2-5/10"}),
    ],
)
def test_partial_response_is_never_returned(response: ScriptedResponse) -> None:
    server = ScriptedServer(always(response))
    with server.running(), pytest.raises(TransientError):
        bare_storage(server.endpoint).read("f", offset=2, length=4)


def test_server_that_ignores_ranges_is_supported() -> None:
    server = ScriptedServer(always(ScriptedResponse(200, b"0123456789")))
    with server.running():
        assert bare_storage(server.endpoint).read("f", offset=2, length=4) == b"2345"


def test_slow_server_times_out() -> None:
    server = ScriptedServer(always(ScriptedResponse(200, b"x" * 1000, byte_delay_s=0.05)))
    with server.running():
        storage = bare_storage(server.endpoint, read_timeout_seconds="0.2", connect_timeout_seconds="0.2")
        start_s = time.monotonic()
        with pytest.raises(TransientError):
            storage.read("f")
        assert time.monotonic() - start_s < MAX_DURATION_S


def test_no_redirect_is_followed() -> None:
    """Following it would send a token, or a second create, to an unintended location."""
    server = ScriptedServer(lambda number, request: ScriptedResponse(307, b"", {"Location": f"/other/{number}"}))
    with server.running():
        storage = bare_storage(server.endpoint)
        for call in (lambda: storage.create("f", b"x"), lambda: storage.read("f"), lambda: list(storage.list())):
            with pytest.raises(StorageError, match="'endpoint'"):
                call()
        assert [request.method for request in server.requests] == ["POST", "GET", "GET"]


def test_upload_may_exceed_the_read_timeout() -> None:
    body = b"x" * (32 << 20)  # more than the buffers between client and server
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> int:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(MAX_DURATION_S)
                time.sleep(1.2)
                n_received_bytes = 0
                while n_received_bytes <= len(body) and (chunk := connection.recv(1 << 20)):
                    n_received_bytes += len(chunk)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                return n_received_bytes

        with ThreadPoolExecutor(1) as pool:
            n_received = pool.submit(serve)
            bare_storage(f"http://127.0.0.1:{listener.getsockname()[1]}", read_timeout_seconds="0.4").create("f", body)
            assert n_received.result() > len(body)


def test_response_without_a_date_is_rejected() -> None:
    server = ScriptedServer(always(ScriptedResponse(200, b"{}", {"Date": ""})))
    with server.running(), pytest.raises(StorageError):
        bare_storage(server.endpoint).now_ms()


def test_names_reach_the_server_unchanged() -> None:
    server = ScriptedServer(always(json_response({})))
    with server.running():
        storage = bare_storage(server.endpoint)
        for name in ("a/b", "%20", "a%2Fb", "?", "#x", "..a", "ü", "a b+c", "~", "{0}"):
            storage.delete(name)
            target = server.requests[-1].path
            assert unquote(target.rpartition("/")[2]) == f"lake/{name}"


# --- processes --------------------------------------------------------------------------------------


def test_forked_child_shares_no_connection_with_its_parent(fake_gcs: GcsServer) -> None:
    """The requests of the child use connections that are separate from those of its parent."""
    root = fake_gcs.fresh_root()
    storage = bare_storage(fake_gcs.endpoint, root)
    storage.create("parent", b"1")

    def work(report: Callable[[str], None]) -> None:
        storage.create("child", b"2")
        report(storage.read("parent").decode())

    status, lines = fork(work).finish()
    assert (status, lines) == (0, ["1"])
    start_s = time.monotonic()
    assert storage.read("child") == b"2"
    assert time.monotonic() - start_s < MAX_DURATION_S / 2
    fake_gcs.delete_all(root)


_FORKING_PROGRAM = """
import os, sys
from trinitylake_ops.storage import open_storage
storage = open_storage(sys.argv[1], {"endpoint": sys.argv[2], "credentials": "anonymous"}).inner
storage.create("parent", b"1")
if os.fork() == 0:
    storage.create("child", b"2")
    sys.exit(0)
os.wait()
print(storage.read("child").decode())
"""


def test_exit_of_a_forked_child_does_not_affect_its_parent(fake_gcs: GcsServer) -> None:
    """When the child exits, its interpreter destroys all objects except those that belong to the parent."""
    root = fake_gcs.fresh_root()
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", _FORKING_PROGRAM, root, fake_gcs.endpoint]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "2\n", "")
    fake_gcs.delete_all(root)
