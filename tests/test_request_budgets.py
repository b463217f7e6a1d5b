"""Every operation sends exactly the requests that ``tests/request_budgets.py`` budgets for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import RESULTS
from benchmarks.request_counts import OPERATIONS
from tests.clock import ManualClock
from tests.request_budgets import BUDGETS, StorageKind, budget
from tests.request_workloads import WORKLOADS, Subject
from trinitylake_ops.storage import drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROWS = [(operation, kind) for operation, row in BUDGETS.items() for kind in row]


@pytest.mark.local_only("measures on separate storages")
@pytest.mark.parametrize(("operation", "kind"), ROWS, ids=[f"{operation}: {kind}" for operation, kind in ROWS])
def test_operation_sends_its_budgeted_requests(
    operation: str, kind: StorageKind, tmp_path: Path, manual_clock: ManualClock
) -> None:
    subject = Subject(kind, tmp_path)
    expected = budget(operation, kind)
    try:
        assert expected.with_counts(WORKLOADS[operation](subject)) == expected
    finally:
        if kind is not StorageKind.FOLDER:
            drop_memory_root(subject.root)


def test_every_budget_has_workload() -> None:
    assert set(WORKLOADS) == set(BUDGETS)


def test_benchmark_results_equal_budgets() -> None:
    text = (RESULTS / "request_counts.md").read_text()
    published = {
        name: (int(requests), int(rounds))
        for name, requests, rounds in re.findall(r"^\| ([^|]+) \| (\d+) \((\d+)\) \|", text, re.MULTILINE)
        if name in BUDGETS
    }
    assert published.keys() >= OPERATIONS.keys() & BUDGETS.keys()
    expected = {name: budget(name) for name in published}
    assert published == {name: (sum(row.requests.values()), row.rounds) for name, row in expected.items()}
