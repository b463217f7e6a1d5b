"""Maintenance next to writers, and two runs at once."""

from __future__ import annotations

import threading

from tests.lakes import Lakes
from tests.operations.aging import Aging
from tests.operations.changes import ROWS, append_rows, create, overwrite_rows
from tests.operations.neglected import neglect, new_lake, states
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import MaintenanceReport, maintain
from trinitylake_ops.operations.maintenance.decisions import DecisionState
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage.contract.suite import run_together

DONE, LEFT = DecisionState.DONE, DecisionState.LEFT
TABLES = ("ns.t", "ns.u", "ns.v")


def neglected(lakes: Lakes) -> Aging:
    aging = new_lake(lakes.storage(), targets={"small_files": 2, "export": None})
    lakes.watch(aging.lake)
    create(aging.lake, "ns")
    neglect(aging, n_appends=2, n_dropped=3)
    return aging


def rows_of(lake: Lakehouse, name: str) -> list[int]:
    return sorted(catalog_at(lake).load_table(name).scan().to_arrow()["id"].to_pylist())


def test_table_that_is_overwritten_all_the_time_does_not_stop_the_others(lakes: Lakes) -> None:
    aging = neglected(lakes)
    overwrite_rows(aging.lake, "ns.busy")
    rows = {name: rows_of(aging.lake, name) for name in ("ns.t", "ns.u")}
    is_over = threading.Event()
    n_written = 0

    def write() -> None:
        nonlocal n_written
        with catalog_at(Lakehouse(aging.lake.storage)) as catalog:
            while not is_over.is_set():
                table = catalog.load_table("ns.busy")
                table.overwrite(ROWS)
                table.append(ROWS)
                n_written += 1

    def run() -> MaintenanceReport:
        try:
            return maintain(Lakehouse(aging.lake.storage))
        finally:
            is_over.set()

    _, report = run_together([write, run])
    assert isinstance(report, MaintenanceReport), report
    assert n_written > 0
    assert not report.failed, str(report)
    for name in ("ns.t", "ns.u"):
        compactions = [
            decision.state
            for decision in report.decisions
            if (decision.step, decision.what) == (Step.COMPACT_TABLES, name)
        ]
        assert compactions == [DONE], str(report)
    for step in (Step.TRIM, Step.EXPIRE, Step.PURGE, Step.ORPHANS, Step.VERIFY):
        assert DONE in states(report)[step], str(report)
    assert {name: rows_of(aging.lake, name) for name in rows} == rows
    assert len(rows_of(aging.lake, "ns.busy")) == 2 * ROWS.num_rows
    assert operations.verify(aging.lake, deep=True).is_clean
    again = maintain(aging.lake)
    assert not again.failed


def test_two_runs_at_once_are_harmless(lakes: Lakes) -> None:
    aging = neglected(lakes)
    append_rows(aging.lake, "ns.v")
    append_rows(aging.lake, "ns.v")
    rows = {name: rows_of(aging.lake, name) for name in TABLES}
    reports = run_together([lambda: maintain(Lakehouse(aging.lake.storage))] * 2)
    for report in reports:
        assert isinstance(report, MaintenanceReport), report
        assert not report.failed, str(report)
    last = maintain(aging.lake)
    assert not last.failed and not last.left, str(last)
    assert {name: rows_of(aging.lake, name) for name in TABLES} == rows
    for name in TABLES:
        assert len(list(catalog_at(aging.lake).load_table(name).scan().plan_files())) == 1
    assert operations.verify(aging.lake, deep=True).is_clean
    assert [info.state for info in operations.list_exports(aging.lake)] == ["complete", "complete"]
