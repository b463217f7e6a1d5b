"""Who asks: bearer tokens from a file of the operator, which holds their hashes only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.responses import RejectedError, forbidden
from trinitylake_ops.server.settings import read_yaml

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ANONYMOUS = "anonymous"
_HOW_TO_WRITE = "; its operator lets programs on this machine write by --anonymous-writes, and others by --tokens"
#: How long a request waits for the file of tokens to be read.
_READ_SECONDS = 5.0
#: What pyiceberg sends for a token when it was given none.
_OF_PYICEBERG = "None"
_KNOWN = frozenset({"name", "sha256", "scope", "namespaces", "lakehouses", "expires"})


class Scope(IntEnum):
    """What a principal may do. Each includes those before it; OPERATE registers tables of others."""

    NONE = 0
    READ = 1
    WRITE = 2
    OPERATE = 3


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who asks, with a name for the log.

    ``scope`` holds in namespaces that ``namespaces`` does not have. ``lakehouses`` are the names of those that may be
    seen at all, None for every one. ``expires`` is when the token ends.
    """

    name: str
    scope: Scope
    namespaces: Mapping[str, Scope] = field(default_factory=dict)
    lakehouses: frozenset[str] | None = None
    expires: datetime | None = None

    def may(self, scope: Scope, namespace: str) -> bool:
        """Whether something is allowed in a namespace."""
        return self.namespaces.get(namespace, self.scope) >= scope

    @property
    def least_scope(self) -> Scope:
        """What is allowed in every namespace."""
        return min(self.scope, *self.namespaces.values()) if self.namespaces else self.scope

    @property
    def most_scope(self) -> Scope:
        """What is allowed in at least one namespace."""
        return max(self.scope, *self.namespaces.values()) if self.namespaces else self.scope

    def check(self, scope: Scope, namespace: str) -> None:
        """Raise RejectedError, 403, if something is not allowed in a namespace, whether or not it exists."""
        if not self.may(scope, namespace):
            message = f"{self.name} may not {scope.name.lower()} in namespace {namespace}"
            raise forbidden(message + (_HOW_TO_WRITE if self.name == _ANONYMOUS else ""))

    def may_see(self, lakehouse: str) -> bool:
        """Whether a lakehouse, given by its name, may be seen."""
        return self.lakehouses is None or lakehouse in self.lakehouses


def anonymous(scope: Scope) -> Principal:
    """Return the principal for everybody, where there are no tokens."""
    return Principal(_ANONYMOUS, scope)


class Tokens:
    """The principals of a file of tokens. The file is read again when it has changed, so that a token can be revoked.

    Raises InvalidInputError when the file cannot be used at first. Later nobody is let in until it can.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._state: tuple[int, ...] | None = None
        self._reading: asyncio.Task[dict[str, Principal]] | None = None
        self._principals: dict[str, Principal] = {}
        self._load()

    def principals(self) -> list[Principal]:
        """Return everybody whom the file names. Raises InvalidInputError."""
        return list(self._load().values())

    async def principal(self, authorization: str | None) -> Principal:
        """Return who sends a header ``Authorization``. Raises RejectedError, 401, and 503 for a broken file."""
        try:
            principals = await self._current()
        except InvalidInputError as error:
            raise RejectedError(
                503, "ServiceUnavailableException", "the file of tokens cannot be used", detail=str(error)
            ) from error
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or token.strip() in ("", _OF_PYICEBERG):
            raise unauthorized("a bearer token is needed")
        found = principals.get(hashlib.sha256(token.strip().encode("utf-8", "replace")).hexdigest())
        if found is None:
            raise unauthorized("the token is not known")
        if found.expires is not None and found.expires <= datetime.now(UTC):
            raise unauthorized(f"the token of {found.name} has expired")
        return found

    async def _current(self) -> dict[str, Principal]:
        """Read the file in one thread for all requests, because a file system may not respond."""
        reading = self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.create_task(asyncio.to_thread(self._load))
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # no request may be left
        await asyncio.wait({reading}, timeout=_READ_SECONDS)
        if not reading.done():
            raise InvalidInputError(f"{str(self._path)!r} cannot be read within {_READ_SECONDS:g} s")
        return reading.result()

    def _load(self) -> dict[str, Principal]:
        with self._lock:
            try:
                status = self._path.stat()
            except OSError as error:
                self._state = None
                raise InvalidInputError(f"{str(self._path)!r} cannot be read: {error.strerror}") from error
            # A writer can keep the size and the time of modification, but not that of the change.
            state = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
            if state != self._state:
                self._state = None
                self._principals = _principals(self._path)
                self._state = state
            return self._principals


def bearer_of(authorization: str | None) -> str:
    """Return a header ``Authorization`` with the password of basic authentication as a token, any other as it is.

    Raises RejectedError, 401, where there is none, so that a browser asks for it.
    """
    kind, _, encoded = (authorization or "").partition(" ")
    if kind.lower() == "bearer":
        return authorization or ""
    if kind.lower() == "basic":
        with contextlib.suppress(ValueError):
            _, _, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
            return f"Bearer {password}"
    raise RejectedError(
        401,
        "NotAuthorizedException",
        "a token is needed; a browser sends it as the password, with any name",
        headers={"WWW-Authenticate": 'Basic realm="trinitylake", charset="UTF-8"'},
    )


def unauthorized(message: str) -> RejectedError:
    """Return the error for a request whose sender is not known."""
    return RejectedError(401, "NotAuthorizedException", message, headers={"WWW-Authenticate": "Bearer"})


def _principals(path: Path) -> dict[str, Principal]:
    content = read_yaml(path, "tokens")
    if not isinstance(content, list):
        raise InvalidInputError(f"{str(path)!r}: 'tokens' must be a list")
    found: dict[str, Principal] = {}
    for at, raw in enumerate(content, 1):
        digest, principal = _principal(f"{str(path)!r}: token {at}", raw)
        if digest in found:
            raise InvalidInputError(f"{str(path)!r}: token {at} is there twice")
        found[digest] = principal
    return found


def _principal(where: str, raw: Any) -> tuple[str, Principal]:
    if not isinstance(raw, dict) or not raw.keys() <= _KNOWN:
        raise InvalidInputError(f"{where} must be a mapping with no other keys than {', '.join(sorted(_KNOWN))}")
    name, digest = raw.get("name"), raw.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"{where} needs a name of letters, digits, '.', '_', '@' and '-'")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise InvalidInputError(f"{where} needs the SHA-256 of the token as 'sha256', in 64 hexadecimal digits")
    return digest, Principal(
        name,
        scope_of(where, raw.get("scope", "none")),
        scopes_of(where, raw.get("namespaces", {})),
        _names(where, raw["lakehouses"]) if "lakehouses" in raw else None,
        _timestamp(where, raw["expires"]) if "expires" in raw else None,
    )


def scopes_of(where: str, raw: Any) -> dict[str, Scope]:
    """Return the scopes of namespaces that an operator's file gives.

    YAML reads some names as numbers or truths. A restriction of them would hold for another name, so it is refused.
    Raises InvalidInputError.
    """
    if not isinstance(raw, dict):
        raise InvalidInputError(f"{where}: 'namespaces' must be a mapping of namespaces to scopes")
    for namespace in raw:
        if not isinstance(namespace, str):
            raise InvalidInputError(f"{where}: the namespace {namespace!r} is no text; put it in quotes")
    return {namespace: scope_of(where, scope) for namespace, scope in raw.items()}


def scope_of(where: str, raw: Any) -> Scope:
    """Return the scope that an operator's file names. Raises InvalidInputError."""
    known = {scope.name.lower(): scope for scope in Scope}
    if not isinstance(raw, str) or raw not in known:
        raise InvalidInputError(f"{where}: a scope is one of {', '.join(known)}")
    return known[raw]


def _names(where: str, raw: Any) -> frozenset[str]:
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise InvalidInputError(f"{where}: 'lakehouses' must be a list of names")
    names: Iterable[str] = raw
    return frozenset(names)


def _timestamp(where: str, raw: Any) -> datetime:
    if isinstance(raw, str):
        try:
            raw = datetime.fromisoformat(raw)
        except ValueError:
            raw = None
    if not isinstance(raw, datetime):
        raise InvalidInputError(f"{where}: 'expires' must be a time, such as 2030-01-31T12:00:00Z")
    return raw if raw.tzinfo is not None else raw.replace(tzinfo=UTC)
