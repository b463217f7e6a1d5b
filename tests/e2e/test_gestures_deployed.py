"""What each gesture of Dagster does to tables, in a deployment, by four ways to store them.

A run is green only if its rows are visible, each once. docs/dagster/publishing.md has the outcomes as a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.conftest import SHOWN
from tests.e2e.browser import opened_page
from tests.e2e.gestures import (
    AUTOMATED,
    DAYS,
    FAILS_OTHERWISE,
    GESTURES,
    IN_ERRORS,
    NO_GESTURE,
    NOT_REQUESTED,
    VISIBLE,
    Click,
    Ends,
    Gesture,
    Rows,
    backfill,
    by_day,
    expected_of,
)
from tests.e2e.gestures_deployment import Deployment
from tests.e2e.gestures_project import STORES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "dagster" / "publishing.md"
STORE_TITLES = ("published by its own step", "published by a publish asset", "dagster-iceberg", "files")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_page() as opened:
        yield opened


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("gestures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GESTURES", str(folder))
        with Deployment(folder).running() as made:
            yield made


def visible(deployment: Deployment, store: str, expected: Rows, value: int | None) -> Rows:
    """Return the rows of tables. Of the table of appended rows only those of a value, if one is given."""
    found = {table: deployment.rows(store, table) for table in expected}
    if value is not None and "events" in found:
        found["events"] = [row for row in found["events"] if row[-1] == str(value)]
    return found


def judged(deployment: Deployment, store: str, before: Rows, expected: Rows, value: int, ends: Ends) -> str:
    """Return the outcome of a gesture in a few words."""
    statuses, runs = ends
    after, whole = visible(deployment, store, expected, value), visible(deployment, store, expected, None)
    if not statuses:
        return NOT_REQUESTED if whole == before else f"no run, and {whole}"
    if all(status == "SUCCESS" for status in statuses):
        return VISIBLE if after == expected else f"green, and {after} instead of {expected}"
    messages = [text for run_id in runs for text in deployment.messages(run_id)]
    if whole != before:
        return f"fails, and {whole} is stored: {messages[-3:]}"
    named = (outcome for outcome, pattern in IN_ERRORS.items() if any(map(pattern.search, messages)))
    return next(named, FAILS_OTHERWISE)


def check(gesture: Gesture, outcomes: Mapping[str, str], record: Callable[[str, object], None]) -> None:
    """Show the outcomes, and compare them with those of the docs."""
    record(SHOWN, row_of(gesture.title, [outcomes.get(store, NO_GESTURE) for store in STORES]))
    assert outcomes == expected_of(gesture)


def row_of(title: str, outcomes: Sequence[str]) -> str:
    return f"| {' | '.join([title, *outcomes])} |"


def perform_all(deployment: Deployment, page: Page, gesture: Gesture, value: int) -> dict[str, str]:
    """Perform a gesture in all projects, at the same time but for the clicks, and return the outcomes."""
    stores, expected, perform = list(expected_of(gesture)), gesture.rows(value), gesture.perform
    before = {store: visible(deployment, store, expected, None) for store in stores}
    for store in stores:
        deployment.set_value(store, value)
    clicks = {store: perform.launch(deployment, page, store) for store in stores} if isinstance(perform, Click) else {}

    def outcome(store: str) -> str:
        try:
            ends = perform.end(deployment, clicks[store]) if isinstance(perform, Click) else perform(deployment, store)
        except AssertionError as error:
            return f"not performed: {error}"
        return judged(deployment, store, before[store], expected, value, ends)

    with ThreadPoolExecutor(len(stores)) as pool:
        return dict(zip(stores, pool.map(outcome, stores), strict=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(GESTURES)), ids=[re.sub(r"\W+", "_", one.title) for one in GESTURES])
def test_a_gesture_has_the_outcome_of_the_docs(
    deployment: Deployment, page: Page, number: int, record_property: Callable[[str, object], None]
) -> None:
    gesture = GESTURES[number]
    check(gesture, perform_all(deployment, page, gesture, number + 1), record_property)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("table", "counts", "concurrent_runs"), [("two_days", (2, 4), 1), ("of_last_day", (2, 2), 4)])
def test_partitions_of_a_split_backfill_are_published_after_those_that_they_were_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, counts: tuple[int, int], concurrent_runs: int
) -> None:
    """One run at a time; and a table that reads the last day, so that the first publication waits for the last."""
    monkeypatch.setenv("GESTURES", str(tmp_path))
    with Deployment(tmp_path, ["publisher"], concurrent_runs=concurrent_runs).running() as deployment:
        deployment.set_value("publisher", 1)
        statuses, runs = backfill("day_orders", table, "publish_days")(deployment, "publisher")
        messages = [text for run_id in runs for text in deployment.messages(run_id)]
        assert statuses == ["SUCCESS"], messages[-10:]
        assert deployment.rows("publisher", table) == by_day(1, *counts)
        assert deployment.rows("publisher", "day_orders") == by_day(1, 2, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_automation_has_the_outcome_of_the_docs(
    deployment: Deployment, record_property: Callable[[str, object], None]
) -> None:
    value = 100
    cells = [(gesture, store) for gesture in AUTOMATED for store in expected_of(gesture)]
    before = {(one.title, store): visible(deployment, store, one.rows(value), None) for one, store in cells}
    for store in STORES:
        deployment.set_value(store, value)
    deployment.start_automation()
    runs = [deployment.materialize(store, ["raw"]) for store in STORES]
    runs += [deployment.materialize(store, ["raw_day"], DAYS[-1]) for store in STORES]
    assert [deployment.wait_for_run(run) for run in runs] == ["SUCCESS"] * len(runs)
    deployment.wait_for_automation()
    deployment.stop_automation()
    outcomes: dict[str, dict[str, str]] = {gesture.title: {} for gesture in AUTOMATED}
    for one, store in cells:
        assert not isinstance(one.perform, Click)
        ends = one.perform(deployment, store)
        outcomes[one.title][store] = judged(deployment, store, before[one.title, store], one.rows(value), value, ends)
    rows = [row_of(title, [found.get(store, NO_GESTURE) for store in STORES]) for title, found in outcomes.items()]
    record_property(SHOWN, "\n".join(rows))
    assert outcomes == {gesture.title: expected_of(gesture) for gesture in AUTOMATED}


def test_the_docs_have_these_outcomes() -> None:
    header = [row_of("Gesture", STORE_TITLES), f"|{'---|' * (len(STORES) + 1)}"]
    rows = [row_of(one.title, one.outcomes) for one in (*GESTURES, *AUTOMATED)]
    assert "\n".join([*header, *rows]) in DOCS.read_text()
