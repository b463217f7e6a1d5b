"""Tokens of other issuers: which are trusted, and checks by keys that are fetched within bounds.

The address is the operator's. What stands there is not believed: its size, the time it takes and the number of keys
have bounds. Only keys of the algorithms that the operator named are taken. Whoever needs keys that are being
fetched waits for the same request, and in no thread.
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
from trinitylake_ops.server.tokens import Principal, Scope, scope_of, scopes_of, unauthorized
from trinitylake_ops.storage.http.settings import is_loopback

logger = logging.getLogger(__name__)

#: Keys are asked for again when they are older, so that a key that was withdrawn is out after that time.
KEPT_SECONDS = 300.0
#: Keys are used for so long while their address does not answer.
LONGEST_KEPT_SECONDS = 3_600.0
#: A token with an unknown key lets keys be fetched no more often than this.
PAUSE_SECONDS = 10.0
LONGEST_FETCH_SECONDS = 10.0
MOST_BYTES = 1 << 20
MOST_KEYS = 100
_CONNECT_SECONDS = 5.0
_PART_BYTES = 64 << 10
_FAMILIES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}


@dataclass(frozen=True, slots=True)
class Key:
    """A public key, and the only algorithm that its issuer lets it have, None for any of its family."""

    key: jwt.PyJWK
    algorithm: str | None

    def fits(self, algorithm: str) -> bool:
        """Whether a signature by an algorithm can be of this key."""
        return self.key.key_type == _FAMILIES[algorithm[:2]] and self.algorithm in (None, algorithm)


class KeysUnavailableError(TrinityLakeError):
    """The keys of an issuer could not be had."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Keys:
    """The keys at an address, by their ids. ``now`` is a clock in seconds that never goes back."""

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

    def wanted(self, kid: str | None) -> Future[None] | None:
        """Return the request to wait for before a token with a key id is checked, None if the keys are good for it."""
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
        """Return the key of an id that fits an algorithm, None if there is none. Raises KeysUnavailableError.

        A token without an id is checked by the only key of its family.
        """
        now_s = self._now()
        with self._lock:
            if self._fetched_s is None or now_s - self._fetched_s >= LONGEST_KEPT_SECONDS:
                raise KeysUnavailableError("the keys of the issuer cannot be had")
            found = (
                self._keys.get(kid, ()) if kid is not None else [one for many in self._keys.values() for one in many]
            )
        fitting = [key for key in found if key.fits(algorithm)]
        return fitting[0].key if len(fitting) == 1 else None

    def close(self) -> None:
        """End the thread that fetches."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self) -> None:
        try:
            keys = self._parsed(_read(self._url))
        except (OSError, ValueError, http.client.HTTPException, RecursionError, jwt.PyJWTError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            logger.warning("the keys at %s cannot be had: %s", self._url, str(reason)[:300] or type(error).__name__)
            keys = None
        with self._lock:
            self._fetching = None
            if keys is not None:
                self._keys, self._fetched_s = keys, self._now()

    def _parsed(self, data: bytes) -> Mapping[str | None, tuple[Key, ...]]:
        content = json.loads(data)
        listed = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_KEYS:
            raise ValueError(f"it is no set of 1 to {MOST_KEYS} keys")
        found: dict[str | None, tuple[Key, ...]] = {}
        for one in listed:
            key = self._key(one)
            if key is not None:
                kid = key.key.key_id
                found[kid] = (*found.get(kid, ()), key)
        if not found:
            raise ValueError(f"it holds no key for {', '.join(self._algorithms)}")
        return found

    def _key(self, content: Any) -> Key | None:
        """Return a key of the set, None for one that is not for signatures, or of an algorithm that is not taken."""
        if not isinstance(content, dict) or content.get("use", "sig") != "sig":
            return None
        if content.get("alg", self._algorithms[0]) not in self._algorithms or "d" in content:
            return None
        if content.get("kty") not in _FAMILIES.values() or not isinstance(content.get("kid", ""), str):
            return None
        try:
            return Key(jwt.PyJWK(content), content.get("alg"))
        except jwt.PyJWTError as error:
            logger.warning("a key at %s cannot be used: %s", self._url, type(error).__name__)
            return None


def _read(url: str) -> bytes:
    """Return what stands at an address. Raises OSError, HTTPException, and ValueError beyond the bounds."""
    deadline_s = time.monotonic() + LONGEST_FETCH_SECONDS
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    parts, n_bytes = [], 0
    try:
        opened = urllib.request.build_opener(_NoRedirect).open(request, timeout=_CONNECT_SECONDS)
    except HTTPError as error:  # which is an open answer, too
        error.close()
        raise OSError(f"it answers {error.code}") from None
    with opened as response:
        while part := response.read1(_PART_BYTES):
            n_bytes += len(part)
            if n_bytes > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"it took longer than {LONGEST_FETCH_SECONDS:.0f} seconds")
            parts.append(part)
    return b"".join(parts)


#: The families of algorithms with a public key. With a secret key, who checks a token could also make one.
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)  # fmt: skip
_DEFAULT_ALGORITHMS = ("RS256", "ES256")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_KNOWN = frozenset({"name", "issuer", "audience", "keys", "algorithms", "principal", "claim", "grants", "lakehouses"})
_NEEDED = ("name", "issuer", "audience", "keys", "grants")
_MOST = 100


@dataclass(frozen=True, slots=True)
class Grant:
    """What a value of the claim allows: a scope, and other scopes in some namespaces."""

    scope: Scope
    namespaces: Mapping[str, Scope] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IssuerSettings:
    """An issuer of tokens. ``issuer`` and ``audience`` are compared with those of a token, letter by letter.

    ``keys_url`` is where its keys are, as a JSON Web Key Set. ``principal`` is the claim that says who asks, ``claim``
    the one whose values choose ``grants``. ``lakehouses`` are the names of those that may be seen, None for every one.
    """

    name: str
    issuer: str
    audience: str
    keys_url: str
    grants: Mapping[str, Grant]
    algorithms: tuple[str, ...] = _DEFAULT_ALGORITHMS
    principal: str = "sub"
    claim: str = "scope"
    lakehouses: frozenset[str] | None = None


def read_issuers(path: Path) -> tuple[IssuerSettings, ...]:
    """Return the issuers of a YAML file, which has a list ``issuers``. Raises InvalidInputError."""
    content = read_yaml(path, "issuers")
    if not isinstance(content, list) or not 1 <= len(content) <= _MOST:
        raise InvalidInputError(f"{str(path)!r}: 'issuers' must be a list of 1 to {_MOST} issuers", path=str(path))
    found = tuple(_issuer(f"{str(path)!r}: issuer {at}", raw) for at, raw in enumerate(content, 1))
    for what in ("name", "issuer"):
        if len({getattr(one, what) for one in found}) < len(found):
            raise InvalidInputError(f"{str(path)!r}: two issuers have the same {what}", path=str(path))
    return found


def _issuer(where: str, raw: Any) -> IssuerSettings:
    if not isinstance(raw, dict) or not raw.keys() <= _KNOWN or not all(raw.get(name) for name in _NEEDED):
        raise InvalidInputError(
            f"{where} must be a mapping with {', '.join(_NEEDED)}; no keys are known but {', '.join(sorted(_KNOWN))}"
        )
    name = raw["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"{where}: a name has up to 32 of a-z, 0-9, '_' and '-'")
    grants = raw["grants"]
    if not isinstance(grants, dict):
        raise InvalidInputError(f"{where}: 'grants' must be a mapping of values of the claim to what they allow")
    for value in grants:
        if not isinstance(value, str):
            raise InvalidInputError(f"{where}: the value {value!r} of the claim is no text; put it in quotes")
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
        raise InvalidInputError(f"{where}: {name!r} must be a text")
    return value


def _texts(where: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidInputError(f"{where}: {name!r} must be a list of texts")
    return value


def _checked_url(where: str, url: str) -> str:
    """Return the address of keys. Who can change them on their way could let anybody in, so it has TLS."""
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:
        host, split = "", urlsplit("")
    if not host or not (split.scheme == "https" or (split.scheme == "http" and is_loopback(host))):
        raise InvalidInputError(f"{where}: 'keys' must be an https:// address; http:// is for this machine alone")
    return url


def _algorithms(where: str, raw: Any) -> tuple[str, ...]:
    found = tuple(_texts(where, "algorithms", raw))
    if not found or not set(found) <= ALGORITHMS:
        raise InvalidInputError(f"{where}: 'algorithms' must be some of {', '.join(sorted(ALGORITHMS))}")
    return found


def _grant(where: str, raw: Any) -> Grant:
    if isinstance(raw, str):
        return Grant(scope_of(where, raw))
    if not isinstance(raw, dict) or not raw.keys() <= {"scope", "namespaces"}:
        raise InvalidInputError(f"{where} must be a scope, or a mapping with scope and namespaces")
    return Grant(scope_of(where, raw.get("scope", "none")), scopes_of(where, raw.get("namespaces", {})))


#: Three parts in base64url: a signed token as RFC 7519 writes it.
_SIGNED = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_LONGEST_CHARS = 16 << 10
_PRINCIPAL = re.compile(r"[\x21-\x7e]{1,64}")
#: Clocks may be so far from each other.
LEEWAY_SECONDS = 60
_MOST_VALUES = 1_000


def signed_token(authorization: str | None) -> str | None:
    """Return the signed token in a header ``Authorization``, None if what it has is not of that form."""
    kind, _, token = (authorization or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and _SIGNED.fullmatch(token.strip()) else None


class Issuers:
    """The issuers whose tokens are taken."""

    def __init__(self, settings: Sequence[IssuerSettings], keys: Callable[[IssuerSettings], Keys] | None = None):
        make = keys or (lambda one: Keys(one.keys_url, one.algorithms))
        self._issuers = {one.issuer: (one, make(one)) for one in settings}

    def close(self) -> None:
        """End the threads that fetch keys."""
        for _, keys in self._issuers.values():
            keys.close()

    async def principal(self, token: str) -> Principal:
        """Return who sends a token. Raises RejectedError: 401, and 503 while the issuer's keys cannot be had."""
        if len(token) > _LONGEST_CHARS:
            raise unauthorized("the token is too long")
        header, issuer = _header(token), _claimed_issuer(token)
        if issuer not in self._issuers:
            raise unauthorized("the token is of no issuer that is known here")
        settings, keys = self._issuers[issuer]
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in settings.algorithms:
            raise unauthorized("the token is signed in a way that is not taken here")
        wanted = keys.wanted(kid)
        if wanted is not None:
            await asyncio.wait({asyncio.wrap_future(wanted)}, timeout=LONGEST_FETCH_SECONDS)
        return self._checked(token, settings, keys, algorithm, kid)

    def _checked(self, token: str, settings: IssuerSettings, keys: Keys, algorithm: str, kid: str | None) -> Principal:
        try:
            key = keys.named(kid, algorithm)
        except KeysUnavailableError as error:
            raise RejectedError(503, UNAVAILABLE, str(error), headers={"Retry-After": "1"}) from error
        if key is None:
            raise unauthorized("the token is signed by a key that its issuer does not have")
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
            raise unauthorized("the token has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            _reject(error)
        return _principal(settings, claims)


def _reject(error: Exception) -> NoReturn:
    reasons: dict[type[Exception], str] = {
        jwt.InvalidAudienceError: "the token is for another audience",
        jwt.MissingRequiredClaimError: "the token lacks a claim that is needed: exp, iss and aud",
        jwt.ImmatureSignatureError: "the token is not valid yet",
    }
    raise unauthorized(reasons.get(type(error), "the token is not valid")) from None


def _header(token: str) -> dict[str, Any]:
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise unauthorized("the token is not valid") from None
    if not isinstance(header.get("kid", ""), str):
        raise unauthorized("the token is not valid")
    return header


def _claimed_issuer(token: str) -> str:
    """Return the issuer that a token names. It only chooses the keys; they show whether it is true."""
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError):
        raise unauthorized("the token is not valid") from None
    issuer = claims.get("iss")
    if not isinstance(issuer, str):
        raise unauthorized("the token names no issuer")
    return issuer


def _principal(settings: IssuerSettings, claims: dict[str, Any]) -> Principal:
    """Return the principal of claims. The file of tokens has no such name: it begins with that of the issuer."""
    who = claims.get(settings.principal)
    if not isinstance(who, str) or not _PRINCIPAL.fullmatch(who):
        raise unauthorized(f"the claim {settings.principal} does not say who asks, in up to 64 letters and signs")
    grants = [settings.grants[value] for value in _values(claims.get(settings.claim)) if value in settings.grants]
    names = {name for grant in grants for name in grant.namespaces}
    return Principal(
        f"{settings.name}:{who}",
        max((grant.scope for grant in grants), default=Scope.NONE),
        {name: max(_in_namespace(grant, name) for grant in grants) for name in names},
        settings.lakehouses,
    )


def _in_namespace(grant: Grant, name: str) -> Scope:
    return grant.namespaces.get(name, grant.scope)


def _values(claim: Any) -> list[str]:
    """Return the values of a claim: words of a text, as in ``scope``, or a list of texts, as in ``roles``."""
    values = claim.split() if isinstance(claim, str) else claim
    if not isinstance(values, list):
        return []
    return list(dict.fromkeys(value for value in values[:_MOST_VALUES] if isinstance(value, str)))
