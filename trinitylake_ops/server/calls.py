"""A request as its handler sees it: who sends it, its body, and how the commit records it.

A request with an ``Idempotency-Key`` is a publication (``iceberg/write/publication.py``). Its id is among the members
of the version that has its change. So any replica finds it, without a store of answers.
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
from trinitylake_ops.versions.roots import ProbedRoots
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import find_version_before

M = TypeVar("M", bound=IcebergBaseModel)

#: Stands between the levels of a namespace in a path.
SEPARATOR = "\x1f"
_DOCUMENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_PROPERTIES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])
_NAMES: TypeAdapter[list[str]] = TypeAdapter(list[str])
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_LONGEST_CLIENT_CHARS = 100
_MOST_VALUES = 500_000
_MOST_OBJECTS = 50_000


@dataclass(frozen=True, slots=True)
class Call:
    """A request that somebody may make. ``names`` are the parts of its path that are names, decoded.

    ``path`` is as it came, without its query. ``query`` and ``headers`` have lower case names for headers.
    ``note_conflict`` counts an attempt that lost to another commit.
    """

    method: str
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    principal: Principal
    warehouse: Warehouse
    request_id: str
    limits: Limits
    note_conflict: Callable[[], None]

    @property
    def namespace(self) -> str:
        """The namespace in the path. Raises NoSuchNamespaceError for one of several levels."""
        return single_level(self.names["namespace"].split(SEPARATOR))

    @property
    def table(self) -> tuple[str, str]:
        """The namespace and the table in the path. Raises NoSuchTableError for one in a namespace of several levels.

        Iceberg's Java asks for ``ns.t.snapshots`` so, and takes it for a metadata table if no such table is there.
        """
        try:
            return self.namespace, self.names["table"]
        except NoSuchNamespaceError as error:
            name = ".".join([*self.names["namespace"].split(SEPARATOR), self.names["table"]])
            raise NoSuchTableError(f"Table does not exist: {name} (namespaces here have one level)") from error

    @property
    def client(self) -> str:
        """The program that asks, as it says."""
        return _UNPRINTABLE.sub("?", self.headers.get("user-agent", ""))[:_LONGEST_CLIENT_CHARS]

    def document(self) -> dict[str, Any]:
        """Return the body, a JSON object. Raises RejectedError, 400, and 413 for one of too many values."""
        # Marks within texts count, too. A value takes tens of bytes, even if the body has two for it.
        if sum(self.body.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
            raise RejectedError(413, "BadRequestException", f"the body holds more than {_MOST_VALUES} values")
        # An object becomes a field of a schema, an update or a part of a filter: some 0.1 ms of work each.
        if self.body.count(b"{") > _MOST_OBJECTS:
            raise RejectedError(413, "BadRequestException", f"the body holds more than {_MOST_OBJECTS} objects")
        try:
            content = _DOCUMENT.validate_json(self.body)
        except PydanticError as error:
            reason = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise bad_request(f"the body is no JSON object: {reason}") from None
        _check_numbers(content)
        return content

    def model(self, kind: type[M], **defaults: Any) -> M:
        """Return the body as a model. ``defaults`` are for fields that the specification lets clients leave out.

        Raises RejectedError, 400, InvalidInputError, and pydantic's ValidationError.
        """
        content = {**defaults, **self.document()}
        with as_invalid_input():
            return kind.model_validate(content)

    def check(self, scope: Scope, namespace: str) -> None:
        """Raise RejectedError, 403, if the principal may not do something in a namespace."""
        self.principal.check(scope, namespace)

    def may_change(self, scope: Scope, definition: TableDef, latest: Snapshot | None = None) -> bool:
        """Whether the principal may do something to a table under all of its current names.

        A table that was dropped has none, so only a principal with the right in every namespace has it there.

        Args:
            scope: What the principal wants to do.
            definition: The table's definition, in whatever version.
            latest: The latest version, if the caller has just read it.

        Raises:
            StorageError: If the latest version cannot be read for now.
        """
        if self.principal.least_scope >= scope:
            return True
        namespaces = self.warehouse.current_namespaces(definition.id, latest)
        return bool(namespaces) and all(self.principal.may(scope, namespace) for namespace in namespaces)

    def check_table(self, scope: Scope, definition: TableDef, latest: Snapshot | None = None) -> None:
        """Raise RejectedError, 403, unless :meth:`may_change`. The message names no namespace."""
        if not self.may_change(scope, definition, latest):
            raise forbidden(
                f"{self.principal.name} may not {scope.name.lower()} this table: it is in a namespace now that forbids"
                " it, or it was dropped"
            )

    def requested_table(self, scope: Scope = Scope.READ) -> RequestedTable:
        """Return the table in the path, to which the principal has a right under all of its current names.

        Raises RejectedError, 403, NoSuchTableError, StorageError.
        """
        namespace, name = self.table
        self.check(scope, namespace)
        catalog, latest = self.warehouse.pinned()
        definition = catalog.definition_of(namespace, name)
        self.check_table(scope, definition, latest)
        return RequestedTable(catalog, definition, latest)

    def flag(self, name: str) -> bool:
        """Return a parameter of the query that is true or false, false if absent. Raises RejectedError, 400."""
        value = self.query.get(name, "false").lower()
        if value not in ("true", "false"):
            raise bad_request(f"{name} must be true or false")
        return value == "true"


@dataclass(frozen=True, slots=True)
class RequestedTable:
    """A table that a request names: its definition, a catalog that reads it, and the latest version if that is read."""

    catalog: TrinityLakeCatalog
    definition: TableDef
    latest: Snapshot | None


def _check_numbers(content: Any) -> None:
    """Raise RejectedError, 400, for a number beyond 64 bits, or none: other programs read what is kept of it."""
    rest = [content]
    while rest:
        found = rest.pop()
        if isinstance(found, dict):
            rest += found.values()
        elif isinstance(found, list):
            rest += found
        elif isinstance(found, int | float) and not -(2**63) <= found < 2**63:
            raise bad_request("a number in the body does not fit into 64 bits")


def single_level(levels: Sequence[str]) -> str:
    """Return the name of a namespace. Raises NoSuchNamespaceError for one of no or several levels: there is none."""
    if len(levels) != 1:
        raise NoSuchNamespaceError(
            f"Namespace does not exist: {'.'.join(levels)} (namespaces of a lakehouse have one level)"
        )
    return levels[0]


def texts(value: Any) -> dict[str, str]:
    """Return properties of a body. Raises pydantic's ValidationError for another thing than texts by names."""
    return _PROPERTIES.validate_python(value)


def names(value: Any) -> list[str]:
    """Return names of a body. Raises pydantic's ValidationError for another thing than a list of texts."""
    return _NAMES.validate_python(value)


def page_of(call: Call, found: Sequence[str]) -> tuple[list[str], str | None]:
    """Return one page of names, in their order, and the token of the next one, None for the last.

    Clients that send no ``pageToken`` get all. Raises RejectedError, 400.
    """
    token, ordered = call.query.get("pageToken"), sorted(found)
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
        raise bad_request("pageSize must be a whole number of at least 1")
    return min(int(text), call.limits.page_names)


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _decoded(token: str) -> str:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise bad_request("pageToken is not one that this server gave") from None


def too_large(limit_bytes: int) -> RejectedError:
    """Return the error for a body that is too large."""
    return RejectedError(413, "BadRequestException", f"the body has more than {limit_bytes} bytes; send less at once")


T = TypeVar("T")

#: A key can be sent again for so long after it was made, by the client's clock.
KEY_LIFETIME_MS = 30 * 60_000
#: The clocks of clients may be so far from the storage's.
CLOCK_MARGIN_MS = 5 * 60_000
#: A change that loses to others is made again so often.
MOST_ATTEMPTS = 20
_LONGEST_MESSAGE_CHARS = 500
_LONGEST_REQUEST_CHARS = 300
_KEY_CHARS = 36
_DIGEST_CHARS = 12
#: The property of a commit with a key that says what was asked for.
_KEYED = "asked"


class RequestTarget(LatestTarget):
    """The latest version of a lakehouse, whose changes are those of one request."""

    def __init__(self, call: Call):
        self._call = call
        self._request_lake = call.warehouse.served.lake
        super().__init__(self._request_lake)

    @contextmanager
    def change(self, message: str) -> Iterator[Transaction]:
        """Begin a change that the request asks for, and commit it at the end of the block.

        Raises CommittedByOtherError if the request was carried out before, and what a commit raises.
        """
        with transaction_of(self._call, message) as txn:
            yield txn


def transaction_of(call: Call, message: str, base: Snapshot | None = None) -> Transaction:
    """Return a transaction that a request asks for, on the latest version or on ``base``.

    Raises as :meth:`RequestTarget.change`, and RejectedError.
    """
    lake, key = call.warehouse.served.lake, call.headers.get("idempotency-key")
    publication = None if key is None else publication_id("idempotency-key", call.principal.name, _checked_key(key))
    txn = lake.transaction(
        message=message[:_LONGEST_MESSAGE_CHARS],
        properties=_commit_properties(call),
        transaction_id=publication,
        base=base,
    )
    if publication is not None and key is not None:
        txn.require(_unpublished(lake, publication, uuid.UUID(key), call), alone=False)
    return txn


def _commit_properties(call: Call) -> Mapping[str, str]:
    """Return what a commit says of its request. It is short, since a version has room for few bytes of each commit."""
    properties = {CLIENT_PROPERTY: call.principal.name, "request": call.request_id}
    return {**properties, _KEYED: _request_text(call)} if "idempotency-key" in call.headers else properties


def _request_text(call: Call) -> str:
    """Return what tells two requests apart, in a form that people can read, too."""
    body = hashlib.sha256(call.body).hexdigest()[:_DIGEST_CHARS]
    return f"{call.method} {call.path}"[:_LONGEST_REQUEST_CHARS] + f" {body}"


def _checked_key(key: str) -> str:
    try:
        parsed = uuid.UUID(key)
    except ValueError:
        parsed = None
    if parsed is None or len(key) != _KEY_CHARS or parsed.version != 7:
        raise bad_request("Idempotency-Key must be a UUID of version 7, in its written form")
    return str(parsed)


def _unpublished(lake: Lakehouse, publication: str, key: uuid.UUID, call: Call) -> Callable[[Snapshot], None]:
    """Return a condition that a publication is in no version since its key was made.

    Versions are looked through once. The moment of the key is the client's, and is not believed to the minute.
    """
    now_ms, made_ms = lake.storage.now_ms(), key.int >> 80
    if made_ms < now_ms - KEY_LIFETIME_MS - CLOCK_MARGIN_MS:
        raise bad_request(
            "Idempotency-Key is too old, so nobody would find what it did; look whether it was done, or send a new one"
        )
    if made_ms > now_ms + CLOCK_MARGIN_MS:
        made_ms = now_ms - KEY_LIFETIME_MS  # the client's clock is fast, and tells nothing
    searched_to = _version_before(lake, made_ms - CLOCK_MARGIN_MS)

    def check(latest: Snapshot) -> None:
        nonlocal searched_to
        try:
            version = version_of(latest.files, publication, searched_to, latest.version)
        except VersionNotFoundError as error:
            raise CommitStateUnknownException(str(error)) from error
        if version is not None:
            _check_same_request(lake, version, call)
            raise CommittedByOtherError("the request was carried out before", committed_version=version)
        searched_to = latest.version

    return check


def _version_before(lake: Lakehouse, moment_ms: int) -> int:
    roots = lake.files.roots
    try:
        return find_version_before(roots, moment_ms, lake.latest_version(), ProbedRoots(roots.storage))
    except VersionNotFoundError:  # the lakehouse is younger
        return 0


def _check_same_request(lake: Lakehouse, version: int, call: Call) -> None:
    """Raise RejectedError, 422, if a key was used for another request."""
    properties = decode_commit_info(lake.snapshot(version).root.system).get("properties")
    before = properties.get(_KEYED) if isinstance(properties, dict) else None
    if before is not None and before != _request_text(call):
        raise RejectedError(
            422, "UnprocessableEntityException", "Idempotency-Key was used for another request; make a new one for each"
        )


def changed(call: Call, change: Callable[[TrinityLakeCatalog], T]) -> T | None:
    """Make one change by a catalog, and again where others were faster. None if it was made by the request before.

    Raises what the catalog raises for it.
    """
    catalog = call.warehouse.served.catalog_on(RequestTarget(call))
    return retry_on_conflict(lambda: change(catalog), call.note_conflict)


def retry_on_conflict(attempt: Callable[[], T], note_conflict: Callable[[], None]) -> T | None:
    """Return what an attempt returns that loses to no other commit. None if the request was carried out before.

    Raises CommitFailedException after too many attempts, and what an attempt raises.
    """
    lost: Exception | None = None
    for _ in range(MOST_ATTEMPTS):
        try:
            return attempt()
        except CommittedByOtherError:
            return None
        except CommitConflictError as error:
            lost = error
        except CommitFailedException as error:
            if not isinstance(error.__cause__, CommitConflictError):
                raise
            lost = error
        note_conflict()
    raise CommitFailedException(f"others were faster {MOST_ATTEMPTS} times: {lost}") from lost
