"""Find committed epochs of a writing stream, each of which is a publication, in the history.

A killed stream repeats its last epoch. An epoch's number does not identify it: a query whose checkpoint was reset uses
the same numbers again, for other rows. An epoch is therefore identified by its number and its rows. The search goes
backwards from the latest version, to an earlier epoch of the stream or to the version on which the stream began. This
version is pinned under the stream's id. The pin may be removed after the lakehouse's ``txn_ttl_millis``. Without a pin
all versions are searched.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import ConflictError, TransactionNotFoundError, VersionNotFoundError
from trinitylake_ops.format.keys import decode_commit_info
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.iceberg.write.publication import publication_id
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version, read_saved
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import Snapshot

#: Property of a version with the query's id.
QUERY_ID = "query_id"

_BATCH = 16
#: A publication id is one UUID of 32 hexadecimal digits.
_HALF_DIGITS = 16
#: Number of neighboring epochs that are recognized in the history.
_KNOWN_EPOCHS = 1_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a stream."""

    stream_id: str
    #: Number of the epoch.
    number: int
    #: Digest of its rows, as a string.
    rows: str
    #: Id of the query, if it is known.
    query_id: str | None = None

    @property
    def publication(self) -> str:
        """Id of the publication. Its first half identifies the stream and number, its second half the rows."""
        return str(uuid.UUID(hex=_stream_half(self.stream_id, self.number) + _hash_half("rows", self.rows)))


def _stream_half(stream_id: str, number: int) -> str:
    return _hash_half("stream", stream_id, str(number))


def _hash_half(*names: str) -> str:
    return uuid.UUID(publication_id(*names)).hex[:_HALF_DIGITS]


@dataclass(frozen=True, slots=True)
class EpochLookup:
    """The result of a search for an epoch."""

    #: The version that contains the epoch, or None.
    version: int | None
    #: The last version that was searched.
    searched_to: int


def find_epoch(lake: Lakehouse, epoch: Epoch) -> EpochLookup:
    """Search the history for an epoch, newest version first.

    An epoch was committed if a version has its number and its rows. A query id lives as long as a checkpoint, so
    another query id proves that the checkpoint is another one. Purged versions lack the query id.

    Args:
        lake: The lakehouse.
        epoch: The epoch.

    Raises:
        ConflictError: The stream committed a later epoch, or other rows under the same number, or another query
            committed the newest epoch. The checkpoint was lost or reset, or repeated rows differ.
        VersionNotFoundError: The result is unknown, because a root is missing.
        StorageError: A root cannot be read.
    """
    latest = lake.snapshot()
    pin = publication_id("pin", "stream", epoch.stream_id)
    begun = _pinned_version(lake, pin)
    version, is_known = _search(latest, epoch, begun)
    if not is_known and begun < 0:
        pinned_version(latest, pin)
    return EpochLookup(version, latest.version)


class EpochGuard:
    """Precondition of an epoch's commit: no other process has committed an epoch of the stream since the search."""

    def __init__(self, epoch: Epoch, searched_to: int):
        self._epoch = epoch
        self._searched_to = searched_to

    def __call__(self, latest: Snapshot) -> None:
        """Search the versions since the last call. Raises the errors of :func:`find_epoch`."""
        _search(latest, self._epoch, self._searched_to)
        self._searched_to = latest.version


def _search(latest: Snapshot, epoch: Epoch, after: int) -> tuple[int | None, bool]:
    """Return the version above ``after`` with an epoch, and whether any version there has an epoch of the stream."""
    neighbors = range(max(0, epoch.number - _KNOWN_EPOCHS), epoch.number + _KNOWN_EPOCHS)
    epochs = {_stream_half(epoch.stream_id, number): number for number in neighbors}
    roots = latest.files.roots
    for version, data in read_roots(roots, range(latest.version, after, -1), _BATCH):
        path = roots.path(version)
        if data is None:
            raise VersionNotFoundError(
                f"cannot determine whether epoch {epoch.number} of stream {epoch.stream_id!r} was committed: the root"
                f" of version {version} is missing",
                path=path,
                version=version,
            )
        info = decode_commit_info(decode_system_rows(data, path))
        members = info.get("members")
        ids = (
            [member_id.replace("-", "") for member_id in members if isinstance(member_id, str)]
            if isinstance(members, list)
            else []
        )
        committed = {
            epochs[member_id[:_HALF_DIGITS]]: member_id for member_id in ids if member_id[:_HALF_DIGITS] in epochs
        }
        if not committed:
            continue
        newest = max(committed)
        if newest > epoch.number:
            raise ConflictError(
                f"stream {epoch.stream_id!r} already committed epoch {newest} as version {version}, but now commits"
                f" epoch {epoch.number}: its checkpoint was lost or reset; continue with a new stream_id",
                version=version,
            )
        _check_query(info, epoch.stream_id, epoch.query_id, version)
        if newest < epoch.number:
            return None, True
        if uuid.UUID(committed[newest]) != uuid.UUID(epoch.publication):
            raise ConflictError(
                f"stream {epoch.stream_id!r} cannot commit epoch {epoch.number}: version {version} has other rows for"
                " this epoch, because the checkpoint was reset or the query is not deterministic; nothing was"
                f" committed; compare the rows with version {version}, and start a new stream after it with a new"
                " stream_id and checkpoint",
                version=version,
            )
        return version, True
    return None, False


def _check_query(info: Mapping[str, Any], stream_id: str, query_id: str | None, version: int) -> None:
    """Raise ConflictError if another query committed a version, as far as that is known."""
    properties = info.get("properties")
    committed_query_id = properties.get(QUERY_ID) if isinstance(properties, dict) else None
    if query_id is not None and isinstance(committed_query_id, str) and committed_query_id != query_id:
        raise ConflictError(
            f"version {version} of stream {stream_id!r} was committed by another query, {committed_query_id}, or the"
            f" checkpoint was lost and this query, {query_id}, starts from scratch; continue with a new stream_id",
            version=version,
        )


def _pinned_version(lake: Lakehouse, pin: str) -> int:
    """Return the version on which the stream began, -1 if it is not known."""
    try:
        return read_saved(lake.storage, pin).base_version
    except TransactionNotFoundError:
        return -1
