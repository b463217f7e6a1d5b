"""The metrics of a lakehouse's latest version for an operator, which plot over time."""

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

#: The metadata entry of assets with the version of the lakehouse that they describe.
VERSION = "lakehouse_version"

#: The metadata entry of an observation by a sensor that missed something; it says what.
GAP = "gap"

_SECONDS_PER_HOUR = 3_600
#: A materialization reads fewer versions, because each run that commits has one.
LAST_OF_A_RUN = 10


def head_metadata(
    lake: Lakehouse, head: Snapshot, status: Status | None, since: int | None = None, *, is_planned: bool = False
) -> dict[str, Any]:
    """Return the metrics of an observation of a version, from its tree and its settings.

    Args:
        lake: The lakehouse.
        head: The version.
        status: The state of the lakehouse, None if it cannot be read.
        since: The version to count changes from, by default the one before ``head``.
        is_planned: Whether plans counted the bytes that can be reclaimed.
    """
    return {
        "created_at": dg.MetadataValue.timestamp(head.created_at),
        **_tree_metrics(head),
        **_changes(lake, head, since),
        **status_metadata(status, is_planned=is_planned),
    }


def commit_metrics(head: Snapshot, status: Status | None) -> dict[str, Any]:
    """Return the metrics that are reported with each commit.

    Those of the tree are left out where it has more than two levels, because all of its nodes are read for them.
    """
    root = head.root
    is_small = root.is_leaf or head.files.nodes.load(root.children[0]).is_leaf
    return {**(_tree_metrics(head) if is_small else {}), **status_metadata(status)}


def lake_status(lake: Lakehouse, *, last: int = LAST_VERSIONS, plan_seconds: float = 0) -> Status | None:
    """Return the state of a lakehouse, None if its latest version cannot be read."""
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
    """Return the state of a lakehouse as metrics and tables, nothing if it could not be read.

    Hours since an expiry or an export began, or a verification was recorded, are "none" if there was none.
    ``is_planned`` says that plans counted the bytes that can be reclaimed.
    """
    if status is None:
        return {}
    ages, commits = status.ages, status.commits
    rows = [(one.what, one.state, one.why, one.command) for one in status.due]
    committers = [
        (one.name, one.versions, one.transactions, one.lost, ", ".join(one.operations)) for one in commits.committers
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
            "findings": "; ".join(one.message for one in status.findings) or "none",
            "lost_attempts": commits.lost,
            "hint": None if status.hint is None else status.hint.value,
            "deletes_now": status.running,
            **_space(status.space, is_planned=is_planned),
            **{name: None if age is None else round(age / _SECONDS_PER_HOUR, 3) for name, age in hours.items()},
        }
    )


def _space(space: Space, *, is_planned: bool) -> dict[str, int | str]:
    """Return the bytes that can be freed, apart and together, where plans counted them; or why they did not."""
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
    """Return which objects changed, nothing if the version to compare with expired or is gone."""
    before = min(since, head.version) if since is not None else max(head.version - 1, 0)
    try:
        changes = diff_snapshots(lake.snapshot(before, latest=head), head)
    except VersionExpiredError:
        return {"changes": f"version {before}, which was observed last, has expired"}
    except VersionNotFoundError:
        return {"changes": f"version {before}, which was observed last, is gone"}
    rows = [(change.kind, change.namespace, change.table or "") for change in changes]
    return {
        "changed_since": before,
        "changed_tables": sum(change.table is not None for change in changes),
        "changes": table_value(("change", "namespace", "table"), rows),
    }
