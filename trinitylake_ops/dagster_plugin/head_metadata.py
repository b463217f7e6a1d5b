"""The figures of a lakehouse's latest version for an operator, which plot over time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.dagster_plugin.metadata import figures, markdown_table
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    MaintenanceBlockedError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import VERIFIED_PREFIX
from trinitylake_ops.versions.changes import diff_snapshots
from trinitylake_ops.versions.snapshot import Snapshot

#: The metadata entry of assets with the version of the lakehouse that they describe.
VERSION = "lakehouse_version"

#: The metadata entry of an observation by a sensor that missed something; it says what.
GAP = "gap"

_MS_PER_HOUR = 3_600_000


class _TooLongError(Exception):
    """The count of freeable bytes took longer than it may."""


def head_metadata(
    lake: Lakehouse, head: Snapshot, since: int | None = None, *, reclaimable_seconds: float = 0
) -> dict[str, Any]:
    """Return the figures of a version, from its tree and its settings.

    A bounded time counts the bytes that can be freed. Changes are those since version ``since``, by default those of
    this version alone. Hours since an expiry or an export began, or a verification was recorded, are "none" if there
    was none. For ``reclaimable_seconds`` see :func:`reclaimable_bytes`.
    """
    return {
        VERSION: head.version,
        "created_at": dg.MetadataValue.timestamp(head.created_at),
        **_tree_figures(head),
        **_changes(lake, head, since),
        **reclaimable_bytes(lake, reclaimable_seconds),
        **_hours_since(lake, head),
    }


def head_figures(lake: Lakehouse, head: Snapshot) -> dict[str, Any]:
    """Return the figures that each materialization of the lakehouse has, too, as pages show the newest event.

    Those of the tree are left out where it has more than two levels, since all of its nodes are read for them. The
    observations have them.
    """
    root = head.root
    is_small = root.is_leaf or head.files.nodes.load(root.children[0]).is_leaf
    return {**(_tree_figures(head) if is_small else {}), **_hours_since(lake, head)}


def _tree_figures(head: Snapshot) -> dict[str, Any]:
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


def _hours_since(lake: Lakehouse, head: Snapshot) -> dict[str, Any]:
    definition, now_ms = head.definition, lake.storage.now_ms()
    verified = [info.last_modified_ms for info in lake.storage.list(VERIFIED_PREFIX)]
    return figures(
        {
            "hours_since_expiry": _hours(now_ms, [batch.expired_at_millis for batch in definition.expirations]),
            "hours_since_export": _hours(now_ms, [export.created_at_millis for export in definition.exports]),
            "hours_since_verify": _hours(now_ms, verified),
        }
    )


def reclaimable_bytes(lake: Lakehouse, max_seconds: float) -> dict[str, int | str]:
    """Return the bytes that an expiry by the lakehouse's settings and a purge would free.

    They are counted apart, with their sum. For this, all roots that were not purged are read, and the nodes that they
    reach. If it takes more than ``max_seconds``, a file is damaged, or the lakehouse waits for a reconcile,
    ``reclaimable_bytes`` says so instead. With 0 seconds nothing is returned.
    """
    if max_seconds <= 0:
        return {}
    end_s = time.monotonic() + max_seconds

    def check_time(_what: str, _done: int, _all: int) -> None:
        if time.monotonic() > end_s:
            raise _TooLongError

    try:
        expirable = maintenance.plan_expiration(lake, progress=check_time).bytes
        purgeable = maintenance.plan_purge(lake, progress=check_time).bytes
    except _TooLongError:
        return {"reclaimable_bytes": f"not counted: it takes more than {max_seconds:g} seconds"}
    except (MaintenanceBlockedError, CorruptFileError, FileMissingError) as error:
        return {"reclaimable_bytes": f"not counted: {error}"}
    return {
        "expirable_bytes": expirable,
        "purgeable_bytes": purgeable,
        "reclaimable_bytes": expirable + purgeable,
    }


def _hours(now_ms: int, times_ms: Sequence[int]) -> float | None:
    return round(max(0, now_ms - max(times_ms)) / _MS_PER_HOUR, 3) if times_ms else None


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
        "changes": markdown_table(("change", "namespace", "table"), rows),
    }
