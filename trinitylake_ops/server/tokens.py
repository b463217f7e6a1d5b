"""Authentication with bearer tokens; the token file stores only their SHA-256 hashes."""

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
_HOW_TO_WRITE = "; start the server with --anonymous-writes for programs on this machine, or with --tokens for others"
#: How long a request waits until the token file has been read.
READ_TIMEOUT_S = 5.0
#: The token that pyiceberg sends if no token is configured.
_OF_PYICEBERG = "None"
_FIELDS = frozenset({"name", "sha256", "scope", "namespaces", "lakehouses", "expires"})


class Scope(IntEnum):
    """Rights of a principal. Each scope includes the previous ones. OPERATE also allows registering external tables."""

    NONE = 0
    READ = 1
    WRITE = 2
    OPERATE = 3


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated sender of a request."""

    #: The name that appears in the log and in commits.
    name: str
    #: The scope in namespaces without an entry in ``namespaces``.
    scope: Scope
    #: The scopes in individual namespaces.
    namespaces: Mapping[str, Scope] = field(default_factory=dict)
    #: The names of the lakehouses that the principal may access, or None for all lakehouses.
    lakehouses: frozenset[str] | None = None
    #: When the token expires, or None if it never expires.
    expires: datetime | None = None

    def may(self, scope: Scope, namespace: str) -> bool:
        """Whether the principal has a scope in a namespace.

        Args:
            scope: The required scope.
            namespace: The name of the namespace, which need not exist.
        """
        return self.namespaces.get(namespace, self.scope) >= scope

    @property
    def min_scope(self) -> Scope:
        """The scope that the principal has in every namespace."""
        return min(self.scope, *self.namespaces.values()) if self.namespaces else self.scope

    @property
    def max_scope(self) -> Scope:
        """The highest scope that the principal has in any namespace."""
        return max(self.scope, *self.namespaces.values()) if self.namespaces else self.scope

    def check(self, scope: Scope, namespace: str) -> None:
        """Check the scope in a namespace, whether or not the namespace exists.

        Args:
            scope: The required scope.
            namespace: The name of the namespace.

        Raises:
            RejectedError: Status 403 if the principal does not have the scope.
        """
        if not self.may(scope, namespace):
            message = f"{self.name} is not allowed to {scope.name.lower()} in namespace {namespace}"
            raise forbidden(message + (_HOW_TO_WRITE if self.name == _ANONYMOUS else ""))

    def may_see(self, lakehouse: str) -> bool:
        """Whether the principal may access a lakehouse, by its name."""
        return self.lakehouses is None or lakehouse in self.lakehouses


def anonymous(scope: Scope) -> Principal:
    """Return the principal of all requests to a server without tokens."""
    return Principal(_ANONYMOUS, scope)


class Tokens:
    """The principals of a token file. The file is read again after each change, so that a token can be revoked.

    The constructor raises InvalidInputError if the file is not usable. If it becomes unusable later, all requests are
    rejected until it is fixed.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._state: tuple[int, ...] | None = None
        self._reading: asyncio.Task[dict[str, Principal]] | None = None
        self._principals: dict[str, Principal] = {}
        self._load()

    def principals(self) -> list[Principal]:
        """Return all principals in the file. Raises InvalidInputError."""
        return list(self._load().values())

    async def principal(self, authorization: str | None) -> Principal:
        """Return the principal for an ``Authorization`` header. Raises RejectedError (401, or 503 for a bad file)."""
        try:
            principals = await self._current()
        except InvalidInputError as error:
            raise RejectedError(
                503, "ServiceUnavailableException", "the token file is not usable", detail=str(error)
            ) from error
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or token.strip() in ("", _OF_PYICEBERG):
            raise unauthorized_error("the bearer token is missing")
        principal = principals.get(hashlib.sha256(token.strip().encode("utf-8", "replace")).hexdigest())
        if principal is None:
            raise unauthorized_error("the token is unknown")
        if principal.expires is not None and principal.expires <= datetime.now(UTC):
            raise unauthorized_error(f"the token of {principal.name} has expired")
        return principal

    async def _current(self) -> dict[str, Principal]:
        """Read the file in a single thread for all requests, because the file system may hang."""
        reading = self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.create_task(asyncio.to_thread(self._load))
            # retrieve any exception, because all waiting requests may have been canceled
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
        if not reading.done():
            raise InvalidInputError(f"{str(self._path)!r} was not read within {READ_TIMEOUT_S:g} s")
        return reading.result()

    def _load(self) -> dict[str, Principal]:
        with self._lock:
            try:
                status = self._path.stat()
            except OSError as error:
                self._state = None
                raise InvalidInputError(f"cannot read {str(self._path)!r}: {error.strerror}") from error
            # A writer can preserve the size and the modification time, but not the change time (ctime).
            state = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
            if state != self._state:
                self._state = None
                self._principals = _principals(self._path)
                self._state = state
            return self._principals


def bearer_of(authorization: str | None) -> str:
    """Return an ``Authorization`` header in bearer form. Browsers send the token as the basic authentication password.

    A bearer header is returned unchanged. Raises RejectedError (401) for any other header, so that a browser prompts
    for the token.
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
        "the token is missing; in a browser, enter it as the password, with any user name",
        headers={"WWW-Authenticate": 'Basic realm="trinitylake", charset="UTF-8"'},
    )


def unauthorized_error(message: str) -> RejectedError:
    """Return the error for a request without a valid token."""
    return RejectedError(401, "NotAuthorizedException", message, headers={"WWW-Authenticate": "Bearer"})


def _principals(path: Path) -> dict[str, Principal]:
    content = read_yaml(path, "tokens")
    if not isinstance(content, list):
        raise InvalidInputError(f"{str(path)!r}: 'tokens' must be a list")
    principals: dict[str, Principal] = {}
    for at, raw in enumerate(content, 1):
        digest, principal = _principal(f"{str(path)!r}: token {at}", raw)
        if digest in principals:
            raise InvalidInputError(f"{str(path)!r}: token {at} is a duplicate")
        principals[digest] = principal
    return principals


def _principal(where: str, raw: Any) -> tuple[str, Principal]:
    if not isinstance(raw, dict) or not raw.keys() <= _FIELDS:
        raise InvalidInputError(f"{where} must be a mapping with only these keys: {', '.join(sorted(_FIELDS))}")
    name, digest = raw.get("name"), raw.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"{where}: the name is missing or not made of letters, digits, '.', '_', '@' and '-'")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise InvalidInputError(f"{where}: 'sha256' must be the SHA-256 of the token, as 64 hexadecimal digits")
    return digest, Principal(
        name,
        scope_of(where, raw.get("scope", "none")),
        scopes_of(where, raw.get("namespaces", {})),
        _names(where, raw["lakehouses"]) if "lakehouses" in raw else None,
        _timestamp(where, raw["expires"]) if "expires" in raw else None,
    )


def scopes_of(where: str, raw: Any) -> dict[str, Scope]:
    """Parse the scopes of namespaces in an operator's file.

    YAML parses some unquoted names as numbers or booleans. A restriction under such a key would apply to another name,
    so it is rejected.

    Args:
        where: The place in the file, for error messages.
        raw: The parsed YAML.

    Raises:
        InvalidInputError: If the value is not a mapping of names to scopes.
    """
    if not isinstance(raw, dict):
        raise InvalidInputError(f"{where}: 'namespaces' must be a mapping of namespaces to scopes")
    for namespace in raw:
        if not isinstance(namespace, str):
            raise InvalidInputError(f"{where}: namespace {namespace!r} is not a string; put it in quotes")
    return {namespace: scope_of(where, scope) for namespace, scope in raw.items()}


def scope_of(where: str, raw: Any) -> Scope:
    """Parse a scope in an operator's file.

    Args:
        where: The place in the file, for error messages.
        raw: The parsed YAML.

    Raises:
        InvalidInputError: If the value is not a scope.
    """
    scopes = {scope.name.lower(): scope for scope in Scope}
    if not isinstance(raw, str) or raw not in scopes:
        raise InvalidInputError(f"{where}: the scope must be one of {', '.join(scopes)}")
    return scopes[raw]


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
        raise InvalidInputError(f"{where}: 'expires' must be a timestamp, for example 2030-01-31T12:00:00Z")
    return raw if raw.tzinfo is not None else raw.replace(tzinfo=UTC)
