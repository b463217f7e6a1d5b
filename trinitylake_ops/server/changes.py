"""What a request changes: who asked for it stands in the commit, and a request that is sent again changes nothing more.

A request with an ``Idempotency-Key`` is a publication (``tables/writing/publication.py``). Its id is among the members
of the version that has its change. So any replica finds it, without a store of answers.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from trinitylake_ops.errors import CommitConflictError, VersionNotFoundError
from trinitylake_ops.format.nodes.system_rows import decode_commit_info
from trinitylake_ops.server.answers import RefusedError, bad_request
from trinitylake_ops.server.calls import Call
from trinitylake_ops.tables.catalog.catalog import TrinityLakeCatalog
from trinitylake_ops.tables.catalog.target import LatestTarget
from trinitylake_ops.tables.writing.publication import publication_id
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import CommittedElsewhereError, version_of
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.history import CLIENT_PROPERTY
from trinitylake_ops.versions.roots import ProbedRoots
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import find_version_before

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

        Raises CommittedElsewhereError if the request was carried out before, and what a commit raises.
        """
        with transaction_of(self._call, message) as txn:
            yield txn


def transaction_of(call: Call, message: str, base: Snapshot | None = None) -> Transaction:
    """Return a transaction that a request asks for, on the latest version or on ``base``.

    Raises as :meth:`RequestTarget.change`, and RefusedError.
    """
    lake, key = call.warehouse.served.lake, call.headers.get("idempotency-key")
    publication = None if key is None else publication_id("idempotency-key", call.principal.name, _checked_key(key))
    txn = lake.transaction(
        message=message[:_LONGEST_MESSAGE_CHARS], properties=_said_of(call), transaction_id=publication, base=base
    )
    if publication is not None and key is not None:
        txn.require(_unpublished(lake, publication, uuid.UUID(key), call), alone=False)
    return txn


def _said_of(call: Call) -> Mapping[str, str]:
    """Return what a commit says of its request. It is short, since a version has room for few bytes of each commit."""
    said = {CLIENT_PROPERTY: call.principal.name, "request": call.request_id}
    return {**said, _KEYED: _asked(call)} if "idempotency-key" in call.headers else said


def _asked(call: Call) -> str:
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
    looked_through = _version_before(lake, made_ms - CLOCK_MARGIN_MS)

    def check(latest: Snapshot) -> None:
        nonlocal looked_through
        try:
            version = version_of(latest.files, publication, looked_through, latest.version)
        except VersionNotFoundError as error:
            raise CommitStateUnknownException(str(error)) from error
        if version is not None:
            _check_same_request(lake, version, call)
            raise CommittedElsewhereError("the request was carried out before", committed_version=version)
        looked_through = latest.version

    return check


def _version_before(lake: Lakehouse, moment_ms: int) -> int:
    roots = lake.files.roots
    try:
        return find_version_before(roots, moment_ms, lake.latest_version(), ProbedRoots(roots.storage))
    except VersionNotFoundError:  # the lakehouse is younger
        return 0


def _check_same_request(lake: Lakehouse, version: int, call: Call) -> None:
    """Raise RefusedError, 422, if a key was used for another request."""
    said = decode_commit_info(lake.snapshot(version).root.system).get("properties")
    before = said.get(_KEYED) if isinstance(said, dict) else None
    if before is not None and before != _asked(call):
        raise RefusedError(
            422, "UnprocessableEntityException", "Idempotency-Key was used for another request; make a new one for each"
        )


def changed(call: Call, change: Callable[[TrinityLakeCatalog], T]) -> T | None:
    """Make one change by a catalog, and again where others were faster. None if it was made by the request before.

    Raises what the catalog raises for it.
    """
    catalog = call.warehouse.served.catalog_on(RequestTarget(call))
    return until_it_lands(lambda: change(catalog), call.note_lost)


def until_it_lands(attempt: Callable[[], T], note_lost: Callable[[], None]) -> T | None:
    """Return what an attempt returns that loses to no other commit. None if the request was carried out before.

    Raises CommitFailedException after too many attempts, and what an attempt raises.
    """
    lost: Exception | None = None
    for _ in range(MOST_ATTEMPTS):
        try:
            return attempt()
        except CommittedElsewhereError:
            return None
        except CommitConflictError as error:
            lost = error
        except CommitFailedException as error:
            if not isinstance(error.__cause__, CommitConflictError):
                raise
            lost = error
        note_lost()
    raise CommitFailedException(f"others were faster {MOST_ATTEMPTS} times: {lost}") from lost
