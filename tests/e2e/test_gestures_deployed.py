"""What each gesture of Dagster does to tables, in a deployment, by four ways to store them.

A run is green only if its rows are visible, each once. docs/gestures.md has the outcomes below as a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.conftest import SHOWN
from tests.e2e.browser import opened_page
from tests.e2e.gestures_deployment import Deployment
from tests.e2e.gestures_project import STORES

DAYS = ("2026-01-01", "2026-01-02")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "gestures.md"
STORE_TITLES = ("published by its own step", "published by a publish asset", "dagster-iceberg", "files")
VISIBLE, FAILS, FAILS_OTHERWISE = "visible", "fails, and names the selection", "fails"
NOT_REQUESTED, SAME = "no run", ""

Rows = Mapping[str, list[tuple[str, ...]]]
#: The statuses of the runs or backfills that had to become green, and the ids of all runs.
Ends = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Click:
    """Materialize by the button of a page; partitions are all selected in its dialog.

    Attributes:
        page: Its path, for a store.
        is_backfill: Whether the button opens the dialog.
    """

    page: Callable[[str], str]
    is_backfill: bool = False

    def launch(self, deployment: Deployment, page: Page, store: str) -> str:
        """Click, and return the id of the new run or backfill."""
        before = deployment.launched()
        page.goto(f"{deployment.url}{self.page(store)}")
        button = page.get_by_role("button", name=re.compile("^Materialize")).first
        expect(button).to_be_enabled()
        button.click()
        if self.is_backfill:
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="All", exact=True).click()
            dialog.get_by_role("button", name="Launch backfill").click()
        deployment.wait_until(lambda: bool(deployment.launched() - before), "what was launched")
        page.goto("about:blank")  # pages ask the webserver all the time
        (launched,) = deployment.launched() - before
        return launched

    def end(self, deployment: Deployment, launched: str) -> Ends:
        return backfilled(deployment, launched) if self.is_backfill else ran(deployment, launched)


def asset_page(table: str) -> Callable[[str], str]:
    return lambda store: f"/assets/{store}/{table}"


def selection_page(*tables: str) -> Callable[[str], str]:
    """Return the page of the lineage for a selection, as the user types it."""

    def path(store: str) -> str:
        selection = " or ".join(f'key:"{store}/{table}"' for table in of(store, *tables))
        return f"/asset-groups~{quote(selection, safe='')}"

    return path


@dataclass(frozen=True)
class Gesture:
    """What a user does, and what it has to make visible.

    Attributes:
        title: Its name in the docs.
        perform: Does it in the project of a store, and waits for the end. Clicks in a browser are a :class:`Click`.
        rows: The rows of each table, by the value that the project writes.
        outcomes: Of each store, in the order of STORES. SAME: there is no such gesture.
    """

    title: str
    perform: Callable[[Deployment, str], Ends] | Click
    rows: Callable[[int], Rows]
    outcomes: tuple[str, str, str, str] = (VISIBLE, VISIBLE, VISIBLE, VISIBLE)


def made(value: int, count: int, *partition: str) -> list[tuple[str, ...]]:
    return [(*partition, str(n), str(value)) for n in range(1, count + 1)]


def by_day(value: int, *counts: int) -> list[tuple[str, ...]]:
    return [row for day, count in zip(DAYS, counts, strict=True) for row in made(value, count, day)]


def of(store: str, *tables: str) -> list[str]:
    """Return the tables, with those names that are publish assets only where there are any."""
    return [table for table in tables if store == "publisher" or not table.startswith("publish_")]


def ran(deployment: Deployment, *run_ids: str) -> Ends:
    return [deployment.wait_for_run(run_id) for run_id in run_ids], list(run_ids)


def materialize(*tables: str, partition: str | None = None) -> Callable[[Deployment, str], Ends]:
    def perform(deployment: Deployment, store: str) -> Ends:
        return ran(deployment, deployment.materialize(store, of(store, *tables), partition))

    return perform


def backfill(*tables: str) -> Callable[[Deployment, str], Ends]:
    def perform(deployment: Deployment, store: str) -> Ends:
        return backfilled(deployment, deployment.backfill(store, of(store, *tables), DAYS))

    return perform


def backfilled(deployment: Deployment, backfill: str) -> Ends:
    status = deployment.wait_for_backfill(backfill)
    return ["SUCCESS" if status == "COMPLETED_SUCCESS" else status], deployment.runs_of(backfill)


INTERRUPTED = ("events", "latest", "publish_interrupted")


def re_execute_from_failure(deployment: Deployment, store: str) -> Ends:
    broken = deployment.folder / store / "broken"
    broken.touch()
    first = deployment.materialize(store, of(store, *INTERRUPTED))
    assert deployment.wait_for_run(first) == "FAILURE"
    broken.unlink()
    return ran(deployment, deployment.re_execute(first))


def interrupt(by: Callable[[Deployment, str], None], status: str) -> Callable[[Deployment, str], Ends]:
    """Interrupt a run while its last table waits, and re-execute it from failure."""

    def perform(deployment: Deployment, store: str) -> Ends:
        slow, waits = (deployment.folder / store / name for name in ("slow", "waits"))
        waits.unlink(missing_ok=True)
        slow.touch()
        first = deployment.materialize(store, of(store, *INTERRUPTED))
        deployment.wait_until(waits.exists, "the step that waits")
        by(deployment, first)
        assert deployment.wait_for_run(first) == status
        slow.unlink()
        return ran(deployment, deployment.re_execute(first))

    return perform


def add_partition(deployment: Deployment, store: str) -> Ends:
    deployment.add_partition(store, "berlin")
    return materialize("shops", "publish_shops", partition="berlin")(deployment, store)


def launch_by_command(deployment: Deployment, store: str) -> Ends:
    return [deployment.command_line(store, of(store, "orders", "totals", "publish_plain"))], []


def requested(*tables: str) -> Callable[[Deployment, str], Ends]:
    """Return what automation requested of some tables."""

    def perform(deployment: Deployment, store: str) -> Ends:
        wanted = {f"{store}/{table}" for table in tables}
        runs = [run for run in deployment.requested() if run["assets"] & wanted]
        return [run["status"] for run in runs], [run["runId"] for run in runs]

    return perform


def materialize_elsewhere(deployment: Deployment, store: str) -> Ends:
    return ran(deployment, deployment.materialize(f"{store}_second", of(store, "elsewhere", "publish_elsewhere")))


def plain(value: int) -> Rows:
    return {"orders": made(value, 2), "totals": made(value, 2)}


def interrupted(value: int) -> Rows:
    return {"events": made(value, 2), "latest": made(value, 2)}


GESTURES = [
    Gesture(
        "Materialize one table",
        Click(asset_page("orders")),
        lambda v: {"orders": made(v, 2)},
        (VISIBLE, FAILS, VISIBLE, VISIBLE),
    ),
    Gesture(
        "Materialize all of a group",
        Click(lambda store: f"/locations/__repository__@{store}/asset-groups/plain"),
        plain,
    ),
    Gesture(
        "Materialize a selection of tables",
        Click(selection_page("orders", "totals")),
        plain,
        (VISIBLE, FAILS, VISIBLE, VISIBLE),
    ),
    Gesture(
        "Materialize a selection with its publish asset",
        Click(selection_page("orders", "totals", "publish_plain")),
        plain,
        (SAME, VISIBLE, SAME, SAME),
    ),
    Gesture("Materialize the publish asset alone", materialize("publish_plain"), plain, (SAME, FAILS, SAME, SAME)),
    Gesture("`dg launch` of a selection", launch_by_command, plain),
    Gesture(
        "Backfill one table",
        Click(asset_page("day_orders"), is_backfill=True),
        lambda v: {"day_orders": by_day(v, 2, 2)},
        (VISIBLE, FAILS, VISIBLE, VISIBLE),
    ),
    Gesture(
        "Backfill a group: the same partition",
        backfill("day_orders", "day_totals", "publish_days"),
        lambda v: {"day_orders": by_day(v, 2, 2), "day_totals": by_day(v, 2, 2)},
    ),
    Gesture(
        "Backfill a group: the partition and the one before",
        backfill("day_orders", "two_days", "publish_days"),
        lambda v: {"day_orders": by_day(v, 2, 2), "two_days": by_day(v, 2, 4)},
    ),
    Gesture(
        "Backfill a group: all partitions to one table",
        backfill("day_orders", "summary", "publish_days"),
        lambda v: {"day_orders": by_day(v, 2, 2), "summary": made(v, 4)},
    ),
    Gesture(
        "Backfill a group: several dimensions",
        backfill("day_orders", "publish_days", "regions", "publish_regions"),
        lambda v: {
            "day_orders": by_day(v, 2, 2),
            "regions": [row for day in DAYS for region in ("north", "south") for row in made(v, 2, day, region)],
        },
    ),
    Gesture(
        "Backfill a table that reads its previous partition",
        backfill("running", "publish_running"),
        lambda v: {"running": by_day(v, 1, 2)},
        (VISIBLE, VISIBLE, FAILS_OTHERWISE, VISIBLE),
    ),
    Gesture("Materialize a dynamic partition", add_partition, lambda v: {"shops": made(v, 2, "berlin")}),
    Gesture(
        "A step that its retry policy repeats", materialize("flaky", "publish_flaky"), lambda v: {"flaky": made(v, 2)}
    ),
    Gesture("Re-execute from failure", re_execute_from_failure, interrupted),
    Gesture("Terminate the run, re-execute from failure", interrupt(Deployment.terminate, "CANCELED"), interrupted),
    Gesture("The run is killed, re-execute from failure", interrupt(Deployment.kill, "FAILURE"), interrupted),
]


#: After one table above all of these was materialized, with the automation sensors on.
AUTOMATED = [
    Gesture("Automation (`eager`) of a table", requested("eager_table"), lambda v: {"eager_table": made(v, 2)}),
    Gesture(
        "Automation of the publish asset, not of its table",
        requested("table_of_eager", "publish_table_of_eager"),
        lambda v: {"table_of_eager": made(v, 2)},
        (SAME, NOT_REQUESTED, SAME, SAME),
    ),
    Gesture(
        "Automation of a table and of its publish asset",
        requested("both_eager", "publish_both_eager"),
        lambda v: {"both_eager": made(v, 2)},
        (SAME, VISIBLE, SAME, SAME),
    ),
    Gesture(
        "Automation of a table that reads one of another code location",
        requested("elsewhere"),
        lambda v: {"elsewhere": made(v, 2)},
    ),
]
#: After these.
AFTER_AUTOMATION = [
    Gesture(
        "Materialize a table that reads one of another code location",
        materialize_elsewhere,
        lambda v: {"elsewhere": made(v, 2)},
    )
]


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
    if whole == before and any("--select '" in text for text in messages):
        return FAILS
    return FAILS_OTHERWISE if whole == before else f"fails, and {whole} is stored: {messages[-3:]}"


def expected_of(gesture: Gesture) -> dict[str, str]:
    """Return the outcome in each store that has the gesture."""
    return {name: wanted for name, wanted in zip(STORES, gesture.outcomes, strict=True) if wanted != SAME}


def check(gesture: Gesture, outcomes: Mapping[str, str], record: Callable[[str, object], None]) -> None:
    """Show the outcomes, and compare them with those of the docs."""
    record(SHOWN, row_of(gesture.title, [outcomes.get(store, SAME) for store in STORES]))
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
def test_automation_has_the_outcome_of_the_docs(
    deployment: Deployment, page: Page, record_property: Callable[[str, object], None]
) -> None:
    value = 100
    cells = [(gesture, store) for gesture in AUTOMATED for store in expected_of(gesture)]
    before = {(one.title, store): visible(deployment, store, one.rows(value), None) for one, store in cells}
    for store in STORES:
        deployment.set_value(store, value)
    deployment.set_automation(is_on=True)
    runs = [deployment.materialize(store, ["raw"]) for store in STORES]
    assert [deployment.wait_for_run(run) for run in runs] == ["SUCCESS"] * len(STORES)
    deployment.wait_for_automation()
    deployment.set_automation(is_on=False)
    outcomes: dict[str, dict[str, str]] = {gesture.title: {} for gesture in AUTOMATED}
    for gesture, store in cells:
        assert not isinstance(gesture.perform, Click)
        ends = gesture.perform(deployment, store)
        outcomes[gesture.title][store] = judged(
            deployment, store, before[gesture.title, store], gesture.rows(value), value, ends
        )
    for gesture in AUTOMATED:
        record_property(SHOWN, row_of(gesture.title, [outcomes[gesture.title].get(store, SAME) for store in STORES]))
    assert outcomes == {gesture.title: expected_of(gesture) for gesture in AUTOMATED}
    (last,) = AFTER_AUTOMATION
    check(last, perform_all(deployment, page, last, value + 1), record_property)


def test_the_docs_have_these_outcomes() -> None:
    header = [row_of("Gesture", STORE_TITLES), f"|{'---|' * (len(STORES) + 1)}"]
    rows = [row_of(one.title, one.outcomes) for one in (*GESTURES, *AUTOMATED, *AFTER_AUTOMATION)]
    assert "\n".join([*header, *rows]) in DOCS.read_text()
