"""A real Airflow: tasks that are killed, cleared runs and two schedulers publish once; a person approves a plan."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import expect

from tests.airflow.deployment import HERE, PASSWORD, PERSON, Deployment, deployed, wait_for
from tests.e2e.browser import opened_page
from tests.environments import PROJECT
from tests.local_clock import LocalClock
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.tables import catalog_at
from trinitylake_ops.tables.writing.arrow_writer import stage_arrow
from trinitylake_ops.tables.writing.publication import publication_id, publish_once

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(3_000)]

EXAMPLES = PROJECT / "trinitylake_ops" / "airflow_plugin" / "example_dags"


def append(lake: Lakehouse, table: str, rows: pa.Table) -> None:
    """Commit as another program does."""
    staged = stage_arrow(lake, rows, "sales", table, mode="append")
    publish_once(lake, [staged], publication_id(staged.metadata_location))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lakehouse:
    """A lakehouse with versions of yesterday, which may expire."""
    with pytest.MonkeyPatch.context() as patch:
        LocalClock(patch).forward(-24)
        lake = Lakehouse.create(str(tmp_path_factory.mktemp("lake") / "lake"), {"fsync": "false"})
        for number in range(4):
            append(lake, "old", pa.table({"n": [number]}))
    return Lakehouse.open(lake.root, {"fsync": "false"})


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, lake: Lakehouse) -> Iterator[Deployment]:
    dags = [HERE / "dags" / "killed.py", EXAMPLES / "example_trinitylake.py"]
    with deployed(tmp_path_factory.mktemp("airflow"), lake.root, dags, schedulers=2) as deployment:
        yield deployment


def column(lake: Lakehouse, table: str, name: str) -> Counter[int]:
    return Counter(catalog_at(lake).load_table(table).scan().to_arrow()[name].to_pylist())


def publications(lake: Lakehouse) -> Counter[str | None]:
    """Return how many versions each run published."""
    infos = lake.history(lake.latest_version() + 1)
    return Counter(info.run_id for info in infos if info.operation == "publish" and info.run_id)


def test_a_killed_or_cleared_task_publishes_once_beside_two_schedulers(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("killed")
    # How many steps there are is told by runs that nobody kills.
    for task in ("load", "publish"):
        airflow.trigger("killed", f"whole-{task}", {"id": len(task), "task": task, "at": 0, "moment": "before"})
        assert airflow.wait_for_run("killed", f"whole-{task}") == "success"
    wanted = {4, 7}
    steps = {task: len(list((airflow.folder / "steps").glob(f"{task}-*"))) for task in ("load", "publish")}
    assert steps["publish"] >= 3 and steps["load"] >= 3
    each = [(task, at) for task, most in steps.items() for at in range(1, most + 1)]
    killed = [(task, at, moment) for task, at in each for moment in ("before", "after")]
    killed.append(("publish", 0, "told"))
    for number, (task, at, moment) in enumerate(killed, 100):
        airflow.trigger("killed", f"k{number}", {"id": number, "task": task, "at": at, "moment": moment})
        wanted.add(number)
    wait_for(lambda: airflow.state("killed", "k110") != "queued" or None)
    airflow.replace_a_scheduler()
    for number, (task, at, moment) in enumerate(killed, 100):
        assert airflow.wait_for_run("killed", f"k{number}") == "success", (task, at, moment)
        if (airflow.folder / "steps" / f"killed-k{number}").exists():
            assert airflow.tries("killed", f"k{number}", task) >= 2, (task, at, moment)
    assert column(lake, "sales.killed", "id") == Counter(wanted)
    assert set(publications(lake).values()) == {1}
    assert airflow.returned("killed", f"k{99 + len(killed)}", "publish")["was_published"]
    told = sum(airflow.returned("killed", f"k{number}", "publish")["was_published"] for number in wanted - {4, 7})
    n_killed = len(list((airflow.folder / "steps").glob("killed-*")))
    assert n_killed >= len(killed) * 3 // 4  # beside others a publication may take fewer steps
    version = lake.latest_version()
    cleared = [f"k{number}" for number in range(100, 100 + len(killed))]
    for run_id in cleared:
        airflow.clear("killed", run_id)
    for run_id in cleared:
        assert airflow.wait_for_run("killed", run_id) == "success"
        assert airflow.returned("killed", run_id, "publish")["was_published"]
    assert column(lake, "sales.killed", "id") == Counter(wanted)
    assert lake.latest_version() == version
    assert maintenance.verify(lake, deep=True).findings == ()
    print(f"killed {n_killed} tasks at {steps} steps; {len(wanted)} runs, {told} told what was there; {version=}")


def test_a_cleared_run_replaces_where_that_is_asked_for(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("replaced")
    airflow.trigger("replaced", "once")
    assert airflow.wait_for_run("replaced", "once") == "success"
    airflow.clear("replaced", "once")
    wait_for(lambda: airflow.tries("replaced", "once", "publish") == 2 or None)
    assert airflow.wait_for_run("replaced", "once") == "success"
    assert column(lake, "sales.replaced", "cleared") == {1: 1}
    assert publications(lake)["replaced/once"] == 2
    airflow.trigger("refused", "once")
    assert airflow.wait_for_run("refused", "once") == "failed"


def test_a_rejected_plan_is_not_applied(airflow: Deployment, lake: Lakehouse) -> None:
    dag, run_id = "trinitylake_upkeep", "rejected"
    airflow.wait_for_dag(dag)
    airflow.trigger(dag, run_id)
    wait_for(lambda: airflow.task_state(dag, run_id, "expire.approve") == "deferred" or None)
    path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/expire.approve/-1/hitlDetails"
    airflow.ask("PATCH", path, {"chosen_options": ["Reject"], "params_input": {}})
    airflow.wait_for_run(dag, run_id)
    assert airflow.task_state(dag, run_id, "expire.apply") == "skipped"
    assert "expire" not in {info.operation for info in lake.history(lake.latest_version() + 1)}


def test_a_person_approves_a_plan(airflow: Deployment, lake: Lakehouse, tmp_path: Path) -> None:
    dag, run_id = "trinitylake_upkeep", "approved"
    airflow.wait_for_dag(dag)
    airflow.trigger(dag, run_id)
    wait_for(lambda: airflow.task_state(dag, run_id, "expire.approve") == "deferred" or None)
    plan = airflow.returned(dag, run_id, "expire.plan")
    assert not plan["is_empty"]
    with opened_page() as page:
        page.goto(f"{airflow.url}/auth/login/")
        page.get_by_label("Username").fill(PERSON)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in").click()
        page.goto(f"{airflow.url}/dags/{dag}/runs/{run_id}/tasks/expire.approve/required_actions")
        expect(page.get_by_text("Approve the plan of expire?").first).to_be_visible()
        page.screenshot(path=tmp_path / "approval.png", full_page=True)
        page.get_by_role("button", name="Approve").click()
        wait_for(lambda: airflow.state(dag, run_id) != "running" or None)
        assert airflow.state(dag, run_id) == "success"
    info = next(info for info in lake.history(20) if info.operation == "expire")
    assert (info.approved_by, info.run_id) == (PERSON, f"{dag}/{run_id}")
    assert airflow.returned(dag, run_id, "expire.apply")["versions"] == plan["versions"]
    shutil.copy(tmp_path / "approval.png", airflow.folder.parent)


def test_the_example_publishes_and_a_watcher_follows_commits_of_others(airflow: Deployment, lake: Lakehouse) -> None:
    assert "trinitylake" in airflow.run("providers", "hooks")
    dag, follow = "trinitylake_publish", "trinitylake_follow"
    airflow.wait_for_dag(follow)
    (scheduled,) = wait_for(lambda: airflow.runs(dag) or None)
    assert airflow.wait_for_run(dag, scheduled) == "success"
    airflow.trigger(dag, "by-hand")
    assert airflow.wait_for_run(dag, "by-hand") == "success"
    assert airflow.returned(dag, "by-hand", "publish")["lakehouse_version"] == lake.latest_version()
    assert column(lake, "sales.orders", "amount") == {9.5: 1, 20.0: 1}

    def told(rows: int) -> bool | None:
        """Whether a run that follows has counted so many rows."""
        ended = [run_id for run_id in airflow.runs(follow) if airflow.state(follow, run_id) == "success"]
        return any(airflow.returned(follow, run_id, "count") == rows for run_id in ended) or None

    wait_for(lambda: told(2))
    append(lake, "orders", pa.table({"day": ["2020-01-01"], "amount": [7.0]}))
    wait_for(lambda: told(3))


def test_sensors_wait_for_a_commit(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("waits")
    airflow.trigger("waits", "w")
    wait_for(lambda: airflow.task_state("waits", "w", "deferred") == "deferred" or None)
    wait_for(lambda: airflow.task_state("waits", "w", "poking") == "running" or None)
    append(lake, "awaited", pa.table({"n": [1]}))
    version = lake.latest_version()
    assert airflow.wait_for_run("waits", "w") == "success"
    assert {airflow.returned("waits", "w", task) for task in ("deferred", "poking")} == {version}
