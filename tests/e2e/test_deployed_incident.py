"""Handle incidents in a real browser with page loads and clicks, from the first page to the proof, without pasted text.

The tests count clicks and report seconds; docs/dagster/README.md lists the times of an idle machine.
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


class Walk:
    """The actions of an operator: opened pages, clicks and typed names. Nothing is pasted."""

    def __init__(self, pages: Pages, name: str, record: Callable[[str, object], None]):
        self.pages = pages
        self._record = record
        self.name = name
        self.clicks = 0
        self.loads = 0
        self._started_s = 0.0

    def begin(self) -> None:
        self._started_s = time.monotonic()

    def end(self, max_clicks: int = 8) -> None:
        """Report the number of actions and the duration, and assert that there were few actions."""
        seconds = time.monotonic() - self._started_s
        text = f"{self.name}: {self.clicks} clicks, {self.loads} addresses, {seconds:.0f} s"
        self._record(SUMMARY_PROPERTY, text)
        assert self.clicks <= max_clicks, text

    def note(self, text: str) -> None:
        """Report a measurement."""
        self._record(SUMMARY_PROPERTY, text)

    def open(self, path: str) -> None:
        self.loads += 1
        self.pages.open(path)

    def click(self, element: Locator) -> None:
        self.clicks += 1
        element.click()

    def markdown(self, label: str) -> Locator:
        """Show a Markdown metadata value of the newest event."""
        expect(self.pages.value(label)).to_be_visible()
        dialog = self.pages.page.get_by_role("dialog")
        if self.pages.value(label).get_by_text("[Show Markdown]").count():
            self.click(self.pages.value(label).get_by_text("[Show Markdown]"))
            expect(dialog.last).to_be_visible()
            return dialog.last
        return self.pages.value(label)

    def follow(self, link: Locator) -> None:
        """Follow a link to a prefilled launchpad in the same tab. A new tab would be another browser page."""
        link.evaluate("link => link.removeAttribute('target')")
        self.click(link)
        self.pages.page.wait_for_url(re.compile("/playground"))
        expect(self.pages.page.locator(".CodeMirror-code")).to_be_visible()

    def type_after(self, option: str, text: str) -> None:
        """Type the value of an option that is left empty."""
        line = self.pages.page.locator(".CodeMirror-line", has_text=f"{option}:")
        self.click(line)
        self.pages.page.keyboard.press("End")
        self.pages.page.keyboard.type(text)
        self.pages.page.keyboard.press("Escape")  # closes the editor's suggestions

    def launch(self, status: str = "Success") -> str:
        """Launch the configured run, and wait until its page shows the status. Return the run's id."""
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
def walk(pages: Pages, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Walk:
    return Walk(pages, request.node.name.removeprefix("test_").replace("_", " "), record_property)


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


def test_bad_publication_is_rolled_back(walk: Walk, shop: Lakehouse) -> None:
    pages, bad_version = walk.pages, shop.latest_version()
    walk.begin()
    walk.open("/assets/shop/sales/orders?view=checks")
    expect(pages.page.get_by_text("no_negative_amounts").first).to_be_visible()
    expect(pages.page.get_by_text("Failed").first).to_be_visible()
    walk.open("/assets/shop/lakehouse")
    versions = walk.markdown("last_versions")
    listed = {text.split()[0]: text for text in versions.get_by_role("listitem").all_inner_texts()}
    assert "; sales.orders +2 -3;" in listed[str(bad_version)]
    assert "; 1 passed" in listed[str(bad_version - 1)]
    walk.note(
        f"the page of the lakehouse with 3 versions: {pages.height('lakehouse_version', 'last_versions'):.0f} pixels"
    )
    pages.page.set_viewport_size({"width": WIDTH, "height": 1500})
    pages.picture("dagster-incident-1-versions")
    pages.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    walk.follow(pages.value("go_back").get_by_role("link"))
    walk.launch()
    plan = walk.markdown("plan")
    assert table(plan)[1][:3] == ["changed", "sales.orders", "2 -> 3"]
    pages.picture("dagster-incident-2-plan")
    walk.follow(pages.value("apply").get_by_role("link").first)
    walk.type_after("approved_by", APPROVER)
    pages.picture("dagster-incident-3-approval")
    walk.launch()
    assert (pages.text("rows_before"), pages.text("rows_after")) == ("2", "3")
    assert (pages.text("checks_passed"), pages.text("checks_failed")) == ("1", "0")
    pages.picture("dagster-incident-4-proof")
    walk.end()
    assert rows(shop) == [1, 2, 3]
    assert next(shop.history()).approved_by == APPROVER


def test_page_of_ten_versions_fits_one_screen(walk: Walk, topology: Topology, shop: Lakehouse) -> None:
    for amount in range(10 - shop.latest_version()):
        (topology.volume / SOURCE).write_text(f"{amount}\n7")
        topology.must_run(LOAD)
    walk.open("/assets/shop/lakehouse")
    listed = walk.markdown("last_versions").get_by_role("listitem").all_inner_texts()
    assert listed[0].split()[0] == "10"
    height = walk.pages.height("lakehouse_version", "last_versions")
    walk.note(f"the page of the lakehouse with 10 versions: {height:.0f} pixels")
    assert height <= MAX_PIXELS


def restart_webserver(topology: Topology) -> None:
    """Kill the webserver with all its children, and restart it."""
    webserver = topology.services["webserver"]
    webserver.kill()
    webserver.start()
    topology.wait_until(topology.is_loaded, "the webserver")


def test_incident_continues_after_webserver_is_killed(walk: Walk, topology: Topology, shop: Lakehouse) -> None:
    """The webserver is killed after the plan and during two launches; the operator launches again from the plan."""
    bad_version, before = shop.latest_version(), {run["runId"] for run in topology.runs()}
    walk.open("/assets/shop/lakehouse")
    walk.follow(walk.pages.value("go_back").get_by_role("link"))
    plan_run = walk.launch()

    def approve() -> None:
        walk.open(f"/runs/{plan_run}")
        walk.follow(walk.pages.value("apply").get_by_role("link").first)
        walk.type_after("approved_by", APPROVER)

    for _launch in range(2):
        restart_webserver(topology)
        approve()
        walk.click(walk.pages.launch_button)
    restart_webserver(topology)
    topology.wait_until(lambda: all(run["status"] in FINISHED for run in topology.runs()), "the runs")
    launched = [run["status"] for run in topology.runs() if run["runId"] not in {*before, plan_run}]
    if "SUCCESS" not in launched:  # the webserver was killed before it received a launch
        approve()
        walk.launch()
    assert launched.count("SUCCESS") <= 1
    assert (shop.latest_version(), rows(shop)) == (bad_version + 1, [1, 2, 3])


def test_version_is_exported_before_migration(walk: Walk, shop: Lakehouse) -> None:
    version = shop.latest_version()
    walk.begin()
    walk.open("/assets/shop/lakehouse")
    walk.follow(walk.markdown("last_versions").get_by_role("link", name="export"))
    walk.type_after("name", "before-migration")
    walk.launch()
    walk.end()
    walk.pages.picture("dagster-export-before-migration")
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


def launch_repair(walk: Walk, check: str, job: str) -> None:
    """Launch the repair job that a failed check links to."""
    walk.open("/assets/purged/lakehouse?view=checks")
    walk.click(walk.pages.page.get_by_text(check, exact=True).first)
    walk.follow(walk.markdown(f"open {job}").get_by_role("link"))
    walk.launch()


def test_expiry_is_approved(walk: Walk, topology: Topology) -> None:
    lake = damaged_lakehouse(topology)
    walk.begin()
    launch_repair(walk, "retention_kept", "purged_expire")
    walk.follow(walk.pages.value("apply").get_by_role("link").first)
    walk.type_after("approved_by", APPROVER)
    walk.launch()
    walk.end()
    walk.pages.picture("dagster-expiry-approved")
    assert [state for state, _ in states(lake)] == ["EXPIRED"]


def test_hint_is_repaired(walk: Walk, topology: Topology) -> None:
    lake = damaged_lakehouse(topology, lambda lake: lake.storage.write(HINT_PATH, b"0"))
    walk.begin()
    launch_repair(walk, "hint_right", "purged_repair_hint")
    walk.end()
    walk.pages.picture("dagster-hint-repaired")
    assert lake.storage.read(HINT_PATH) == str(lake.latest_version()).encode()


def test_findings_of_verify_are_repaired(walk: Walk, topology: Topology) -> None:
    lake = damaged_lakehouse(topology, delete_export_root)
    walk.begin()
    launch_repair(walk, "verify_clean", "purged_repair")
    walk.follow(walk.pages.value("apply").get_by_role("link").first)
    walk.type_after("approved_by", APPROVER)
    walk.launch()
    walk.end()
    walk.pages.picture("dagster-repaired")
    assert operations.list_exports(lake) == []
    check_lake(lake)
