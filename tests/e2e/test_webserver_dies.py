"""An operator launches what was approved, and the webserver dies meanwhile: it is done once, or clearly not at all.

The browser asks by one request. The webserver dies before it gets there, while it is worked on, or before the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from playwright.sync_api import Route, expect

from tests.e2e.browser import Pages
from tests.e2e.test_deployed_daemon import values
from tests.e2e.test_deployed_incident import APPROVER, pages, rows, shop
from tests.e2e.topology import Topology
from tests.lakes import check_lake
from trinitylake_ops import Lakehouse

__all__ = ["pages", "shop"]

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("radosgw"), pytest.mark.timeout(900)]

APPLY = "shop_rollback_apply"


@contextmanager
def queueing_waits(topology: Topology) -> Iterator[Callable[[], bool]]:
    """Let whoever queues a run wait, and lose what it wanted to write; yields whether one waits."""
    with closing(topology.database.connect()) as connection:
        connection.autocommit = True
        said = connection.cursor()
        said.execute(
            "CREATE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.dagster_event_type = 'PIPELINE_ENQUEUED' THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$"
        )
        said.execute(
            "CREATE TRIGGER stand_still BEFORE INSERT ON event_logs FOR EACH ROW EXECUTE FUNCTION stand_still()"
        )
        waiting = "FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        def is_waiting() -> bool:
            said.execute(f"SELECT count(*) {waiting}")
            return bool(said.fetchone()[0])

        try:
            yield is_waiting
        finally:
            said.execute(f"SELECT pg_terminate_backend(pid) {waiting}")
            said.execute("DROP FUNCTION stand_still CASCADE")


#: What the page says where no answer came.
LOST = re.compile("Failed to fetch|Network error|An error occurred|Could not launch", re.IGNORECASE)


def is_launch(route: Route) -> bool:
    asked = json.loads(route.request.post_data or "{}")
    return re.search(r"mutation \w*launch", asked.get("query", ""), re.IGNORECASE) is not None


def die_before(pages: Pages) -> None:
    pages.topology.services["webserver"].kill()
    pages.launch_button.click()
    expect(pages.page.get_by_text(LOST).first).to_be_visible()


def die_while_it_is_queued(pages: Pages) -> None:
    topology = pages.topology
    with queueing_waits(topology) as is_waiting:
        pages.launch_button.click()
        topology.wait_until(is_waiting, "the launch")
        topology.services["webserver"].kill()
    expect(pages.page.get_by_text(LOST).first).to_be_visible()


def die_before_the_answer(pages: Pages) -> None:
    killed = []

    def lose(route: Route) -> None:
        if not is_launch(route):
            route.continue_()
            return
        route.fetch()
        pages.topology.services["webserver"].kill()
        killed.append(True)
        route.abort()

    pages.page.route("**/graphql*", lose)
    pages.launch_button.click()
    expect(pages.page.get_by_text(LOST).first).to_be_visible()
    pages.page.unroute("**/graphql*")
    assert killed == [True]


class Approved:
    """A rollback that was planned and is approved: what to launch, and what came of it."""

    def __init__(self, topology: Topology, shop: Lakehouse):
        self.topology = topology
        self.shop = shop
        self.bad = shop.latest_version()
        self._known = {run["runId"] for run in topology.runs(pipelineName=APPLY)}
        planned = topology.must_run("shop_rollback_plan", {"to": str(self.bad - 1)})
        shown = [values(event) for event in topology.events(planned) if event.get("metadataEntries")]
        (config,) = [one[f"configuration of {APPLY}"] for one in shown if f"configuration of {APPLY}" in one]
        self.config = {**json.loads(config), "approved_by": APPROVER}

    def statuses(self) -> list[str]:
        """Return those of the runs since, the first one first."""
        runs = [run for run in self.topology.runs(pipelineName=APPLY) if run["runId"] not in self._known]
        return [run["status"] for run in reversed(runs)]

    def check_done_once(self) -> None:
        assert [info.operation for info in self.shop.history() if info.version > self.bad] == ["rollback"]
        assert rows(self.shop) == [1, 2, 3]
        check_lake(self.shop)


@pytest.fixture
def approved(topology: Topology, shop: Lakehouse) -> Approved:
    return Approved(topology, shop)


@pytest.mark.parametrize(
    ("die", "first", "second"),
    [
        (die_before, [], "SUCCESS"),
        (die_while_it_is_queued, ["NOT_STARTED"], "SUCCESS"),
        (die_before_the_answer, ["SUCCESS"], "FAILURE"),
    ],
)
def test_it_is_done_once_though_the_webserver_dies(
    pages: Pages, topology: Topology, approved: Approved, die: Callable[[Pages], None], first: list[str], second: str
) -> None:
    pages.edit(APPLY, approved.config)
    die(pages)
    pages.page.goto("about:blank")
    webserver = topology.services["webserver"]
    webserver.start()
    topology.wait_until(webserver.is_healthy, "the webserver")
    topology.wait_until(lambda: approved.statuses() == first, f"runs that are {first}")
    # An operator who did not look launches it again. Where it was done, the plan is another one by now.
    pages.launch(APPLY, approved.config, second.capitalize())
    assert approved.statuses() == [*first, second]
    approved.check_done_once()


def test_it_waits_for_a_daemon_that_is_dead(pages: Pages, topology: Topology, approved: Approved) -> None:
    daemon = topology.services["daemon"]
    daemon.kill()
    pages.edit(APPLY, approved.config)
    pages.launch_button.click()
    expect(pages.page.get_by_text("Queued", exact=True).first).to_be_visible()
    daemon.start()
    topology.wait_until(lambda: approved.statuses() == ["SUCCESS"], "the run")
    approved.check_done_once()
