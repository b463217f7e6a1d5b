"""A real Airflow deployment: its processes in a separate environment and folder, and a client of its API."""

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
USER, PASSWORD = "ana", "approves"
TIMEOUT_S = 900.0
_INSTALL_TIMEOUT_S = 1_200

Value = TypeVar("Value")


def airflow_environment() -> Path:
    """Return the programs folder of an environment with Airflow, which is created once and cached.

    It contains the packages of constraints.txt in this folder, without this project.
    """

    def install(folder: Path) -> None:
        uv = [str(Path(sys.executable).with_name("uv"))]
        environment = folder / "v"
        subprocess.run([*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, environment], check=True)
        options = ["--quiet", "--python", environment / "bin" / "python"]
        subprocess.run([*uv, "pip", "install", *options, "-r", CONSTRAINTS], check=True, timeout=_INSTALL_TIMEOUT_S)

    name = f"airflow-{hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:16]}"
    return cached_folder(name, install) / "v" / "bin"


def copy_source(folder: Path) -> Path:
    """Copy the sources of this project, because builds leave files in the folder. Return the new folder."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "trinitylake_ops", folder / "trinitylake_ops", ignore=ignore)
    return folder


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this project."""
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
    """A client of the Airflow API for a signed-in user."""

    def __init__(self, url: str):
        self.url = url
        self._token = ""

    def request(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """Send a request and return the response. Retry if the database is locked or the server is slow."""
        headers = {"Content-Type": "application/json"}
        if token is None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        http_request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)

        def send() -> str | None:
            try:
                with urllib.request.urlopen(http_request, timeout=60) as response:
                    return str(response.read().decode())
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise
            except TimeoutError:
                return None
            return None

        return json.loads(wait_for(send) or "null")

    def sign_in(self, user: str, password: str) -> None:
        """Wait until the server is ready, and get a token for a user."""

        def token() -> str | None:
            try:
                return str(
                    self.request("POST", "/auth/token", {"username": user, "password": password}, token="")[
                        "access_token"
                    ]
                )
            except (urllib.error.URLError, ConnectionError):
                return None

        self._token = wait_for(token)

    def wait_for_dag(self, dag: str) -> None:
        """Wait until a DAG is loaded."""

        def is_loaded() -> bool | None:
            try:
                self.request("GET", f"/api/v2/dags/{dag}/details")
            except urllib.error.HTTPError as error:
                assert error.code == 404, error
                return None
            return True

        wait_for(is_loaded)

    def trigger(self, dag: str, run_id: str, conf: Any = None) -> None:
        """Start a run of a DAG."""
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf or {}}
        try:
            self.request("POST", f"/api/v2/dags/{dag}/dagRuns", body)
        except urllib.error.HTTPError as error:
            assert error.code == 409, error  # the run was created by an earlier attempt whose response was lost

    def state(self, dag: str, run_id: str) -> str:
        """Return the state of a run."""
        return str(self.request("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}")["state"])

    def wait_for_run(self, dag: str, run_id: str, *states: str) -> str:
        """Wait until a run is in one of the states, by default until it has ended."""
        expected = states or ("success", "failed")
        return wait_for(lambda: state if (state := self.state(dag, run_id)) in expected else None)

    def runs(self, dag: str) -> list[str]:
        """Return the ids of the runs of a DAG."""
        return [str(run["dag_run_id"]) for run in self.request("GET", f"/api/v2/dags/{dag}/dagRuns")["dag_runs"]]

    def n_tries(self, dag: str, run_id: str, task: str) -> int:
        """Return the number of tries of a task."""
        return int(self.request("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}")["try_number"])

    def task_state(self, dag: str, run_id: str, task: str) -> str | None:
        """Return the state of a task."""
        state: str | None = self.request("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}")["state"]
        return state

    def return_value(self, dag: str, run_id: str, task: str) -> Any:
        """Return the return value of a task."""
        path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}/xcomEntries/return_value"
        return self.request("GET", f"{path}?deserialize=false&stringify=false")["value"]

    def clear(self, dag: str, run_id: str) -> None:
        """Clear all tasks of a run, so that it starts again."""
        body = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True}
        self.request("POST", f"/api/v2/dags/{dag}/clearTaskInstances", body)


class Deployment(Api):
    """The processes of an Airflow with the plugin installed from a wheel."""

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
        options = ["--quiet", "--no-deps", "--python", self._programs / "python", "--target", self._packages]
        subprocess.run([uv, "pip", "install", *options, wheel], check=True, capture_output=True)
        (folder / "passwords.json").write_text(json.dumps({USER: PASSWORD}))
        self._environment = self._settings(database)

    def _settings(self, database: str | None) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        # The timeout is long because other processes hold SQLite's lock on a busy machine.
        address = database or f"sqlite:///{self.folder / 'airflow.db'}?timeout=300"
        settings = {
            "DATABASE__SQL_ALCHEMY_CONN": address,
            "CORE__DAGS_FOLDER": self.folder / "dags",
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
            "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
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
            # Long timeouts for busy machines.
            "CORE__DAGBAG_IMPORT_TIMEOUT": "600",
            "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "900",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "SCHEDULER__JOB_HEARTBEAT_SEC": "1",
            # Another scheduler quickly adopts the tasks of a killed scheduler.
            "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "60",
            "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
            "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "120",
            # On a busy machine, a scheduler may adopt the tasks of a scheduler that is only slow.
            "CORE__DEFAULT_TASK_RETRIES": "4",
            "CORE__DEFAULT_TASK_RETRY_DELAY": "1",
            "USAGE_DATA_COLLECTION__ENABLED": "False",
        }
        return {
            **inherited,
            "AIRFLOW_HOME": str(self.folder),
            "PYTHONPATH": str(self._packages),
            "STEPS_FOLDER": str(self.folder / "steps"),
            "NO_PROXY": "127.0.0.1",
            **{f"AIRFLOW__{name}": str(value) for name, value in settings.items()},
        }

    def run(self, *arguments: str) -> str:
        """Run a command of Airflow, and return its output."""
        process = subprocess.run(
            [self._programs / "python", "-m", "airflow", *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, f"{process.stdout[-3_000:]}\n{process.stderr[-3_000:]}"
        return process.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process of Airflow that writes its output to a file named after the command."""
        log = (self.folder / f"{'-'.join(arguments)}-{len(self._running)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [self._programs / "python", "-m", "airflow", *arguments],
                env=self._environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def replace_scheduler(self) -> None:
        """Kill a scheduler with all its workers and tasks, as when its machine fails, and start another one.

        If the workers continued, they would keep the scheduler's database connection open, including its locks.
        """
        scheduler = next(process for process in self._running if "scheduler" in process.args and process.poll() is None)
        os.killpg(scheduler.pid, signal.SIGKILL)
        scheduler.wait()
        self.start("scheduler", "--skip-serve-logs")

    def notes(self, run_id: str) -> list[str]:
        """Return the recorded steps of a run's tasks, each prefixed with its try number (see dags/killed_tasks.py)."""
        return (self.folder / "steps" / run_id).read_text().splitlines()

    def steps(self, run_id: str) -> list[str]:
        """Return the names of the storage steps in the first try of the run's watched task."""
        names = [name.removeprefix("1 ") for name in self.notes(run_id)]
        return [step for step in names if step not in ("started", "committed")]

    def stop(self) -> None:
        """Stop all processes with their children."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, signal_number)
            for process in self._running:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def wait_for_approval_request(log: Path, dag: str, run_id: str, task: str) -> None:
    """Wait until a task requests an approval and, according to its log, the scheduler has processed this.

    If the approval arrives earlier, the task starts while the scheduler still assumes that it has ended, and Airflow
    requests the approval again.
    """
    key = f"TaskInstanceKey(dag_id='{dag}', task_id='{task}', run_id='{run_id}'"
    expected_line = f"Received executor event with state success for task instance {key}"
    wait_for(lambda: expected_line in log.read_text(errors="replace") or None)


def wait_for(probe: Callable[[], Value | None]) -> Value:
    """Poll until a probe returns a value other than None."""
    end_s = time.monotonic() + TIMEOUT_S
    while (value := probe()) is None:
        assert time.monotonic() < end_s, "timed out"
        time.sleep(1)
    return value


@contextmanager
def running_deployment(
    folder: Path, dags: Sequence[Path], *commands: Sequence[str], database: str | None = None, schedulers: int = 1
) -> Iterator[Deployment]:
    """Provide a running Airflow with DAGs, after running commands such as adding a connection; stop it after the block.

    Without a database address it uses SQLite, with which Airflow only supports one scheduler.
    """
    airflow = Deployment(folder, dags, database)
    try:
        airflow.run("db", "migrate")
        for command in commands:
            airflow.run(*command)
        airflow.start("api-server")
        airflow.sign_in(USER, PASSWORD)
        airflow.start("dag-processor")
        airflow.start("triggerer", "--skip-serve-logs")
        for _ in range(schedulers):
            airflow.start("scheduler", "--skip-serve-logs")
        yield airflow
    finally:
        airflow.stop()
