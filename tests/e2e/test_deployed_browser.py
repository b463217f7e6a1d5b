"""What operators see and do in Dagster's pages, in a real browser, against the deployment of ``deploy/``.

``python -m scripts.make_dagster_pictures`` runs these tests, too: the pictures they take become those of the docs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from playwright.sync_api import expect

from tests.credentials.canaries import SECRET_ACCESS_KEY
from tests.e2e.aged_lakes import aged_lake
from tests.e2e.browser import Pages, launchpad, opened_pages, table
from tests.e2e.topology import Topology, secrets_in
from tests.lakes import check_lake, objects
from tests.operations.aging import DAY_MS, live_versions, states
from tests.operations.changes import alter, append_rows
from trinitylake_ops import Lakehouse, operations

pytestmark = [pytest.mark.usefixtures("radosgw"), pytest.mark.timeout(900)]

CHECKS = {
    "clones_in_time", "data_files_in_shape", "exports_fresh", "hint_right", "orphans_bounded", "retention_kept",
    "tree_in_shape",
    "verify_clean",
}  # fmt: skip
APPROVER = "Ada Lovelace"


@pytest.fixture(scope="module")
def pages(topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with opened_pages(topology, tmp_path_factory.mktemp("pages")) as opened:
        yield opened


@pytest.fixture(scope="module")
def sales(topology: Topology) -> Iterator[Lakehouse]:
    """A lakehouse in a folder, whose versions are weeks old."""
    lake = aged_lake(topology.volume / "sales", n_versions=8, n_tables=3, is_expired=False)
    yield lake
    check_lake(lake)


def test_the_graph_shows_the_lakehouse_its_exports_and_the_tables_that_are_published(pages: Pages) -> None:
    above_exports = quote('+key:"exports"')  # with them all of definitions.py
    pages.open(f"/asset-groups~{above_exports}")
    expect(pages.page.get_by_text("publish", exact=True).first).to_be_visible()
    pages.page.keyboard.press("Alt+e")  # expands all groups
    for name in ("lakehouse", "exports", "month", "reference_tables", "airlines", "flights", "weather", "planes"):
        expect(pages.page.get_by_text(name, exact=True).last).to_be_visible()
    pages.picture("dagster-asset-graph")


def run_config(topology: Topology, run_id: str) -> Any:
    (run,) = topology.runs(runIds=[run_id])
    return yaml.safe_load(run["runConfigYaml"])


def test_the_launchpad_says_what_is_wrong_and_nothing_runs(pages: Pages, topology: Topology) -> None:
    before = topology.runs()
    pages.edit("export", {"name": "before-migration", "retain_weeks": 5})
    expect(pages.page.get_by_text('Received unexpected config entry "retain_weeks" at the root.')).to_be_visible()
    expect(pages.launch_button).to_be_disabled()
    pages.write({"name": "17"})
    pages.launch_button.click()  # which waits until it can be clicked
    dialog = pages.page.get_by_role("dialog")
    expect(
        dialog.get_by_text("export name '17' has only digits, like a version number; choose another name")
    ).to_be_visible()
    expect(dialog.get_by_text("Stack Trace")).to_have_count(0)
    expect(dialog.get_by_text("Traceback")).to_have_count(0)
    assert pages.page.url.endswith(launchpad("export"))
    assert topology.runs() == before


def test_an_export_and_a_rollback_to_it_are_launched_and_shown(
    pages: Pages, topology: Topology, lake: Lakehouse
) -> None:
    append_rows(lake, "facts.flights")
    exported = lake.latest_version()
    before = objects(lake.snapshot())

    config = {"name": "before-migration", "level": "full", "retain_for": "30d", "version": exported}
    run_id = pages.launch("export", config, picture="dagster-launchpad")
    assert run_config(topology, run_id) == config
    assert (pages.text("name"), pages.text("version")) == ("before-migration", str(exported))
    (export,) = operations.list_exports(lake)
    assert (export.name, export.level, export.version) == ("before-migration", "full", exported)
    assert operations.verify_export(lake, "before-migration").is_clean

    append_rows(lake, "facts.flights")
    alter(lake, "ns", "a")
    changed = objects(lake.snapshot())
    config = {"to": {"export": "before-migration"}, "namespaces": ["facts"]}
    pages.launch("rollback", config)
    digest = pages.text("digest")
    config["approval"] = {"digest": digest, "approved_by": APPROVER}
    run_id = pages.launch("rollback", config)
    assert run_config(topology, run_id) == config
    with pages.markdown("changes") as shown:  # the export has a definition of the namespace of its own
        assert table(shown)[1:] == [["changed", "facts", ""], ["changed", "facts", "flights"]]
    after = objects(lake.snapshot())
    assert after == {**changed, ("facts", "flights"): before["facts", "flights"]}
    assert (newest := next(lake.history())).run_id == run_id

    pages.open("/assets/lakehouse")
    assert pages.text("lakehouse_version").endswith(str(newest.version))
    expect(pages.value("last_versions")).to_contain_text("facts.flights +0 -3; latest")
    pages.page.get_by_role("button", name="Plots").click()
    pages.wait_for_plots()
    pages.picture("dagster-asset-plots")
    pages.open("/assets/exports?view=partitions")
    expect(pages.page.get_by_text("before-migration").first).to_be_visible()


@pytest.mark.soak
def test_checks_name_the_job_that_mends_what_fails(pages: Pages, topology: Topology, sales: Lakehouse) -> None:
    topology.must_run("sales_check")
    pages.open("/assets/sales/lakehouse?view=checks")
    for check in sorted(CHECKS):
        expect(pages.page.get_by_text(check, exact=True).first).to_be_visible()
    pages.page.get_by_text("retention_kept", exact=True).first.click()
    expect(pages.page.get_by_text("10 versions should have expired")).to_be_visible()
    assert pages.text("repaired_by") == "sales_expire"
    pages.wait_for_plots()
    pages.picture("dagster-checks")


@pytest.mark.soak
def test_an_expiry_needs_the_digest_of_its_plan_and_one_that_is_stale_lets_nothing_go(
    pages: Pages, topology: Topology, sales: Lakehouse
) -> None:
    rules = {"keep_last": 3}
    kept, past = live_versions(sales)[-3:], live_versions(sales)[:-3]
    pages.launch("sales_expire", rules)
    message = pages.full_message()
    digest = pages.text("digest", message)
    assert pages.text("versions", message) == f"{past[0]}-{past[-1]}"
    with pages.markdown("timeline", message) as shown:
        picture = shown.get_by_role("img", name="The versions of the lakehouse")
        assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 0
    with pages.markdown("plan", message) as shown:
        verdicts = {int(version): verdict for version, verdict, _why in table(shown)[1:]}
        assert verdicts == {**dict.fromkeys(past, "expires"), **dict.fromkeys(kept, "kept")}
        pages.picture("dagster-expire-plan")
    assert states(sales) == []

    # Somebody changes the rules by a commit in between: what was approved is not what would happen.
    maximum_ms = sales.snapshot().definition.maximum_version_age_millis
    sales.alter_definition(maximum_version_age_millis=1_000 * DAY_MS)
    approved = {**rules, "approval": {"digest": digest, "approved_by": APPROVER}}
    stale = pages.launch("sales_expire", approved, "Failure")
    expect(pages.page.get_by_text("review the new plan").first).to_be_visible()
    assert states(sales) == []
    assert run_config(topology, stale) == approved

    sales.alter_definition(maximum_version_age_millis=maximum_ms)
    run_id = pages.launch("sales_expire", approved)
    assert pages.text("approved_by") == APPROVER
    assert states(sales) == [("EXPIRED", f"{past[0]}-{past[-1]}")]
    expired = next(info for info in sales.history() if info.operation == "expire")
    assert (expired.run_id, expired.approved_by) == (run_id, APPROVER)


@pytest.mark.soak
def test_the_read_only_webserver_offers_no_launch_and_refuses_one(
    pages: Pages, topology: Topology, lake: Lakehouse
) -> None:
    before = topology.runs(), lake.latest_version()
    pages.open(launchpad("rollback"), viewer=True)
    expect(pages.page.get_by_text("Commits the content of an earlier version").first).to_be_visible()
    expect(pages.page.get_by_role("tab", name="Launchpad")).to_be_disabled()
    expect(pages.launch_button).to_have_count(0)
    with pytest.raises(AssertionError, match="UnauthorizedError"):
        topology.launch("rollback", {"to": {"version": 0}}, viewer=True)
    assert (topology.runs(), lake.latest_version()) == before


@pytest.mark.soak
def test_no_page_shows_a_secret(pages: Pages, topology: Topology) -> None:
    """Runs last: searches all that the tests of this file looked at."""
    pages.look()
    assert [(address, found) for address, text in pages.seen if (found := secrets_in(text))] == []
    # The search looks at what was shown, and finds a secret there.
    assert any("before-migration" in text for _, text in pages.seen)
    pages.edit("rollback", {"to": SECRET_ACCESS_KEY})
    assert secrets_in(pages.look()) != []
