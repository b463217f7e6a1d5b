"""What the operator says of issuers: which are trusted, for which audience, and what a claim allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.settings import read_yaml
from trinitylake_ops.server.tokens import Scope, scope_of, scopes_of
from trinitylake_ops.storage.remote.settings import is_loopback

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
    found = tuple(_issuer(f"{str(path)!r}: issuer {at}", said) for at, said in enumerate(content, 1))
    for what in ("name", "issuer"):
        if len({getattr(one, what) for one in found}) < len(found):
            raise InvalidInputError(f"{str(path)!r}: two issuers have the same {what}", path=str(path))
    return found


def _issuer(where: str, said: Any) -> IssuerSettings:
    if not isinstance(said, dict) or not said.keys() <= _KNOWN or not all(said.get(name) for name in _NEEDED):
        raise InvalidInputError(
            f"{where} must be a mapping with {', '.join(_NEEDED)}; no keys are known but {', '.join(sorted(_KNOWN))}"
        )
    name = said["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"{where}: a name has up to 32 of a-z, 0-9, '_' and '-'")
    grants = said["grants"]
    if not isinstance(grants, dict):
        raise InvalidInputError(f"{where}: 'grants' must be a mapping of values of the claim to what they allow")
    for value in grants:
        if not isinstance(value, str):
            raise InvalidInputError(f"{where}: the value {value!r} of the claim is no text; put it in quotes")
    return IssuerSettings(
        name,
        _text(where, said, "issuer"),
        _text(where, said, "audience"),
        _checked_url(where, _text(where, said, "keys")),
        {value: _grant(f"{where}, grant {value[:64]!r}", allows) for value, allows in grants.items()},
        _algorithms(where, said.get("algorithms", list(_DEFAULT_ALGORITHMS))),
        _text(where, said, "principal", "sub"),
        _text(where, said, "claim", "scope"),
        frozenset(_texts(where, "lakehouses", said["lakehouses"])) if "lakehouses" in said else None,
    )


def _text(where: str, said: Mapping[str, Any], name: str, default: str = "") -> str:
    value = said.get(name, default)
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


def _algorithms(where: str, said: Any) -> tuple[str, ...]:
    found = tuple(_texts(where, "algorithms", said))
    if not found or not set(found) <= ALGORITHMS:
        raise InvalidInputError(f"{where}: 'algorithms' must be some of {', '.join(sorted(ALGORITHMS))}")
    return found


def _grant(where: str, said: Any) -> Grant:
    if isinstance(said, str):
        return Grant(scope_of(where, said))
    if not isinstance(said, dict) or not said.keys() <= {"scope", "namespaces"}:
        raise InvalidInputError(f"{where} must be a scope, or a mapping with scope and namespaces")
    return Grant(scope_of(where, said.get("scope", "none")), scopes_of(where, said.get("namespaces", {})))
