"""Who is let in, what a token may, which limits hold, and what no answer and no log tells."""

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
from tests.server.requests import TABLE, TABLES, commit_of, created, properties
from tests.server.served import Reply, Served, serving, settings_for
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
READER, WRITER, OPERATOR, MIXED, OLD = ("reader-1x", "writer-2y", "operator-3z", "mixed-4w", "old-5v")


def entry(token: str, name: str, **said: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **said}


ENTRIES = [
    entry(READER, "reader", scope="read"),
    entry(WRITER, "writer", scope="write"),
    entry(OPERATOR, "operator", scope="operate"),
    entry(MIXED, "mixed", scope="none", namespaces={"ns": "read", "own": "write"}),
    entry(OLD, "old", scope="operate", expires="2020-01-31T00:00:00Z"),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    return path


@pytest.fixture
def guarded(lake: Lakehouse, tokens: Path) -> Iterator[Served]:
    """A server with tokens, whose lakehouse has ``ns.t`` and the namespaces ``own`` and ``other``."""
    catalog = catalog_at(lake)
    for name in ("ns", "own", "other"):
        catalog.create_namespace(name)
    with serving(settings_for(lake, tokens=tokens)) as served:
        assert ask(served, OPERATOR, "POST", TABLES, created()).status == 200
        yield served


def ask(served: Served, token: str, method: str, path: str, body: Any = None) -> Reply:
    return served.ask(method, path, body, {"Authorization": f"Bearer {token}"})


def test_nobody_is_let_in_without_a_token(guarded: Served) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic cmVhZGVyOng="},
        {"Authorization": READER},
    ):
        refused = guarded.ask("GET", "/v1/config", headers=headers)
        assert refused.error == UNAUTHORIZED
        assert refused.headers["www-authenticate"] == "Bearer"
    assert ask(guarded, "nobody", "GET", "/v1/config").error == UNAUTHORIZED
    assert ask(guarded, OLD, "GET", "/v1/config").error == UNAUTHORIZED
    assert guarded.ask("GET", "/healthz").status == guarded.ask("GET", "/readyz").status == 200
    with pytest.raises(UnauthorizedError):
        guarded.catalog(token="nobody", **{"oauth2-server-uri": guarded.url})
    assert guarded.catalog(token=READER, **{"oauth2-server-uri": guarded.url}).list_tables("ns") == [("ns", "t")]


def test_a_client_with_a_name_and_a_secret_hears_that_it_needs_a_token(guarded: Served, lake: Lakehouse) -> None:
    """Clients that are given no token ask for one, as OAuth has it. So the answer is one of OAuth."""
    asked = b"grant_type=client_credentials&client_id=etl&client_secret=verysecret42"
    with serving(settings_for(lake)) as open_to_all:
        for served in (guarded, open_to_all):
            answer = served.ask("POST", "/v1/oauth/tokens", asked)
            assert (answer.status, answer.document["error"]) == (400, "unsupported_grant_type")
            assert "verysecret42" not in answer.body.decode()
            given = {"credential": "etl:verysecret42", "oauth2-server-uri": f"{served.url}/v1/oauth/tokens"}
            with pytest.raises(OAuthError, match="unsupported_grant_type"):
                served.catalog(**given)
    assert guarded.ask("GET", "/v1/oauth/tokens").error == UNAUTHORIZED


def test_a_client_without_a_token_is_not_told_that_its_token_is_wrong(guarded: Served) -> None:
    with pytest.raises(UnauthorizedError, match="missing"):
        guarded.catalog()


WRITES = [
    ("POST", TABLES, created("u")),
    ("POST", TABLES, created("v", **{"stage-create": True})),
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


def test_a_reader_reads(guarded: Served, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for path in ("/v1/config", "/v1/main/namespaces", TABLES, TABLE):
        assert ask(guarded, READER, "GET", path).status == 200
    for method, path, body in WRITES:
        assert ask(guarded, READER, method, path, body).error == FORBIDDEN
    assert lake.latest_version() == before


def test_a_writer_writes_and_registers_nothing(guarded: Served, lake: Lakehouse) -> None:
    body = {"name": "r", "metadata-location": "file:///data/t/metadata/1.metadata.json"}
    assert ask(guarded, WRITER, "POST", "/v1/main/namespaces/ns/register", body).error == FORBIDDEN
    assert {ask(guarded, WRITER, *write).status for write in WRITES} == {200, 204}
    (latest,) = lake.history(1)
    assert latest.properties["principal"] == "writer"


def test_scopes_differ_by_namespace(guarded: Served, lake: Lakehouse) -> None:
    assert ask(guarded, MIXED, "GET", "/v1/main/namespaces").document["namespaces"] == [["ns"], ["own"]]
    assert ask(guarded, MIXED, "GET", TABLE).status == 200
    assert ask(guarded, MIXED, "POST", "/v1/main/namespaces/own/tables", created("mine")).status == 200
    before = lake.latest_version()
    refused = [
        ("POST", TABLES, created("u")),
        ("GET", "/v1/main/namespaces/other", None),
        ("GET", "/v1/main/namespaces/never-there", None),
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
    for method, path, body in refused:
        assert ask(guarded, MIXED, method, path, body).status == 403, (method, path)
    assert lake.latest_version() == before


def test_a_token_is_revoked_without_a_restart(guarded: Served, tokens: Path) -> None:
    assert ask(guarded, READER, "GET", "/v1/config").status == 200
    tokens.write_text(yaml.safe_dump({"tokens": ENTRIES[1:]}))
    assert ask(guarded, READER, "GET", "/v1/config").error == UNAUTHORIZED
    assert ask(guarded, WRITER, "GET", "/v1/config").status == 200
    tokens.write_text("tokens: [")
    assert ask(guarded, WRITER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.unlink()
    assert ask(guarded, WRITER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    assert ask(guarded, READER, "GET", "/v1/config").status == 200


def test_a_right_is_withdrawn_in_a_file_of_the_same_size_and_time(guarded: Served, tokens: Path) -> None:
    status, text = tokens.stat(), tokens.read_text()
    digest = hashlib.sha256(READER.encode()).hexdigest()
    assert ask(guarded, READER, "GET", "/v1/config").status == 200
    tokens.write_text(text.replace(digest, "f" * 64))
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (tokens.stat().st_size, tokens.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert ask(guarded, READER, "GET", "/v1/config").error == UNAUTHORIZED


def test_a_file_of_tokens_that_does_not_respond_stops_no_other_request(
    guarded: Served, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens.read_text()
    tokens.unlink()
    os.mkfifo(tokens)
    assert ask(guarded, READER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
    tokens.unlink()
    tokens.write_text(text)
    released = threading.Event()
    read = server_tokens.read_yaml
    monkeypatch.setattr(server_tokens, "read_yaml", lambda *args: released.wait(60) and read(*args))
    monkeypatch.setattr(server_tokens, "_READ_SECONDS", 0.1)
    try:
        assert ask(guarded, READER, "GET", "/v1/config").error == (503, "ServiceUnavailableException")
        assert guarded.ask("GET", "/healthz").status == 200
    finally:
        released.set()
    monkeypatch.undo()
    assert ask(guarded, READER, "GET", "/v1/config").status == 200


def test_lakehouses_that_a_token_may_not_see(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": [entry(WRITER, "writer", scope="write", lakehouses=["north"])]}))
    lakehouses = {
        lake.root.split("/")[-2]: LakehouseSettings(lake.root, lake.storage_options) for lake in (north, south)
    }
    with serving(settings_for(north, lakehouses=lakehouses, tokens=path)) as served:
        assert ask(served, WRITER, "GET", "/v1/config?warehouse=north").status == 200
        assert ask(served, WRITER, "GET", "/v1/config?warehouse=south").error == FORBIDDEN
        assert ask(served, WRITER, "POST", "/v1/south.main/namespaces", {"namespace": ["x"]}).error == FORBIDDEN
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
def test_files_of_tokens_that_make_no_sense(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        Tokens(path)
    assert "verysecret42" not in str(caught.value)


NAMELESS = ("no", "on", "2026_11", "0123", "null", "1.10", "12:30:00")


@pytest.mark.parametrize("name", NAMELESS)
def test_a_restriction_of_what_yaml_takes_for_no_text_is_refused(tmp_path: Path, name: str) -> None:
    """It would hold for another namespace, such as ``False``."""
    path = tmp_path / "tokens.yaml"
    said = f"tokens: [{{name: a, sha256: '{'a' * 64}', scope: read, namespaces: {{{{}}: none}}}}]"
    path.write_text(said.replace("{}", name))
    with pytest.raises(InvalidInputError):
        Tokens(path)
    path.write_text(said.replace("{}", f"'{name}'"))
    (principal,) = Tokens(path).principals()
    assert not principal.may(Scope.READ, name)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(f"tokens:\n- name: a\n  sha256: {'a' * 64}\n  namespaces: {{s: none}}\n  namespaces: {{t: none}}\n")
    with pytest.raises(InvalidInputError):
        Tokens(path)


def test_metrics_and_the_page_are_for_who_may_read_everything(lake: Lakehouse, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    restricted = entry(MIXED, "mixed", scope="read", namespaces={"secret": "none"})
    path.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read"), restricted]}))
    with serving(settings_for(lake, tokens=path)) as served:
        for place in ("/metrics", "/"):
            assert ask(served, READER, "GET", place).status == 200
            assert ask(served, MIXED, "GET", place).error == FORBIDDEN


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "CONNECT"])
def test_what_is_only_read_takes_no_other_method(served: Served, method: str, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("/healthz", "/readyz", "/metrics", "/v1/config"):
        assert served.ask(method, place, None).status in (404, 405)
    assert "Exception in ASGI" not in caplog.text


def test_a_time_of_expiry_in_yaml_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    soon = datetime.now(UTC) + timedelta(hours=1)
    path.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read", expires=soon)]}))
    assert asyncio.run(Tokens(path).principal(f"bearer {READER}")).expires == soon


def test_without_tokens_this_machine_reads_only(lake: Lakehouse) -> None:
    with serving(settings_for(lake, anonymous_writes=False)) as served:
        with pytest.raises(ForbiddenError, match=r"anonymous .*--anonymous-writes"):
            served.catalog().create_namespace("ns")
        assert served.catalog().list_namespaces() == []
        assert served.ask("GET", "/v1/config", headers={"Authorization": "Bearer None"}).status == 200


def test_pages_in_a_browser_are_not_answered(served: Served) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Host": "evil.example:8181"},
        {"Host": "evil.example"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert served.ask("GET", "/v1/config", headers=headers).error == FORBIDDEN
    for host in ("localhost:8181", "127.0.0.1", "[::1]:8181", "[::1]"):
        assert served.ask("GET", "/v1/config", headers={"Host": host}).status == 200


def test_settings_that_let_strangers_in_are_refused(tmp_path: Path) -> None:
    file, plain = tmp_path / "file", ServerSettings({})
    for refused, told in (
        (replace(plain, host="0.0.0.0"), "--tokens"),
        (replace(plain, host="lake.example", anonymous_writes=True), "--tokens"),
        (replace(plain, host="::", tokens=file), "--behind-proxy"),
        (replace(plain, tokens=file, anonymous_writes=True), "token file"),
        (replace(plain, tls_key=file), "both"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            refused.check()
    replace(plain, host="0.0.0.0", tokens=file, behind_proxy=True).check()
    replace(plain, host="0.0.0.0", tokens=file, tls_certificate=file, tls_key=file).check()
    for host in ("localhost", "127.0.0.2", "::1"):
        replace(plain, host=host, anonymous_writes=True).check()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "certificate.pem", folder / "key.pem"


def test_tls(lake: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    file, key = certificate(tmp_path)
    settings = settings_for(lake, tokens=tokens, tls_certificate=file, tls_key=key)
    with serving(settings) as served:
        trusting = ssl.create_default_context(cafile=str(file))
        connection = HTTPSConnection("127.0.0.1", int(served.url.rpartition(":")[2]), context=trusting)
        connection.request("GET", "/v1/config", headers={"Authorization": f"Bearer {READER}"})
        assert connection.getresponse().status == 200
        connection.close()
        weak = ssl.create_default_context(cafile=str(file))
        weak.maximum_version = ssl.TLSVersion.TLSv1_2
        weak.set_ciphers("AES128-SHA:AES256-SHA256:AES128-GCM-SHA256")
        with pytest.raises(ssl.SSLError):
            HTTPSConnection("127.0.0.1", int(served.url.rpartition(":")[2]), context=weak).connect()
    file.write_text("no certificate")
    with pytest.raises(InvalidInputError):
        serve(settings)


def test_bodies_pages_and_queries_have_limits(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        for number in range(5):
            txn.create_namespace(f"n{number}")
    with serving(settings_for(lake, limits=Limits(body_bytes=2_000, page_names=2))) as served:
        large = {"namespace": ["x"], "properties": {"a": "b" * 3_000}}
        assert served.ask("POST", "/v1/main/namespaces", large).error == (413, "BadRequestException")
        assert served.ask("POST", "/v1/main/namespaces", headers={"Content-Length": "x"}).status == 400
        page = served.ask("GET", "/v1/main/namespaces?pageToken=&pageSize=100").document
        assert len(page["namespaces"]) == 2
        assert served.ask("GET", f"/v1/config?warehouse={'x' * 20_000}").error[0] == 400
        chunks = b"POST /v1/main/namespaces HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
            connection.sendall(chunks + b"7d0\r\n" + b"x" * 2_000 + b"\r\n" + b"10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n")
            assert b"413" in connection.recv(4_096).splitlines()[0]
    assert lake.snapshot().namespaces() == [f"n{number}" for number in range(5)]


def test_a_body_of_too_many_values_is_not_parsed(served: Served) -> None:
    """Two bytes of a body become an object of fifty or more."""
    for many in (b"[" * 600_000 + b"]" * 600_000, b"[" + b"{}," * 600_000 + b"0]"):
        answer = served.ask("POST", "/v1/main/namespaces", b'{"namespace": ["a"], "x": ' + many + b"}")
        assert answer.error == (413, "BadRequestException")


def test_a_commit_of_too_many_parts_is_not_begun(served: Served, lake: Lakehouse) -> None:
    before = lake.latest_version()
    requirement = {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1}
    for body in (
        commit_of(*[properties(a="1")] * 1_001),
        commit_of(properties(a="1"), requirements=(requirement,) * 1_001),
    ):
        assert served.ask("POST", TABLE, body).error == (400, "BadRequestException")
    assert lake.latest_version() == before


def test_a_request_that_takes_too_long_goes_on(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(settings_for(lake, limits=Limits(seconds=0.2, threads=1))) as served:
        assert served.application is not None
        own = served.application.warehouses.served[0].lake
        begin = own.transaction
        reader, writer = os.pipe()

        def slowly(*arguments: Any, **named: Any) -> Any:
            os.read(reader, 1)
            return begin(*arguments, **named)

        monkeypatch.setattr(own, "transaction", slowly)
        late = served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"]})
        assert late.error == (504, "CommitStateUnknownException")
        waiting = served.ask("POST", "/v1/main/namespaces", {"namespace": ["other"]})
        assert waiting.error == (503, "ServiceUnavailableException")  # the only thread is taken, so it did not begin
        assert served.ask("GET", "/v1/main/namespaces").status == 200  # reads have other threads
        os.write(writer, b"x")
    assert lake.snapshot().namespaces() == ["ns"]  # the server has waited for it
    os.close(reader)
    os.close(writer)


def test_too_many_requests_are_told_to_come_back(lake: Lakehouse) -> None:
    with serving(settings_for(lake, limits=Limits(threads=1, waiting=-1))) as served:
        busy = served.ask("GET", "/v1/main/namespaces")
        assert busy.error == (503, "ServiceUnavailableException")
        assert busy.headers["retry-after"] == "1"


def test_tables_are_registered_where_the_operator_allows_it(lakes: Lakes, tmp_path: Path) -> None:
    lake, other = lakes.local(), lakes.local("other")
    for one in (lake, other):
        catalog_at(one).create_namespace("ns")
    theirs = catalog_at(other).create_table("ns.t", catalog_schema())
    body = {"name": "r", "metadata-location": theirs.metadata_location}
    path = "/v1/main/namespaces/ns/register"
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "verysecret42"}')
    with serving(settings_for(lake)) as served:
        before = lake.latest_version()
        assert served.ask("POST", path, body).error == FORBIDDEN
        for place in (f"file://{secret}", "file:///etc/passwd", "s3://bucket/t.metadata.json", "relative.json", ""):
            refused = served.ask("POST", path, {**body, "metadata-location": place})
            assert refused.status in (400, 403, 503), place
            assert b"verysecret42" not in refused.body
        assert lake.latest_version() == before
    allowed = allowing(lake, Path(other.root.removeprefix("file://").rstrip("/")))
    with serving(settings_for(allowed)) as served:
        registered = served.ask("POST", path, body)
        assert registered.document["metadata-location"] == theirs.metadata_location
        assert served.ask("POST", path, body).error == (409, "AlreadyExistsException")
        assert served.ask("POST", path, {**body, "overwrite": True}).status == 200
    assert lake.snapshot().table("ns", "r").table_type == "EXTERNAL"


def catalog_schema() -> Any:
    import pyarrow as pa

    return pa.schema([("id", pa.int64())])


def test_no_secret_is_logged(lake: Lakehouse, tokens: Path) -> None:
    """Tokens, storage credentials and bodies stand in no line of the log. Each line is one JSON object."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter(redact_assignments))
    ours = logging.getLogger("trinitylake_ops")
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        options = StorageOptions({**lake.storage_options, "s3.secret_access_key": "verysecret42"})
        with serving(settings_for(Lakehouse(lake.storage, options), tokens=tokens)) as served:
            ask(
                served,
                WRITER,
                "POST",
                "/v1/main/namespaces",
                {"namespace": ["ns"], "properties": {"user.password": "hidden43"}},
            )
            ask(served, "wrong-token-44", "GET", "/v1/config?token=inquery45")
            ask(served, WRITER, "GET", "/v1/main/namespaces/a%0Ab%1b[2J")
            ask(served, WRITER, "GET", "/v1/main/namespaces/verysecret42")
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    said = [line for line in lines if "status" in line]
    assert [line["status"] for line in said] == [200, 401, 400, 404]
    assert said[0].items() >= {"principal": "writer", "method": "POST", "path": "/v1/main/namespaces"}.items()
    assert all(line["request"] and line["milliseconds"] >= 0 for line in said)
    for secret in (WRITER, "hidden43", "wrong-token-44", "inquery45"):
        assert secret not in text.getvalue()
    assert "verysecret42" not in said[3]["detail"]
