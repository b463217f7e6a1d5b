"""Budgets limit the time and the requests of a run, and reports list the remaining work."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest

from tests.lakes import Lakes
from tests.operations.aging import Aging
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.operations import Budget, budget
from trinitylake_ops.operations.budget import BudgetSpentBeforeError, BudgetSpentError, Spending, counting
from trinitylake_ops.storage import MeteredStorage, RequestCounts

pytestmark = pytest.mark.usefixtures("fixed_requests")

DELETING = {"purge": operations.plan_purge, "orphans": operations.plan_orphan_removal}
#: Maximum number of requests that release the lease and record the progress.
TIDY_REQUESTS = 24


@pytest.fixture
def expired(aging: Aging) -> Aging:
    aging.expire()
    for _ in range(3):
        aging.clock.create(new_node_path(), b"left")
    aging.later()
    return aging


@pytest.fixture
def meter(expired: Aging) -> MeteredStorage:
    """Counts the requests to the lakehouse's storage independently."""
    return MeteredStorage(expired.lake.storage)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Advances the clock by a second at each reading, after a number of readings."""

    class Ticking:
        readings = count()
        n_constant = 0

        @classmethod
        def monotonic(cls) -> float:
            return max(0.0, float(next(cls.readings) - cls.n_constant))

    def start(n_constant: int) -> None:
        Ticking.n_constant = n_constant

    monkeypatch.setattr(budget, "time", Ticking)
    return start


def test_plan_requests_beyond_the_budget_are_rejected(expired: Aging) -> None:
    spending = Spending(Budget(max_requests=2))
    storage = counting(expired.lake.storage, spending)
    assert counting(storage, spending) is storage, "none counts twice"
    path = expired.lake.files.roots.path(0)
    for _ in range(3):
        storage.read(path)
    assert spending.requests == 3, "requests outside of planning are only counted"
    ends = pytest.raises(BudgetSpentBeforeError)
    with ends, spending.planning(lambda *_: None) as progress:
        progress("versions", 1, 9)
        storage.read(path)
    storage.read(path)
    storage.add(RequestCounts(requests={"read": 5}))
    assert spending.requests == 9


@pytest.mark.parametrize("operation", DELETING)
def test_plan_ends_with_its_budget(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    lake = Lakehouse(meter, cache="off")
    meter.reset()
    total = Spending()
    DELETING[operation](lake, budget=total)
    assert total.requests == meter.snapshot().total, "all is counted"
    for max_requests in (1, total.requests // 2, total.requests - 1):
        meter.reset()
        with pytest.raises(BudgetSpentBeforeError) as raised:
            DELETING[operation](lake, budget=Budget(max_requests=max_requests))
        assert raised.value.exit_code == 1
        assert f"the budget of {max_requests} requests is spent while planning" in str(raised.value)
        assert meter.snapshot().total == max_requests
    assert DELETING[operation](lake, budget=Budget(max_requests=total.requests)).base_version == lake.latest_version()


@pytest.mark.parametrize("operation", DELETING)
def test_repeated_plan_counts_against_the_budget(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    lake = Lakehouse(meter, cache="off")
    preview = DELETING[operation](lake)
    expired.later()
    spending = Spending(Budget(max_requests=10_000))
    plan = DELETING[operation](lake, budget=spending)
    assert plan.digest != preview.digest
    of_planning = spending.requests
    before = lake.latest_version()
    spending.budget = Budget(max_requests=of_planning + 2)
    with pytest.raises(BudgetSpentBeforeError):
        plan.execute(preview.digest, budget=spending)
    assert lake.latest_version() == before, "not even begun"
    meter.reset()
    total = Spending()
    assert plan.execute(preview.digest, budget=total).is_complete
    assert total.requests == meter.snapshot().total


@pytest.mark.parametrize("operation", DELETING)
def test_any_budget_ends_the_run_near_its_limit(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    """Only requests that end the run orderly exceed the limit, and each run that completes its plan makes progress."""
    lake = Lakehouse(meter, cache="off")
    outcomes: set[str] = set()
    for max_requests in range(5, 400, 7):
        meter.reset()
        spending = Spending(Budget(max_requests=max_requests))
        try:
            plan = DELETING[operation](lake, budget=spending)
            report = plan.execute(budget=spending)
        except BudgetSpentBeforeError:
            outcomes.add("planning")
        else:
            outcomes.add("done" if report.is_complete else "deleting")
            assert report.is_complete or report.stopped is not None
            assert not plan.is_empty
        assert meter.snapshot().total <= max_requests + TIDY_REQUESTS + expired.clock.concurrency
        if "done" in outcomes:
            break
    assert {"planning", "done"} <= outcomes


def test_time_budget_counts_from_the_start(expired: Aging) -> None:
    spending = Spending(Budget(max_seconds=60), begun_s=time.monotonic() - 3600)
    for plan in DELETING.values():
        with pytest.raises(BudgetSpentBeforeError):
            plan(expired.lake, budget=spending)
        plan_to_execute = plan(expired.lake)
        with pytest.raises(BudgetSpentBeforeError):
            plan_to_execute.execute(budget=spending)


def test_time_without_requests_ends_a_plan(clock: Callable[[int], None]) -> None:
    spending = Spending(Budget(max_seconds=3), begun_s=0.0)
    clock(2)
    ends = pytest.raises(BudgetSpentBeforeError)
    with ends, spending.planning(lambda *_: None) as progress:
        for number in range(1, 10):
            progress("versions", number, 9)


def test_time_budget_ends_a_long_listing(clock: Callable[[int], None], lakes: Lakes) -> None:
    storage = lakes.memory().storage
    for number in range(3001):
        storage.create(f"file-{number}", b"")
    spending = Spending(Budget(max_seconds=1), begun_s=0.0)
    listed: list[str] = []
    with pytest.raises(BudgetSpentError):
        listed.extend(info.path for info in spending.listed(storage.list(), always=True))
    assert len(listed) == 2000
    assert len(list(spending.listed(storage.list()))) > 3000, "only plans and verify end in it"


def test_purge_that_ends_while_sealing_makes_progress_in_each_run(expired: Aging) -> None:
    plan = operations.plan_purge(expired.lake)
    stopped: list[str] = []
    for max_requests in range(20, 500):  # the smallest one that suffices for marking
        try:
            report = plan.execute(budget=Budget(max_requests=max_requests))
        except BudgetSpentBeforeError:
            assert not stopped, "what is marked once is marked by the same budget again"
            continue
        if report.is_complete:
            break
        assert report.stopped is not None
        stopped.append(report.stopped)
    assert report.is_complete
    assert "remain to be sealed, and all files to be deleted" in stopped[0]
    assert any("all versions are sealed, the files remain" in reason for reason in stopped)


@pytest.mark.parametrize("incremental", [False, True])
def test_verify_counts_its_first_requests(expired: Aging, meter: MeteredStorage, incremental: bool) -> None:
    lake = Lakehouse(meter, cache="off")
    meter.reset()
    report = operations.verify(lake, budget=Budget(max_requests=1), incremental=incremental)
    assert (report.stopped, report.is_complete, report.record_path) == (
        "the budget of 1 requests is spent",
        False,
        None,
    )
    assert report.unchecked[0] == "names of roots, records"
    assert f"versions 0-{report.latest_version}" in report.unchecked
    assert meter.snapshot().requests.get("list", 0) == 0, "not even the listing"
    assert report.cost.total_requests == meter.snapshot().total <= 4
    total = Spending()
    assert operations.verify(lake, budget=total).is_complete
    meter.reset()
    repeated = operations.verify(lake, budget=Budget(max_requests=total.requests))
    assert repeated.is_complete
    assert meter.snapshot().total == total.requests


def test_verify_keeps_an_old_record_if_the_budget_ends_first(expired: Aging) -> None:
    record = operations.verify(expired.lake, incremental=True).record_path
    assert record is not None
    for max_requests in (1, 4, 5):
        operations.verify(expired.lake, incremental=True, budget=Budget(max_requests=max_requests))
    assert operations.verify(expired.lake, incremental=True).known_files > 0


def test_run_without_limits_completes(expired: Aging) -> None:
    for plan in DELETING.values():
        spending = Spending()
        try:
            assert plan(expired.lake, budget=spending).execute(budget=spending).is_complete
        except TrinityLakeError as error:
            pytest.fail(str(error))
        assert spending.exhausted() is None
