"""Tokens of external issuers, verified with keys of a real key server: valid and invalid tokens, and key rotation."""

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

from tests.server.live_server import LiveServer, Response, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, create_body
from tests.server.test_access_control import FORBIDDEN, READER, UNAUTHORIZED, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server import issuers as issuers_module
from trinitylake_ops.server.issuers import read_issuers
from trinitylake_ops.server.settings import LakehouseSettings, ServerSettings

ISSUER, AUDIENCE = "https://login.test/realm", "trinitylake"
FIRST_KEY, SECOND_KEY = (rsa.generate_private_key(public_exponent=65537, key_size=2_048) for _ in range(2))
EC_KEY = ec.generate_private_key(ec.SECP256R1())
UNAVAILABLE = (503, "ServiceUnavailableException")


def public_jwk(key: Any, kid: str, **fields: Any) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, "use": "sig", **fields}


class KeyServer:
    """An HTTP server that returns ``content`` and counts requests."""

    def __init__(self) -> None:
        self.content: bytes | None = json.dumps(
            {"keys": [public_jwk(FIRST_KEY, "1"), public_jwk(EC_KEY, "c")]}
        ).encode()
        self.n_requests = 0
        self.delay_s = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.n_requests += 1
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
def token_server(lake: Lakehouse, key_server: KeyServer, tmp_path: Path) -> Iterator[LiveServer]:
    catalog = catalog_at(lake)
    for name in ("ns", "own"):
        catalog.create_namespace(name)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read")]}))
    issuers = issuers_file(tmp_path / "issuers.yaml", key_server.url)
    with serving(settings_for(lake, tokens=tokens, issuers=issuers)) as server:
        yield server


def token(key: Any = FIRST_KEY, kid: str | None = "1", algorithm: str = "RS256", **claims: Any) -> str:
    content = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "scope": "openid lake.read", "exp": time.time() + 600}
    content = {name: value for name, value in {**content, **claims}.items() if value is not None}
    return jwt.encode(content, key, algorithm=algorithm, headers=None if kid is None else {"kid": kid})


def signed_with_secret(claims: str, secret: str) -> str:
    """Return a token with the claims of another one, signed with a public secret, which JWT libraries refuse to do."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"1","typ":"JWT"}').decode().rstrip("=")
    signature = hmac.new(secret.encode(), f"{head}.{claims}".encode(), hashlib.sha256).digest()
    return f"{head}.{claims}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def request(
    server: LiveServer, bearer: str, method: str = "GET", path: str = "/v1/config", body: Any = None
) -> Response:
    return server.request(method, path, body, {"Authorization": f"Bearer {bearer}"})


def test_claims_determine_principal_and_scopes(token_server: LiveServer, lake: Lakehouse) -> None:
    assert request(token_server, token(), path=TABLES).status == 200
    assert request(token_server, token(EC_KEY, "c", "ES256")).status == 200
    assert request(token_server, READER, path=TABLES).status == 200  # tokens of the file are still accepted
    assert request(token_server, token(), "POST", TABLES, create_body()).error == FORBIDDEN
    etl = token(scope=["lake.etl", "unknown"], sub="etl")
    assert request(token_server, etl, "POST", "/v1/main/namespaces/own/tables", create_body()).status == 200
    (latest,) = lake.history(1)
    assert latest.properties["principal"] == "sso:etl"
    assert request(token_server, etl, "POST", TABLES, create_body()).error == FORBIDDEN
    assert request(token_server, etl, "POST", "/v1/main/namespaces", {"namespace": ["new"]}).error == FORBIDDEN
    two_scopes = token(scope="lake.etl lake.operate")
    assert request(token_server, two_scopes, "POST", "/v1/main/namespaces", {"namespace": ["new"]}).status == 200
    without_scope = token(scope="openid")
    assert request(token_server, without_scope).error == FORBIDDEN
    for path in (TABLES, "/v1/main/namespaces", "/v1/v99/namespaces"):
        assert request(token_server, without_scope, path=path).error == FORBIDDEN


def test_invalid_tokens_are_rejected(
    token_server: LiveServer, lake: Lakehouse, caplog: pytest.LogCaptureFixture, key_server: KeyServer
) -> None:
    before, now = lake.latest_version(), time.time()
    valid_token = token()
    head, claims, signature = valid_token.split(".")
    public_key_text = json.dumps(public_jwk(FIRST_KEY, "1"))
    invalid_tokens = {
        "expired": token(exp=now - 120),
        "no expiry": token(exp=None),
        "not yet valid": token(nbf=now + 600),
        "another audience": token(aud="another"),
        "no audience": token(aud=None),
        "another issuer": token(iss="https://evil.test"),
        "no issuer": token(iss=None),
        "no subject": token(sub=None),
        "invalid subject": token(sub="a b\n"),
        "signed with another key": token(SECOND_KEY),
        "unknown key": token(SECOND_KEY, "9"),
        "no algorithm": jwt.encode({"iss": ISSUER, "aud": AUDIENCE}, None, algorithm="none"),
        "signed with the public key as secret": signed_with_secret(claims, public_key_text),
        "algorithm not allowed": token(algorithm="RS512"),
        "wrong key type": token(EC_KEY, "1", "ES256"),
        "modified claims": f"{head}.{claims[:-4]}AAAA.{signature}",
        "no signature": f"{head}.{claims}.",
        "invalid claims": f"{head}.{'A' * 8}.{signature}",
        "too long": token(scope="x" * 20_000),
    }
    with caplog.at_level(logging.INFO):
        for reason, bearer in invalid_tokens.items():
            assert request(token_server, bearer, "POST", TABLES, create_body()).error == UNAUTHORIZED, reason
    assert lake.latest_version() == before
    for bearer in (valid_token, *invalid_tokens.values()):
        assert bearer not in caplog.text
        assert bearer.rpartition(".")[2] not in caplog.text or bearer.endswith(".")
    assert key_server.n_requests == 1  # the second unknown key came too soon to fetch the keys again


def test_rotated_keys_are_fetched_and_withdrawn_keys_rejected(
    token_server: LiveServer, key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = token(), token(SECOND_KEY, "2")
    assert request(token_server, old).status == 200
    key_server.serve(public_jwk(SECOND_KEY, "2"))
    assert request(token_server, new).error == UNAUTHORIZED  # keys are not fetched again during the pause
    monkeypatch.setattr(issuers_module, "PAUSE_SECONDS", 0.0)
    assert request(token_server, new).status == 200
    assert request(token_server, old).error == UNAUTHORIZED
    n_requests = key_server.n_requests
    assert {request(token_server, new).status for _ in range(5)} == {200}
    assert key_server.n_requests == n_requests
    monkeypatch.setattr(issuers_module, "KEPT_SECONDS", 0.0)
    key_server.serve(public_jwk(FIRST_KEY, "1"))
    assert request(token_server, new).error == UNAUTHORIZED


def test_failures_of_key_server_get_503(
    token_server: LiveServer, key_server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuers_module, "PAUSE_SECONDS", 0.0)
    valid_token, valid_content = token(), key_server.content
    monkeypatch.setattr(issuers_module, "MAX_BYTES", 100_000)
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "1", "alg": "HS256"}
    private = {**public_jwk(FIRST_KEY, "1"), "d": "AQAB"}
    for content in (
        None,
        b"",
        b"{",
        b"[" * 5_000,
        b'{"keys": []}',
        b'{"keys": [1]}',
        b'{"keys": ' + b" " * 200_000 + b"[]}",
        json.dumps({"keys": [public_jwk(FIRST_KEY, "1")] * 101}).encode(),
        json.dumps({"keys": [symmetric]}).encode(),
        json.dumps({"keys": [private]}).encode(),
        json.dumps({"keys": [public_jwk(FIRST_KEY, "1", use="enc")]}).encode(),
        json.dumps({"keys": [public_jwk(FIRST_KEY, "1", alg="RS512")]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "kid": "1", "n": "!", "e": "!"}]}).encode(),
    ):
        key_server.content = content
        assert request(token_server, valid_token).error == UNAVAILABLE, content
    assert request(token_server, READER).status == 200
    key_server.content = valid_content
    assert request(token_server, valid_token).status == 200
    monkeypatch.setattr(issuers_module, "KEPT_SECONDS", 0.0)
    key_server.content = None
    assert request(token_server, valid_token).status == 200  # cached keys remain valid for some time
    monkeypatch.setattr(issuers_module, "MAX_KEPT_SECONDS", 0.0)
    assert request(token_server, valid_token).error == UNAVAILABLE


def test_waiting_for_keys_does_not_block_other_requests(token_server: LiveServer, key_server: KeyServer) -> None:
    """A slow key server gets one request for many tokens, and other requests are served in the meantime."""
    key_server.delay_s = 0.5
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(request(token_server, token()).status)) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    assert request(token_server, READER).status == 200
    assert statuses == []
    for thread in threads:
        thread.join()
    assert (statuses, key_server.n_requests) == ([200] * 20, 1)


def test_redirect_of_key_server_is_not_followed(lake: Lakehouse, key_server: KeyServer, tmp_path: Path) -> None:
    issuers = issuers_file(tmp_path / "issuers.yaml", key_server.url.replace("/keys", "/moved"))
    with serving(settings_for(lake, issuers=issuers, anonymous_writes=False)) as server:
        assert request(server, token()).error == UNAVAILABLE
        assert server.request("GET", "/v1/config").error == UNAUTHORIZED
        assert request(server, "no-jwt").error == UNAUTHORIZED


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


def test_issuer_settings_are_validated(tmp_path: Path, lake: Lakehouse) -> None:
    path = issuers_file(tmp_path / "issuers.yaml", "https://login.test/keys", lakehouses=["a"])
    (issuer,) = read_issuers(path)
    assert (issuer.lakehouses, issuer.principal, issuer.claim) == (frozenset({"a"}), "sub", "scope")
    lakehouses = {"": LakehouseSettings(lake.root, lake.storage_options)}
    with pytest.raises(InvalidInputError):
        ServerSettings(lakehouses, issuers=path, anonymous_writes=True).check()
    with pytest.raises(InvalidInputError):
        ServerSettings(lakehouses, host="0.0.0.0", issuers=path).check()
    ServerSettings(lakehouses, host="0.0.0.0", issuers=path, behind_proxy=True).check()
    duplicate_issuers = yaml.safe_load(path.read_text())["issuers"] * 2
    path.write_text(yaml.safe_dump({"issuers": duplicate_issuers}))
    with pytest.raises(InvalidInputError):
        read_issuers(path)


def test_readers_with_issuer_tokens_load_table(token_server: LiveServer) -> None:
    operator = token(scope="lake.operate")
    assert request(token_server, operator, "POST", TABLES, create_body()).status == 200
    assert request(token_server, token(), path=TABLE).status == 200
