"""The deployment of ``deploy/`` as processes on loopback: what its files say, with other hosts, ports and folders.

Commands, variables and their defaults come from ``deploy/compose.yaml``, files and folders from ``deploy/Dockerfile``,
so what is tested is what is shipped. Not tested is what Docker does: images, volumes, networks.
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
from tests.e2e.graphql import PATIENCE_SECONDS, Webserver
from tests.servers.daemons import ServerStartError, die_with_parent, free_port, listens, log_tail
from tests.servers.postgres import Postgres, postgres

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DEFINITIONS = Path(__file__).with_name("deployed_definitions.py")
LOCATION, CODE_REPOSITORY = "trinitylake", "__repository__"
#: Of the database; to be found nowhere but in the environment of processes.
POSTGRES_PASSWORD = "LeakCanaryDatabase/Password+0123456789"

_POLL_SECONDS = 0.5
_REFERENCE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?(?P<error>[^}]*))?\}")
# Of the machine's own variables only those without which no program runs.
_KEPT_VARIABLES = ("HOME", "LANG", "PATH", "TMPDIR", "TZ")


def secrets_in(text: str) -> list[str]:
    """Return where a text holds credentials of S3 in any form, or the password of the database."""
    return leaks(text) + ([f"the password: {POSTGRES_PASSWORD}"] if POSTGRES_PASSWORD in text else [])


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a compose file with variables in the place of references, as compose does."""
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}

    def resolved(found: re.Match[str]) -> str:
        name = found["name"]
        if variables.get(name):
            return variables[name]
        assert found["error"] is None, f"{name}: {found['error']}"
        return found["default"] or ""

    return _REFERENCE.sub(resolved, value) if isinstance(value, str) else value


class Image:
    """What the Dockerfile puts where and the variables it sets, with a folder in the place of the file system."""

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
        """Return an absolute path below the root; anything else as it is."""
        return str(self.root / path.removeprefix("/")) if path.startswith("/") else path

    def _copy(self, sources: list[str], target: Path) -> None:
        for source in sources:
            place = target if (REPOSITORY / source).is_dir() else target / Path(source).name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(REPOSITORY / source)


class Service:
    """One service of the compose file as a process, in a group of its own with all that it starts."""

    def __init__(self, name: str, definition: Mapping[str, Any], variables: Mapping[str, str], image: Image):
        self.name = name
        self.command = [str(argument) for argument in definition["command"]]
        self.healthcheck = [str(argument) for argument in definition.get("healthcheck", {}).get("test", [])][1:]
        given = {
            key: variables.get(key) if value is None else value for key, value in definition["environment"].items()
        }
        self.environment = {
            **{key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ},
            "PYTHONPATH": str(REPOSITORY),
            # On a busy machine it may take more than Dagster's 60 seconds to start the process of a run.
            "DAGSTER_GRPC_TIMEOUT_SECONDS": str(PATIENCE_SECONDS),
            **image.environment,
            **{key: str(value) for key, value in given.items() if value is not None},
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
        """Start it and wait until it ends well. Raises ServerStartError."""
        self.start()
        assert self._process is not None
        if self._process.wait(PATIENCE_SECONDS):
            raise ServerStartError(f"{self.name} failed; its log:\n{log_tail(self.log)}")

    def check(self) -> None:
        """Raise ServerStartError if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerStartError(f"{self.name} ended; its log:\n{log_tail(self.log)}")

    def is_healthy(self) -> bool:
        """Ask the service's own health check."""
        done = subprocess.run(self._program(self.healthcheck), env=self.environment, cwd=self._folder, timeout=60)
        return done.returncode == 0

    def end(self) -> int:
        """Ask it to end, and return its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """Kill it at once, with all processes that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it ended, and so did all that it had started
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @staticmethod
    def _program(command: list[str]) -> list[str]:
        """Return a command whose program is the one of this Python's environment."""
        return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


class Topology(Webserver):
    """All of the deployment, running: call ``stop`` when it is no longer needed."""

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
            if "profiles" not in definition  # tests/test_deploy.py starts these by themselves
        }
        database = self.services.pop("postgres")
        given = database.environment
        self._database_command, self._database_log = database.command, database.log
        self.database = Postgres(
            int(ports["POSTGRES_PORT"]), given["POSTGRES_DB"], given["POSTGRES_USER"], given["POSTGRES_PASSWORD"]
        )
        self._running = ExitStack()

    @property
    def root(self) -> str:
        """The root of the lakehouse."""
        return self.server.root

    @property
    def volume(self) -> Path:
        """The folder in the place of the volume ``lakehouse``."""
        return Path(self._image.inside("/lakehouse"))

    @property
    def url(self) -> str:
        """The operator's webserver."""
        return f"http://127.0.0.1:{self.variables['WEBSERVER_PORT']}"

    @property
    def viewer_url(self) -> str:
        """The read-only webserver."""
        return f"http://127.0.0.1:{self.variables['VIEWER_PORT']}"

    def start(self) -> None:
        """Start everything, in compose's order. Raises ServerStartError."""
        services = self.services
        try:
            self._start("code")  # it asks for the database only when a run begins
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
        """End all processes at once."""
        self._running.close()

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for something; fails with the logs when it does not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_done():
            for service in self.services.values():
                if service.name != "pools":
                    service.check()
            if time.monotonic() > deadline:
                raise ServerStartError(f"{what}: waited in vain; the logs end with:\n{self._tails()}")
            time.sleep(_POLL_SECONDS)

    def _tails(self) -> str:
        return "\n".join(f"--- {service.name}\n{log_tail(service.log)}" for service in self.services.values())

    def logs(self) -> dict[str, str]:
        """Return what each process printed so far, and what runs did, by name of the file."""
        files = [*self.folder.glob("*.log"), *(p for p in self._home("storage").rglob("*") if p.is_file())]
        return {str(path.relative_to(self.folder)): path.read_text(errors="replace") for path in files}

    def log(self, name: str) -> str:
        """Return what a service printed so far."""
        return self.services[name].log.read_text(errors="replace")

    def _home(self, name: str) -> Path:
        return Path(self._image.environment["DAGSTER_HOME"]) / name

    # GraphQL

    def is_loaded(self) -> bool:
        """Ask the webserver whether it knows the code location."""
        try:
            data = self.graphql("{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }")
        except (urllib.error.URLError, ConnectionError):
            return False
        return data["repositoriesOrError"].get("nodes") == [{"name": CODE_REPOSITORY}]

    def launch(self, job: str, run_config: Mapping[str, Any] | None = None, *, viewer: bool = False) -> str:
        """Launch a job as the launchpad does; returns the run's id."""
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
        """Launch a job and wait until it succeeded; returns the run's id."""
        run_id = self.launch(job, run_config)
        assert self.wait_for_run(run_id) == "SUCCESS", self.messages(run_id)
        return run_id


CODE = {"repositoryLocationName": LOCATION, "repositoryName": CODE_REPOSITORY}

#: The deployment that runs in this process, if one does.
RUNNING = pytest.StashKey["Topology"]()


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """The deployment, with a lakehouse to be made at ``topology.root``; one for all tests of a worker."""
    servers = canary_server(request.config)
    made = request.config.stash[RUNNING] = Topology(tmp_path_factory.mktemp("deployed"), next(servers))
    made.start()
    try:
        yield made
    finally:
        made.stop()
        assert next(servers, None) is None
