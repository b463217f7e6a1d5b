"""Authentication, scopes and limits. Responses and logs contain no secrets."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pyiceberg.exceptions import ForbiddenError, OAuthError, UnauthorizedError

from tests.lakes import Lakes, allowing
from tests.server.live_server import LiveServer, Response, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, create_body, properties
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server import tokens as server_tokens
from trinitylake_ops.server.run import serve
from trinitylake_ops.server.settings import LakehouseSettings, Limits, ServerSettings
from trinitylake_ops.server.tokens import Scope, Tokens
from trinitylake_ops.storage.options import StorageOptions, redact_assignments
from trinitylake_ops.telemetry.settings import JsonFormatter

FORBIDDEN = (403, "ForbiddenException")
UNAUTHORIZED = (401, "NotAuthorizedException")
READER, WRITER, OPERATOR, MIXED, EXPIRED = ("reader-1x", "writer-2y", "operator-3z", "mixed-4w", "old-5v")


def entry(token: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **fields}


ENTRIES = [
    entry(READER, "reader", scope="read"),
    entry(WRITER, "writer", scope="write"),
    entry(OPERATOR, "operator", scope="operate"),
    entry(MIXED, "mixed", scope="none", namespaces={"ns": "read", "own": "write"}),
    entry(EXPIRED, "old", scope="operate", expires="2020-01-31T00:00:00Z"),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    return path


@pytest.fixture
def token_server(lake: Lakehouse, tokens: Path) -> Iterator[LiveServer]:
    """A server with tokens, whose lakehouse has ``ns.t`` and the namespaces ``own`` and ``other``."""
    catalog = catalog_at(lake)
    for name in ("ns", "own", "other"):
        catalog.create_namespace(name)
    with serving(settings_for(lake, tokens=tokens)) as server:
        assert request(server, OPERATOR, "POST", TABLES, create_body()).status == 200
        yield server


def request(server: LiveServer, token: str, method: str, path: str, body: Any = None) -> Response:
    return server.request(method, path, body, {"Authorization": f"Bearer {token}"})


def test_requests_without_valid_token_are_rejected(token_server: LiveServer) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic cmVhZGVyOng="},
        {"Authorization": READER},
    ):
        response = token_server.request("GET", "/v1/config", headers=headers)
        assert response.error == UNAUTHORIZED
        assert response.headers["www-authenticate"] == "Bearer"
    assert request(token_server, "unknown", "GET", "/v1/config").error == UNAUTHORIZED
    assert request(token_server, EXPIRED, "GET", "/v1/config").error == UNAUTHORIZED
    assert token_server.request("GET", "/healthz").status == token_server.request("GET", "/readyz").status == 200
    with pytest.raises(UnauthorizedError):
        token_server.catalog(token="unknown", **{"oauth2-server-uri": token_server.url})
    assert token_server.catalog(token=READER, **{"oauth2-server-uri": token_server.url}).list_tables("ns") == [
        ("ns", "t")
    ]


def test_oauth_client_credentials_are_rejected_with_oauth_error(token_server: LiveServer, lake: Lakehouse) -> None:
    """Clients without a token request one with OAuth, so the error has the format of OAuth."""
    body = b"grant_type=client_credentials&client_id=etl&client_secret=verysecret42"
    with serving(settings_for(lake)) as anonymous_server:
        for server in (token_server, anonymous_server):
            response = server.request("POST", "/v1/oauth/tokens", body)
            assert (response.status, response.document["error"]) == (400, "unsupported_grant_type")
            assert "verysecret42" not in response.body.decode()
            client_properties = {"credential": "etl:verysecret42", "oauth2-server-uri": f"{server.url}/v1/oauth/tokens"}
            with pytest.raises(OAuthError, match="unsupported_grant_type"):
                server.catalog(**client_properties)
    assert token_server.request("GET", "/v1/oauth/tokens").error == UNAUTHORIZED


def test_missing_token_is_not_reported_as_invalid(token_server: LiveServer) -> None:
    with pytest.raises(UnauthorizedError, match="missing"):
        token_server.catalog()


WRITES = [
    ("POST", TABLES, create_body("u")),
    ("POST", TABLES, create_body("v", **{"stage-create": True})),
    ("POST", TABLE, commit_of(properties(a="1"))),
    ("POST", "/v1/main/transactions/commit", {"table-changes": [commit_of(properties(a="1"))]}),
    ("POST", "/v1/main/namespaces", {"namespace": ["new"]}),
    ("POST", "/v1/main/namespaces/ns/properties", {"updates": {"a": "1"}}),
    ("DELETE", TABLE, None),
    ("DELETE", "/v1/main/namespaces/other", None),
    (
        "POST",
        "/v1/main/tables/rename",
        {"source": {"namespace": ["ns"], "name": "u"}, "destination": {"namespace": ["own"], "name": "u"}},
    ),
]


def test_reader_can_read_but_not_write(token_server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for path in ("/v1/config", "/v1/main/namespaces", TABLES, TABLE):
        assert request(token_server, READER, "GET", path).status == 200
    for method, path, body in WRITES:
        assert request(token_server, READER, method, path, body).error == FORBIDDEN
    assert lake.latest_version() == before


def test_writer_can_write_but_not_register(token_server: LiveServer, lake: Lakehouse) -> None:
    body = {"name": "r", "metadata-location": "file:///data/t/metadata/1.metadata.json"}
    assert request(token_server, WRITER, "POST", "/v1/main/namespaces/ns/register", body).error == FORBIDDEN
    assert {request(token_server, WRITER, *write).status for write in WRITES} == {200, 204}
    (latest,) = lake.history(1)
    assert latest.properties["principal"] == "writer"


def test_scopes_apply_by_namespace(token_server: LiveServer, lake: Lakehouse) -> None:
    assert request(token_server, MIXED, "GET", "/v1/main/namespaces").document["namespaces"] == [["ns"], ["own"]]
    assert request(token_server, MIXED, "GET", TABLE).status == 200
    assert request(token_server, MIXED, "POST", "/v1/main/namespaces/own/tables", create_body("mine")).status == 200
    before = lake.latest_version()
    forbidden_requests = [
        ("POST", TABLES, create_body("u")),
        ("GET", "/v1/main/namespaces/other", None),
        ("GET", "/v1/main/namespaces/missing", None),
        ("GET", "/v1/main/namespaces/other/tables/t", None),
        ("HEAD", "/v1/main/namespaces/other", None),
        ("GET", "/v1/main/namespaces?parent=other", None),
        ("POST", "/v1/main/namespaces", {"namespace": ["new"]}),
        (
            "POST",
            "/v1/main/tables/rename",
            {"source": {"namespace": ["own"], "name": "mine"}, "destination": {"namespace": ["ns"], "name": "m"}},
        ),
        (
            "POST",
            "/v1/main/transactions/commit",
            {
                "table-changes": [
                    {"identifier": {"namespace": ["own"], "name": "mine"}, "requirements": [], "updates": []},
                    commit_of(properties(a="1")),
                ]
            },
        ),
    ]
    for method, path, body in forbidden_requests:
        assert request(token_server, MIXED, method, path, body).status == 403, (method, path)
    assert lake.latest_version() == before


def test_token_is_revoked_without_restart(token_server: LiveServer, tokens: Path) -> None:
    assert request(token_server, READER, "GET", "/v1/config").status == 200
    tokens.write_text(yaml.safe_dump({"tokens": ENTRIES[1:]}))
    assert request(token_server, READER, "GET", "/v1/config").error == UNAUTHORIZED
    assert request(token_server, WRITER, "GET", "/v1/config").status == 200
    tokens.write_text("tokens: [")
    assert request(token_server, WRITER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.unlink()
    assert request(token_server, WRITER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    assert request(token_server, READER, "GET", "/v1/config").status == 200


def test_token_file_with_same_size_and_time_is_read_again(token_server: LiveServer, tokens: Path) -> None:
    status, text = tokens.stat(), tokens.read_text()
    digest = hashlib.sha256(READER.encode()).hexdigest()
    assert request(token_server, READER, "GET", "/v1/config").status == 200
    tokens.write_text(text.replace(digest, "f" * 64))
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (tokens.stat().st_size, tokens.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert request(token_server, READER, "GET", "/v1/config").error == UNAUTHORIZED


def test_unresponsive_token_file_does_not_block_other_requests(
    token_server: LiveServer, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_text = tokens.read_text()
    tokens.unlink()
    os.mkfifo(tokens)
    assert request(token_server, READER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.unlink()
    tokens.write_text(original_text)
    may_read = threading.Event()
    read = server_tokens.read_yaml
    monkeypatch.setattr(server_tokens, "read_yaml", lambda *args: may_read.wait(60) and read(*args))
    monkeypatch.setattr(server_tokens, "READ_TIMEOUT_S", 0.1)
    try:
        assert request(token_server, READER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
        assert token_server.request("GET", "/healthz").status == 200
    finally:
        may_read.set()
    monkeypatch.undo()
    assert request(token_server, READER, "GET", "/v1/config").status == 200


def test_hidden_lakehouses_are_not_listed(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": [entry(WRITER, "writer", scope="write", lakehouses=["north"])]}))
    lakehouses = {
        lake.root.split("/")[-2]: LakehouseSettings(lake.root, lake.storage_options) for lake in (north, south)
    }
    with serving(settings_for(north, lakehouses=lakehouses, tokens=path)) as server:
        assert request(server, WRITER, "GET", "/v1/config?warehouse=north").status == 200
        assert request(server, WRITER, "GET", "/v1/config?warehouse=south").error == FORBIDDEN
        assert request(server, WRITER, "POST", "/v1/south.main/namespaces", {"namespace": ["x"]}).error == FORBIDDEN
    assert south.snapshot().namespaces() == []


@pytest.mark.parametrize(
    "text",
    [
        "tokens: {}",
        "tokens: [a]",
        "tokens: [{name: a}]",
        f"tokens: [{{name: a, sha256: {'0' * 63}}}]",
        f"tokens: [{{name: 'a b', sha256: '{'0' * 64}'}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', scope: all}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', scope: 2}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', namespaces: [ns]}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', namespaces: {{ns: x}}}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', expires: soon}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', expires: }}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', expires: 2020-01-01T00:00:00+99:99}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', scope: {'9' * 5000}}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', lakehouses: }}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', lakehouses: a}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}', token: verysecret42}}]",
        f"tokens: [{{name: a, sha256: '{'a' * 64}'}}, {{name: b, sha256: '{'a' * 64}'}}]",
    ],
    ids=range(17),
)
def test_invalid_token_files_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        Tokens(path)
    assert "verysecret42" not in str(caught.value)


NON_STRING_NAMES = ("no", "on", "2026_11", "0123", "null", "1.10", "12:30:00")


@pytest.mark.parametrize("name", NON_STRING_NAMES)
def test_namespace_that_yaml_does_not_parse_as_string_is_rejected(tmp_path: Path, name: str) -> None:
    """The restriction would apply to another namespace, such as ``False``."""
    path = tmp_path / "tokens.yaml"
    template = f"tokens: [{{name: a, sha256: '{'a' * 64}', scope: read, namespaces: {{{{}}: none}}}}]"
    path.write_text(template.replace("{}", name))
    with pytest.raises(InvalidInputError):
        Tokens(path)
    path.write_text(template.replace("{}", f"'{name}'"))
    (principal,) = Tokens(path).principals()
    assert not principal.may(Scope.READ, name)


def test_duplicate_yaml_key_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(f"tokens:\n- name: a\n  sha256: {'a' * 64}\n  namespaces: {{s: none}}\n  namespaces: {{t: none}}\n")
    with pytest.raises(InvalidInputError):
        Tokens(path)


def test_metrics_and_status_page_require_read_access_to_all_namespaces(lake: Lakehouse, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    restricted = entry(MIXED, "mixed", scope="read", namespaces={"secret": "none"})
    path.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read"), restricted]}))
    with serving(settings_for(lake, tokens=path)) as server:
        for target in ("/metrics", "/"):
            assert request(server, READER, "GET", target).status == 200
            assert request(server, MIXED, "GET", target).error == FORBIDDEN


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "CONNECT"])
def test_read_only_paths_reject_other_methods(
    server: LiveServer, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/v1/config"):
        assert server.request(method, path, None).status in (404, 405)
    assert "Exception in ASGI" not in caplog.text


def test_yaml_timestamp_is_accepted_as_expiry(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    expiry = datetime.now(UTC) + timedelta(hours=1)
    path.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read", expires=expiry)]}))
    assert asyncio.run(Tokens(path).principal(f"bearer {READER}")).expires == expiry


def test_server_without_tokens_is_local_and_read_only(lake: Lakehouse) -> None:
    with serving(settings_for(lake, anonymous_writes=False)) as server:
        with pytest.raises(ForbiddenError, match=r"anonymous .*--anonymous-writes"):
            server.catalog().create_namespace("ns")
        assert server.catalog().list_namespaces() == []
        assert server.request("GET", "/v1/config", headers={"Authorization": "Bearer None"}).status == 200


def test_requests_from_web_pages_are_rejected(server: LiveServer) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Host": "evil.example:8181"},
        {"Host": "evil.example"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert server.request("GET", "/v1/config", headers=headers).error == FORBIDDEN
    for host in ("localhost:8181", "127.0.0.1", "[::1]:8181", "[::1]"):
        assert server.request("GET", "/v1/config", headers={"Host": host}).status == 200


def test_unsafe_settings_are_rejected(tmp_path: Path) -> None:
    file, defaults = tmp_path / "file", ServerSettings({})
    for unsafe, message in (
        (replace(defaults, host="0.0.0.0"), "--tokens"),
        (replace(defaults, host="lake.example", anonymous_writes=True), "--tokens"),
        (replace(defaults, host="::", tokens=file), "--behind-proxy"),
        (replace(defaults, tokens=file, anonymous_writes=True), "token file"),
        (replace(defaults, tls_key=file), "both"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            unsafe.check()
    replace(defaults, host="0.0.0.0", tokens=file, behind_proxy=True).check()
    replace(defaults, host="0.0.0.0", tokens=file, tls_certificate=file, tls_key=file).check()
    for host in ("localhost", "127.0.0.2", "::1"):
        replace(defaults, host=host, anonymous_writes=True).check()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "certificate.pem", folder / "key.pem"


def test_tls_rejects_weak_ciphers_and_invalid_certificate(lake: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    file, key = write_certificate(tmp_path)
    settings = settings_for(lake, tokens=tokens, tls_certificate=file, tls_key=key)
    with serving(settings) as server:
        trusted_context = ssl.create_default_context(cafile=str(file))
        connection = HTTPSConnection("127.0.0.1", int(server.url.rpartition(":")[2]), context=trusted_context)
        connection.request("GET", "/v1/config", headers={"Authorization": f"Bearer {READER}"})
        assert connection.getresponse().status == 200
        connection.close()
        weak_context = ssl.create_default_context(cafile=str(file))
        weak_context.maximum_version = ssl.TLSVersion.TLSv1_2
        weak_context.set_ciphers("AES128-SHA:AES256-SHA256:AES128-GCM-SHA256")
        with pytest.raises(ssl.SSLError):
            HTTPSConnection("127.0.0.1", int(server.url.rpartition(":")[2]), context=weak_context).connect()
    file.write_text("no certificate")
    with pytest.raises(InvalidInputError):
        serve(settings)


def test_bodies_pages_and_queries_are_limited(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        for number in range(5):
            txn.create_namespace(f"n{number}")
    with serving(settings_for(lake, limits=Limits(body_bytes=2_000, page_names=2))) as server:
        large = {"namespace": ["x"], "properties": {"a": "b" * 3_000}}
        assert server.request("POST", "/v1/main/namespaces", large).error == (413, "BadRequestException")
        assert server.request("POST", "/v1/main/namespaces", headers={"Content-Length": "x"}).status == 400
        page = server.request("GET", "/v1/main/namespaces?pageToken=&pageSize=100").document
        assert len(page["namespaces"]) == 2
        assert server.request("GET", f"/v1/config?warehouse={'x' * 20_000}").error[0] == 400
        chunks = b"POST /v1/main/namespaces HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(chunks + b"7d0\r\n" + b"x" * 2_000 + b"\r\n" + b"10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n")
            assert b"413" in connection.recv(4_096).splitlines()[0]
    assert lake.snapshot().namespaces() == [f"n{number}" for number in range(5)]


def test_body_with_too_many_values_is_not_parsed(server: LiveServer) -> None:
    """Two bytes of a body can become an object of fifty bytes or more."""
    for values in (b"[" * 600_000 + b"]" * 600_000, b"[" + b"{}," * 600_000 + b"0]"):
        response = server.request("POST", "/v1/main/namespaces", b'{"namespace": ["a"], "x": ' + values + b"}")
        assert response.error == (413, "BadRequestException")


def test_commit_with_too_many_parts_is_rejected(server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    requirement = {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1}
    for body in (
        commit_of(*[properties(a="1")] * 1_001),
        commit_of(properties(a="1"), requirements=(requirement,) * 1_001),
    ):
        assert server.request("POST", TABLE, body).error == (400, "BadRequestException")
    assert lake.latest_version() == before


def test_change_that_times_out_is_completed(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings_for(lake, limits=Limits(seconds=0.2, threads=1))) as server:
        assert server.application is not None
        server_lake = server.application.warehouses.served[0].lake
        begin = server_lake.transaction
        reader, writer = os.pipe()

        def delayed_transaction(*arguments: Any, **keywords: Any) -> Any:
            os.read(reader, 1)
            return begin(*arguments, **keywords)

        monkeypatch.setattr(server_lake, "transaction", delayed_transaction)
        timed_out = server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]})
        assert timed_out.error == (504, "CommitStateUnknownException")
        queued = server.request("POST", "/v1/main/namespaces", {"namespace": ["other"]})
        assert queued.error == (
            503,
            "ServiceUnavailableException",
        )  # the only thread is busy, so the request did not start
        assert server.request("GET", "/v1/main/namespaces").status == 200  # reads use other threads
        os.write(writer, b"x")
    assert lake.snapshot().namespaces() == ["ns"]  # the server completed the change
    os.close(reader)
    os.close(writer)


def test_too_many_requests_get_retry_after(lake: Lakehouse) -> None:
    with serving(settings_for(lake, limits=Limits(threads=1, waiting=-1))) as server:
        response = server.request("GET", "/v1/main/namespaces")
        assert response.error == (503, "ServiceUnavailableException")
        assert response.headers["retry-after"] == "1"


def test_tables_are_registered_below_allowed_roots_only(lakes: Lakes, tmp_path: Path) -> None:
    lake, other = lakes.local(), lakes.local("other")
    for lakehouse in (lake, other):
        catalog_at(lakehouse).create_namespace("ns")
    external_table = catalog_at(other).create_table("ns.t", catalog_schema())
    body = {"name": "r", "metadata-location": external_table.metadata_location}
    path = "/v1/main/namespaces/ns/register"
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "verysecret42"}')
    with serving(settings_for(lake)) as server:
        before = lake.latest_version()
        assert server.request("POST", path, body).error == FORBIDDEN
        for location in (f"file://{secret}", "file:///etc/passwd", "s3://bucket/t.metadata.json", "relative.json", ""):
            response = server.request("POST", path, {**body, "metadata-location": location})
            assert response.status in (400, 403, 503), location
            assert b"verysecret42" not in response.body
        assert lake.latest_version() == before
    allowed = allowing(lake, Path(other.root.removeprefix("file://").rstrip("/")))
    with serving(settings_for(allowed)) as server:
        registered = server.request("POST", path, body)
        assert registered.document["metadata-location"] == external_table.metadata_location
        assert server.request("POST", path, body).error == (409, "AlreadyExistsException")
        assert server.request("POST", path, {**body, "overwrite": True}).status == 200
    assert lake.snapshot().table("ns", "r").table_type == "EXTERNAL"


def catalog_schema() -> Any:
    import pyarrow as pa

    return pa.schema([("id", pa.int64())])


def test_secrets_are_not_logged(lake: Lakehouse, tokens: Path) -> None:
    """Tokens, storage credentials and bodies never appear in the log. Each line is one JSON object."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter(redact_assignments))
    package_logger = logging.getLogger("trinitylake_ops")
    level = package_logger.level
    package_logger.addHandler(handler)
    package_logger.setLevel(logging.DEBUG)
    try:
        options = StorageOptions({**lake.storage_options, "s3.secret_access_key": "verysecret42"})
        with serving(settings_for(Lakehouse(lake.storage, options), tokens=tokens)) as server:
            request(
                server,
                WRITER,
                "POST",
                "/v1/main/namespaces",
                {"namespace": ["ns"], "properties": {"user.password": "hidden43"}},
            )
            request(server, "wrong-token-44", "GET", "/v1/config?token=inquery45")
            request(server, WRITER, "GET", "/v1/main/namespaces/a%0Ab%1b[2J")
            request(server, WRITER, "GET", "/v1/main/namespaces/verysecret42")
    finally:
        package_logger.removeHandler(handler)
        package_logger.setLevel(level)
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    access_lines = [line for line in lines if "status" in line]
    assert [line["status"] for line in access_lines] == [200, 401, 400, 404]
    assert access_lines[0].items() >= {"principal": "writer", "method": "POST", "path": "/v1/main/namespaces"}.items()
    assert all(line["request"] and line["milliseconds"] >= 0 for line in access_lines)
    for secret in (WRITER, "hidden43", "wrong-token-44", "inquery45"):
        assert secret not in text.getvalue()
    assert "verysecret42" not in access_lines[3]["detail"]
