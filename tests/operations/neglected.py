"""A lakehouse in which every step of maintenance is due."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.operations.aging import DAY_MS, HOUR_MS, Aging
from tests.operations.changes import append_rows, create, drop
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import HINT_PATH, new_table_path
from trinitylake_ops.operations import MaintenancePolicy, MaintenanceReport
from trinitylake_ops.operations.maintenance.decisions import Decision, DecisionState
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import Storage, StorageWrapper

#: The policy of the lakehouses of these tests.
DOCUMENT: dict[str, Any] = {
    "retention": {
        "versions": {"max_age": "1d", "min_versions": 1},
        "exports": [{"pattern": "nightly-*", "min_exports": 1}],
    },
    "limits": {"min_age": "0s", "max_duration": None},
    "targets": {
        "verify_every": "7d",
        "orphans_every": "7d",
        "unfinished_after": "1d",
        "export": {"every": "30d", "retain_for": "60d"},
    },
}


def with_policy(lake: Lakehouse, **sections: Any) -> None:
    """Set the policy of the tests, with changed sections."""
    merged = {
        name: {**DOCUMENT.get(name, {}), **sections.get(name, {})}
        if isinstance(DOCUMENT.get(name, sections.get(name)), dict)
        else sections[name]
        for name in {**DOCUMENT, **sections}
    }
    operations.set_policy(lake, MaintenancePolicy.of_document(merged))


def new_lake(storage: Storage, **sections: Any) -> Aging:
    """Create a lakehouse with the policy of the tests."""
    aging = Aging.on(storage, txn_ttl_millis=HOUR_MS)
    with_policy(aging.lake, **sections)
    return aging


class _NoManifest(StorageWrapper):
    """A storage on which exports cannot be finished."""

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_export_"):
            raise StorageError("no export", path=path)
        super().create(path, data)


def neglect(aging: Aging, clone_root: str | None = None, *, n_appends: int = 6, n_dropped: int = 27) -> None:
    """Make every step due.

    Args:
        aging: The lakehouse.
        clone_root: The root of an overdue clone; without it, no clone is overdue.
        n_appends: The number of files that are appended to each table before, and after, a version expires.
        n_dropped: The number of tables that are created and dropped.
    """
    lake = aging.lake
    create(lake, "tree", *(f"t{number}" for number in range(n_dropped + 3)))
    drop(lake, "tree", *(f"t{number}" for number in range(3, n_dropped + 3)))
    for name in ("nightly-1", "nightly-2"):
        operations.plan_export(lake, name).execute()
        aging.later(HOUR_MS)
    for _ in range(n_appends):
        append_rows(lake, "ns.t")
        append_rows(lake, "ns.u")
        aging.later(HOUR_MS)
    with contextlib.suppress(StorageError):
        operations.plan_export(Lakehouse(_NoManifest(lake.storage)), "interrupted").execute()
    if clone_root is not None:
        operations.plan_clone(lake, clone_root, "branch", retain_for=DAY_MS).execute()
    aging.later(2 * DAY_MS)
    operations.plan_expiration(lake).execute()
    aging.later(DAY_MS)
    for _ in range(n_appends):
        append_rows(lake, "ns.t")
        append_rows(lake, "ns.u")
        aging.later(HOUR_MS)
    lake.storage.create(new_table_path("ns", "orphan", 200), b"left by a failed commit")
    aging.later(8 * DAY_MS)
    lake.close()
    lake.storage.write(HINT_PATH, b"1")


def states(report: MaintenanceReport) -> dict[Step, set[DecisionState]]:
    """Return the states of each step."""
    by_step: dict[Step, set[DecisionState]] = {}
    for decision in report.decisions:
        by_step.setdefault(decision.step, set()).add(decision.state)
    return by_step


def decision_of(report: MaintenanceReport, step: Step, what: str | None = None) -> Decision:
    """Return the only decision of a step, or of an object of a step."""
    (decision,) = (one for one in report.decisions if one.step == step and what in (None, one.what))
    return decision
