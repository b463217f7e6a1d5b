"""Epochs of a stream that writes. Each is a publication, and only the history shows which were committed.

A stream that was killed repeats its last epoch. The epoch is looked for from the latest version backwards. The search
ends at an earlier epoch of the stream, or at the version on which the stream began. This version is pinned under the
stream's id. The pin may be gone after the lakehouse's ``txn_ttl_millis``. Without a pin all versions are searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import ConflictError, TransactionNotFoundError, VersionNotFoundError
from trinitylake_ops.format.nodes.node_file import decode_system_rows
from trinitylake_ops.format.nodes.system_rows import decode_commit_info
from trinitylake_ops.tables.writing.publication import publication_id
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version, read_saved
from trinitylake_ops.versions.roots import read_roots

#: The property of a version that holds the query's id.
QUERY_ID = "query_id"

_BATCH = 16
#: The number of neighbouring epochs that are known when they are met in the history.
_KNOWN_EPOCHS = 1_000


@dataclass(frozen=True, slots=True)
class FoundEpoch:
    """The version that holds an epoch, None if there is none up to ``looked_through``."""

    version: int | None
    looked_through: int


def epoch_publication(stream_id: str, epoch: int) -> str:
    """Return the id of the publication of a stream's epoch."""
    return publication_id("stream", stream_id, str(epoch))


def find_epoch(lake: Lakehouse, stream_id: str, epoch: int, query_id: str | None = None) -> FoundEpoch:
    """Look for an epoch in the history, newest first.

    Raises ConflictError if a later epoch of the stream was committed, as its checkpoint was lost or set back. Raises it
    also if a query with another ``query_id`` committed the newest one. A query id lives as long as a checkpoint, so the
    same number then proves nothing about the rows. Purged versions do not tell the query. Raises VersionNotFoundError
    if a root is gone and the answer is unknown, StorageError.
    """
    latest = lake.snapshot()
    around = range(max(0, epoch - _KNOWN_EPOCHS), epoch + _KNOWN_EPOCHS)
    epochs = {epoch_publication(stream_id, number): number for number in around}
    pin = publication_id("pin", "stream", stream_id)
    begun = _pinned(lake, pin)
    for version, data in read_roots(lake.files.roots, range(latest.version, begun, -1), _BATCH):
        path = lake.files.roots.path(version)
        if data is None:
            raise VersionNotFoundError(
                f"nobody can tell whether epoch {epoch} of stream {stream_id!r} was committed: the root of version"
                f" {version} is gone",
                path=path,
                version=version,
            )
        info = decode_commit_info(decode_system_rows(data, path))
        members = info.get("members")
        found = [epochs[member] for member in members if member in epochs] if isinstance(members, list) else []
        if later := [number for number in found if number > epoch]:
            raise ConflictError(
                f"stream {stream_id!r} has committed epoch {max(later)} already, as version {version}, and now epoch"
                f" {epoch} arrives: its checkpoint was lost or set back; go on with a stream_id of its own",
                version=version,
            )
        if found:
            _check_query(info, stream_id, query_id, version)
            return FoundEpoch(version if epoch in found else None, latest.version)
    if begun < 0:
        pinned_version(latest, pin)
    return FoundEpoch(None, latest.version)


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
