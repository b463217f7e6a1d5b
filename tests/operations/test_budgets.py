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
from trinitylake_ops.operations.budget import BudgetSpentBeforeError, BudgetSpentError, Spending, counting_storage
from trinitylake_ops.storage import MeteredStorage, RequestCounts

pytestmark = pytest.mark.usefixtures("fixed_requests")

PLAN_FUNCTIONS = {"purge": operations.plan_purge, "orphans": operations.plan_orphan_removal}
#: Maximum number of requests that a run sends after its limit, to release the lease and record its progress.
MAX_CLEANUP_REQUESTS = 24


@pytest.fixture
def expired(aging: Aging) -> Aging:
    aging.expire()
    for _ in range(3):
        aging.clock.create(new_node_path(), b"orphan")
    aging.later()
    return aging


@pytest.fixture
def meter(expired: Aging) -> MeteredStorage:
    """Counts the requests to the lakehouse's storage independently."""
    return MeteredStorage(expired.lake.storage)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Advances the clock by a second at each reading, after a number of readings."""

    class TickingTime:
        readings = count()
        n_constant = 0

        @classmethod
        def monotonic(cls) -> float:
            return max(0.0, float(next(cls.readings) - cls.n_constant))

    def start(n_constant: int) -> None:
        TickingTime.n_constant = n_constant

    monkeypatch.setattr(budget, "time", TickingTime)
    return start


def test_plan_requests_beyond_the_budget_are_rejected(expired: Aging) -> None:
    spending = Spending(Budget(max_requests=2))
    storage = counting_storage(expired.lake.storage, spending)
    assert counting_storage(storage, spending) is storage, "no request is counted twice"
    path = expired.lake.files.roots.path(0)
    for _ in range(3):
        storage.read(path)
    assert spending.requests == 3, "requests outside of planning are only counted"
    raises_error = pytest.raises(BudgetSpentBeforeError)
    with raises_error, spending.planning(lambda *_: None) as progress:
        progress("versions", 1, 9)
        storage.read(path)
    storage.read(path)
    storage.add(RequestCounts(requests={"read": 5}))
    assert spending.requests == 9


@pytest.mark.parametrize("operation", PLAN_FUNCTIONS)
def test_plan_fails_when_its_budget_is_spent(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    lake = Lakehouse(meter, cache="off")
    meter.reset()
    total = Spending()
    PLAN_FUNCTIONS[operation](lake, budget=total)
    assert total.requests == meter.snapshot().total, "all requests are counted"
    for max_requests in (1, total.requests // 2, total.requests - 1):
        meter.reset()
        with pytest.raises(BudgetSpentBeforeError) as raised:
            PLAN_FUNCTIONS[operation](lake, budget=Budget(max_requests=max_requests))
        assert raised.value.exit_code == 1
        assert f"the budget of {max_requests} requests is spent while planning" in str(raised.value)
        assert meter.snapshot().total == max_requests
    assert (
        PLAN_FUNCTIONS[operation](lake, budget=Budget(max_requests=total.requests)).base_version
        == lake.latest_version()
    )


@pytest.mark.parametrize("operation", PLAN_FUNCTIONS)
def test_repeated_plan_counts_against_the_budget(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    lake = Lakehouse(meter, cache="off")
    preview = PLAN_FUNCTIONS[operation](lake)
    expired.later()
    spending = Spending(Budget(max_requests=10_000))
    plan = PLAN_FUNCTIONS[operation](lake, budget=spending)
    assert plan.digest != preview.digest
    planning_requests = spending.requests
    before = lake.latest_version()
    spending.budget = Budget(max_requests=planning_requests + 2)
    with pytest.raises(BudgetSpentBeforeError):
        plan.execute(preview.digest, budget=spending)
    assert lake.latest_version() == before, "nothing is committed"
    meter.reset()
    total = Spending()
    assert plan.execute(preview.digest, budget=total).is_complete
    assert total.requests == meter.snapshot().total


@pytest.mark.parametrize("operation", PLAN_FUNCTIONS)
def test_run_ends_near_the_limit_of_any_budget(expired: Aging, meter: MeteredStorage, operation: str) -> None:
    """Only requests that end the run cleanly may exceed the limit. Each run that completes its plan makes progress."""
    lake = Lakehouse(meter, cache="off")
    outcomes: set[str] = set()
    for max_requests in range(5, 400, 7):
        meter.reset()
        spending = Spending(Budget(max_requests=max_requests))
        try:
            plan = PLAN_FUNCTIONS[operation](lake, budget=spending)
            report = plan.execute(budget=spending)
        except BudgetSpentBeforeError:
            outcomes.add("planning")
        else:
            outcomes.add("done" if report.is_complete else "deleting")
            assert report.is_complete or report.stopped is not None
            assert not plan.is_empty
        assert meter.snapshot().total <= max_requests + MAX_CLEANUP_REQUESTS + expired.clock.concurrency
        if "done" in outcomes:
            break
    assert {"planning", "done"} <= outcomes


def test_time_budget_counts_from_the_start(expired: Aging) -> None:
    spending = Spending(Budget(max_seconds=60), begun_s=time.monotonic() - 3600)
    for make_plan in PLAN_FUNCTIONS.values():
        with pytest.raises(BudgetSpentBeforeError):
            make_plan(expired.lake, budget=spending)
        plan = make_plan(expired.lake)
        with pytest.raises(BudgetSpentBeforeError):
            plan.execute(budget=spending)


def test_time_without_requests_ends_a_plan(clock: Callable[[int], None]) -> None:
    spending = Spending(Budget(max_seconds=3), begun_s=0.0)
    clock(2)
    raises_error = pytest.raises(BudgetSpentBeforeError)
    with raises_error, spending.planning(lambda *_: None) as progress:
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
    assert len(list(spending.listed(storage.list()))) > 3000, "other operations complete a listing"


def test_purge_that_stops_while_sealing_makes_progress_in_each_run(expired: Aging) -> None:
    plan = operations.plan_purge(expired.lake)
    stopped: list[str] = []
    for max_requests in range(20, 500):  # until a budget is sufficient for marking
        try:
            report = plan.execute(budget=Budget(max_requests=max_requests))
        except BudgetSpentBeforeError:
            assert not stopped, "a budget that was sufficient for marking is still sufficient"
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
    assert meter.snapshot().requests.get("list", 0) == 0, "the listing is not started"
    assert report.cost.total_requests == meter.snapshot().total <= 4
    total = Spending()
    assert operations.verify(lake, budget=total).is_complete
    meter.reset()
    repeated = operations.verify(lake, budget=Budget(max_requests=total.requests))
    assert repeated.is_complete
    assert meter.snapshot().total == total.requests


def test_verify_keeps_the_old_record_if_the_budget_is_spent_first(expired: Aging) -> None:
    record = operations.verify(expired.lake, incremental=True).record_path
    assert record is not None
    for max_requests in (1, 4, 5):
        operations.verify(expired.lake, incremental=True, budget=Budget(max_requests=max_requests))
    assert operations.verify(expired.lake, incremental=True).known_files > 0


def test_run_without_limits_completes(expired: Aging) -> None:
    for make_plan in PLAN_FUNCTIONS.values():
        spending = Spending()
        try:
            assert make_plan(expired.lake, budget=spending).execute(budget=spending).is_complete
        except TrinityLakeError as error:
            pytest.fail(str(error))
        assert spending.exhausted() is None
