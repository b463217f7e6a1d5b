"""A Dagster deployment of the publishing project: two code locations for each store, a webserver and a daemon."""

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
from tests.e2e import publishing_project
from tests.e2e.graphql import FINISHED, Webserver
from tests.e2e.publishing_project import SENSOR, STORES, catalog_properties, folder_of, lakehouse_root
from tests.server.live_server import duckdb_with_iceberg
from tests.servers.daemons import ServerStartError, die_with_parent, free_port, listens, log_tail
from trinitylake_ops import Lakehouse

PROJECT = Path(publishing_project.__file__)
REPOSITORY = PROJECT.parents[2]
SECOND = "_second"
_POLL_SECONDS = 0.5
#: Maximum time for a backfill of all stores on a busy machine. After a timeout, its runs would disturb the next action.
_TIMEOUT_SECONDS = 900
#: Maximum number of rounds in which automation reacts to its own runs.
_MAX_ROUNDS = 10
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
    """Return the Python interpreter for a code location."""
    is_iceberg = location.removesuffix(SECOND) == "iceberg"
    return str(python_of("with_dagster_iceberg_deployed")) if is_iceberg else sys.executable


class Deployment(Webserver):
    """The processes of a deployment, its runs, and the rows in its stores."""

    def __init__(self, folder: Path, stores: Sequence[str] = STORES, *, concurrent_runs: int = 4):
        """Write the files of a deployment.

        Args:
            folder: Folder for its files.
            stores: Stores whose projects are loaded.
            concurrent_runs: Maximum number of concurrent runs.
        """
        self.folder = folder
        self.stores = tuple(stores)
        self.port = free_port()
        self.locations = {name: free_port() for store in stores for name in (store, f"{store}{SECOND}")}
        inherited_variables = {
            name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR", "TZ") if name in os.environ
        }
        self.environment = {
            **inherited_variables,
            "DAGSTER_HOME": str(folder / "dagster"),
            "PUBLISHING_PROJECT": str(folder),
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
        """Start all processes, and stop them after the block."""
        with ExitStack() as processes:
            with dg.DagsterInstance.from_config(self.environment["DAGSTER_HOME"]) as instance:
                # Create the database tables before several processes do so at the same time.
                instance.get_runs(limit=1)
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

        def stop() -> None:
            with suppress(ProcessLookupError):  # the process and its children have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        processes.callback(stop)

    def _is_loaded(self) -> bool:
        query = "{ repositoriesOrError { ... on RepositoryConnection { nodes { location { name } } } } }"
        try:
            nodes = self.graphql(query)["repositoriesOrError"].get("nodes", [])
        except (urllib.error.URLError, ConnectionError):
            return False
        return {node["location"]["name"] for node in nodes} == set(self.locations)

    def wait_until(self, is_done: Callable[[], bool], condition: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not is_done():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ServerStartError(f"{name} ended; its log:\n{log_tail(self.folder / f'{name}.log')}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"timed out after {_TIMEOUT_SECONDS} s while waiting for {condition}")
            time.sleep(_POLL_SECONDS)

    # Actions

    def materialize(self, location: str, tables: Iterable[str], partition: str | None = None) -> str:
        """Launch a run of assets like the UI does. Return its ID."""
        tags = [] if partition is None else [{"key": "dagster/partition", "value": partition}]
        selector = {**_repository(location), "jobName": "__ASSET_JOB", "assetSelection": _keys(location, tables)}
        run: str = self._mutate(
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
        """Launch an asset backfill like the dialog does. Return its ID."""
        backfill: str = self._mutate(
            "mutation ($params: LaunchBackfillParams!) { done: launchPartitionBackfill(backfillParams: $params)"
            " { __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }",
            params={"assetSelection": _keys(store, tables), "partitionNames": list(partitions), "fromFailure": False},
        )["backfillId"]
        return backfill

    def re_execute(self, run_id: str) -> str:
        """Re-execute a run from failure. Return the ID of the new run."""
        run: str = self._mutate(
            "mutation ($params: ReexecutionParams!) { done: launchRunReexecution(reexecutionParams: $params)"
            " { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            params={"parentRunId": run_id, "strategy": "FROM_FAILURE"},
        )["run"]["runId"]
        return run

    def terminate(self, run_id: str) -> None:
        """Terminate a run like the button on its page does."""
        self._mutate(
            "mutation ($id: String!) { done: terminateRun(runId: $id) { __typename"
            " ... on TerminateRunFailure { message } ... on PythonError { message } } }",
            id=run_id,
        )

    def kill(self, run_id: str) -> None:
        """Kill the process of a run with all its descendants, like a failure of its machine."""
        (message,) = [text for text in self.messages(run_id) if text.startswith("Started process for run")]
        root_pid = int(message.partition("pid: ")[2].partition(")")[0])
        parents = _parents()
        processes = [root_pid]
        for process in processes:
            processes += [child for child, parent in parents.items() if parent == process]
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def set_value(self, store: str, value: int) -> None:
        """Set the value of the rows that the next runs of a store write."""
        (self.folder / store / "value").write_text(str(value))

    def add_partition(self, store: str, partition: str) -> None:
        self._mutate(
            "mutation ($repository: RepositorySelector!, $name: String!, $key: String!) { done: addDynamicPartition("
            "repositorySelector: $repository, partitionsDefName: $name, partitionKey: $key) { __typename"
            " ... on PythonError { message } } }",
            repository=_repository(store),
            name=f"{store}_shops",
            key=partition,
        )

    def command_line(self, store: str, tables: Iterable[str]) -> str:
        """Materialize assets with ``dg launch``, or ``dagster asset materialize`` if ``dg`` is not installed."""
        selection = " or ".join(f'key:"{store}/{table}"' for table in tables)
        has_dg = python_for(store) == sys.executable
        launch = [_program("dg"), "launch", "--assets"]
        materialize = [python_for(store), "-m", "dagster", "asset", "materialize", "--select"]
        command = [*(launch if has_dg else materialize), selection, "-f", str(PROJECT), "-a", store]
        process = subprocess.run(command, env=self.environment, cwd=self.folder, timeout=_TIMEOUT_SECONDS, check=False,
                              capture_output=True)  # fmt: skip
        (self.folder / f"dg-{store}.log").write_bytes(process.stdout + process.stderr)
        return "FAILURE" if process.returncode else "SUCCESS"

    def _mutate(self, mutation: str, **variables: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.graphql(mutation, **variables)["done"]
        assert result["__typename"].endswith("Success"), result
        return result

    # Automation

    def start_automation(self) -> None:
        """Start the automation sensors, and wait until each has evaluated the current state."""
        for location in self.locations:
            mutation = "mutation ($s: SensorSelector!) { done: startSensor(sensorSelector: $s) { __typename } }"
            assert self.graphql(mutation, s=_sensor(location))["done"]["__typename"] == "Sensor"
        self._wait_for_ticks()

    def stop_automation(self) -> None:
        """Stop the automation sensors."""
        for location in self.locations:
            mutation = "mutation ($id: String!) { done: stopSensor(id: $id) { __typename } }"
            sensor = self._sensor_state(location, "id")["id"]
            assert self.graphql(mutation, id=sensor)["done"]["__typename"] == "StopSensorMutationResult"

    def wait_for_automation(self) -> None:
        """Wait until all requested runs have ended and no sensor requests more runs."""
        for _ in range(_MAX_ROUNDS):
            self.wait_until(
                lambda: all(run["status"] in FINISHED for run in self.requested_runs()), "the requested runs"
            )
            before = len(self.requested_runs())
            self._wait_for_ticks()
            if len(self.requested_runs()) == before:
                return
        raise AssertionError("automation keeps requesting runs")

    def _wait_for_ticks(self) -> None:
        """Wait until each sensor has completed a tick that started after this call."""
        before = {location: self._ended_ticks(location) for location in self.locations}
        self.wait_until(
            lambda: all(self._ended_ticks(location) >= count + 2 for location, count in before.items()), "the ticks"
        )

    def _ended_ticks(self, location: str) -> int:
        ticks = self._sensor_state(location, "ticks(limit: 1000) { status }")["ticks"]
        return sum(tick["status"] != "STARTED" for tick in ticks)

    def _sensor_state(self, location: str, fields: str) -> dict[str, Any]:
        query = f"""query ($s: SensorSelector!) {{ result: sensorOrError(sensorSelector: $s) {{
            ... on Sensor {{ sensorState {{ {fields} }} }} }} }}"""
        state: dict[str, Any] = self.graphql(query, s=_sensor(location))["result"]["sensorState"]
        return state

    def requested_runs(self) -> list[dict[str, Any]]:
        """Return the runs requested by automation, with their asset keys in ``assets``."""
        data = self.graphql(
            """query ($filter: RunsFilter) { runsOrError(filter: $filter) { ... on Runs { results {
                 runId status assetSelection { path } } } } }""",
            filter={"tags": [{"key": "dagster/from_automation_condition", "value": "true"}]},
        )["runsOrError"]["results"]
        return [{**run, "assets": {"/".join(key["path"]) for key in run["assetSelection"]}} for run in data]

    # Results

    def launched_ids(self) -> set[str]:
        """Return the IDs of backfills, and of runs outside of backfills."""
        data = self.graphql(
            "{ result: partitionBackfillsOrError(limit: 1000) { ... on PartitionBackfills { results { id } } } }"
        )["result"]["results"]
        runs = {run["runId"] for run in self.runs() if "dagster/backfill" not in run["tags"]}
        return runs | {backfill["id"] for backfill in data}

    def wait_for_backfill(self, backfill: str) -> str:
        """Wait until a backfill has ended. Return its status."""
        self.wait_until(lambda: self._backfill_status(backfill) in _BACKFILL_ENDED, f"backfill {backfill}")
        return self._backfill_status(backfill)

    def _backfill_status(self, backfill: str) -> str:
        query = "query ($id: String!) { result: partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill"
        status: str = self.graphql(f"{query} {{ status }} }} }}", id=backfill)["result"]["status"]
        return status

    def runs_of(self, backfill: str) -> list[str]:
        """Return the IDs of a backfill's runs."""
        return [run["runId"] for run in self.runs(tags=[{"key": "dagster/backfill", "value": backfill}])]

    # Rows, read by a reader that is independent of the writer if possible

    def rows(self, store: str, table: str) -> list[tuple[str, ...]]:
        """Return the published rows of a table as sorted tuples of text, or no rows if the table does not exist."""
        read_rows = {"iceberg": self._iceberg_rows, "files": self._file_rows}.get(store, self._lakehouse_rows)
        return sorted(tuple(str(value) for value in row.values()) for row in read_rows(store, table))

    def _lakehouse_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        head = Lakehouse.open(lakehouse_root()).snapshot()
        if not (head.has_namespace(store) and head.has_table(store, table)):
            return []
        location = f"{lakehouse_root()}/{head.table(store, table).format_properties['metadata_location']}"
        with duckdb_with_iceberg() as connection:
            rows: list[dict[str, Any]] = (
                connection.execute("SELECT * FROM iceberg_scan(?)", [location]).to_arrow_table().to_pylist()
            )
        return rows

    def _catalog(self) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("tables", **catalog_properties())

    def _iceberg_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        catalog = self._catalog()
        if not catalog.table_exists((store, table)):
            return []
        rows: list[dict[str, Any]] = catalog.load_table((store, table)).scan().to_arrow().to_pylist()
        return rows

    def _file_rows(self, store: str, table: str) -> list[dict[str, Any]]:
        table_path = folder_of("files") / "stored" / store / table
        files = [table_path] if table_path.is_file() else [path for path in table_path.rglob("*") if path.is_file()]
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
    """Return the parent process id of each process."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
    return parents
