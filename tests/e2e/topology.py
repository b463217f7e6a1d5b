"""The deployment of ``deploy/`` as processes on the loopback interface, with other hosts, ports and folders.

Commands, variables and their defaults are read from ``deploy/compose.yaml``, and files and folders from
``deploy/Dockerfile``, so the tests cover what is shipped. Not tested: Docker's images, volumes and networks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.credentials.canaries import leaks
from tests.credentials.server import CanaryServer, canary_server
from tests.e2e.graphql import TIMEOUT_SECONDS, Webserver
from tests.servers.daemons import ServerStartError, die_with_parent, free_port, listens, log_tail
from tests.servers.postgres import Postgres, postgres

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DEFINITIONS = Path(__file__).with_name("deployed_definitions.py")
LOCATION, CODE_REPOSITORY = "trinitylake", "__repository__"
#: Password of the database, which must only be in the environment of processes.
POSTGRES_PASSWORD = "LeakCanaryDatabase/Password+0123456789"

_POLL_SECONDS = 0.5
_REFERENCE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?(?P<error>[^}]*))?\}")
# The variables of this process that programs need.
_INHERITED_VARIABLES = ("HOME", "LANG", "PATH", "TMPDIR", "TZ")


def secrets_in(text: str) -> list[str]:
    """Return descriptions of the S3 credentials, in any form, and of the database password that a text contains."""
    return leaks(text) + ([f"the password: {POSTGRES_PASSWORD}"] if POSTGRES_PASSWORD in text else [])


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace variable references in a part of a compose file, like Docker Compose."""
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}

    def replacement(match: re.Match[str]) -> str:
        name = match["name"]
        if variables.get(name):
            return variables[name]
        assert match["error"] is None, f"{name}: {match['error']}"
        return match["default"] or ""

    return _REFERENCE.sub(replacement, value) if isinstance(value, str) else value


class Image:
    """Files and variables of the Dockerfile, with a folder as the root of the file system."""

    def __init__(self, dockerfile: Path, root: Path):
        self.root = root
        self.environment: dict[str, str] = {}
        self.working_folder = root
        joined = dockerfile.read_text().replace("\\\n", " ")
        for line in joined.splitlines():
            instruction, _, rest = line.partition(" ")
            if instruction == "ENV":
                name, _, value = rest.partition("=")
                self.environment[name] = self.inside(value)
            elif instruction == "WORKDIR":
                self.working_folder = Path(self.inside(rest))
            elif instruction == "COPY":
                *sources, target = shlex.split(rest)
                self._copy(sources, self.working_folder / self.inside(target))

    def inside(self, path: str) -> str:
        """Return an absolute path below the root; other values are unchanged."""
        return str(self.root / path.removeprefix("/")) if path.startswith("/") else path

    def _copy(self, sources: list[str], target: Path) -> None:
        for source in sources:
            path = target if (REPOSITORY / source).is_dir() else target / Path(source).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(REPOSITORY / source)


class Service:
    """A service of the compose file as a process, in a separate process group."""

    def __init__(self, name: str, definition: Mapping[str, Any], variables: Mapping[str, str], image: Image):
        self.name = name
        self.command = [str(argument) for argument in definition["command"]]
        self.healthcheck = [str(argument) for argument in definition.get("healthcheck", {}).get("test", [])][1:]
        environment = {
            key: variables.get(key) if value is None else value for key, value in definition["environment"].items()
        }
        self.environment = {
            **{key: os.environ[key] for key in _INHERITED_VARIABLES if key in os.environ},
            "PYTHONPATH": str(REPOSITORY),
            # On a busy machine it may take more than Dagster's 60 seconds to start the process of a run.
            "DAGSTER_GRPC_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
            **image.environment,
            **{key: str(value) for key, value in environment.items() if value is not None},
        }
        self.log = image.root / f"{name}.log"
        self._folder = image.working_folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._program(self.command), env=self.environment, cwd=self._folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def run_to_end(self) -> None:
        """Start the service and wait until it ends successfully. Raises ServerStartError."""
        self.start()
        assert self._process is not None
        if self._process.wait(TIMEOUT_SECONDS):
            raise ServerStartError(f"{self.name} failed; its log:\n{log_tail(self.log)}")

    def check(self) -> None:
        """Raise ServerStartError if the service has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerStartError(f"{self.name} ended; its log:\n{log_tail(self.log)}")

    def is_healthy(self) -> bool:
        """Run the service's health check."""
        process = subprocess.run(self._program(self.healthcheck), env=self.environment, cwd=self._folder, timeout=60)
        return process.returncode == 0

    def terminate(self) -> int:
        """Terminate the service, and return its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill the service with all its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # the process and its children have ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @staticmethod
    def _program(command: list[str]) -> list[str]:
        """Return a command with the program of this Python environment."""
        return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


class Topology(Webserver):
    """The running deployment. Call ``stop`` when it is no longer needed."""

    def __init__(self, folder: Path, server: CanaryServer):
        self.folder = folder
        self.server = server
        ports = {f"{name}_PORT": str(free_port()) for name in ("POSTGRES", "CODE", "WEBSERVER", "VIEWER")}
        self.variables = {
            **server.environment,
            **ports,
            "POSTGRES_HOST": "127.0.0.1",
            "POSTGRES_PASSWORD": POSTGRES_PASSWORD,
            "CODE_HOST": "127.0.0.1",
            "LISTEN_HOST": "127.0.0.1",
            "DEFINITIONS_FILE": str(DEFINITIONS),
        }
        self._image = Image(DEPLOY / "Dockerfile", folder)
        (Path(self._image.environment["DAGSTER_HOME"]) / "storage").mkdir()
        definitions = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        self.services = {
            name: Service(name, interpolate(definition, self.variables), self.variables, self._image)
            for name, definition in definitions.items()
            if "profiles" not in definition  # tests/test_deploy.py starts these separately
        }
        database = self.services.pop("postgres")
        environment = database.environment
        self._database_command, self._database_log = database.command, database.log
        self.database = Postgres(
            int(ports["POSTGRES_PORT"]),
            environment["POSTGRES_DB"],
            environment["POSTGRES_USER"],
            environment["POSTGRES_PASSWORD"],
        )
        self._running = ExitStack()

    @property
    def root(self) -> str:
        """The root of the lakehouse."""
        return self.server.root

    @property
    def volume(self) -> Path:
        """The folder that replaces the volume ``lakehouse``."""
        return Path(self._image.inside("/lakehouse"))

    @property
    def url(self) -> str:
        """The URL of the operator's webserver."""
        return f"http://127.0.0.1:{self.variables['WEBSERVER_PORT']}"

    @property
    def viewer_url(self) -> str:
        """The URL of the read-only webserver."""
        return f"http://127.0.0.1:{self.variables['VIEWER_PORT']}"

    def start(self) -> None:
        """Start all services in the order of the compose file. Raises ServerStartError."""
        services = self.services
        try:
            self._start("code")  # connects to the database only when a run starts
            self._running.enter_context(postgres(self.database, self._database_command, self._database_log))
            services["pools"].run_to_end()
            self.wait_until(lambda: listens(int(self.variables["CODE_PORT"])), "the code location")
            for name in ("webserver", "viewer", "daemon"):
                self._start(name)
            self.wait_until(self.is_loaded, "the webserver")
            self.wait_until(lambda: listens(int(self.variables["VIEWER_PORT"])), "the read-only webserver")
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str) -> None:
        service = self.services[name]
        service.start()
        self._running.callback(service.kill)

    def stop(self) -> None:
        """Kill all processes."""
        self._running.close()

    def wait_until(self, is_done: Callable[[], bool], condition: str) -> None:
        """Wait until a condition is satisfied; fails with the logs on timeout."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_done():
            for service in self.services.values():
                if service.name != "pools":
                    service.check()
            if time.monotonic() > deadline:
                raise ServerStartError(f"timed out while waiting for {condition}; the logs end with:\n{self._tails()}")
            time.sleep(_POLL_SECONDS)

    def _tails(self) -> str:
        return "\n".join(f"--- {service.name}\n{log_tail(service.log)}" for service in self.services.values())

    def logs(self) -> dict[str, str]:
        """Return the output of each process and of runs, by file name."""
        files = [*self.folder.glob("*.log"), *(p for p in self._home("storage").rglob("*") if p.is_file())]
        return {str(path.relative_to(self.folder)): path.read_text(errors="replace") for path in files}

    def log(self, name: str) -> str:
        """Return the output of a service."""
        return self.services[name].log.read_text(errors="replace")

    def _home(self, name: str) -> Path:
        return Path(self._image.environment["DAGSTER_HOME"]) / name

    # GraphQL

    def is_loaded(self) -> bool:
        """Return whether the webserver has loaded the code location."""
        try:
            data = self.graphql("{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }")
        except (urllib.error.URLError, ConnectionError):
            return False
        return data["repositoriesOrError"].get("nodes") == [{"name": CODE_REPOSITORY}]

    def launch(self, job: str, run_config: Mapping[str, Any] | None = None, *, viewer: bool = False) -> str:
        """Launch a job like the launchpad. Return the run's ID."""
        result = self.graphql(
            """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
                 ... on LaunchRunSuccess { run { runId } }
                 ... on RunConfigValidationInvalid { errors { message } }
                 ... on PythonError { message } } }""",
            viewer=viewer,
            params={"selector": {**CODE, "jobName": job}, "runConfigData": json.dumps(run_config or {})},
        )["launchRun"]
        assert result["__typename"] == "LaunchRunSuccess", result
        run_id: str = result["run"]["runId"]
        return run_id

    def must_run(self, job: str, run_config: Mapping[str, Any] | None = None) -> str:
        """Launch a job and wait until it succeeds. Return the run's ID."""
        run_id = self.launch(job, run_config)
        assert self.wait_for_run(run_id) == "SUCCESS", self.messages(run_id)
        return run_id


CODE = {"repositoryLocationName": LOCATION, "repositoryName": CODE_REPOSITORY}

#: The running deployment of this process, if any.
RUNNING = pytest.StashKey["Topology"]()


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """The deployment, with an unused lakehouse root ``topology.root``; shared by all tests of a worker."""
    servers = canary_server(request.config)
    running_topology = request.config.stash[RUNNING] = Topology(tmp_path_factory.mktemp("deployed"), next(servers))
    running_topology.start()
    try:
        yield running_topology
    finally:
        running_topology.stop()
        assert next(servers, None) is None
