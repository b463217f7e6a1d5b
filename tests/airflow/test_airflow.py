"""A real Airflow: killed tasks, cleared runs and two schedulers publish once, and a user approves a plan."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import expect

from tests.airflow.deployment import (
    HERE,
    PASSWORD,
    USER,
    Deployment,
    running_deployment,
    wait_for,
    wait_for_approval_request,
)
from tests.docs.pages import DOCS, snippets
from tests.e2e.browser import WIDTH, opened_page
from tests.environments import PROJECT
from tests.local_clock import LocalClock
from tests.servers.daemons import free_port
from tests.servers.postgres import Postgres, postgres
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(7_200)]

#: The step that commits, as named in dags/killed_tasks.py.
COMMIT = "create root 1"
EXAMPLES = PROJECT / "trinitylake_ops" / "airflow_plugin" / "example_dags"


def append(lake: Lakehouse, table: str, rows: pa.Table) -> None:
    """Commit rows as another program does."""
    staged = stage_arrow(lake, rows, "sales", table, mode="append")
    publish_once(lake, [staged], publication_id(staged.metadata_location))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lakehouse:
    """A lakehouse with versions from two days ago, which may expire."""
    folder = tmp_path_factory.mktemp("lake") / "lake"
    with pytest.MonkeyPatch.context() as patch:
        LocalClock(patch).forward(-48)
        lake = Lakehouse.create(str(folder), {"fsync": "false"})
        for number in range(4):
            append(lake, "old", pa.table({"n": [number]}))
    two_days_ago_s = time.time() - 48 * 3_600
    for path in folder.rglob("*"):
        os.utime(path, (two_days_ago_s, two_days_ago_s))
    return Lakehouse.open(lake.root, {"fsync": "false"})


def connection_to(lake: Lakehouse) -> list[str]:
    """Return the arguments of the documented command that adds a connection to the lakehouse."""
    (documented,) = (
        snippet.text for snippet in snippets(DOCS / "deploy" / "airflow.md") if "--conn-json" in snippet.text
    )
    program, *arguments = shlex.split(documented.replace("s3://bucket/lake", lake.root))
    assert program == "airflow"
    return arguments


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, lake: Lakehouse) -> Iterator[Deployment]:
    """An Airflow on SQLite with one scheduler."""
    dags = [HERE / "dags" / "killed_tasks.py", EXAMPLES / "example_trinitylake.py"]
    extra = json.dumps({"storage_options": {"fsync": "false"}})
    host = ["--conn-type", "trinitylake", "--conn-host", lake.root]
    with_extra = ["connections", "add", "trinitylake_with_extra", *host, "--conn-extra", extra]
    with running_deployment(tmp_path_factory.mktemp("airflow"), dags, connection_to(lake), with_extra) as deployment:
        yield deployment


@contextmanager
def airflow_on_postgres(folder: Path, server: Postgres, lake: Lakehouse) -> Iterator[Deployment]:
    """Provide an Airflow on Postgres with two schedulers."""
    address = f"postgresql+psycopg2://{server.user}:{server.password}@127.0.0.1:{server.port}/{server.database}"
    command, dags = ["postgres", "-p", str(server.port)], [HERE / "dags" / "killed_tasks.py"]
    folder.mkdir()
    with (
        postgres(server, command, folder / "postgres.log"),
        running_deployment(folder, dags, connection_to(lake), database=address, schedulers=2) as deployment,
    ):
        yield deployment


def queued_tries(server: Postgres) -> dict[int, int]:
    """Return the number of task tries that each scheduler has queued according to Airflow's database."""
    tries_query = (
        "SELECT queued_by_job_id AS job FROM task_instance UNION ALL SELECT queued_by_job_id FROM task_instance_history"
    )
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(
            f"SELECT job, count(*) FROM ({tries_query}) AS tries WHERE job IS NOT NULL GROUP BY job ORDER BY job"
        )
        return dict(cursor.fetchall())


def column(lake: Lakehouse, table: str, name: str) -> Counter[int]:
    """Count the values of a column, except those of the rows that dags/killed_tasks.py appends as another program."""
    values = catalog_at(lake).load_table(table).scan().to_arrow()[name].to_pylist()
    return Counter(value for value in values if value != -1)


def publications(lake: Lakehouse) -> Counter[str | None]:
    """Count the versions that each run published."""
    infos = lake.history(lake.latest_version() + 1)
    return Counter(info.run_id for info in infos if info.operation == "publish" and info.run_id)


@dataclass(frozen=True)
class Kill:
    """Where and how tries of a task are killed (see dags/killed_tasks.py)."""

    task: str
    step: str
    timing: str
    scope: str = "task"
    tries: int = 1


def kills_around(steps: dict[str, list[str]]) -> list[Kill]:
    """Return kills before and after each step of both tasks, and more kills around the commit."""
    return [
        *(Kill(task, step, timing) for task in steps for step in steps[task] for timing in ("before", "after")),
        Kill("load", "", "returned"),
        Kill("publish", "", "returned", tries=3),
        Kill("publish", COMMIT, "before", tries=3),
        Kill("load", steps["load"][-1], "after", scope="machine"),
        Kill("publish", COMMIT, "before", scope="machine"),
        Kill("publish", COMMIT, "after", scope="machine"),
        Kill("publish", COMMIT, "before", scope="supervisor"),
    ]


def test_killed_or_cleared_task_publishes_once_with_two_schedulers(tmp_path: Path) -> None:
    server = Postgres(free_port(), "airflow", "airflow", "of-a-test")
    lake = Lakehouse.create(str(tmp_path / "lake"))
    with airflow_on_postgres(tmp_path / "airflow", server, lake) as airflow:
        kill_and_clear(airflow, server, lake)
    assert operations.verify(lake, deep=True).findings == ()


def kill_and_clear(airflow: Deployment, server: Postgres, lake: Lakehouse) -> None:
    airflow.wait_for_dag("killed")
    # Runs without kills record which steps exist. The first run creates the table.
    expected_ids = {}
    for number, task in enumerate(("publish", "load", "publish")):
        airflow.trigger("killed", run_id := f"complete-{number}", {"id": number, "task": task})
        assert airflow.wait_for_run("killed", run_id) == "success"
        expected_ids[run_id] = number
    steps = {task: airflow.steps(f"complete-{number}") for number, task in ((1, "load"), (2, "publish"))}
    assert COMMIT in steps["publish"] and COMMIT not in steps["load"]
    killed = {f"k{number}": kill for number, kill in enumerate(kills_around(steps), 100)}
    for run_id, kill in killed.items():
        expected_ids[run_id] = int(run_id[1:])
        airflow.trigger("killed", run_id, {"id": expected_ids[run_id], **asdict(kill)})
    wait_for(lambda: len(queued_tries(server)) == 2 or None)
    airflow.replace_scheduler()
    n_killed: Counter[str] = Counter()
    not_reached, n_committed = [], 0
    for run_id, kill in killed.items():
        assert airflow.wait_for_run("killed", run_id) == "success", kill
        notes = airflow.notes(run_id)
        tries = [note for note in notes if note[1:].startswith(" killed")]
        n_killed[kill.scope] += len(tries)
        assert len({*tries}) == len(tries) and "timed out" not in str(notes), notes
        if len(tries) < kill.tries:  # a publication may take fewer steps while other runs publish
            not_reached.append(kill)
        else:
            assert airflow.n_tries("killed", run_id, kill.task) > kill.tries, kill
        if kill.task == "publish":
            (committing_try,) = (note[0] for note in notes if note[1:] == " committed")
            last_try = max(note[0] for note in notes)
            was_published = airflow.return_value("killed", run_id, "publish")["was_published"]
            assert was_published == (committing_try != last_try), (kill, notes)
            n_committed += was_published
    assert not [kill for kill in not_reached if kill.task == "load" or kill.step in ("", COMMIT)]
    assert column(lake, "sales.killed", "id") == Counter(expected_ids.values())
    expected_publications = dict.fromkeys((f"killed/{name}" for name in expected_ids), 1)
    assert publications(lake) == expected_publications
    for run_id in killed:
        airflow.clear("killed", run_id)
    for run_id in killed:
        assert airflow.wait_for_run("killed", run_id) == "success"
        assert airflow.return_value("killed", run_id, "publish")["was_published"]
    assert column(lake, "sales.killed", "id") == Counter(expected_ids.values())
    assert publications(lake) == expected_publications
    n_queued = queued_tries(server)
    assert len(n_queued) == 3, n_queued  # the two initial schedulers, and the replacement of the killed one
    print(f"steps: {steps}")
    print(f"killed: {dict(n_killed)}, {n_committed} of them had committed; not reached: {not_reached}")
    print(f"{len(expected_ids)} runs, {len(killed)} of them cleared; tasks queued by each scheduler: {n_queued}")


def test_cleared_run_replaces_if_configured(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("replaced")
    airflow.trigger("replaced", "once")
    assert airflow.wait_for_run("replaced", "once") == "success"
    airflow.clear("replaced", "once")
    wait_for(lambda: airflow.n_tries("replaced", "once", "publish") == 2 or None)
    assert airflow.wait_for_run("replaced", "once") == "success"
    assert column(lake, "sales.replaced", "cleared") == {1: 1}
    assert publications(lake)["replaced/once"] == 2
    airflow.trigger("rejected", "once")
    assert airflow.wait_for_run("rejected", "once") == "failed"


def test_rejected_plan_is_not_applied(airflow: Deployment, lake: Lakehouse) -> None:
    """This test runs before the one that approves a plan, because afterwards no version can expire."""
    dag, run_id = "trinitylake_maintenance", "rejected"
    airflow.wait_for_dag(dag)
    airflow.trigger(dag, run_id)
    wait_for(lambda: airflow.task_state(dag, run_id, "expire.approve") == "awaiting_input" or None)
    wait_for_approval_request(next(airflow.folder.glob("scheduler*.log")), dag, run_id, "expire.approve")
    path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/expire.approve/-1/hitlDetails"
    airflow.request("PATCH", path, {"chosen_options": ["Reject"], "params_input": {}})
    airflow.wait_for_run(dag, run_id)
    assert airflow.task_state(dag, run_id, "expire.apply") == "skipped"
    assert "expire" not in {info.operation for info in lake.history(lake.latest_version() + 1)}


def test_user_approves_plan(airflow: Deployment, lake: Lakehouse) -> None:
    """``python -m scripts.make_airflow_picture`` runs this test and copies its screenshot into the documentation."""
    dag, run_id = "trinitylake_maintenance", "approved"
    airflow.wait_for_dag(dag)
    airflow.trigger(dag, run_id)
    wait_for(lambda: airflow.task_state(dag, run_id, "expire.approve") == "awaiting_input" or None)
    wait_for_approval_request(next(airflow.folder.glob("scheduler*.log")), dag, run_id, "expire.approve")
    plan = airflow.return_value(dag, run_id, "expire.plan")
    assert not plan["is_empty"]
    with opened_page() as page:
        page.goto(f"{airflow.url}/auth/login/")
        page.get_by_label("Username").fill(USER)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda current_url: "/auth/login" not in current_url)
        page.set_viewport_size({"width": WIDTH, "height": 1_250})  # shows the buttons
        page.goto(f"{airflow.url}/dags/{dag}/runs/{run_id}/tasks/expire.approve/required_actions")
        expect(page.get_by_text("Approve the plan of expire?").first).to_be_visible()
        page.screenshot(path=airflow.folder / "airflow-approval.png", animations="disabled")
        page.get_by_role("button", name="Approve").click()
        wait_for(lambda: airflow.state(dag, run_id) != "running" or None)
        assert airflow.state(dag, run_id) == "success"
    info = next(info for info in lake.history(20) if info.operation == "expire")
    assert (info.approved_by, info.run_id) == (USER, f"{dag}/{run_id}")
    assert airflow.return_value(dag, run_id, "expire.apply")["versions"] == plan["versions"]


def test_example_publishes_and_follows_commits_of_other_writers(airflow: Deployment, lake: Lakehouse) -> None:
    assert "trinitylake" in airflow.run("providers", "hooks")
    dag, follow_dag = "trinitylake_publish", "trinitylake_follow"
    airflow.wait_for_dag(follow_dag)
    (scheduled,) = wait_for(lambda: airflow.runs(dag) or None)
    assert airflow.wait_for_run(dag, scheduled) == "success"
    airflow.trigger(dag, "manual")
    assert airflow.wait_for_run(dag, "manual") == "success"
    assert airflow.return_value(dag, "manual", "publish")["lakehouse_version"] == lake.latest_version()
    assert column(lake, "sales.orders", "amount") == {9.5: 1, 20.0: 1}

    def has_counted(rows: int) -> bool | None:
        """Return True if a run of the DAG that follows commits has counted this number of rows."""
        ended = [run_id for run_id in airflow.runs(follow_dag) if airflow.state(follow_dag, run_id) == "success"]
        return any(airflow.return_value(follow_dag, run_id, "count") == rows for run_id in ended) or None

    wait_for(lambda: has_counted(2))
    append(lake, "orders", pa.table({"day": ["2020-01-01"], "amount": [7.0]}))
    wait_for(lambda: has_counted(3))


def test_sensors_wait_for_a_commit(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("sensors")
    airflow.trigger("sensors", "w")
    wait_for(lambda: airflow.task_state("sensors", "w", "deferred") == "deferred" or None)
    wait_for(lambda: airflow.task_state("sensors", "w", "poking") == "running" or None)
    append(lake, "awaited", pa.table({"n": [1]}))
    version = lake.latest_version()
    assert airflow.wait_for_run("sensors", "w") == "success"
    assert {airflow.return_value("sensors", "w", task) for task in ("deferred", "poking")} == {version}


def test_concurrent_coroutines_open_connections(airflow: Deployment, lake: Lakehouse) -> None:
    airflow.wait_for_dag("coroutines")
    airflow.trigger("coroutines", "t")
    assert airflow.wait_for_run("coroutines", "t") == "success"
    assert airflow.return_value("coroutines", "t", "open_concurrently") == [lake.root]
