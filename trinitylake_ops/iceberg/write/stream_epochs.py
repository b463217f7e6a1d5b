"""Epochs of a stream that writes. Each is a publication, and only the history shows which were committed.

A stream that was killed repeats its last epoch. The number of an epoch does not identify it: a query whose checkpoint
was set back counts the same numbers again, for other rows. So an epoch is recognized by its number and its rows. The
search goes from the latest version backwards. It ends at an earlier epoch of the stream, or at the version on which the
stream began. This version is pinned under the stream's id. The pin may be gone after the lakehouse's
``txn_ttl_millis``. Without a pin all versions are searched.
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

#: The property of a version that holds the query's id.
QUERY_ID = "query_id"

_BATCH = 16
#: An id of a publication is one UUID of 32 hexadecimal digits.
_HALF_DIGITS = 16
#: The number of neighboring epochs that are known when they are met in the history.
_KNOWN_EPOCHS = 1_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a stream: its number, its rows (the text of a digest of them), and the id of the query."""

    stream_id: str
    number: int
    rows: str
    query_id: str | None = None

    @property
    def publication(self) -> str:
        """The id of the publication. Its first half identifies stream and number, its second half the rows."""
        return str(uuid.UUID(hex=_half(self.stream_id, self.number) + _half_of("rows", self.rows)))


def _half(stream_id: str, number: int) -> str:
    return _half_of("stream", stream_id, str(number))


def _half_of(*names: str) -> str:
    return uuid.UUID(publication_id(*names)).hex[:_HALF_DIGITS]


@dataclass(frozen=True, slots=True)
class EpochLookup:
    """The version that holds an epoch, None if there is none up to ``searched_to``."""

    version: int | None
    searched_to: int


def find_epoch(lake: Lakehouse, epoch: Epoch) -> EpochLookup:
    """Search the history for an epoch, newest version first.

    An epoch was committed if a version has its number and its rows. A query id lives as long as a checkpoint, so
    another query id proves that the checkpoint is another one. Purged versions lack the query id.

    Raises:
        ConflictError: The stream committed a later epoch, or other rows under the same number, or another query
            committed the newest epoch. The checkpoint was lost or set back, or the rows of a repetition differ.
        VersionNotFoundError: A root is gone, so that the answer is unknown.
        StorageError: The storage failed.
    """
    latest = lake.snapshot()
    pin = publication_id("pin", "stream", epoch.stream_id)
    begun = _pinned(lake, pin)
    version, is_known = _search(latest, epoch, begun)
    if not is_known and begun < 0:
        pinned_version(latest, pin)
    return EpochLookup(version, latest.version)


class EpochGuard:
    """Precondition of the commit of an epoch: no other process has committed an epoch of the stream meanwhile."""

    def __init__(self, epoch: Epoch, searched_to: int):
        self._epoch = epoch
        self._searched_to = searched_to

    def __call__(self, latest: Snapshot) -> None:
        """Search the versions since the last call. Raises what :func:`find_epoch` raises."""
        _search(latest, self._epoch, self._searched_to)
        self._searched_to = latest.version


def _search(latest: Snapshot, epoch: Epoch, after: int) -> tuple[int | None, bool]:
    """Return the version above ``after`` that holds an epoch, and whether any version there holds one of the stream."""
    around = range(max(0, epoch.number - _KNOWN_EPOCHS), epoch.number + _KNOWN_EPOCHS)
    epochs = {_half(epoch.stream_id, number): number for number in around}
    roots = latest.files.roots
    for version, data in read_roots(roots, range(latest.version, after, -1), _BATCH):
        path = roots.path(version)
        if data is None:
            raise VersionNotFoundError(
                f"cannot find out whether epoch {epoch.number} of stream {epoch.stream_id!r} was committed: the root of"
                f" version {version} is gone",
                path=path,
                version=version,
            )
        info = decode_commit_info(decode_system_rows(data, path))
        members = info.get("members")
        ids = [one.replace("-", "") for one in members if isinstance(one, str)] if isinstance(members, list) else []
        committed = {epochs[one[:_HALF_DIGITS]]: one for one in ids if one[:_HALF_DIGITS] in epochs}
        if not committed:
            continue
        newest = max(committed)
        if newest > epoch.number:
            raise ConflictError(
                f"stream {epoch.stream_id!r} has committed epoch {newest} already, as version {version}, and now epoch"
                f" {epoch.number} arrives: its checkpoint was lost or set back; go on with a stream_id of its own",
                version=version,
            )
        _check_query(info, epoch.stream_id, epoch.query_id, version)
        if newest < epoch.number:
            return None, True
        if uuid.UUID(committed[newest]) != uuid.UUID(epoch.publication):
            raise ConflictError(
                f"stream {epoch.stream_id!r} cannot commit epoch {epoch.number}: version {version} has this epoch with"
                " other rows, because the checkpoint was set back, or because the query returns other rows each time;"
                f" nothing was committed; compare the rows with version {version}, and start a new stream behind it"
                " with its own stream_id and checkpoint",
                version=version,
            )
        return version, True
    return None, False


def _check_query(info: Mapping[str, Any], stream_id: str, query_id: str | None, version: int) -> None:
    """Raise ConflictError if another query committed a version, as far as that is known."""
    properties = info.get("properties")
    theirs = properties.get(QUERY_ID) if isinstance(properties, dict) else None
    if query_id is not None and isinstance(theirs, str) and theirs != query_id:
        raise ConflictError(
            f"version {version} of stream {stream_id!r} was committed by another query, {theirs}, or the checkpoint was"
            f" lost and this query, {query_id}, begins anew; go on with a stream_id of its own",
            version=version,
        )


def _pinned(lake: Lakehouse, pin: str) -> int:
    """Return the version on which the stream began, -1 if it is not known."""
    try:
        return read_saved(lake.storage, pin).base_version
    except TransactionNotFoundError:
        return -1
