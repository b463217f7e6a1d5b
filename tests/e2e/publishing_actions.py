"""Actions in Dagster that publish tables, with the expected rows and the expected outcome for each store."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.e2e.publishing_deployment import SECOND, Deployment
from tests.e2e.publishing_project import STORES

DAYS = ("2026-01-01", "2026-01-02")
VISIBLE, NOT_REQUESTED, FAILS_WITH_OTHER_ERROR = "visible", "not requested", "fails"
FAILS_NAMING_SELECTION, FAILS_NAMING_LOCATION = "fails, and names the selection", "fails, and names the code location"
NOT_APPLICABLE = ""
#: Patterns of the errors that distinguish outcomes.
ERROR_PATTERNS = {
    FAILS_NAMING_SELECTION: re.compile(r'--select: (1\+)?key:"'),
    FAILS_NAMING_LOCATION: re.compile("build the publish asset in the code location of"),
}

Rows = Mapping[str, list[tuple[str, ...]]]
#: Statuses of the runs or backfills that should succeed, and the IDs of all their runs.
Results = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Click:
    """Materialize assets with the button on a page, for all partitions if the button opens a dialog.

    Attributes:
        page: Return the path of the page for a store.
        is_backfill: Whether the button opens the backfill dialog.
    """

    page: Callable[[str], str]
    is_backfill: bool = False

    def launch(self, deployment: Deployment, page: Page, store: str) -> str:
        """Click the button, and return the ID of the launched run or backfill."""
        before = deployment.launched_ids()
        page.goto(f"{deployment.url}{self.page(store)}")
        button = page.get_by_role("button", name=re.compile(r"\bMaterialize")).first
        expect(button).to_be_enabled()
        button.click()
        if self.is_backfill:
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="All", exact=True).click()
            dialog.get_by_role("button", name="Launch backfill").click()
        deployment.wait_until(lambda: bool(deployment.launched_ids() - before), "the launched run or backfill")
        page.goto("about:blank")  # an open page sends requests continuously
        (launched_id,) = deployment.launched_ids() - before
        return launched_id

    def wait(self, deployment: Deployment, launched_id: str) -> Results:
        return (
            wait_for_backfill(deployment, launched_id) if self.is_backfill else wait_for_runs(deployment, launched_id)
        )


def asset_page(table: str) -> Callable[[str], str]:
    return lambda store: f"/assets/{store}/{table}"


def selection_page(*tables: str) -> Callable[[str], str]:
    """Return the path of the lineage page for a selection that the user enters."""

    def path(store: str) -> str:
        selection = " or ".join(f'key:"{store}/{table}"' for table in existing_tables(store, *tables))
        return f"/asset-groups~{quote(selection, safe='')}"

    return path


@dataclass(frozen=True)
class UserAction:
    """A user action, and the rows that it is expected to publish.

    Attributes:
        title: Title in the documentation.
        perform: Perform the action for a store, and wait until it ends. Browser actions are a :class:`Click`.
        rows: Return the expected rows of each table, given the value that the project writes.
        outcomes: The outcome for each store, in the order of ``STORES``, or ``NOT_APPLICABLE``.
    """

    title: str
    perform: Callable[[Deployment, str], Results] | Click
    rows: Callable[[int], Rows]
    outcomes: tuple[str, str, str, str] = (VISIBLE, VISIBLE, VISIBLE, VISIBLE)


def value_rows(value: int, count: int, *partition: str) -> list[tuple[str, ...]]:
    return [(*partition, str(n), str(value)) for n in range(1, count + 1)]


def value_rows_by_day(value: int, *counts: int) -> list[tuple[str, ...]]:
    return [row for day, count in zip(DAYS, counts, strict=True) for row in value_rows(value, count, day)]


def existing_tables(store: str, *tables: str) -> list[str]:
    """Return the tables, and publish assets only for the store that has them."""
    return [table for table in tables if store == "publisher" or not table.startswith("publish_")]


def wait_for_runs(deployment: Deployment, *run_ids: str) -> Results:
    return [deployment.wait_for_run(run_id) for run_id in run_ids], list(run_ids)


def materialize(*tables: str, partition: str | None = None, suffix: str = "") -> Callable[[Deployment, str], Results]:
    """Return the action that materializes assets in the code location ``STORE + suffix``."""

    def perform(deployment: Deployment, store: str) -> Results:
        return wait_for_runs(
            deployment, deployment.materialize(f"{store}{suffix}", existing_tables(store, *tables), partition)
        )

    return perform


def materialize_in_both_locations(deployment: Deployment, store: str) -> Results:
    """Materialize a table, and then a downstream table in the other code location."""
    first_statuses, first_runs = materialize("eager_table", "publish_eager_table")(deployment, store)
    statuses, runs = materialize("downstream", "publish_downstream", suffix=SECOND)(deployment, store)
    return first_statuses + statuses, first_runs + runs


def requested_runs(table: str) -> Callable[[Deployment, str], Results]:
    """Return the action of an automation sensor that requests runs of a table or its publish asset."""

    def perform(deployment: Deployment, store: str) -> Results:
        keys = {f"{store}/{name}" for name in (table, f"publish_{table}")}
        runs = [run for run in deployment.requested_runs() if run["assets"] & keys]
        return [run["status"] for run in runs], [run["runId"] for run in runs]

    return perform


def backfill(*tables: str) -> Callable[[Deployment, str], Results]:
    def perform(deployment: Deployment, store: str) -> Results:
        return wait_for_backfill(deployment, deployment.backfill(store, existing_tables(store, *tables), DAYS))

    return perform


def wait_for_backfill(deployment: Deployment, backfill: str) -> Results:
    status = deployment.wait_for_backfill(backfill)
    return ["SUCCESS" if status == "COMPLETED_SUCCESS" else status], deployment.runs_of(backfill)


INTERRUPTED = ("events", "latest", "publish_interrupted")


def re_execute_from_failure(deployment: Deployment, store: str) -> Results:
    broken = deployment.folder / store / "broken"
    broken.touch()
    first_run = deployment.materialize(store, existing_tables(store, *INTERRUPTED))
    assert deployment.wait_for_run(first_run) == "FAILURE"
    broken.unlink()
    return wait_for_runs(deployment, deployment.re_execute(first_run))


def interrupt(stop_run: Callable[[Deployment, str], None], status: str) -> Callable[[Deployment, str], Results]:
    """Interrupt a run in the step of its last table, and re-execute it from failure."""

    def perform(deployment: Deployment, store: str) -> Results:
        slow, waiting = (deployment.folder / store / name for name in ("slow", "waiting"))
        waiting.unlink(missing_ok=True)
        slow.touch()
        first_run = deployment.materialize(store, existing_tables(store, *INTERRUPTED))
        deployment.wait_until(waiting.exists, "the step that waits")
        stop_run(deployment, first_run)
        assert deployment.wait_for_run(first_run) == status
        slow.unlink()
        return wait_for_runs(deployment, deployment.re_execute(first_run))

    return perform


def add_partition(deployment: Deployment, store: str) -> Results:
    deployment.add_partition(store, "berlin")
    return materialize("shops", "publish_shops", partition="berlin")(deployment, store)


def launch_from_command_line(deployment: Deployment, store: str) -> Results:
    return [deployment.command_line(store, existing_tables(store, "orders", "totals", "publish_plain"))], []


def plain_rows(value: int) -> Rows:
    return {"orders": value_rows(value, 2), "totals": value_rows(value, 2)}


def interrupted_rows(value: int) -> Rows:
    return {"events": value_rows(value, 2), "latest": value_rows(value, 2)}


ACTIONS = [
    UserAction(
        "Materialize one table",
        Click(asset_page("orders")),
        lambda v: {"orders": value_rows(v, 2)},
        (VISIBLE, FAILS_NAMING_SELECTION, VISIBLE, VISIBLE),
    ),
    UserAction(
        "Materialize all of a group",
        Click(lambda store: f"/locations/__repository__@{store}/asset-groups/plain"),
        plain_rows,
    ),
    UserAction(
        "Materialize a selection of tables",
        Click(selection_page("orders", "totals")),
        plain_rows,
        (VISIBLE, FAILS_NAMING_SELECTION, VISIBLE, VISIBLE),
    ),
    UserAction(
        "Materialize a selection with its publish asset",
        Click(selection_page("orders", "totals", "publish_plain")),
        plain_rows,
        (NOT_APPLICABLE, VISIBLE, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction(
        "Materialize the publish asset alone",
        materialize("publish_plain"),
        plain_rows,
        (NOT_APPLICABLE, FAILS_NAMING_SELECTION, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction("`dg launch` of a selection", launch_from_command_line, plain_rows),
    UserAction(
        "Backfill one table",
        Click(asset_page("day_orders"), is_backfill=True),
        lambda v: {"day_orders": value_rows_by_day(v, 2, 2)},
        (VISIBLE, FAILS_NAMING_SELECTION, VISIBLE, VISIBLE),
    ),
    UserAction(
        "Backfill a group: the same partition",
        backfill("day_orders", "day_totals", "publish_days"),
        lambda v: {"day_orders": value_rows_by_day(v, 2, 2), "day_totals": value_rows_by_day(v, 2, 2)},
    ),
    UserAction(
        "Backfill a group: the same and the previous partition",
        backfill("day_orders", "two_days", "publish_days"),
        lambda v: {"day_orders": value_rows_by_day(v, 2, 2), "two_days": value_rows_by_day(v, 2, 4)},
    ),
    UserAction(
        "Backfill a group: all partitions to one table",
        backfill("day_orders", "summary", "publish_days"),
        lambda v: {"day_orders": value_rows_by_day(v, 2, 2), "summary": value_rows(v, 4)},
    ),
    UserAction(
        "Backfill a group: several dimensions",
        backfill("day_orders", "publish_days", "regions", "publish_regions"),
        lambda v: {
            "day_orders": value_rows_by_day(v, 2, 2),
            "regions": [row for day in DAYS for region in ("north", "south") for row in value_rows(v, 2, day, region)],
        },
    ),
    UserAction(
        "Backfill a table that reads its previous partition",
        backfill("running", "publish_running"),
        lambda v: {"running": value_rows_by_day(v, 1, 2)},
        (VISIBLE, VISIBLE, FAILS_WITH_OTHER_ERROR, VISIBLE),
    ),
    UserAction("Materialize a dynamic partition", add_partition, lambda v: {"shops": value_rows(v, 2, "berlin")}),
    UserAction(
        "A step that is retried by its retry policy",
        materialize("flaky", "publish_flaky"),
        lambda v: {"flaky": value_rows(v, 2)},
    ),
    UserAction(
        "Re-execute from failure", re_execute_from_failure, interrupted_rows, (VISIBLE, VISIBLE, VISIBLE, VISIBLE)
    ),
    UserAction(
        "Terminate the run, re-execute from failure",
        interrupt(Deployment.terminate, "CANCELED"),
        interrupted_rows,
        (VISIBLE, VISIBLE, VISIBLE, VISIBLE),
    ),
    UserAction(
        "The run is killed, re-execute from failure",
        interrupt(Deployment.kill, "FAILURE"),
        interrupted_rows,
        (VISIBLE, VISIBLE, VISIBLE, VISIBLE),
    ),
    UserAction(
        "Materialize a table, and a downstream table in another code location",
        materialize_in_both_locations,
        lambda v: {"eager_table": value_rows(v, 2), "downstream": value_rows(v, 2)},
    ),
    UserAction(
        "Materialize a table whose publish asset is in another code location",
        materialize("remote"),
        lambda v: {"remote": value_rows(v, 2)},
        (NOT_APPLICABLE, VISIBLE, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction(
        "Materialize a publish asset whose table is in another code location",
        materialize("publish_remote", suffix=SECOND),
        lambda v: {"remote": value_rows(v, 2)},
        (NOT_APPLICABLE, FAILS_NAMING_LOCATION, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
]

#: Requested by automation sensors after an upstream asset is materialized.
AUTOMATED_ACTIONS = [
    UserAction("Automation of a table", requested_runs("eager_table"), lambda v: {"eager_table": value_rows(v, 2)}),
    UserAction(
        "Automation of a table with partitions",
        requested_runs("eager_day"),
        lambda v: {"eager_day": value_rows(v, 2, DAYS[-1])},
    ),
    UserAction(
        "Automation of a table that the publish asset references by key",
        requested_runs("eager_by_key"),
        lambda v: {"eager_by_key": value_rows(v, 2)},
        (NOT_APPLICABLE, VISIBLE, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction(
        "Automation of a table and of its publish asset",
        requested_runs("both_eager"),
        lambda v: {"both_eager": value_rows(v, 2)},
        (NOT_APPLICABLE, VISIBLE, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction(
        "Automation of a publish asset, not of its table",
        requested_runs("eager_publisher"),
        lambda v: {"eager_publisher": value_rows(v, 2)},
        (NOT_APPLICABLE, NOT_REQUESTED, NOT_APPLICABLE, NOT_APPLICABLE),
    ),
    UserAction(
        "Automation of a table downstream of another code location",
        requested_runs("downstream"),
        lambda v: {"downstream": value_rows(v, 2)},
    ),
]


def expected_outcomes(action: UserAction) -> dict[str, str]:
    """Return the outcome for each store that the action applies to."""
    return {name: outcome for name, outcome in zip(STORES, action.outcomes, strict=True) if outcome != NOT_APPLICABLE}
