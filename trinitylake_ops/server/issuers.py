"""Tokens of external issuers: the trusted issuers, and signature checks with their published keys.

The operator configures the address of the keys. The content is untrusted: its size, the download time and the number of
keys are limited, and only keys for the configured algorithms are used. Requests that need keys while they are being
fetched wait for the same download, and occupy no thread.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import jwt

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.server.responses import UNAVAILABLE, RejectedError
from trinitylake_ops.server.settings import read_yaml
from trinitylake_ops.server.tokens import Principal, Scope, scope_of, scopes_of, unauthorized_error
from trinitylake_ops.storage.http.settings import is_loopback

logger = logging.getLogger(__name__)

#: Keys that are older than this are fetched again, so that a withdrawn key is rejected after at most this time.
KEPT_SECONDS = 300.0
#: How long cached keys are used while their address does not respond.
MAX_KEPT_SECONDS = 3_600.0
#: The minimum interval between downloads that are caused by unknown keys in tokens.
PAUSE_SECONDS = 10.0
MAX_FETCH_SECONDS = 10.0
MAX_BYTES = 1 << 20
MAX_KEYS = 100
_CONNECT_SECONDS = 5.0
_PART_BYTES = 64 << 10
_FAMILIES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}


@dataclass(frozen=True, slots=True)
class Key:
    """A public key of an issuer."""

    #: The key.
    key: jwt.PyJWK
    #: The only algorithm that the issuer allows for the key, or None for any algorithm of its family.
    algorithm: str | None

    def fits(self, algorithm: str) -> bool:
        """Whether the key can verify signatures of an algorithm."""
        return self.key.key_type == _FAMILIES[algorithm[:2]] and self.algorithm in (None, algorithm)


class KeysUnavailableError(TrinityLakeError):
    """The keys of an issuer are not available."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Keys:
    """The keys at an address, by id.

    Args:
        url: The address of the JSON Web Key Set.
        algorithms: The accepted algorithms.
        now: A monotonic clock, in seconds.
    """

    def __init__(self, url: str, algorithms: tuple[str, ...], now: Callable[[], float] = time.monotonic):
        self._url = url
        self._algorithms = algorithms
        self._now = now
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self._keys: Mapping[str | None, tuple[Key, ...]] = {}
        self._fetched_s: float | None = None
        self._fetch_attempt_s: float | None = None
        self._fetching: Future[None] | None = None

    def refresh_for(self, kid: str | None) -> Future[None] | None:
        """Return the download to wait for before a token with a key id is checked, or None if no download is needed."""
        now_s = self._now()
        with self._lock:
            is_old = self._fetched_s is None or now_s - self._fetched_s >= KEPT_SECONDS
            if not is_old and (kid is None or kid in self._keys):
                return None
            if self._fetching is not None:
                return self._fetching
            if self._fetch_attempt_s is not None and now_s - self._fetch_attempt_s < PAUSE_SECONDS:
                return None
            self._fetch_attempt_s = now_s
            self._fetching = self._thread.submit(self._fetch)
            return self._fetching

    def named(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Return the key with an id that fits an algorithm.

        Args:
            kid: The key id in the token. For a token without a key id, there must be exactly one key of the algorithm's
                family.
            algorithm: The algorithm in the token.

        Returns:
            The key, or None if there is no matching key or more than one.

        Raises:
            KeysUnavailableError: If there are no keys, or they are too old.
        """
        now_s = self._now()
        with self._lock:
            if self._fetched_s is None or now_s - self._fetched_s >= MAX_KEPT_SECONDS:
                raise KeysUnavailableError("the issuer's keys are not available; retry later")
            candidates = (
                self._keys.get(kid, ()) if kid is not None else [key for keys in self._keys.values() for key in keys]
            )
        matching_keys = [key for key in candidates if key.fits(algorithm)]
        return matching_keys[0].key if len(matching_keys) == 1 else None

    def close(self) -> None:
        """Stop the thread that fetches keys."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self) -> None:
        try:
            keys = self._parse_keys(_read(self._url))
        except (OSError, ValueError, http.client.HTTPException, RecursionError, jwt.PyJWTError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            logger.warning("cannot fetch keys from %s: %s", self._url, str(reason)[:300] or type(error).__name__)
            keys = None
        with self._lock:
            self._fetching = None
            if keys is not None:
                self._keys, self._fetched_s = keys, self._now()

    def _parse_keys(self, data: bytes) -> Mapping[str | None, tuple[Key, ...]]:
        content = json.loads(data)
        listed = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS:
            raise ValueError(f"the response is not a set of 1 to {MAX_KEYS} keys")
        keys: dict[str | None, tuple[Key, ...]] = {}
        for entry in listed:
            key = self._key(entry)
            if key is not None:
                kid = key.key.key_id
                keys[kid] = (*keys.get(kid, ()), key)
        if not keys:
            raise ValueError(f"the response contains no key for {', '.join(self._algorithms)}")
        return keys

    def _key(self, content: Any) -> Key | None:
        """Return a key of the set, or None if it is not for signatures or its algorithm is not accepted."""
        if not isinstance(content, dict) or content.get("use", "sig") != "sig":
            return None
        if content.get("alg", self._algorithms[0]) not in self._algorithms or "d" in content:
            return None
        if content.get("kty") not in _FAMILIES.values() or not isinstance(content.get("kid", ""), str):
            return None
        try:
            return Key(jwt.PyJWK(content), content.get("alg"))
        except jwt.PyJWTError as error:
            logger.warning("ignoring an invalid key from %s: %s", self._url, type(error).__name__)
            return None


def _read(url: str) -> bytes:
    """Return the content at an address. Raises OSError, HTTPException, or ValueError if it is too large."""
    deadline_s = time.monotonic() + MAX_FETCH_SECONDS
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    parts, n_bytes = [], 0
    try:
        opened = urllib.request.build_opener(_NoRedirect).open(request, timeout=_CONNECT_SECONDS)
    except HTTPError as error:  # the error is also an open response
        error.close()
        raise OSError(f"the response has status {error.code}") from None
    with opened as response:
        while part := response.read1(_PART_BYTES):
            n_bytes += len(part)
            if n_bytes > MAX_BYTES:
                raise ValueError(f"the response is larger than {MAX_BYTES} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the download took longer than {MAX_FETCH_SECONDS:.0f} seconds")
            parts.append(part)
    return b"".join(parts)


#: Only algorithms with public keys: with a shared secret, a server that verifies tokens could also create tokens.
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)  # fmt: skip
_DEFAULT_ALGORITHMS = ("RS256", "ES256")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_FIELDS = frozenset({"name", "issuer", "audience", "keys", "algorithms", "principal", "claim", "grants", "lakehouses"})
_REQUIRED_FIELDS = ("name", "issuer", "audience", "keys", "grants")
_MAX_COUNT = 100


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights that one value of the claim grants."""

    #: The scope in namespaces without an entry in ``namespaces``.
    scope: Scope
    #: The scopes in individual namespaces.
    namespaces: Mapping[str, Scope] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IssuerSettings:
    """Settings of a token issuer."""

    #: The name, which is a prefix of the names of its principals.
    name: str
    #: The exact value of a token's ``iss`` claim.
    issuer: str
    #: The exact value that a token's ``aud`` claim must have or contain.
    audience: str
    #: The address of its keys, as a JSON Web Key Set.
    keys_url: str
    #: The rights for each value of ``claim``.
    grants: Mapping[str, Grant]
    #: The accepted signature algorithms.
    algorithms: tuple[str, ...] = _DEFAULT_ALGORITHMS
    #: The claim with the name of the principal.
    principal: str = "sub"
    #: The claim whose values select ``grants``.
    claim: str = "scope"
    #: The names of the lakehouses that its principals may access, or None for all lakehouses.
    lakehouses: frozenset[str] | None = None


def read_issuers(path: Path) -> tuple[IssuerSettings, ...]:
    """Read the issuers of a YAML file, which contains a list ``issuers``. Raises InvalidInputError."""
    content = read_yaml(path, "issuers")
    if not isinstance(content, list) or not 1 <= len(content) <= _MAX_COUNT:
        raise InvalidInputError(f"{str(path)!r}: 'issuers' must be a list of 1 to {_MAX_COUNT} issuers", path=str(path))
    issuers = tuple(_issuer(f"{str(path)!r}: issuer {at}", raw) for at, raw in enumerate(content, 1))
    for field_name in ("name", "issuer"):
        if len({getattr(issuer, field_name) for issuer in issuers}) < len(issuers):
            raise InvalidInputError(f"{str(path)!r}: two issuers have the same {field_name}", path=str(path))
    return issuers


def _issuer(where: str, raw: Any) -> IssuerSettings:
    if not isinstance(raw, dict) or not raw.keys() <= _FIELDS or not all(raw.get(name) for name in _REQUIRED_FIELDS):
        raise InvalidInputError(
            f"{where} must be a mapping with {', '.join(_REQUIRED_FIELDS)}, and with no keys other than"
            f" {', '.join(sorted(_FIELDS))}"
        )
    name = raw["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"{where}: the name must be up to 32 of a-z, 0-9, '_' and '-'")
    grants = raw["grants"]
    if not isinstance(grants, dict):
        raise InvalidInputError(f"{where}: 'grants' must be a mapping of claim values to scopes")
    for value in grants:
        if not isinstance(value, str):
            raise InvalidInputError(f"{where}: claim value {value!r} is not a string; put it in quotes")
    return IssuerSettings(
        name,
        _text(where, raw, "issuer"),
        _text(where, raw, "audience"),
        _checked_url(where, _text(where, raw, "keys")),
        {value: _grant(f"{where}, grant {value[:64]!r}", allows) for value, allows in grants.items()},
        _algorithms(where, raw.get("algorithms", list(_DEFAULT_ALGORITHMS))),
        _text(where, raw, "principal", "sub"),
        _text(where, raw, "claim", "scope"),
        frozenset(_texts(where, "lakehouses", raw["lakehouses"])) if "lakehouses" in raw else None,
    )


def _text(where: str, raw: Mapping[str, Any], name: str, default: str = "") -> str:
    value = raw.get(name, default)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{where}: {name!r} must be a non-empty string")
    return value


def _texts(where: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidInputError(f"{where}: {name!r} must be a list of strings")
    return value


def _checked_url(where: str, url: str) -> str:
    """Return the address of keys. It must use TLS, so that an attacker cannot forge keys in transit and sign tokens."""
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:
        host, split = "", urlsplit("")
    if not host or not (split.scheme == "https" or (split.scheme == "http" and is_loopback(host))):
        raise InvalidInputError(
            f"{where}: 'keys' must be an https:// address; http:// is allowed for loopback addresses only"
        )
    return url


def _algorithms(where: str, raw: Any) -> tuple[str, ...]:
    algorithms = tuple(_texts(where, "algorithms", raw))
    if not algorithms or not set(algorithms) <= ALGORITHMS:
        raise InvalidInputError(f"{where}: 'algorithms' must be a non-empty list of {', '.join(sorted(ALGORITHMS))}")
    return algorithms


def _grant(where: str, raw: Any) -> Grant:
    if isinstance(raw, str):
        return Grant(scope_of(where, raw))
    if not isinstance(raw, dict) or not raw.keys() <= {"scope", "namespaces"}:
        raise InvalidInputError(f"{where} must be a scope, or a mapping with scope and namespaces")
    return Grant(scope_of(where, raw.get("scope", "none")), scopes_of(where, raw.get("namespaces", {})))


#: Three base64url parts: the compact form of a signed token (RFC 7515).
_SIGNED = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_MAX_CHARS = 16 << 10
_PRINCIPAL = re.compile(r"[\x21-\x7e]{1,64}")
#: The accepted difference between clocks.
LEEWAY_SECONDS = 60
_MAX_VALUES = 1_000


def signed_token(authorization: str | None) -> str | None:
    """Return the signed token in an ``Authorization`` header, or None if it contains no token in that form."""
    kind, _, token = (authorization or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and _SIGNED.fullmatch(token.strip()) else None


class Issuers:
    """The issuers whose tokens are accepted.

    Args:
        settings: The issuers.
        keys: Returns the keys of an issuer; by default they are fetched from its address.
    """

    def __init__(self, settings: Sequence[IssuerSettings], keys: Callable[[IssuerSettings], Keys] | None = None):
        make = keys or (lambda issuer: Keys(issuer.keys_url, issuer.algorithms))
        self._issuers = {issuer.issuer: (issuer, make(issuer)) for issuer in settings}

    def close(self) -> None:
        """Stop the threads that fetch keys."""
        for _, keys in self._issuers.values():
            keys.close()

    async def principal(self, token: str) -> Principal:
        """Return the principal of a token. Raises RejectedError (401, or 503 if the keys are not available)."""
        if len(token) > _MAX_CHARS:
            raise unauthorized_error("the token is too long")
        header, issuer = _header(token), _claimed_issuer(token)
        if issuer not in self._issuers:
            raise unauthorized_error("the token's issuer is not trusted by this server")
        settings, keys = self._issuers[issuer]
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in settings.algorithms:
            raise unauthorized_error("the token's signature algorithm is not accepted")
        refresh = keys.refresh_for(kid)
        if refresh is not None:
            await asyncio.wait({asyncio.wrap_future(refresh)}, timeout=MAX_FETCH_SECONDS)
        return self._checked(token, settings, keys, algorithm, kid)

    def _checked(self, token: str, settings: IssuerSettings, keys: Keys, algorithm: str, kid: str | None) -> Principal:
        try:
            key = keys.named(kid, algorithm)
        except KeysUnavailableError as error:
            raise RejectedError(503, UNAVAILABLE, str(error), headers={"Retry-After": "1"}) from error
        if key is None:
            raise unauthorized_error("the token's signing key is unknown")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise unauthorized_error("the token has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            _reject(error)
        return _principal(settings, claims)


def _reject(error: Exception) -> NoReturn:
    reasons: dict[type[Exception], str] = {
        jwt.InvalidAudienceError: "the token is for another audience",
        jwt.MissingRequiredClaimError: "the token lacks a required claim (exp, iss, aud)",
        jwt.ImmatureSignatureError: "the token is not valid yet",
    }
    raise unauthorized_error(reasons.get(type(error), "the token is not valid")) from None


def _header(token: str) -> dict[str, Any]:
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise unauthorized_error("the token is not valid") from None
    if not isinstance(header.get("kid", ""), str):
        raise unauthorized_error("the token is not valid")
    return header


def _claimed_issuer(token: str) -> str:
    """Return the issuer that a token names. It only selects the keys, which then verify the token."""
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError):
        raise unauthorized_error("the token is not valid") from None
    issuer = claims.get("iss")
    if not isinstance(issuer, str):
        raise unauthorized_error("the token has no issuer (iss)")
    return issuer


def _principal(settings: IssuerSettings, claims: dict[str, Any]) -> Principal:
    """Return the principal of verified claims. The issuer's prefix distinguishes its name from static tokens."""
    subject = claims.get(settings.principal)
    if not isinstance(subject, str) or not _PRINCIPAL.fullmatch(subject):
        raise unauthorized_error(
            f"claim {settings.principal} is not a name of 1 to 64 printable characters without spaces"
        )
    grants = [settings.grants[value] for value in _values(claims.get(settings.claim)) if value in settings.grants]
    names = {name for grant in grants for name in grant.namespaces}
    return Principal(
        f"{settings.name}:{subject}",
        max((grant.scope for grant in grants), default=Scope.NONE),
        {name: max(_in_namespace(grant, name) for grant in grants) for name in names},
        settings.lakehouses,
    )


def _in_namespace(grant: Grant, name: str) -> Scope:
    return grant.namespaces.get(name, grant.scope)


def _values(claim: Any) -> list[str]:
    """Return the values of a claim: the words of a string, as in ``scope``, or a list of strings, as in ``roles``."""
    values = claim.split() if isinstance(claim, str) else claim
    if not isinstance(values, list):
        return []
    return list(dict.fromkeys(value for value in values[:_MAX_VALUES] if isinstance(value, str)))
