"""A real Airflow in an environment of its own: its processes on a folder, and its API."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.environments import PROJECT
from tests.servers.daemons import free_port
from tests.servers.downloads import cached_folder

HERE = Path(__file__).parent
CONSTRAINTS = HERE / "constraints.txt"
PERSON, PASSWORD = "ana", "approves"
PATIENCE_S = 900.0
_INSTALL_S = 1_200

Found = TypeVar("Found")


def airflow_environment() -> Path:
    """Return the folder of programs of an environment with Airflow, made on the first run and kept. Ours is not there.

    Its packages are those of constraints.txt beside this file.
    """

    def install(folder: Path) -> None:
        uv = [str(Path(sys.executable).with_name("uv"))]
        environment = folder / "v"
        subprocess.run([*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, environment], check=True)
        into = ["--quiet", "--python", environment / "bin" / "python"]
        subprocess.run([*uv, "pip", "install", *into, "-r", CONSTRAINTS], check=True, timeout=_INSTALL_S)

    name = f"airflow-{hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:16]}"
    return cached_folder(name, install) / "v" / "bin"


def copy_source(folder: Path) -> Path:
    """Copy what this project is built of, as builds leave folders where they are made. Returns the folder."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, folder)
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "trinitylake_ops", folder / "trinitylake_ops", ignore=without)
    return folder


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel."""
    source = copy_source(folder / "source")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(
        [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


class Api:
    """The API of an Airflow, for a person who signed in."""

    def __init__(self, url: str):
        self.url = url
        self._token = ""

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """Ask the API, and return its answer. Where its database was locked or it is slow, it is asked again."""
        headers = {"Content-Type": "application/json"}
        if token is None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)

        def answer() -> str | None:
            try:
                with urllib.request.urlopen(request, timeout=60) as answered:
                    return str(answered.read().decode())
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise
            except TimeoutError:
                return None
            return None

        return json.loads(wait_for(answer) or "null")

    def sign_in(self, person: str, password: str) -> None:
        """Get a token of a person, when the server is there."""

        def token() -> str | None:
            try:
                return str(
                    self.ask("POST", "/auth/token", {"username": person, "password": password}, token="")[
                        "access_token"
                    ]
                )
            except (urllib.error.URLError, ConnectionError):
                return None

        self._token = wait_for(token)

    def wait_for_dag(self, dag: str) -> None:
        """Wait until a DAG was read."""

        def is_there() -> bool | None:
            try:
                self.ask("GET", f"/api/v2/dags/{dag}/details")
            except urllib.error.HTTPError as error:
                assert error.code == 404, error
                return None
            return True

        wait_for(is_there)

    def trigger(self, dag: str, run_id: str, conf: Any = None) -> None:
        """Begin a run of a DAG."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf or {}}
        try:
            self.ask("POST", f"/api/v2/dags/{dag}/dagRuns", body)
        except urllib.error.HTTPError as error:
            assert error.code == 409, error  # it had begun, and the answer was lost

    def state(self, dag: str, run_id: str) -> str:
        """Return the state of a run."""
        return str(self.ask("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}")["state"])

    def wait_for_run(self, dag: str, run_id: str, *states: str) -> str:
        """Wait until a run is in one of some states, by default ended."""
        wanted = states or ("success", "failed")
        return wait_for(lambda: state if (state := self.state(dag, run_id)) in wanted else None)

    def runs(self, dag: str) -> list[str]:
        """Return the ids of the runs of a DAG."""
        return [str(run["dag_run_id"]) for run in self.ask("GET", f"/api/v2/dags/{dag}/dagRuns")["dag_runs"]]

    def tries(self, dag: str, run_id: str, task: str) -> int:
        """Return how often a task of a run was begun."""
        return int(self.ask("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}")["try_number"])

    def task_state(self, dag: str, run_id: str, task: str) -> str | None:
        """Return the state of a task of a run."""
        state: str | None = self.ask("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}")["state"]
        return state

    def returned(self, dag: str, run_id: str, task: str) -> Any:
        """Return what a task returned."""
        path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}/xcomEntries/return_value"
        return self.ask("GET", f"{path}?deserialize=false&stringify=false")["value"]

    def clear(self, dag: str, run_id: str) -> None:
        """Clear all tasks of a run, so that it runs again."""
        body = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True}
        self.ask("POST", f"/api/v2/dags/{dag}/clearTaskInstances", body)


class Deployment(Api):
    """Airflow's processes. The plugin comes from the built wheel."""

    def __init__(self, folder: Path, dags: Sequence[Path], database: str | None):
        super().__init__(f"http://127.0.0.1:{free_port()}")
        self.folder = folder
        self._programs = airflow_environment()
        self._packages = folder / "packages"
        self._running: list[subprocess.Popen[bytes]] = []
        (folder / "dags").mkdir()
        (folder / "steps").mkdir()
        for dag in dags:
            shutil.copy(dag, folder / "dags")
        uv = Path(sys.executable).with_name("uv")
        wheel = build_wheel(folder / "wheel")
        into = ["--quiet", "--no-deps", "--python", self._programs / "python", "--target", self._packages]
        subprocess.run([uv, "pip", "install", *into, wheel], check=True, capture_output=True)
        (folder / "passwords.json").write_text(json.dumps({PERSON: PASSWORD}))
        self._environment = self._settings(database)

    def _settings(self, database: str | None) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        # However long others hold SQLite's lock on a busy machine.
        address = database or f"sqlite:///{self.folder / 'airflow.db'}?timeout=300"
        settings = {
            "DATABASE__SQL_ALCHEMY_CONN": address,
            "CORE__DAGS_FOLDER": self.folder / "dags",
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
            "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{PERSON}:admin",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": self.folder / "passwords.json",
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "CORE__PARALLELISM": "6",
            "CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "API__SECRET_KEY": "of-a-test",
            "API_AUTH__JWT_SECRET": "of-a-test-that-has-to-be-longer-than-sixty-four-bytes-for-its-algorithm",
            "API__PORT": self.url.rpartition(":")[2],
            "API__BASE_URL": self.url,
            "API__HOST": "127.0.0.1",
            "API__WORKERS": "1",
            # However busy the machine is.
            "CORE__DAGBAG_IMPORT_TIMEOUT": "600",
            "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "900",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "SCHEDULER__JOB_HEARTBEAT_SEC": "1",
            # What a scheduler that was killed left is taken over soon.
            "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "60",
            "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
            "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "120",
            # On a busy machine a scheduler may take the tasks of one that is only slow.
            "CORE__DEFAULT_TASK_RETRIES": "4",
            "CORE__DEFAULT_TASK_RETRY_DELAY": "1",
            "USAGE_DATA_COLLECTION__ENABLED": "False",
        }
        return {
            **kept,
            "AIRFLOW_HOME": str(self.folder),
            "PYTHONPATH": str(self._packages),
            "STEPS_OF": str(self.folder / "steps"),
            "NO_PROXY": "127.0.0.1",
            **{f"AIRFLOW__{name}": str(value) for name, value in settings.items()},
        }

    def run(self, *words: str) -> str:
        """Run the command line of Airflow, and return what it prints."""
        done = subprocess.run(
            [self._programs / "python", "-m", "airflow", *words],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a process of Airflow, whose output goes to a file of its name."""
        log = (self.folder / f"{'-'.join(words)}-{len(self._running)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [self._programs / "python", "-m", "airflow", *words],
                env=self._environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def replace_a_scheduler(self) -> None:
        """Kill a scheduler with all its workers and their tasks, as a lost machine does, and start another one.

        Workers that went on alone would keep the scheduler's connection to the database open, and with it its locks.
        """
        killed = next(process for process in self._running if "scheduler" in process.args and process.poll() is None)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        self.start("scheduler", "--skip-serve-logs")

    def notes(self, run_id: str) -> list[str]:
        """Return what the tasks of a run noted, each after the number of its try: see dags/killed_tasks.py."""
        return (self.folder / "steps" / run_id).read_text().splitlines()

    def steps(self, run_id: str) -> list[str]:
        """Return the names of the steps that the watched task of a run took in its first try."""
        noted = [note.removeprefix("1 ") for note in self.notes(run_id)]
        return [one for one in noted if one not in ("begun", "committed")]

    def stop(self) -> None:
        """End all processes, with all that they started."""
        for moment in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, moment)
            for process in self._running:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def wait_for_a_question(log: Path, dag: str, run_id: str, task: str) -> None:
    """Wait until a task asks a person, and the scheduler has seen by its log that it does.

    An answer before that begins the task while the scheduler takes it for ended. Then Airflow tries and asks again.
    """
    key = f"TaskInstanceKey(dag_id='{dag}', task_id='{task}', run_id='{run_id}'"
    seen = f"Received executor event with state success for task instance {key}"
    wait_for(lambda: seen in log.read_text(errors="replace") or None)


def wait_for(look: Callable[[], Found | None]) -> Found:
    """Return what a look finds at last."""
    end_s = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(1)
    return found


@contextmanager
def deployed(
    folder: Path, dags: Sequence[Path], *commands: Sequence[str], database: str | None = None, schedulers: int = 1
) -> Iterator[Deployment]:
    """Provide a running Airflow with some DAGs, after commands such as of a connection; it ends with the block.

    Without the address of a database, it is SQLite, which Airflow allows one scheduler alone.
    """
    airflow = Deployment(folder, dags, database)
    try:
        airflow.run("db", "migrate")
        for command in commands:
            airflow.run(*command)
        airflow.start("api-server")
        airflow.sign_in(PERSON, PASSWORD)
        airflow.start("dag-processor")
        airflow.start("triggerer", "--skip-serve-logs")
        for _ in range(schedulers):
            airflow.start("scheduler", "--skip-serve-logs")
        yield airflow
    finally:
        airflow.stop()
