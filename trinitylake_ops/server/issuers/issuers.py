"""Who sends a token of another issuer: it is checked by the issuer's keys, and its claims say what it allows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jwt

from trinitylake_ops.server.answers import UNAVAILABLE, RefusedError
from trinitylake_ops.server.issuers.keys import LONGEST_FETCH_SECONDS, Keys, KeysUnavailableError
from trinitylake_ops.server.issuers.settings import Grant, IssuerSettings
from trinitylake_ops.server.tokens import Principal, Scope, unauthorized

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
        """Return who sends a token. Raises RefusedError: 401, and 503 while the issuer's keys cannot be had."""
        if len(token) > _LONGEST_CHARS:
            raise unauthorized("the token is too long")
        header, issuer = _header(token), _said_issuer(token)
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
            raise RefusedError(503, UNAVAILABLE, str(error), headers={"Retry-After": "1"}) from error
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
            _refuse(error)
        return _principal(settings, claims)


def _refuse(error: Exception) -> NoReturn:
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


def _said_issuer(token: str) -> str:
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
