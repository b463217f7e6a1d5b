"""Perform each publishing action in a deployment, for four stores.

A run may succeed only if each of its rows is visible once. docs/dagster/publishing.md lists the outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.conftest import SUMMARY_PROPERTY
from tests.e2e.browser import opened_page
from tests.e2e.publishing_actions import (
    ACTIONS,
    AUTOMATED_ACTIONS,
    DAYS,
    ERROR_PATTERNS,
    FAILS_WITH_OTHER_ERROR,
    NOT_APPLICABLE,
    NOT_REQUESTED,
    VISIBLE,
    Click,
    Results,
    Rows,
    UserAction,
    backfill,
    expected_outcomes,
    value_rows_by_day,
)
from tests.e2e.publishing_deployment import Deployment
from tests.e2e.publishing_project import STORES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "dagster" / "publishing.md"
STORE_TITLES = ("published by its own step", "published by a publish asset", "dagster-iceberg", "files")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_page() as browser_page:
        yield browser_page


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("publishing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PUBLISHING_PROJECT", str(folder))
        with Deployment(folder).running() as running_deployment:
            yield running_deployment


def visible_rows(deployment: Deployment, store: str, expected: Rows, value: int | None) -> Rows:
    """Return the rows of the expected tables. For the appended table, only rows of ``value`` unless it is None."""
    rows = {table: deployment.rows(store, table) for table in expected}
    if value is not None and "events" in rows:
        rows["events"] = [row for row in rows["events"] if row[-1] == str(value)]
    return rows


def describe_outcome(
    deployment: Deployment, store: str, before: Rows, expected: Rows, value: int, results: Results
) -> str:
    """Describe the outcome of an action in a few words."""
    statuses, runs = results
    new_rows, all_rows = (
        visible_rows(deployment, store, expected, value),
        visible_rows(deployment, store, expected, None),
    )
    if not statuses:
        return NOT_REQUESTED if all_rows == before else f"not requested, but has {all_rows}"
    if all(status == "SUCCESS" for status in statuses):
        return VISIBLE if new_rows == expected else f"succeeds, but has {new_rows} instead of {expected}"
    messages = [text for run_id in runs for text in deployment.messages(run_id)]
    if all_rows != before:
        return f"fails, but has {all_rows}: {messages[-3:]}"
    matching = (outcome for outcome, pattern in ERROR_PATTERNS.items() if any(map(pattern.search, messages)))
    return next(matching, FAILS_WITH_OTHER_ERROR)


def check_outcomes(action: UserAction, outcomes: Mapping[str, str], record: Callable[[str, object], None]) -> None:
    """Report the outcomes, and compare them with the documented outcomes."""
    record(SUMMARY_PROPERTY, table_row(action.title, [outcomes.get(store, NOT_APPLICABLE) for store in STORES]))
    assert outcomes == expected_outcomes(action)


def table_row(title: str, outcomes: Sequence[str]) -> str:
    return f"| {' | '.join([title, *outcomes])} |"


def perform_all(deployment: Deployment, page: Page, action: UserAction, value: int) -> dict[str, str]:
    """Perform an action in all stores and return the outcomes. Only clicks are sequential."""
    stores, expected, perform = list(expected_outcomes(action)), action.rows(value), action.perform
    before = {store: visible_rows(deployment, store, expected, None) for store in stores}
    for store in stores:
        deployment.set_value(store, value)
    clicks = {store: perform.launch(deployment, page, store) for store in stores} if isinstance(perform, Click) else {}

    def outcome(store: str) -> str:
        try:
            results = (
                perform.wait(deployment, clicks[store]) if isinstance(perform, Click) else perform(deployment, store)
            )
        except AssertionError as error:
            return f"not performed: {error}"
        return describe_outcome(deployment, store, before[store], expected, value, results)

    with ThreadPoolExecutor(len(stores)) as pool:
        return dict(zip(stores, pool.map(outcome, stores), strict=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(ACTIONS)), ids=[re.sub(r"\W+", "_", action.title) for action in ACTIONS])
def test_action_has_documented_outcome(
    deployment: Deployment, page: Page, number: int, record_property: Callable[[str, object], None]
) -> None:
    action = ACTIONS[number]
    check_outcomes(action, perform_all(deployment, page, action, number + 1), record_property)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("table", "counts", "concurrent_runs"), [("two_days", (2, 4), 1), ("last_day_orders", (2, 2), 4)]
)
def test_split_backfill_publishes_partitions_after_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, counts: tuple[int, int], concurrent_runs: int
) -> None:
    """Test one run at a time, and a table in which each partition reads the last day of its input."""
    monkeypatch.setenv("PUBLISHING_PROJECT", str(tmp_path))
    with Deployment(tmp_path, ["publisher"], concurrent_runs=concurrent_runs).running() as deployment:
        deployment.set_value("publisher", 1)
        statuses, runs = backfill("day_orders", table, "publish_days")(deployment, "publisher")
        messages = [text for run_id in runs for text in deployment.messages(run_id)]
        assert statuses == ["SUCCESS"], messages[-10:]
        assert deployment.rows("publisher", table) == value_rows_by_day(1, *counts)
        assert deployment.rows("publisher", "day_orders") == value_rows_by_day(1, 2, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_automation_has_documented_outcome(
    deployment: Deployment, record_property: Callable[[str, object], None]
) -> None:
    value = 100
    cases = [(action, store) for action in AUTOMATED_ACTIONS for store in expected_outcomes(action)]
    before = {
        (action.title, store): visible_rows(deployment, store, action.rows(value), None) for action, store in cases
    }
    for store in STORES:
        deployment.set_value(store, value)
    deployment.start_automation()
    runs = [deployment.materialize(store, ["raw"]) for store in STORES]
    runs += [deployment.materialize(store, ["raw_day"], DAYS[-1]) for store in STORES]
    assert [deployment.wait_for_run(run) for run in runs] == ["SUCCESS"] * len(runs)
    deployment.wait_for_automation()
    deployment.stop_automation()
    outcomes: dict[str, dict[str, str]] = {action.title: {} for action in AUTOMATED_ACTIONS}
    for action, store in cases:
        assert not isinstance(action.perform, Click)
        results = action.perform(deployment, store)
        outcomes[action.title][store] = describe_outcome(
            deployment, store, before[action.title, store], action.rows(value), value, results
        )
    rows = [
        table_row(title, [by_store.get(store, NOT_APPLICABLE) for store in STORES])
        for title, by_store in outcomes.items()
    ]
    record_property(SUMMARY_PROPERTY, "\n".join(rows))
    assert outcomes == {action.title: expected_outcomes(action) for action in AUTOMATED_ACTIONS}


def test_docs_list_outcomes() -> None:
    header = [table_row("Action", STORE_TITLES), f"|{'---|' * (len(STORES) + 1)}"]
    rows = [table_row(action.title, action.outcomes) for action in (*ACTIONS, *AUTOMATED_ACTIONS)]
    assert "\n".join([*header, *rows]) in DOCS.read_text()
