"""Metrics of a lakehouse's latest version, as Dagster metadata that the UI plots over time."""

from __future__ import annotations

from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.metadata import metadata_entries, table_value
from trinitylake_ops.errors import CorruptFileError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.operations.status.activity import Space
from trinitylake_ops.operations.status.state import LAST_VERSIONS, Status
from trinitylake_ops.versions.history import diff_snapshots
from trinitylake_ops.versions.snapshot import Snapshot

#: Metadata key for the version of the lakehouse that an event describes.
VERSION = "lakehouse_version"

#: Metadata key of an observation that describes which commits a sensor could not report.
GAP = "gap"

_SECONDS_PER_HOUR = 3_600
#: Number of versions that the materialization of a run reads. It is small because each run that commits logs a
#: materialization.
LAST_OF_A_RUN = 10


def head_metadata(
    lake: Lakehouse, head: Snapshot, status: Status | None, since: int | None = None, *, is_planned: bool = False
) -> dict[str, Any]:
    """Return the metadata for an observation of a version.

    Args:
        lake: The lakehouse.
        head: The version.
        status: The status of the lakehouse, or None if it cannot be read.
        since: The version to compare with. Defaults to the predecessor of ``head``.
        is_planned: Whether ``status`` was computed with plans that count reclaimable bytes.
    """
    return {
        "created_at": dg.MetadataValue.timestamp(head.created_at),
        **_tree_metrics(head),
        **_changes(lake, head, since),
        **status_metadata(status, is_planned=is_planned),
    }


def commit_metrics(head: Snapshot, status: Status | None) -> dict[str, Any]:
    """Return the metrics that are reported with each commit.

    Omits tree metrics if the tree has more than two levels, because they require reading all nodes.
    """
    root = head.root
    is_small = root.is_leaf or head.files.nodes.load(root.children[0]).is_leaf
    return {**(_tree_metrics(head) if is_small else {}), **status_metadata(status)}


def lake_status(lake: Lakehouse, *, last: int = LAST_VERSIONS, plan_seconds: float = 0) -> Status | None:
    """Return the status of a lakehouse, or None if its latest version is corrupt."""
    try:
        return operations.lakehouse_status(lake, last=last, plan_seconds=plan_seconds)
    except CorruptFileError:
        return None


def _tree_metrics(head: Snapshot) -> dict[str, Any]:
    namespaces = head.namespaces()
    tables = sum(len(head.tables(namespace)) for namespace in namespaces)
    shape = head.tree_shape()
    return {
        "namespaces": len(namespaces),
        "tables": tables,
        "objects": len(namespaces) + tables,
        "height": shape.height,
        "nodes": shape.nodes,
        "leaf_fill": shape.leaf_fill,
        "buffer_fill_percent": round(100 * shape.buffer_fill, 2),
        "buffered_messages": shape.messages,
        "tree_bytes": shape.file_bytes,
    }


def status_metadata(status: Status | None, *, is_planned: bool = False) -> dict[str, Any]:
    """Return the status of a lakehouse as metrics and tables.

    The metrics ``hours_since_*`` are "none" if the operation never ran.

    Args:
        status: The status, or None if it could not be read. The result is then empty.
        is_planned: Whether ``status`` was computed with plans that count reclaimable bytes.
    """
    if status is None:
        return {}
    ages, commits = status.ages, status.commits
    rows = [(item.what, item.state, item.why, item.command) for item in status.due]
    committers = [
        (committer.name, committer.versions, committer.transactions, committer.lost, ", ".join(committer.operations))
        for committer in commits.committers
    ]
    hours = {
        "hours_since_expiry": ages.expiry_seconds,
        "hours_since_export": ages.export_seconds,
        "hours_since_verify": ages.verify_seconds,
    }
    return metadata_entries(
        {
            "due": table_value(("what", "state", "why", "command"), rows),
            "committers": table_value(("who", "versions", "transactions", "lost", "operations"), committers),
            "findings": "; ".join(finding.message for finding in status.findings) or "none",
            "lost_attempts": commits.lost,
            "hint": None if status.hint is None else status.hint.value,
            "deletes_now": status.running,
            **_space(status.space, is_planned=is_planned),
            **{name: None if age is None else round(age / _SECONDS_PER_HOUR, 3) for name, age in hours.items()},
        }
    )


def _space(space: Space, *, is_planned: bool) -> dict[str, int | str]:
    """Return the reclaimable bytes by operation and in total, or the reason why the plans did not count them."""
    if not is_planned:
        return {}
    if space.expirable_bytes is None or space.purgeable_bytes is None:
        return {"reclaimable_bytes": space.note}
    return {
        "expirable_bytes": space.expirable_bytes,
        "purgeable_bytes": space.purgeable_bytes,
        "reclaimable_bytes": space.expirable_bytes + space.purgeable_bytes,
    }


def _changes(lake: Lakehouse, head: Snapshot, since: int | None) -> dict[str, Any]:
    """Return the objects that changed, or a note if the version to compare with has expired or does not exist."""
    before = min(since, head.version) if since is not None else max(head.version - 1, 0)
    try:
        changes = diff_snapshots(lake.snapshot(before, latest=head), head)
    except VersionExpiredError:
        return {"changes": f"unknown: the previously observed version {before} has expired"}
    except VersionNotFoundError:
        return {"changes": f"unknown: the previously observed version {before} does not exist"}
    rows = [(change.kind, change.namespace, change.table or "") for change in changes]
    return {
        "changed_since": before,
        "changed_tables": sum(change.table is not None for change in changes),
        "changes": table_value(("change", "namespace", "table"), rows),
    }
