"""The gestures of Dagster, with the rows that each must make visible, and its outcome by each way to store tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.e2e.gestures_deployment import SECOND, Deployment
from tests.e2e.gestures_project import STORES

DAYS = ("2026-01-01", "2026-01-02")
VISIBLE, NOT_REQUESTED, FAILS_OTHERWISE = "visible", "not requested", "fails"
FAILS, FAILS_ELSEWHERE = "fails, and names the selection", "fails, and names the code location"
NO_GESTURE = ""
#: What an error contains, for the outcomes that depend on it.
IN_ERRORS = {
    FAILS: re.compile(r'--select, (1\+)?key:"'),
    FAILS_ELSEWHERE: re.compile("build the publish asset in the code location of"),
}

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
        button = page.get_by_role("button", name=re.compile(r"\bMaterialize")).first
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
        outcomes: Of each store, in the order of STORES. NO_GESTURE: there is no such gesture.
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


def materialize(*tables: str, partition: str | None = None, suffix: str = "") -> Callable[[Deployment, str], Ends]:
    """Return the gesture that materializes assets of a code location of a store, whose name ends with ``suffix``."""

    def perform(deployment: Deployment, store: str) -> Ends:
        return ran(deployment, deployment.materialize(f"{store}{suffix}", of(store, *tables), partition))

    return perform


def materialize_in_both(deployment: Deployment, store: str) -> Ends:
    """Materialize a table of one code location, then a table of another one that is made of it."""
    first_statuses, first_runs = materialize("eager_table", "publish_eager_table")(deployment, store)
    statuses, runs = materialize("elsewhere", "publish_elsewhere", suffix=SECOND)(deployment, store)
    return first_statuses + statuses, first_runs + runs


def requested(table: str) -> Callable[[Deployment, str], Ends]:
    """Return the runs that automation has requested for a table or its publish asset."""

    def perform(deployment: Deployment, store: str) -> Ends:
        keys = {f"{store}/{name}" for name in (table, f"publish_{table}")}
        runs = [run for run in deployment.requested() if run["assets"] & keys]
        return [run["status"] for run in runs], [run["runId"] for run in runs]

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
        (NO_GESTURE, VISIBLE, NO_GESTURE, NO_GESTURE),
    ),
    Gesture(
        "Materialize the publish asset alone",
        materialize("publish_plain"),
        plain,
        (NO_GESTURE, FAILS, NO_GESTURE, NO_GESTURE),
    ),
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
    Gesture("Re-execute from failure", re_execute_from_failure, interrupted, (VISIBLE, VISIBLE, VISIBLE, VISIBLE)),
    Gesture(
        "Terminate the run, re-execute from failure",
        interrupt(Deployment.terminate, "CANCELED"),
        interrupted,
        (VISIBLE, VISIBLE, VISIBLE, VISIBLE),
    ),
    Gesture(
        "The run is killed, re-execute from failure",
        interrupt(Deployment.kill, "FAILURE"),
        interrupted,
        (VISIBLE, VISIBLE, VISIBLE, VISIBLE),
    ),
    Gesture(
        "Materialize a table, and one of another code location that reads it",
        materialize_in_both,
        lambda v: {"eager_table": made(v, 2), "elsewhere": made(v, 2)},
    ),
    Gesture(
        "Materialize a table whose publish asset is in another code location",
        materialize("remote"),
        lambda v: {"remote": made(v, 2)},
        (NO_GESTURE, VISIBLE, NO_GESTURE, NO_GESTURE),
    ),
    Gesture(
        "Materialize a publish asset whose table is in another code location",
        materialize("publish_remote", suffix=SECOND),
        lambda v: {"remote": made(v, 2)},
        (NO_GESTURE, FAILS_ELSEWHERE, NO_GESTURE, NO_GESTURE),
    ),
]

#: By the sensors of automation, after an asset above all of these was materialized.
AUTOMATED = [
    Gesture("Automation of a table", requested("eager_table"), lambda v: {"eager_table": made(v, 2)}),
    Gesture(
        "Automation of a table with partitions",
        requested("eager_day"),
        lambda v: {"eager_day": made(v, 2, DAYS[-1])},
    ),
    Gesture(
        "Automation of a table that the publish asset has by its key",
        requested("eager_by_key"),
        lambda v: {"eager_by_key": made(v, 2)},
        (NO_GESTURE, VISIBLE, NO_GESTURE, NO_GESTURE),
    ),
    Gesture(
        "Automation of a table and of its publish asset",
        requested("both_eager"),
        lambda v: {"both_eager": made(v, 2)},
        (NO_GESTURE, VISIBLE, NO_GESTURE, NO_GESTURE),
    ),
    Gesture(
        "Automation of a publish asset, not of its table",
        requested("of_eager"),
        lambda v: {"of_eager": made(v, 2)},
        (NO_GESTURE, NOT_REQUESTED, NO_GESTURE, NO_GESTURE),
    ),
    Gesture(
        "Automation of a table that reads one of another code location",
        requested("elsewhere"),
        lambda v: {"elsewhere": made(v, 2)},
    ),
]


def expected_of(gesture: Gesture) -> dict[str, str]:
    """Return the outcome in each store that has the gesture."""
    return {name: wanted for name, wanted in zip(STORES, gesture.outcomes, strict=True) if wanted != NO_GESTURE}
