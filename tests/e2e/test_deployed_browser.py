"""Use the pages of Dagster like an operator, in a real browser, with the deployment of ``deploy/``.

``python -m scripts.make_dagster_pictures`` runs these tests and copies their screenshots into the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from playwright.sync_api import expect

from tests.credentials.canaries import SECRET_ACCESS_KEY
from tests.e2e.aged_lakehouses import aged_lakehouse
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
    with opened_pages(topology, tmp_path_factory.mktemp("pages")) as browser_pages:
        yield browser_pages


@pytest.fixture(scope="module")
def sales(topology: Topology) -> Iterator[Lakehouse]:
    """A lakehouse in a folder, with versions that are several weeks old."""
    lake = aged_lakehouse(topology.volume / "sales", n_versions=8, n_tables=3, is_expired=False)
    yield lake
    check_lake(lake)


def test_asset_graph_shows_lakehouse_exports_and_published_tables(pages: Pages) -> None:
    upstream_of_exports = quote('+key:"exports"')  # includes all assets of definitions.py
    pages.open(f"/asset-groups~{upstream_of_exports}")
    expect(pages.page.get_by_text("publish", exact=True).first).to_be_visible()
    pages.page.keyboard.press("Alt+e")  # expands all groups
    for name in ("lakehouse", "exports", "month", "reference_tables", "airlines", "flights", "weather", "planes"):
        expect(pages.page.get_by_text(name, exact=True).last).to_be_visible()
    pages.screenshot("dagster-asset-graph")


def run_config(topology: Topology, run_id: str) -> Any:
    (run,) = topology.runs(runIds=[run_id])
    return yaml.safe_load(run["runConfigYaml"])


def test_launchpad_rejects_invalid_config_without_run(pages: Pages, topology: Topology) -> None:
    before = topology.runs()
    pages.edit("export", {"name": "before-migration", "retain_weeks": 5})
    expect(pages.page.get_by_text('Received unexpected config entry "retain_weeks" at the root.')).to_be_visible()
    expect(pages.launch_button).to_be_disabled()
    pages.write({"name": "17"})
    pages.launch_button.click()  # waits until the button is enabled
    dialog = pages.page.get_by_role("dialog")
    expect(
        dialog.get_by_text("export name '17' has only digits, like a version number; choose another name")
    ).to_be_visible()
    expect(dialog.get_by_text("Stack Trace")).to_have_count(0)
    expect(dialog.get_by_text("Traceback")).to_have_count(0)
    assert pages.page.url.endswith(launchpad("export"))
    assert topology.runs() == before


def test_export_and_rollback_are_launched_and_displayed(pages: Pages, topology: Topology, lake: Lakehouse) -> None:
    append_rows(lake, "facts.flights")
    exported = lake.latest_version()
    before = objects(lake.snapshot())

    config = {"name": "before-migration", "level": "full", "retain_for": "30d", "version": exported}
    run_id = pages.launch("export", config, screenshot="dagster-launchpad")
    assert run_config(topology, run_id) == config
    assert (pages.metadata_text("name"), pages.metadata_text("version")) == ("before-migration", str(exported))
    (export,) = operations.list_exports(lake)
    assert (export.name, export.level, export.version) == ("before-migration", "full", exported)
    assert operations.verify_export(lake, "before-migration").is_clean

    append_rows(lake, "facts.flights")
    alter(lake, "ns", "a")
    changed = objects(lake.snapshot())
    config = {"to": {"export": "before-migration"}, "namespaces": ["facts"]}
    pages.launch("rollback", config)
    digest = pages.metadata_text("digest")
    config["approval"] = {"digest": digest, "approved_by": APPROVER}
    run_id = pages.launch("rollback", config)
    assert run_config(topology, run_id) == config
    with pages.markdown("changes") as element:  # the export has a separate definition of the namespace
        assert table(element)[1:] == [["changed", "facts", ""], ["changed", "facts", "flights"]]
    after = objects(lake.snapshot())
    assert after == {**changed, ("facts", "flights"): before["facts", "flights"]}
    assert (latest := next(lake.history())).run_id == run_id

    pages.open("/assets/lakehouse")
    assert pages.metadata_text("lakehouse_version").endswith(str(latest.version))
    expect(pages.metadata_row("last_versions")).to_contain_text("facts.flights +0 -3; latest")
    pages.page.get_by_role("button", name="Plots").click()
    pages.wait_for_plots()
    pages.screenshot("dagster-asset-plots")
    pages.open("/assets/exports?view=partitions")
    expect(pages.page.get_by_text("before-migration").first).to_be_visible()


@pytest.mark.soak
def test_failed_check_names_repair_job(pages: Pages, topology: Topology, sales: Lakehouse) -> None:
    topology.must_run("sales_check")
    pages.open("/assets/sales/lakehouse?view=checks")
    for check in sorted(CHECKS):
        expect(pages.page.get_by_text(check, exact=True).first).to_be_visible()
    pages.page.get_by_text("retention_kept", exact=True).first.click()
    expect(pages.page.get_by_text("10 versions should have expired")).to_be_visible()
    assert pages.metadata_text("repaired_by") == "sales_expire"
    pages.wait_for_plots()
    pages.screenshot("dagster-checks")


@pytest.mark.soak
def test_expiry_requires_digest_of_current_plan(pages: Pages, topology: Topology, sales: Lakehouse) -> None:
    options = {"keep_last": 3}
    kept_versions, expired_versions = live_versions(sales)[-3:], live_versions(sales)[:-3]
    pages.launch("sales_expire", options)
    message = pages.full_message()
    digest = pages.metadata_text("digest", message)
    assert pages.metadata_text("versions", message) == f"{expired_versions[0]}-{expired_versions[-1]}"
    with pages.markdown("timeline", message) as element:
        image = element.get_by_role("img", name="The versions of the lakehouse")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    with pages.markdown("plan", message) as element:
        verdicts = {int(version): verdict for version, verdict, _reason in table(element)[1:]}
        assert verdicts == {**dict.fromkeys(expired_versions, "expires"), **dict.fromkeys(kept_versions, "kept")}
        pages.screenshot("dagster-expire-plan")
    assert states(sales) == []

    # Another commit changes the retention settings, so the approved plan is out of date.
    maximum_ms = sales.snapshot().definition.maximum_version_age_millis
    sales.alter_definition(maximum_version_age_millis=1_000 * DAY_MS)
    approved_config = {**options, "approval": {"digest": digest, "approved_by": APPROVER}}
    stale_run_id = pages.launch("sales_expire", approved_config, "Failure")
    expect(pages.page.get_by_text("review the new plan").first).to_be_visible()
    assert states(sales) == []
    assert run_config(topology, stale_run_id) == approved_config

    sales.alter_definition(maximum_version_age_millis=maximum_ms)
    run_id = pages.launch("sales_expire", approved_config)
    assert pages.metadata_text("approved_by") == APPROVER
    assert states(sales) == [("EXPIRED", f"{expired_versions[0]}-{expired_versions[-1]}")]
    expired = next(info for info in sales.history() if info.operation == "expire")
    assert (expired.run_id, expired.approved_by) == (run_id, APPROVER)


@pytest.mark.soak
def test_read_only_webserver_rejects_launch(pages: Pages, topology: Topology, lake: Lakehouse) -> None:
    before = topology.runs(), lake.latest_version()
    pages.open(launchpad("rollback"), viewer=True)
    expect(pages.page.get_by_text("Commits the content of an earlier version").first).to_be_visible()
    expect(pages.page.get_by_role("tab", name="Launchpad")).to_be_disabled()
    expect(pages.launch_button).to_have_count(0)
    with pytest.raises(AssertionError, match="UnauthorizedError"):
        topology.launch("rollback", {"to": {"version": 0}}, viewer=True)
    assert (topology.runs(), lake.latest_version()) == before


@pytest.mark.soak
def test_pages_show_no_secret(pages: Pages, topology: Topology) -> None:
    """Search all pages that the tests of this module opened. Must be the last test."""
    pages.read()
    assert [(url, secrets) for url, text in pages.visited_texts if (secrets := secrets_in(text))] == []
    # Verify that the search covers the visited pages and finds secrets.
    assert any("before-migration" in text for _, text in pages.visited_texts)
    pages.edit("rollback", {"to": SECRET_ACCESS_KEY})
    assert secrets_in(pages.read()) != []
