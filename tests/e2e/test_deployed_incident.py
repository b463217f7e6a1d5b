"""Handle incidents in a real browser by page loads and clicks, from the first page to the verified result.

The tests report the number of clicks and the duration; docs/dagster/README.md lists the times of an idle machine.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, expect

from tests.conftest import SUMMARY_PROPERTY
from tests.dagster_plugin.incident_project import LOAD, SOURCE
from tests.e2e.aged_lakehouses import aged_lakehouse
from tests.e2e.browser import HEIGHT, WIDTH, Pages, opened_pages, table
from tests.e2e.graphql import FINISHED
from tests.e2e.topology import Topology
from tests.lakes import check_lake
from tests.operations.aging import states
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.iceberg.catalog import catalog_at

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("radosgw"), pytest.mark.timeout(900)]

APPROVER = "Ada Lovelace"
#: Maximum height of a lakehouse page in a window of 1,280 by 900 pixels, below Dagster's heading.
MAX_PIXELS = 720
_RUN_PAGE = re.compile(r"/runs/(?P<run_id>[0-9a-f-]{36})")


@pytest.fixture(scope="module")
def pages(topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with opened_pages(topology, tmp_path_factory.mktemp("pages")) as browser_pages:
        yield browser_pages


class OperatorSession:
    """The actions of an operator: page loads, clicks and typed names, but no pasted text."""

    def __init__(self, pages: Pages, name: str, record: Callable[[str, object], None]):
        self.pages = pages
        self._record = record
        self.name = name
        self.n_clicks = 0
        self.n_page_loads = 0
        self._started_s = 0.0

    def start(self) -> None:
        self._started_s = time.monotonic()

    def finish(self, max_clicks: int = 8) -> None:
        """Report the number of actions and the duration, and assert an upper bound on the number of clicks."""
        seconds = time.monotonic() - self._started_s
        text = f"{self.name}: {self.n_clicks} clicks, {self.n_page_loads} page loads, {seconds:.0f} s"
        self._record(SUMMARY_PROPERTY, text)
        assert self.n_clicks <= max_clicks, text

    def report(self, text: str) -> None:
        """Report a measurement."""
        self._record(SUMMARY_PROPERTY, text)

    def open(self, path: str) -> None:
        self.n_page_loads += 1
        self.pages.open(path)

    def click(self, element: Locator) -> None:
        self.n_clicks += 1
        element.click()

    def markdown(self, label: str) -> Locator:
        """Show a Markdown metadata value of the newest event."""
        expect(self.pages.metadata_row(label)).to_be_visible()
        dialog = self.pages.page.get_by_role("dialog")
        if self.pages.metadata_row(label).get_by_text("[Show Markdown]").count():
            self.click(self.pages.metadata_row(label).get_by_text("[Show Markdown]"))
            expect(dialog.last).to_be_visible()
            return dialog.last
        return self.pages.metadata_row(label)

    def follow(self, link: Locator) -> None:
        """Follow a link to a prefilled launchpad in the same tab. The tests do not handle new tabs."""
        link.evaluate("link => link.removeAttribute('target')")
        self.click(link)
        self.pages.page.wait_for_url(re.compile("/playground"))
        expect(self.pages.page.locator(".CodeMirror-code")).to_be_visible()

    def type_after(self, option: str, text: str) -> None:
        """Type the value of an option that is empty in the configuration."""
        line = self.pages.page.locator(".CodeMirror-line", has_text=f"{option}:")
        self.click(line)
        self.pages.page.keyboard.press("End")
        self.pages.page.keyboard.type(text)
        self.pages.page.keyboard.press("Escape")  # closes the editor's suggestions

    def launch(self, status: str = "Success") -> str:
        """Launch the configured run, and wait until its page shows the status. Return the run's ID."""
        page = self.pages.page
        self.click(self.pages.launch_button)
        page.wait_for_url(_RUN_PAGE)
        match = _RUN_PAGE.search(run_page := page.url)
        assert match is not None
        page.goto("about:blank")  # the page of a run in progress is redrawn continuously
        run_status = self.pages.topology.wait_for_run(match["run_id"])
        assert run_status == status.upper(), self.pages.topology.messages(match["run_id"])
        page.goto(run_page)
        expect(page.get_by_text(status, exact=True).first).to_be_visible()
        return match["run_id"]


@pytest.fixture
def session(
    pages: Pages, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> OperatorSession:
    return OperatorSession(pages, request.node.name.removeprefix("test_").replace("_", " "), record_property)


@pytest.fixture
def shop(topology: Topology) -> Iterator[Lakehouse]:
    """A lakehouse whose table was published with good rows and then with bad rows."""
    folder = topology.volume / "shop"
    shutil.rmtree(folder, ignore_errors=True)
    lake = Lakehouse.create(str(folder), {"fsync": "false"})
    for amounts in ("1\n2\n3", "4\n-5"):
        folder.with_name(SOURCE).write_text(amounts)
        topology.must_run(LOAD)
    yield lake
    check_lake(lake)


def rows(lake: Lakehouse) -> list[int]:
    amounts: list[int] = catalog_at(lake).load_table("sales.orders").scan().to_arrow()["amount"].to_pylist()
    return amounts


def test_bad_publication_is_rolled_back(session: OperatorSession, shop: Lakehouse) -> None:
    pages, bad_version = session.pages, shop.latest_version()
    session.start()
    session.open("/assets/shop/sales/orders?view=checks")
    expect(pages.page.get_by_text("no_negative_amounts").first).to_be_visible()
    expect(pages.page.get_by_text("Failed").first).to_be_visible()
    session.open("/assets/shop/lakehouse")
    versions = session.markdown("last_versions")
    texts_by_version = {text.split()[0]: text for text in versions.get_by_role("listitem").all_inner_texts()}
    assert "; sales.orders +2 -3;" in texts_by_version[str(bad_version)]
    assert "; 1 passed" in texts_by_version[str(bad_version - 1)]
    height = pages.metadata_height("lakehouse_version", "last_versions")
    session.report(f"the page of the lakehouse with 3 versions: {height:.0f} pixels")
    pages.page.set_viewport_size({"width": WIDTH, "height": 1500})
    pages.screenshot("dagster-incident-1-versions")
    pages.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    session.follow(pages.metadata_row("go_back").get_by_role("link"))
    session.launch()
    plan = session.markdown("plan")
    assert table(plan)[1][:3] == ["changed", "sales.orders", "2 -> 3"]
    pages.screenshot("dagster-incident-2-plan")
    session.follow(pages.metadata_row("apply").get_by_role("link").first)
    session.type_after("approved_by", APPROVER)
    pages.screenshot("dagster-incident-3-approval")
    session.launch()
    assert (pages.metadata_text("rows_before"), pages.metadata_text("rows_after")) == ("2", "3")
    assert (pages.metadata_text("checks_passed"), pages.metadata_text("checks_failed")) == ("1", "0")
    pages.screenshot("dagster-incident-4-proof")
    session.finish()
    assert rows(shop) == [1, 2, 3]
    assert next(shop.history()).approved_by == APPROVER


def test_page_with_ten_versions_fits_one_screen(session: OperatorSession, topology: Topology, shop: Lakehouse) -> None:
    for amount in range(10 - shop.latest_version()):
        (topology.volume / SOURCE).write_text(f"{amount}\n7")
        topology.must_run(LOAD)
    session.open("/assets/shop/lakehouse")
    texts = session.markdown("last_versions").get_by_role("listitem").all_inner_texts()
    assert texts[0].split()[0] == "10"
    height = session.pages.metadata_height("lakehouse_version", "last_versions")
    session.report(f"the page of the lakehouse with 10 versions: {height:.0f} pixels")
    assert height <= MAX_PIXELS


def restart_webserver(topology: Topology) -> None:
    """Kill the webserver with all its child processes, and restart it."""
    webserver = topology.services["webserver"]
    webserver.kill()
    webserver.start()
    topology.wait_until(topology.is_loaded, "the webserver")


def test_incident_continues_after_webserver_is_killed(
    session: OperatorSession, topology: Topology, shop: Lakehouse
) -> None:
    """The webserver is killed after the plan and during two launches. The operator launches again from the plan."""
    bad_version, before = shop.latest_version(), {run["runId"] for run in topology.runs()}
    session.open("/assets/shop/lakehouse")
    session.follow(session.pages.metadata_row("go_back").get_by_role("link"))
    plan_run = session.launch()

    def approve() -> None:
        session.open(f"/runs/{plan_run}")
        session.follow(session.pages.metadata_row("apply").get_by_role("link").first)
        session.type_after("approved_by", APPROVER)

    for _launch in range(2):
        restart_webserver(topology)
        approve()
        session.click(session.pages.launch_button)
    restart_webserver(topology)
    topology.wait_until(lambda: all(run["status"] in FINISHED for run in topology.runs()), "the runs")
    statuses = [run["status"] for run in topology.runs() if run["runId"] not in {*before, plan_run}]
    if "SUCCESS" not in statuses:  # the webserver was killed before it received a launch
        approve()
        session.launch()
    assert statuses.count("SUCCESS") <= 1
    assert (shop.latest_version(), rows(shop)) == (bad_version + 1, [1, 2, 3])


def test_version_is_exported_before_migration(session: OperatorSession, shop: Lakehouse) -> None:
    version = shop.latest_version()
    session.start()
    session.open("/assets/shop/lakehouse")
    session.follow(session.markdown("last_versions").get_by_role("link", name="export"))
    session.type_after("name", "before-migration")
    session.launch()
    session.finish()
    session.pages.screenshot("dagster-export-before-migration")
    (export,) = operations.list_exports(shop)
    assert (export.name, export.version, export.state) == ("before-migration", version, "complete")


def damaged_lakehouse(topology: Topology, damage: Callable[[Lakehouse], object] = lambda _lake: None) -> Lakehouse:
    """Create a lakehouse with old versions, damage it, and run the checks."""
    folder = topology.volume / "purged"
    shutil.rmtree(folder, ignore_errors=True)
    lake = aged_lakehouse(folder, n_versions=6, n_tables=2, is_expired=False)
    damage(lake)
    topology.must_run("purged_check")
    return lake


def delete_export_root(lake: Lakehouse) -> None:
    operations.plan_export(lake, "lost", "minimal").execute()
    (export,) = operations.list_exports(lake)
    lake.storage.delete(export.location)


def launch_repair_job(session: OperatorSession, check: str, job: str) -> None:
    """Launch the repair job that a failed check links to."""
    session.open("/assets/purged/lakehouse?view=checks")
    session.click(session.pages.page.get_by_text(check, exact=True).first)
    session.follow(session.markdown(f"open {job}").get_by_role("link"))
    session.launch()


def test_expiry_is_approved(session: OperatorSession, topology: Topology) -> None:
    lake = damaged_lakehouse(topology)
    session.start()
    launch_repair_job(session, "retention_kept", "purged_expire")
    session.follow(session.pages.metadata_row("apply").get_by_role("link").first)
    session.type_after("approved_by", APPROVER)
    session.launch()
    session.finish()
    session.pages.screenshot("dagster-expiry-approved")
    assert [state for state, _ in states(lake)] == ["EXPIRED"]


def test_hint_is_repaired(session: OperatorSession, topology: Topology) -> None:
    lake = damaged_lakehouse(topology, lambda lake: lake.storage.write(HINT_PATH, b"0"))
    session.start()
    launch_repair_job(session, "hint_right", "purged_repair_hint")
    session.finish()
    session.pages.screenshot("dagster-hint-repaired")
    assert lake.storage.read(HINT_PATH) == str(lake.latest_version()).encode()


def test_findings_of_verify_are_repaired(session: OperatorSession, topology: Topology) -> None:
    lake = damaged_lakehouse(topology, delete_export_root)
    session.start()
    launch_repair_job(session, "verify_clean", "purged_repair")
    session.follow(session.pages.metadata_row("apply").get_by_role("link").first)
    session.type_after("approved_by", APPROVER)
    session.launch()
    session.finish()
    session.pages.screenshot("dagster-repaired")
    assert operations.list_exports(lake) == []
    check_lake(lake)
