"""Test tokens of external issuers with a real key server: which are accepted, which are rejected, and key rotation."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.server.live_server import LiveServer, Reply, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, create_body
from tests.server.test_access_control import FORBIDDEN, READER, UNAUTHORIZED, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server import issuers as of_keys
from trinitylake_ops.server.issuers import read_issuers
from trinitylake_ops.server.settings import LakehouseSettings, ServerSettings

ISSUER, AUDIENCE = "https://login.test/realm", "trinitylake"
FIRST, SECOND = (rsa.generate_private_key(public_exponent=65537, key_size=2_048) for _ in range(2))
CURVE = ec.generate_private_key(ec.SECP256R1())
UNAVAILABLE = (503, "ServiceUnavailableException")


def public(key: Any, kid: str, **fields: Any) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, "use": "sig", **fields}


class KeyServer:
    """Serve ``content``, and count requests."""

    def __init__(self) -> None:
        self.content: bytes | None = json.dumps({"keys": [public(FIRST, "1"), public(CURVE, "c")]}).encode()
        self.n_asked = 0
        self.delay_s = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.n_asked += 1
                time.sleep(outer.delay_s)
                if self.path == "/moved":
                    self.send_response(302)
                    self.send_header("Location", "/keys")
                    self.end_headers()
                    return
                self.send_response(500 if outer.content is None else 200)
                self.end_headers()
                self.wfile.write(outer.content or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def serve(self, *keys: dict[str, Any]) -> None:
        self.content = json.dumps({"keys": list(keys)}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    server = KeyServer()
    yield server
    server.close()


def issuers_file(path: Path, url: str, **fields: Any) -> Path:
    grants = {
        "lake.read": "read",
        "lake.etl": {"scope": "none", "namespaces": {"own": "write", "ns": "read"}},
        "lake.operate": "operate",
    }
    issuer = {"name": "sso", "issuer": ISSUER, "audience": AUDIENCE, "keys": url, "grants": grants, **fields}
    path.write_text(yaml.safe_dump({"issuers": [issuer]}))
    return path


@pytest.fixture
def guarded(lake: Lakehouse, key_server: KeyServer, tmp_path: Path) -> Iterator[LiveServer]:
    catalog = catalog_at(lake)
    for name in ("ns", "own"):
        catalog.create_namespace(name)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read")]}))
    issuers = issuers_file(tmp_path / "issuers.yaml", key_server.url)
    with serving(settings_for(lake, tokens=tokens, issuers=issuers)) as served:
        yield served


def token(key: Any = FIRST, kid: str | None = "1", algorithm: str = "RS256", **claims: Any) -> str:
    content = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "scope": "openid lake.read", "exp": time.time() + 600}
    content = {name: value for name, value in {**content, **claims}.items() if value is not None}
    return jwt.encode(content, key, algorithm=algorithm, headers=None if kid is None else {"kid": kid})


def by_secret(claims: str, secret: str) -> str:
    """Return a token with the claims of another one, signed with a public secret. No library would create it."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"1","typ":"JWT"}').decode().rstrip("=")
    signature = hmac.new(secret.encode(), f"{head}.{claims}".encode(), hashlib.sha256).digest()
    return f"{head}.{claims}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def request(served: LiveServer, bearer: str, method: str = "GET", path: str = "/v1/config", body: Any = None) -> Reply:
    return served.request(method, path, body, {"Authorization": f"Bearer {bearer}"})


def test_claims_determine_principal_and_scopes(guarded: LiveServer, lake: Lakehouse) -> None:
    assert request(guarded, token(), path=TABLES).status == 200
    assert request(guarded, token(CURVE, "c", "ES256")).status == 200
    assert request(guarded, READER, path=TABLES).status == 200  # tokens of the file are still accepted
    assert request(guarded, token(), "POST", TABLES, create_body()).error == FORBIDDEN
    etl = token(scope=["lake.etl", "unknown"], sub="etl")
    assert request(guarded, etl, "POST", "/v1/main/namespaces/own/tables", create_body()).status == 200
    (latest,) = lake.history(1)
    assert latest.properties["principal"] == "sso:etl"
    assert request(guarded, etl, "POST", TABLES, create_body()).error == FORBIDDEN
    assert request(guarded, etl, "POST", "/v1/main/namespaces", {"namespace": ["new"]}).error == FORBIDDEN
    two_scopes = token(scope="lake.etl lake.operate")
    assert request(guarded, two_scopes, "POST", "/v1/main/namespaces", {"namespace": ["new"]}).status == 200
    without_scope = token(scope="openid")
    assert request(guarded, without_scope).error == FORBIDDEN
    for path in (TABLES, "/v1/main/namespaces", "/v1/v99/namespaces"):
        assert request(guarded, without_scope, path=path).error == FORBIDDEN


def test_invalid_tokens_are_rejected(
    guarded: LiveServer, lake: Lakehouse, caplog: pytest.LogCaptureFixture, key_server: KeyServer
) -> None:
    before, now = lake.latest_version(), time.time()
    good = token()
    head, claims, signature = good.split(".")
    public_text = json.dumps(public(FIRST, "1"))
    refused = {
        "expired": token(exp=now - 120),
        "without an end": token(exp=None),
        "not yet": token(nbf=now + 600),
        "another audience": token(aud="another"),
        "no audience": token(aud=None),
        "another issuer": token(iss="https://evil.test"),
        "no issuer": token(iss=None),
        "no subject": token(sub=None),
        "a subject that is none": token(sub="a b\n"),
        "another key": token(SECOND),
        "unknown key": token(SECOND, "9"),
        "no algorithm": jwt.encode({"iss": ISSUER, "aud": AUDIENCE}, None, algorithm="none"),
        "secret of the public key": by_secret(claims, public_text),
        "an algorithm that is not taken": token(algorithm="RS512"),
        "a key of another family": token(CURVE, "1", "ES256"),
        "changed": f"{head}.{claims[:-4]}AAAA.{signature}",
        "no signature": f"{head}.{claims}.",
        "no claims": f"{head}.{'A' * 8}.{signature}",
        "too long": token(scope="x" * 20_000),
    }
    with caplog.at_level(logging.INFO):
        for reason, bearer in refused.items():
            assert request(guarded, bearer, "POST", TABLES, create_body()).error == UNAUTHORIZED, reason
    assert lake.latest_version() == before
    for bearer in (good, *refused.values()):
        assert bearer not in caplog.text
        assert bearer.rpartition(".")[2] not in caplog.text or bearer.endswith(".")
    assert key_server.n_asked == 1  # the second request for an unknown key came too soon


def test_rotated_keys_are_fetched_and_withdrawn_keys_rejected(
    guarded: LiveServer, key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = token(), token(SECOND, "2")
    assert request(guarded, old).status == 200
    key_server.serve(public(SECOND, "2"))
    assert request(guarded, new).error == UNAUTHORIZED  # between two requests for keys there is a pause
    monkeypatch.setattr(of_keys, "PAUSE_SECONDS", 0.0)
    assert request(guarded, new).status == 200
    assert request(guarded, old).error == UNAUTHORIZED
    n_asked = key_server.n_asked
    assert {request(guarded, new).status for _ in range(5)} == {200}
    assert key_server.n_asked == n_asked
    monkeypatch.setattr(of_keys, "KEPT_SECONDS", 0.0)
    key_server.serve(public(FIRST, "1"))
    assert request(guarded, new).error == UNAUTHORIZED


def test_failing_key_server(guarded: LiveServer, key_server: KeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_keys, "PAUSE_SECONDS", 0.0)
    good, answer = token(), key_server.content
    monkeypatch.setattr(of_keys, "MOST_BYTES", 100_000)
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "1", "alg": "HS256"}
    private = {**public(FIRST, "1"), "d": "AQAB"}
    for content in (
        None,
        b"",
        b"{",
        b"[" * 5_000,
        b'{"keys": []}',
        b'{"keys": [1]}',
        b'{"keys": ' + b" " * 200_000 + b"[]}",
        json.dumps({"keys": [public(FIRST, "1")] * 101}).encode(),
        json.dumps({"keys": [symmetric]}).encode(),
        json.dumps({"keys": [private]}).encode(),
        json.dumps({"keys": [public(FIRST, "1", use="enc")]}).encode(),
        json.dumps({"keys": [public(FIRST, "1", alg="RS512")]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "kid": "1", "n": "!", "e": "!"}]}).encode(),
    ):
        key_server.content = content
        assert request(guarded, good).error == UNAVAILABLE, content
    assert request(guarded, READER).status == 200
    key_server.content = answer
    assert request(guarded, good).status == 200
    monkeypatch.setattr(of_keys, "KEPT_SECONDS", 0.0)
    key_server.content = None
    assert request(guarded, good).status == 200  # known keys stay valid for a while
    monkeypatch.setattr(of_keys, "LONGEST_KEPT_SECONDS", 0.0)
    assert request(guarded, good).error == UNAVAILABLE


def test_waiting_for_keys_does_not_block_other_requests(guarded: LiveServer, key_server: KeyServer) -> None:
    """An issuer with slow keys gets one request for many tokens, and other requests are served meanwhile."""
    key_server.delay_s = 0.5
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(request(guarded, token()).status)) for _ in range(20)]
    for thread in threads:
        thread.start()
    assert request(guarded, READER).status == 200
    assert statuses == []
    for thread in threads:
        thread.join()
    assert (statuses, key_server.n_asked) == ([200] * 20, 1)


def test_redirect_of_key_server_is_not_followed(lake: Lakehouse, key_server: KeyServer, tmp_path: Path) -> None:
    issuers = issuers_file(tmp_path / "issuers.yaml", key_server.url.replace("/keys", "/moved"))
    with serving(settings_for(lake, issuers=issuers, anonymous_writes=False)) as served:
        assert request(served, token()).error == UNAVAILABLE
        assert served.request("GET", "/v1/config").error == UNAUTHORIZED
        assert request(served, "no-jwt").error == UNAUTHORIZED


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "A b"},
        {"issuer": ""},
        {"audience": None},
        {"keys": "http://login.test/keys"},
        {"keys": "file:///etc/passwd"},
        {"keys": "https://[/"},
        {"algorithms": ["none"]},
        {"algorithms": ["HS256"]},
        {"algorithms": []},
        {"grants": []},
        {"grants": {"a": "all"}},
        {"grants": {"a": {"scope": "read", "x": 1}}},
        {"grants": {"a": {"namespaces": []}}},
        {"lakehouses": "a"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_invalid_issuers_are_rejected(fields: dict[str, Any], tmp_path: Path) -> None:
    path = issuers_file(tmp_path / "issuers.yaml", "https://login.test/keys", **fields)
    with pytest.raises(InvalidInputError):
        read_issuers(path)


def test_issuers_in_server_settings(tmp_path: Path, lake: Lakehouse) -> None:
    path = issuers_file(tmp_path / "issuers.yaml", "https://login.test/keys", lakehouses=["a"])
    (issuer,) = read_issuers(path)
    assert (issuer.lakehouses, issuer.principal, issuer.claim) == (frozenset({"a"}), "sub", "scope")
    lakehouses = {"": LakehouseSettings(lake.root, lake.storage_options)}
    with pytest.raises(InvalidInputError):
        ServerSettings(lakehouses, issuers=path, anonymous_writes=True).check()
    with pytest.raises(InvalidInputError):
        ServerSettings(lakehouses, host="0.0.0.0", issuers=path).check()
    ServerSettings(lakehouses, host="0.0.0.0", issuers=path, behind_proxy=True).check()
    twice = yaml.safe_load(path.read_text())["issuers"] * 2
    path.write_text(yaml.safe_dump({"issuers": twice}))
    with pytest.raises(InvalidInputError):
        read_issuers(path)


def test_readers_with_issuer_tokens_load_table(guarded: LiveServer) -> None:
    operator = token(scope="lake.operate")
    assert request(guarded, operator, "POST", TABLES, create_body()).status == 200
    assert request(guarded, token(), path=TABLE).status == 200
