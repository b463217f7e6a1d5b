"""Which snapshots, branches and tags of a table its properties and a policy keep, as Iceberg's expire_snapshots does.

A setting of a branch or tag takes precedence over a property of the table, and a property over the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRef, SnapshotRefType

MAX_AGE_PROPERTY = "history.expire.max-snapshot-age-ms"
MIN_SNAPSHOTS_PROPERTY = "history.expire.min-snapshots-to-keep"
MAX_REF_AGE_PROPERTY = "history.expire.max-ref-age-ms"
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """Which snapshots of each branch are kept, if the table itself says nothing."""

    #: Keep snapshots up to this age, in milliseconds; None to ignore their age.
    max_age_ms: int | None = None
    #: Keep at least this number of the newest snapshots.
    min_snapshots: int = 1


#: Keeps only the heads of branches.
HEADS_ONLY = SnapshotRule()


def property_number(properties: Mapping[str, str], name: str) -> int | None:
    """Return the value of a numeric property; None if it is absent or not a number."""
    text = properties.get(name, "")
    # Longer values are not ages or counts, and Python rejects numbers with thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def retained_snapshots(metadata: TableMetadata, rule: SnapshotRule, now_ms: int) -> frozenset[int]:
    """Return the snapshots of branches that are kept for their age or number, heads included.

    Args:
        metadata: The metadata of the table.
        rule: The rule of the policy.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    snapshots = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    retained: set[int] = set()
    for head, max_age_ms, min_snapshots in _branches(metadata, rule):
        snapshot, n_kept, seen = snapshots.get(head), 0, set[int]()
        while snapshot is not None and snapshot.snapshot_id not in seen:
            is_old = max_age_ms is None or now_ms - snapshot.timestamp_ms > max_age_ms
            if n_kept >= min_snapshots and is_old:
                break
            seen.add(snapshot.snapshot_id)  # hostile metadata may contain a cycle
            n_kept += 1
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else snapshots.get(parent)
        retained |= seen
    return frozenset(retained)


def _branches(metadata: TableMetadata, rule: SnapshotRule) -> list[tuple[int, int | None, int]]:
    """Return the head, the maximum age and the minimum number of snapshots of each branch."""
    own_age_ms = property_number(metadata.properties, MAX_AGE_PROPERTY)
    own_min = property_number(metadata.properties, MIN_SNAPSHOTS_PROPERTY)
    max_age_ms = rule.max_age_ms if own_age_ms is None else own_age_ms
    min_snapshots = rule.min_snapshots if own_min is None else max(1, own_min)
    branches = {name: ref for name, ref in metadata.refs.items() if ref.snapshot_ref_type == SnapshotRefType.BRANCH}
    heads = [
        (
            ref.snapshot_id,
            max_age_ms if ref.max_snapshot_age_ms is None else ref.max_snapshot_age_ms,
            min_snapshots if ref.min_snapshots_to_keep is None else ref.min_snapshots_to_keep,
        )
        for ref in branches.values()
    ]
    if MAIN_BRANCH not in branches and metadata.current_snapshot_id is not None:
        heads.append((metadata.current_snapshot_id, max_age_ms, min_snapshots))
    return heads


def expired_refs(metadata: TableMetadata, now_ms: int) -> tuple[str, ...]:
    """Return the names of branches and tags that are older than their maximum age, in ascending order.

    The main branch never expires. Without a maximum age, no branch or tag expires.

    Args:
        metadata: The metadata of the table.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    own_age_ms = property_number(metadata.properties, MAX_REF_AGE_PROPERTY)
    written_ms = {snapshot.snapshot_id: snapshot.timestamp_ms for snapshot in metadata.snapshots}

    def is_expired(name: str, ref: SnapshotRef) -> bool:
        max_age_ms = own_age_ms if ref.max_ref_age_ms is None else ref.max_ref_age_ms
        known_ms = written_ms.get(ref.snapshot_id)
        is_old = max_age_ms is not None and known_ms is not None and now_ms - known_ms > max_age_ms
        return is_old and name != MAIN_BRANCH and ref.snapshot_id != metadata.current_snapshot_id

    return tuple(sorted(name for name, ref in metadata.refs.items() if is_expired(name, ref)))
