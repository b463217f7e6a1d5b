"""A request as passed to its handler: the principal, the body, and the transaction that the handler commits.

A request with an ``Idempotency-Key`` is a publication (``iceberg/write/publication.py``): its id is recorded in the
version that contains its change. Any replica can therefore find it, and no response store is needed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchNamespaceError,
    NoSuchTableError,
)
from pyiceberg.typedef import IcebergBaseModel

from trinitylake_ops.errors import CommitConflictError, VersionNotFoundError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.keys import decode_commit_info
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.table_change import LatestTarget
from trinitylake_ops.iceberg.updates import as_invalid_input
from trinitylake_ops.iceberg.write.publication import publication_id
from trinitylake_ops.server.responses import RejectedError, bad_request, forbidden
from trinitylake_ops.server.settings import Limits
from trinitylake_ops.server.tokens import Principal, Scope
from trinitylake_ops.server.warehouses import Warehouse
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import CommittedByOtherError, version_of
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.history import CLIENT_PROPERTY
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import find_version_before

M = TypeVar("M", bound=IcebergBaseModel)

#: The separator between namespace levels in a path.
SEPARATOR = "\x1f"
_DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_PROPERTIES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])
_NAMES: TypeAdapter[list[str]] = TypeAdapter(list[str])
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_MAX_CLIENT_CHARS = 100
_MAX_VALUES = 500_000
_MAX_OBJECTS = 50_000


@dataclass(frozen=True, slots=True)
class Call:
    """An authenticated request."""

    #: The HTTP method.
    method: str
    #: The raw path, without the query.
    path: str
    #: The decoded names in the path, by their names in the route template.
    names: Mapping[str, str]
    #: The query parameters.
    query: Mapping[str, str]
    #: The headers, by lower-case name.
    headers: Mapping[str, str]
    #: The body.
    body: bytes
    #: The sender.
    principal: Principal
    #: The warehouse that the path names.
    warehouse: Warehouse
    #: The id that identifies the request in the log.
    request_id: str
    #: The limits of the server.
    limits: Limits
    #: Counts a commit attempt that conflicted with another commit.
    note_conflict: Callable[[], None]

    @property
    def namespace(self) -> str:
        """The namespace in the path. Raises NoSuchNamespaceError if it has several levels."""
        return single_level(self.names["namespace"].split(SEPARATOR))

    @property
    def table(self) -> tuple[str, str]:
        """The namespace and the table in the path. Raises NoSuchTableError if the namespace has several levels.

        Iceberg's Java client requests a metadata table as ``ns.t.snapshots``, and expects this error in the response.
        """
        try:
            return self.namespace, self.names["table"]
        except NoSuchNamespaceError as error:
            name = ".".join([*self.names["namespace"].split(SEPARATOR), self.names["table"]])
            raise NoSuchTableError(f"Table does not exist: {name} (namespaces here have one level)") from error

    @property
    def client(self) -> str:
        """The user agent that the client declares."""
        return _UNPRINTABLE.sub("?", self.headers.get("user-agent", ""))[:_MAX_CLIENT_CHARS]

    def document(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises RejectedError (400, or 413 for too many values)."""
        # Punctuation within strings is counted as well. A value takes tens of bytes once it is parsed,
        # but as few as two in the body.
        if sum(self.body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
            raise RejectedError(413, "BadRequestException", f"the body contains more than {_MAX_VALUES} values")
        # An object becomes a schema field, an update or a part of a filter, which takes about 0.1 ms each.
        if self.body.count(b"{") > _MAX_OBJECTS:
            raise RejectedError(413, "BadRequestException", f"the body contains more than {_MAX_OBJECTS} objects")
        try:
            content = _DOCUMENT.validate_json(self.body)
        except PydanticError as error:
            reason = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise bad_request(f"the body is not a JSON object: {reason}") from None
        _check_numbers(content)
        return content

    def model(self, kind: type[M], **defaults: Any) -> M:
        """Return the body as a model.

        Args:
            kind: The class of the model.
            **defaults: Values for fields that the specification allows clients to omit.

        Raises:
            RejectedError: Status 400 or 413 if the body is not an acceptable JSON object.
            InvalidInputError: If a value is invalid.
            pydantic.ValidationError: If the body does not match the model.
        """
        content = {**defaults, **self.document()}
        with as_invalid_input():
            return kind.model_validate(content)

    def check(self, scope: Scope, namespace: str) -> None:
        """Raise RejectedError (403) if the principal does not have a scope in a namespace.

        Args:
            scope: The required scope.
            namespace: The name of the namespace.
        """
        self.principal.check(scope, namespace)

    def may_change(self, scope: Scope, definition: TableDef, latest: Snapshot | None = None) -> bool:
        """Whether the principal has a scope for a table under all of its current names.

        A dropped table has no current name, so the principal needs the scope in every namespace.

        Args:
            scope: The required scope.
            definition: The table's definition, in any version.
            latest: The latest version, if the caller has just read it.

        Raises:
            StorageError: If the latest version cannot be read at the moment.
        """
        if self.principal.min_scope >= scope:
            return True
        namespaces = self.warehouse.current_namespaces(definition.id, latest)
        return bool(namespaces) and all(self.principal.may(scope, namespace) for namespace in namespaces)

    def check_table(self, scope: Scope, definition: TableDef, latest: Snapshot | None = None) -> None:
        """Raise RejectedError (403) unless :meth:`may_change`. The message reveals no namespace.

        Args:
            scope: The required scope.
            definition: The table's definition, in any version.
            latest: The latest version, if the caller has just read it.
        """
        if not self.may_change(scope, definition, latest):
            raise forbidden(
                f"{self.principal.name} is not allowed to {scope.name.lower()} this table: it was dropped, or it is"
                " now in a namespace without this permission"
            )

    def requested_table(self, scope: Scope = Scope.READ) -> RequestedTable:
        """Return the table in the path, after checking the principal's scope under all of its current names.

        Raises RejectedError (403), NoSuchTableError, or StorageError.
        """
        namespace, name = self.table
        self.check(scope, namespace)
        catalog, latest = self.warehouse.pinned()
        definition = catalog.definition_of(namespace, name)
        self.check_table(scope, definition, latest)
        return RequestedTable(catalog, definition, latest)

    def flag(self, name: str) -> bool:
        """Return a boolean query parameter, False if it is absent. Raises RejectedError (400)."""
        value = self.query.get(name, "false").lower()
        if value not in ("true", "false"):
            raise bad_request(f"{name} must be true or false")
        return value == "true"


@dataclass(frozen=True, slots=True)
class RequestedTable:
    """A table that a request names."""

    #: Reads the table at the version of the warehouse.
    catalog: TrinityLakeCatalog
    #: The definition of the table at that version.
    definition: TableDef
    #: The latest version, or None if the warehouse is at another version.
    latest: Snapshot | None


def _check_numbers(content: Any) -> None:
    """Raise RejectedError (400) for NaN, infinity and numbers beyond 64 bits, which other programs could not read."""
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int | float) and not -(2**63) <= value < 2**63:
            raise bad_request("a number in the body does not fit into 64 bits")


def single_level(levels: Sequence[str]) -> str:
    """Return the name of a namespace. Raises NoSuchNamespaceError if it does not have exactly one level."""
    if len(levels) != 1:
        raise NoSuchNamespaceError(
            f"Namespace does not exist: {'.'.join(levels)} (namespaces of a lakehouse have one level)"
        )
    return levels[0]


def texts(value: Any) -> dict[str, str]:
    """Validate properties in a body. Raises pydantic's ValidationError unless it is a mapping of strings."""
    return _PROPERTIES.validate_python(value)


def names(value: Any) -> list[str]:
    """Validate names in a body. Raises pydantic's ValidationError unless it is a list of strings."""
    return _NAMES.validate_python(value)


def page_of(call: Call, names: Sequence[str]) -> tuple[list[str], str | None]:
    """Return one page of sorted names. Clients that send no ``pageToken`` get all names.

    Args:
        call: The request.
        names: All names.

    Returns:
        The names of the page, and the token of the next page, or None for the last page.

    Raises:
        RejectedError: Status 400 if the token or the page size is invalid.
    """
    token, ordered = call.query.get("pageToken"), sorted(names)
    size = _page_size(call)
    if token is None:
        return ordered, None
    if token:
        after = _decoded(token)
        ordered = [name for name in ordered if name > after]
    page = ordered[:size]
    return page, _encoded(page[-1]) if len(ordered) > size else None


def _page_size(call: Call) -> int:
    text = call.query.get("pageSize")
    if text is None:
        return call.limits.page_names
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise bad_request("pageSize must be a positive integer")
    return min(int(text), call.limits.page_names)


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _decoded(token: str) -> str:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise bad_request("pageToken is not a token of this server") from None


def too_large(limit_bytes: int) -> RejectedError:
    """Return the error for a body that is too large."""
    return RejectedError(413, "BadRequestException", f"the body has more than {limit_bytes} bytes; split the request")


T = TypeVar("T")

#: How long after its creation a key can be sent again, on the client's clock.
KEY_LIFETIME_MS = 30 * 60_000
#: The accepted difference between the clocks of clients and the storage.
CLOCK_MARGIN_MS = 5 * 60_000
#: The maximum number of attempts for a change that conflicts with other commits.
MAX_ATTEMPTS = 20
_MAX_MESSAGE_CHARS = 500
_MAX_REQUEST_CHARS = 300
_KEY_CHARS = 36
_DIGEST_CHARS = 12
#: The commit property that identifies the request for an idempotency key.
_KEYED = "asked"


class RequestTarget(LatestTarget):
    """The latest version of a lakehouse, as the target of one request's changes."""

    def __init__(self, call: Call):
        self._call = call
        self._request_lake = call.warehouse.served.lake
        super().__init__(self._request_lake)

    @contextmanager
    def change(self, message: str) -> Iterator[Transaction]:
        """Begin a change for the request, and commit it at the end of the block.

        Raises CommittedByOtherError if the request was already carried out, or an error of a commit.
        """
        with transaction_of(self._call, message) as txn:
            yield txn


def transaction_of(call: Call, message: str, base: Snapshot | None = None) -> Transaction:
    """Begin a transaction for a request.

    Args:
        call: The request.
        message: The commit message.
        base: The version to build on, or None for the latest version.

    Raises:
        RejectedError: Status 400 or 422 if the idempotency key is invalid, too old, or was used for another request.
    """
    lake, key = call.warehouse.served.lake, call.headers.get("idempotency-key")
    publication = None if key is None else publication_id("idempotency-key", call.principal.name, _checked_key(key))
    txn = lake.transaction(
        message=message[:_MAX_MESSAGE_CHARS],
        properties=_commit_properties(call),
        transaction_id=publication,
        base=base,
    )
    if publication is not None and key is not None:
        txn.require(_check_unpublished(lake, publication, uuid.UUID(key), call), alone=False)
    return txn


def _commit_properties(call: Call) -> Mapping[str, str]:
    """Return the commit properties of a request. They are short, because a version has little room for each commit."""
    properties = {CLIENT_PROPERTY: call.principal.name, "request": call.request_id}
    return {**properties, _KEYED: _request_text(call)} if "idempotency-key" in call.headers else properties


def _request_text(call: Call) -> str:
    """Return a readable text that identifies the request."""
    body = hashlib.sha256(call.body).hexdigest()[:_DIGEST_CHARS]
    return f"{call.method} {call.path}"[:_MAX_REQUEST_CHARS] + f" {body}"


def _checked_key(key: str) -> str:
    try:
        parsed = uuid.UUID(key)
    except ValueError:
        parsed = None
    if parsed is None or len(key) != _KEY_CHARS or parsed.version != 7:
        raise bad_request("Idempotency-Key must be a UUID of version 7, in its canonical text form")
    return str(parsed)


def _check_unpublished(lake: Lakehouse, publication: str, key: uuid.UUID, call: Call) -> Callable[[Snapshot], None]:
    """Return a precondition: no version since the key was created contains the publication.

    Each version is searched once. The key's timestamp is from the client's clock, and is trusted only within a margin.
    """
    now_ms, made_ms = lake.storage.now_ms(), key.int >> 80
    if made_ms < now_ms - KEY_LIFETIME_MS - CLOCK_MARGIN_MS:
        raise bad_request(
            "Idempotency-Key is too old to be checked for duplicates; check whether the request was executed, or"
            " send a new key"
        )
    if made_ms > now_ms + CLOCK_MARGIN_MS:
        made_ms = now_ms - KEY_LIFETIME_MS  # the client's clock is ahead, so its timestamp is not usable
    searched_to = _version_before(lake, made_ms - CLOCK_MARGIN_MS)

    def check(latest: Snapshot) -> None:
        nonlocal searched_to
        try:
            version = version_of(latest.files, publication, searched_to, latest.version)
        except VersionNotFoundError as error:
            raise CommitStateUnknownException(str(error)) from error
        if version is not None:
            _check_same_request(lake, version, call)
            raise CommittedByOtherError("the request was already carried out", committed_version=version)
        searched_to = latest.version

    return check


def _version_before(lake: Lakehouse, timestamp_ms: int) -> int:
    roots = lake.files.roots
    try:
        return find_version_before(roots, timestamp_ms, lake.latest_version(), ProbedRoots(roots.storage))
    except VersionNotFoundError:  # the lakehouse was created later
        return 0


def _check_same_request(lake: Lakehouse, version: int, call: Call) -> None:
    """Raise RejectedError (422) if the idempotency key was used for another request."""
    properties = decode_commit_info(lake.snapshot(version).root.system).get("properties")
    before = properties.get(_KEYED) if isinstance(properties, dict) else None
    if before is not None and before != _request_text(call):
        raise RejectedError(
            422,
            "UnprocessableEntityException",
            "Idempotency-Key was used for another request; use a new key for each request",
        )


def changed(call: Call, change: Callable[[TrinityLakeCatalog], T]) -> T | None:
    """Make a change through the catalog, and retry it if it conflicts with another commit.

    Args:
        call: The request.
        change: Makes the change. Called again for each retry.

    Returns:
        The result of the change, or None if an earlier attempt of this request was already committed.

    Raises:
        CommitFailedException: After too many conflicts. Other errors of the catalog are raised unchanged.
    """
    catalog = call.warehouse.served.catalog_on(RequestTarget(call))
    return retry_on_conflict(lambda: change(catalog), call.note_conflict)


def retry_on_conflict(attempt: Callable[[], T], note_conflict: Callable[[], None]) -> T | None:
    """Retry an attempt until it does not conflict with another commit.

    Args:
        attempt: Makes and commits the change.
        note_conflict: Called for each conflict.

    Returns:
        The result of the attempt, or None if the request was already carried out.

    Raises:
        CommitFailedException: After ``MAX_ATTEMPTS`` conflicts. Other errors of an attempt are raised unchanged.
    """
    conflict: Exception | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            return attempt()
        except CommittedByOtherError:
            return None
        except CommitConflictError as error:
            conflict = error
        except CommitFailedException as error:
            if not isinstance(error.__cause__, CommitConflictError):
                raise
            conflict = error
        note_conflict()
    raise CommitFailedException(
        f"commit failed after {MAX_ATTEMPTS} conflicts with other commits; retry later: {conflict}"
    ) from conflict
