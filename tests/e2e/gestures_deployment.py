"""A deployment of Dagster for the project of gestures: two code locations for each store, a webserver and a daemon."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from tests.clients.test_clients import python_of
from tests.e2e import gestures_project
from tests.e2e.gestures_project import SENSOR, STORES, catalog_properties, folder_of, lakehouse_root
from tests.e2e.graphql import FINISHED, Webserver
from tests.server.live_server import duckdb_with_iceberg
from tests.servers.daemons import ServerStartError, die_with_parent, free_port, listens, log_tail
from trinitylake_ops import Lakehouse

PROJECT = Path(gestures_project.__file__)
REPOSITORY = PROJECT.parents[2]
SECOND = "_second"
_POLL_SECONDS = 0.5
#: For a backfill of all stores on a busy machine. A gesture whose runs go on would meet those of the next one.
_PATIENCE_SECONDS = 900
#: How often automation may request further runs because of those that it requested.
_MOST_ROUNDS = 10
_BACKFILL_ENDED = ("COMPLETED", "COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED")
_INSTANCE = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {"dequeue_interval_seconds": 1},
    },
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},
}


def python_for(location: str) -> str:
    """Return the Python that loads and runs a code location."""
    is_iceberg = location.removesuffix(SECOND) == "iceberg"
    return str(python_of("with_dagster_iceberg_deployed")) if is_iceberg else sys.executable


class Deployment(Webserver):
    """The processes of a deployment, with its runs and with the rows that its stores show."""

    def __init__(self, folder: Path, stores: Sequence[str] = STORES, *, concurrent_runs: int = 4):
        """Prepare the files of a deployment.

        Args:
            folder: The folder of its files.
            stores: The stores whose projects it loads.
            concurrent_runs: How many runs are in progress at the same time.
        """
        self.folder = folder
        self.stores = tuple(stores)
        self.port = free_port()
        self.locations = {name: free_port() for store in stores for name in (store, f"{store}{SECOND}")}
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR", "TZ") if name in os.environ}
        self.environment = {
            **kept,
            "DAGSTER_HOME": str(folder / "dagster"),
            "GESTURES": str(folder),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        settings = {**_INSTANCE, "concurrency": {"runs": {"max_concurrent_runs": concurrent_runs}}}
        (folder / "dagster").mkdir()
        (folder / "dagster" / "dagster.yaml").write_text(yaml.safe_dump(settings))
        servers = [
            {"grpc_server": {"location_name": name, "host": "127.0.0.1", "port": port}}
            for name, port in self.locations.items()
        ]
        (folder / "workspace.yaml").write_text(yaml.safe_dump({"load_from": servers}))
        for store in stores:
            (folder / store).mkdir()
        self.lake = Lakehouse.create(str(folder / "lakehouse"), {"fsync": "false"})
        if "iceberg" in stores:
            (folder / "warehouse").mkdir()
            self._catalog().create_namespace("iceberg")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # Processes

    @contextmanager
    def running(self) -> Iterator[Deployment]:
        """Start everything. All processes end in any case."""
        with ExitStack() as processes:
            with dg.DagsterInstance.from_config(self.environment["DAGSTER_HOME"]) as instance:
                instance.get_runs(limit=1)  # makes the tables of its databases, which processes must not do at once
                instance.all_asset_keys()
                instance.all_instigator_state()
            for name, port in self.locations.items():
                server = ["-m", "dagster", "api", "grpc", "-f", str(PROJECT), "-a", name, "--host", "127.0.0.1"]
                self._start(processes, name, [python_for(name), *server, "--port", str(port)])
            self.wait_until(lambda: all(map(listens, self.locations.values())), "the code locations")
            workspace = ["-w", str(self.folder / "workspace.yaml")]
            host = ["-h", "127.0.0.1", "-p", str(self.port)]
            self._start(processes, "webserver", [_program("dagster-webserver"), *workspace, *host])
            self._start(processes, "daemon", [_program("dagster-daemon"), "run", *workspace])
            self.wait_until(self._is_loaded, "the webserver")
            yield self

    def _start(self, processes: ExitStack, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no lock
            )  # fmt: skip
        self._processes[name] = process

        def end() -> None:
            with suppress(ProcessLookupError):  # it ended, and so did all that it had started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        processes.callback(end)

    def _is_loaded(self) -> bool:
        query = "{ repositoriesOrError { ... on RepositoryConnection { nodes { location { name } } } } }"
        try:
            nodes = self.graphql(query)["repositoriesOrError"].get("nodes", [])
        except (urllib.error.URLError, ConnectionError):
            return False
        return {node["location"]["name"] for node in nodes} == set(self.locations)

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_done():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ServerStartError(f"{name} ended; its log:\n{log_tail(self.folder / f'{name}.log')}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"{what} did not come within {_PATIENCE_SECONDS} s")
            time.sleep(_POLL_SECONDS)

    # Gestures

    def materialize(self, location: str, tables: Iterable[str], partition: str | None = None) -> str:
        """Launch a run of assets of a code location as the pages do; returns its id."""
        tags = [] if partition is None else [{"key": "dagster/partition", "value": partition}]
        selector = {**_repository(location), "jobName": "__ASSET_JOB", "assetSelection": _keys(location, tables)}
        run: str = self._done(
            "mutation ($params: ExecutionParams!) { done: launchRun(executionParams: $params)"
            " { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            params={
                "selector": selector,
                "runConfigData": "{}",
                "mode": "default",
                "executionMetadata": {"tags": tags},
            },
        )["run"]["runId"]
        return run

    def backfill(self, store: str, tables: Iterable[str], partitions: Sequence[str]) -> str:
        """Launch an asset backfill as its dialog does; returns its id."""
        backfill: str = self._done(
            "mutation ($params: LaunchBackfillParams!) { done: launchPartitionBackfill(backfillParams: $params)"
            " { __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }",
            params={"assetSelection": _keys(store, tables), "partitionNames": list(partitions), "fromFailure": False},
        )["backfillId"]
        return backfill

    def re_execute(self, run_id: str) -> str:
        """Re-execute a run from failure; returns the new run's id."""
        run: str = self._done(
            "mutation ($params: ReexecutionParams!) { done: launchRunReexecution(reexecutionParams: $params)"
            " { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            params={"parentRunId": run_id, "strategy": "FROM_FAILURE"},
        )["run"]["runId"]
        return run

    def terminate(self, run_id: str) -> None:
        """Terminate a run by the button of its page."""
        self._done(
            "mutation ($id: String!) { done: terminateRun(runId: $id) { __typename"
            " ... on TerminateRunFailure { message } ... on PythonError { message } } }",
            id=run_id,
        )

    def kill(self, run_id: str) -> None:
        """Kill the process of a run, and all that it started, as the end of its machine does."""
        (started,) = [text for text in self.messages(run_id) if text.startswith("Started process for run")]
        root = int(started.partition("pid: ")[2].partition(")")[0])
        parents = _parents()
        processes = [root]
        for process in processes:
            processes += [child for child, parent in parents.items() if parent == process]
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def set_value(self, store: str, value: int) -> None:
        """Set the value of all rows that the next runs of a store make."""
        (self.folder / store / "value").write_text(str(value))

    def add_partition(self, store: str, partition: str) -> None:
        self._done(
            "mutation ($repository: RepositorySelector!, $name: String!, $key: String!) { done: addDynamicPartition("
            "repositorySelector: $repository, partitionsDefName: $name, partitionKey: $key) { __typename"
            " ... on PythonError { message } } }",
            repository=_repository(store),
            name=f"{store}_shops",
            key=partition,
        )

    def command_line(self, store: str, tables: Iterable[str]) -> str:
        """Materialize assets by ``dg launch``, or by ``dagster asset materialize`` where only that is installed."""
        selection = " or ".join(f'key:"{store}/{table}"' for table in tables)
        is_own = python_for(store) == sys.executable
        launch = [_program("dg"), "launch", "--assets"]
        materialize = [python_for(store), "-m", "dagster", "asset", "materialize", "--select"]
        command = [*(launch if is_own else materialize), selection, "-f", str(PROJECT), "-a", store]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, timeout=_PATIENCE_SECONDS, check=False,
                              capture_output=True)  # fmt: skip
        (self.folder / f"dg-{store}.log").write_bytes(done.stdout + done.stderr)
        return "FAILURE" if done.returncode else "SUCCESS"

    def _done(self, mutation: str, **variables: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.graphql(mutation, **variables)["done"]
        assert result["__typename"].endswith("Success"), result
        return result

    # Automation

    def start_automation(self) -> None:
        """Turn the sensors of automation on, and wait until each has seen what is there."""
        for location in self.locations:
            change = "mutation ($s: SensorSelector!) { done: startSensor(sensorSelector: $s) { __typename } }"
            assert self.graphql(change, s=_sensor(location))["done"]["__typename"] == "Sensor"
        self._wait_for_ticks()

    def stop_automation(self) -> None:
        """Turn the sensors of automation off."""
        for location in self.locations:
            change = "mutation ($id: String!) { done: stopSensor(id: $id) { __typename } }"
            sensor = self._sensor_state(location, "id")["id"]
            assert self.graphql(change, id=sensor)["done"]["__typename"] == "StopSensorMutationResult"

    def wait_for_automation(self) -> None:
        """Wait until all requested runs have ended, and the sensors have requested nothing since."""
        for _ in range(_MOST_ROUNDS):
            self.wait_until(lambda: all(run["status"] in FINISHED for run in self.requested()), "the requested runs")
            before = len(self.requested())
            self._wait_for_ticks()
            if len(self.requested()) == before:
                return
        raise AssertionError("automation goes on to request runs")

    def _wait_for_ticks(self) -> None:
        """Wait until each sensor has had a tick that began after now."""
        before = {location: self._ended_ticks(location) for location in self.locations}
        self.wait_until(
            lambda: all(self._ended_ticks(location) >= count + 2 for location, count in before.items()), "the ticks"
        )

    def _ended_ticks(self, location: str) -> int:
        ticks = self._sensor_state(location, "ticks(limit: 1000) { status }")["ticks"]
        return sum(tick["status"] != "STARTED" for tick in ticks)

    def _sensor_state(self, location: str, fields: str) -> dict[str, Any]:
        query = f"""query ($s: SensorSelector!) {{ found: sensorOrError(sensorSelector: $s) {{
            ... on Sensor {{ sensorState {{ {fields} }} }} }} }}"""
        state: dict[str, Any] = self.graphql(query, s=_sensor(location))["found"]["sensorState"]
        return state

    def requested(self) -> list[dict[str, Any]]:
        """Return the runs that automation requested, with the keys of their ``assets``."""
        data = self.graphql(
            """query ($filter: RunsFilter) { runsOrError(filter: $filter) { ... on Runs { results {
                 runId status assetSelection { path } } } } }""",
            filter={"tags": [{"key": "dagster/from_automation_condition", "value": "true"}]},
        )["runsOrError"]["results"]
        return [{**run, "assets": {"/".join(key["path"]) for key in run["assetSelection"]}} for run in data]

    # Ends

    def launched(self) -> set[str]:
        """Return the ids of backfills, and of runs that belong to none."""
        data = self.graphql(
            "{ found: partitionBackfillsOrError(limit: 1000) { ... on PartitionBackfills { results { id } } } }"
        )["found"]["results"]
        runs = {run["runId"] for run in self.runs() if "dagster/backfill" not in run["tags"]}
        return runs | {backfill["id"] for backfill in data}

    def wait_for_backfill(self, backfill: str) -> str:
        """Wait until a backfill has ended; returns its status."""
        self.wait_until(lambda: self._backfill_status(backfill) in _BACKFILL_ENDED, f"backfill {backfill}")
        return self._backfill_status(backfill)

    def _backfill_status(self, backfill: str) -> str:
        query = "query ($id: String!) { found: partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill"
        status: str = self.graphql(f"{query} {{ status }} }} }}", id=backfill)["found"]["status"]
        return status

    def runs_of(self, backfill: str) -> list[str]:
        """Return the ids of the runs of a backfill."""
        return [run["runId"] for run in self.runs(tags=[{"key": "dagster/backfill", "value": backfill}])]

    # Rows, by readers that share no code with what wrote them, where there is one

    def rows(self, store: str, table: str) -> list[tuple[str, ...]]:
        """Return the rows of a table that anyone sees, sorted, as text; none if there is no table."""
        read = {"iceberg": self._iceberg_rows, "files": self._file_rows}.get(store, self._lakehouse_rows)
        return sorted(tuple(str(value) for value in row.values()) for row in read(store, table))

    def _lakehouse_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        head = Lakehouse.open(lakehouse_root()).snapshot()
        if not (head.has_namespace(store) and head.has_table(store, table)):
            return []
        location = f"{lakehouse_root()}/{head.table(store, table).format_properties['metadata_location']}"
        with duckdb_with_iceberg() as connection:
            found: list[dict[str, Any]] = (
                connection.execute("SELECT * FROM iceberg_scan(?)", [location]).to_arrow_table().to_pylist()
            )
        return found

    def _catalog(self) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("tables", **catalog_properties())

    def _iceberg_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        catalog = self._catalog()
        if not catalog.table_exists((store, table)):
            return []
        found: list[dict[str, Any]] = catalog.load_table((store, table)).scan().to_arrow().to_pylist()
        return found

    def _file_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        place = folder_of("files") / "stored" / store / table
        files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
        return [row for path in files for row in pickle.loads(path.read_bytes()).to_pylist()]


def _repository(location: str) -> Mapping[str, str]:
    return {"repositoryLocationName": location, "repositoryName": "__repository__"}


def _sensor(location: str) -> Mapping[str, str]:
    return {**_repository(location), "sensorName": SENSOR}


def _keys(location: str, tables: Iterable[str]) -> list[dict[str, list[str]]]:
    return [{"path": [location.removesuffix(SECOND), table]} for table in tables]


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    return found
