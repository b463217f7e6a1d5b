"""Run random actions on random projects, and compare each version with a model.

The actions are runs of Dagster in this process and rollbacks. Some runs are interleaved, interrupted or re-executed.
After each step, a model that knows only the outputs of the assets verifies all new versions: tables of successful runs
are visible, each row exists once, and no run changes rows of another run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg
import pytest

from tests.conftest import SUMMARY_PROPERTY
from tests.dagster_plugin.random_project import (
    PARTITIONS,
    TABLES,
    PausableThread,
    Project,
    Row,
    Run,
    Shape,
    Staging,
)
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes, check_lake
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.iceberg.catalog import catalog_at

_JOBS: dict[str, dg.JobDefinition] = {}
#: Dagster captures output by redirecting the process's file descriptors, so runs in concurrent threads would interfere.
_NO_LOGS = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}
_TIME_PARTITIONS = {"daily", "daily formats", "hourly", "hourly formats", "weekly", "monthly"}


def all_assets_job(root: str) -> dg.JobDefinition:
    """Return the job of all assets of the project with this lakehouse. Dagster calls this for each execution."""
    return _JOBS[root]


def random_shape(rng: random.Random) -> Shape:
    partitions = rng.choice([*PARTITIONS])
    modes = ["overwrite", "append", "upsert"]
    if partitions != "none":
        modes += ["overwrite_partition"] * 2
    mappings = ["identity"]
    if partitions != "none":
        mappings.append("all")
    if partitions in _TIME_PARTITIONS:
        mappings += ["previous", "self"]
    mapping = rng.choice(mappings)
    first, second = rng.choice(modes), rng.choice(modes)
    if mapping == "all" and second == "overwrite_partition":
        second = "overwrite"
    return Shape(
        partitions,
        rng.choice(["none", "both", "both", "split", "first"]),
        mapping,
        (first, second),
        is_serializable=rng.random() < 0.5,
        has_check=rng.random() < 0.3,
        has_retries=rng.random() < 0.5,
    )


class Scenario:
    """A project, its runs, and the expected content of each version."""

    def __init__(self, project: Project, instance: dg.DagsterInstance, rng: random.Random):
        self.project, self.instance, self.rng = project, instance, rng
        self.lake = project.lake
        self.runs: list[Run] = []
        self.states: dict[int, dict[str, frozenset[Row]]] = {0: {table: frozenset() for table in TABLES}}
        self.targets: dict[int, int] = {}
        self.stagings_by_token: dict[int, Staging] = {}
        self.log: list[str] = []
        if project.shape.partitions == "dynamic":
            instance.add_dynamic_partitions("parts", list(project.partitions.keys))

    # The actions

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of actions by outcome."""
        successful = sum(run.is_successful for run in self.runs)
        rollbacks = sum(text.startswith("rollback") for text in self.log)
        return {
            "projects": 1,
            "actions": len(self.runs) + rollbacks,
            "rollbacks": rollbacks,
            "successful": successful,
            "failed": len(self.runs) - successful,
            "faults": self.project.faults,
            "versions": self.lake.latest_version(),
        }

    def choose_actions(self) -> list[Any]:
        """Return the actions of a step: one, or two that are interleaved."""
        n_actions = 2 if self.rng.random() < 0.4 else 1
        return [self._action() for _ in range(n_actions)]

    def _action(self) -> Any:
        finished_runs = [run for run in self.runs if run.run_id and run.is_finished]
        draw = self.rng.random()
        if draw < 0.12 and len(self.states) > 2:
            target = self.rng.choice([version for version in self.states if version])
            return lambda: self._roll_back(target)
        if draw < 0.45 and finished_runs:
            parent = self.rng.choice(finished_runs[-3:])
            run = Run(parent.keys, parent.selection, self._fault(), parent=parent)
            is_resumed = not parent.is_successful and self.rng.random() < 0.6
            self.runs.append(run)
            return lambda: self._execute(run, is_resumed=is_resumed)
        run = Run(self._keys(), self._selection(), self._fault(), check_fails=self.rng.random() < 0.15)
        self.runs.append(run)
        return lambda: self._execute(run)

    def _keys(self) -> tuple[str | None, ...]:
        keys = self.project.partitions.keys
        if not keys:
            return (None,)
        if "multi" not in self.project.shape.partitions and self.rng.random() < 0.2:
            start = self.rng.randrange(len(keys) - 1)
            return keys[start : start + 2]
        return (self.rng.choice(keys),)

    def _selection(self) -> tuple[str, ...]:
        publishers = self.project.publishers
        all_assets = ("shop/a", "shop/b", *publishers)
        draw = self.rng.random()
        if draw < 0.6:
            return all_assets
        if draw < 0.7:
            return (*all_assets, "report")
        table = self.rng.choice(TABLES)
        publisher = self.project.publisher_of(table)
        if draw < 0.9 and publisher is not None:
            return (f"shop/{table}", publisher)
        return tuple(key for key in all_assets if self.rng.random() < 0.5) or (f"shop/{table}",)

    def _fault(self) -> tuple[str, str] | None:
        if self.rng.random() < 0.6:
            return None
        tables = ["a+b"] if self.project.shape.layout == "both" else [*TABLES]
        points = [*TABLES, *(f"{timing} {table}" for timing in ("before", "after", "after") for table in tables)]
        return self.rng.choice(points), self.rng.choice(["die", "fail"])

    def _roll_back(self, target: int) -> None:
        self.project.pause()
        operations.plan_rollback(self.lake, target).execute()
        self.log.append(f"rollback to {target}")
        latest = self.lake.latest_version()
        if self.lake.snapshot().version == latest and latest not in self.states:
            self.targets[latest] = target

    def _execute(self, run: Run, *, is_resumed: bool = False) -> None:
        self.project.local.run = run
        job = dg.build_reconstructable_job("tests.dagster_plugin.test_random_runs", "all_assets_job", (self.lake.root,))
        tags = self._tags(run)
        options: dict[str, Any] = {"asset_selection": [dg.AssetKey(key.split("/")) for key in run.selection]}
        if run.parent is not None:
            parent_id = run.parent.run_id
            reexecution = dg.ReexecutionOptions(parent_run_id=parent_id)
            tags |= {"dagster/parent_run_id": parent_id, "dagster/root_run_id": self.with_parents(run)[-1].run_id}
            if is_resumed:
                reexecution = dg.ReexecutionOptions.from_failure(parent_id, self.instance)
                tags["dagster/is_resume_retry"] = "true"
            options = {"reexecution_options": reexecution}
        description = f"{'resume' if is_resumed else 'run'} {run.selection} {run.keys} fault {run.fault}"
        self.log.append(f"started: {description}")
        options |= {"run_config": QUIET, "tags": tags, "raise_on_error": False}
        with dg.execute_job(job, self.instance, **options) as result:
            run.run_id, run.is_successful = result.run_id, result.success
            run.error = "; ".join(_failures(result))
        self.log.append(f"{run.run_id[:8]} ended: {'succeeded' if run.is_successful else run.error}")

    def _report_killed_run(self, run: Run) -> None:
        """Report the failure of a run whose process was killed, like Dagster's run monitoring."""
        dagster_run = self.instance.get_run_by_id(run.run_id)
        assert dagster_run is not None
        self.instance.report_run_failed(dagster_run)
        self.log.append(f"{run.run_id[:8]} was killed")

    def _tags(self, run: Run) -> dict[str, str]:
        definition = self.project.partitions.definition
        if definition is None or run.keys == (None,):
            return {}
        first, last = run.keys[0], run.keys[-1]
        assert first is not None and last is not None
        if first == last:
            return dict(definition.get_tags_for_partition_key(first))
        return {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}

    def step(self) -> None:
        """Run one action, or two interleaved actions, and verify the result."""
        n_runs_before = len(self.runs)
        latest = self.lake.latest_version()
        threads = [PausableThread(action, self.project.local) for action in self.choose_actions()]
        pending = list(threads)
        while pending:
            thread = self.rng.choice(pending)
            thread.resume()
            if thread.is_done:
                pending.remove(thread)
                if thread.error is not None:
                    raise thread.error
        for run in self.runs[n_runs_before:]:
            if run.was_killed:
                self._report_killed_run(run)
            run.is_finished = True
        self.check(self.runs[n_runs_before:], latest, is_alone=len(threads) == 1)

    # The model

    def read_state(self, version: int) -> dict[str, frozenset[Row]]:
        snapshot = self.lake.snapshot(version)
        state: dict[str, frozenset[Row]] = {}
        for table in TABLES:
            rows: list[Row] = []
            if snapshot.has_namespace("shop") and snapshot.has_table("shop", table):
                columns = self.project.partitions_of(table).columns
                for row in catalog_at(self.lake, version).load_table(("shop", table)).scan().to_arrow().to_pylist():
                    values = tuple((column, row[column]) for column in columns)
                    read = tuple(int(token) for token in row["sources"].split())
                    rows.append(Row(values, row["key"], row["token"], read))
            assert len({row.token for row in rows}) == len(rows), (
                f"{table} contains a duplicate row at version {version}"
            )
            state[table] = frozenset(rows)
        return state

    def with_parents(self, run: Run | None) -> list[Run]:
        runs: list[Run] = []
        while run is not None:
            runs.append(run)
            run = run.parent
        return runs

    def latest_staging(self, run: Run, table: str) -> Staging | None:
        """Return the latest output for a table of a run or of the runs that it re-executes."""
        for attempt in self.with_parents(run):
            stagings = [
                staging
                for staging in self.project.stagings
                if (staging.run_id, staging.table) == (attempt.run_id, table)
            ]
            if stagings:
                return stagings[-1]
        return None

    def run_of(self, run_id: str) -> Run:
        return next(run for run in self.runs if run.run_id == run_id)

    def check(self, runs: Sequence[Run], before: int, *, is_alone: bool) -> None:
        for version in range(before + 1, self.lake.latest_version() + 1):
            self._check_version(version)
        for run in runs:
            if run.run_id:
                self._check_events(run)
                if run.is_successful:
                    self._check_successful(run)
                else:
                    self._check_failed(run, before)
                if is_alone:
                    self._check_progress(run)
        for run_id, tokens in self.project.reported:
            assert all(self.stagings_by_token.get(token) for token in tokens), (
                f"{run_id[:8]} read rows that no version contains"
            )

    def _check_version(self, version: int) -> None:
        (info,) = [info for info in self.lake.history() if info.version == version]
        actual = self.read_state(version)
        previous_state = self.states[version - 1]
        if version in self.targets:
            assert actual == self.states[self.targets[version]]
            self.states[version] = actual
            return
        run = self.run_of(str(info.run_id))
        assert info.operation == "publish"
        changed = [table for table in TABLES if actual[table] != previous_state[table]]
        assert changed, f"version {version} changed nothing"
        self.states[version] = actual
        stagings: list[Staging] = []
        for table in changed:
            added = actual[table] - previous_state[table]
            latest_staging = self.latest_staging(run, table)
            assert latest_staging is not None
            stagings_of_run = [
                staging
                for staging in self.project.stagings
                if (staging.run_id, staging.table) == (latest_staging.run_id, table)
            ]
            staging = next((staging for staging in stagings_of_run if added == frozenset(staging.rows)), None)
            assert staging is not None, f"{table} at {version} does not contain the staged rows"
            assert staging.version is None, f"{table} was published by {staging.version} and {version}"
            assert previous_state[table] - actual[table] == self._replaced_rows(staging, previous_state[table]), (
                f"{table} at {version}"
            )
            staging.version = version
            self.stagings_by_token |= {row.token: staging for row in staging.rows}
            stagings.append(staging)
        for staging in stagings:
            self._check_reads(staging, version, run)

    def _replaced_rows(self, staging: Staging, previous_state: frozenset[Row]) -> frozenset[Row]:
        shape = self.project.shape
        mode = shape.modes[TABLES.index(staging.table)]
        values = {row.values for row in staging.rows}
        if mode == "overwrite":
            return previous_state
        if mode == "overwrite_partition":
            return frozenset(row for row in previous_state if row.values in values)
        if mode == "upsert":
            keys = {(row.values, row.key) for row in staging.rows}
            return frozenset(row for row in previous_state if (row.values, row.key) in keys)
        return frozenset(self._superseded_rows(staging)) & previous_state

    def _superseded_rows(self, staging: Staging) -> Sequence[Row]:
        """Return the rows of an interrupted append that its re-execution replaces."""
        publisher = self.project.publisher_of(staging.table) or f"shop/{staging.table}"
        for start, run in enumerate(self.with_parents(self.run_of(staging.run_id))):
            if start > 0 and publisher in self._materialized(run):
                return ()
            stagings = [
                other
                for other in self.project.stagings
                if (other.run_id, other.table) == (run.run_id, staging.table) and other is not staging and other.version
            ]
            if stagings:
                return stagings[-1].rows
        return ()

    def _check_reads(self, staging: Staging, version: int, run: Run) -> None:
        if staging.table != "b":
            return
        for token in staging.read | staging.read_self:
            source = self.stagings_by_token.get(token)
            assert source is not None, f"version {version} was computed from an unpublished row"
        if not self.project.shape.is_serializable:
            return
        expected = self._tokens(self.states[version]["a"], self._read_values(staging))
        assert staging.read == expected, f"version {version} was computed from other rows of table a"
        if self.project.shape.mapping == "self":
            previous_keys = {self.project.partitions.previous_key(str(key)) for key in staging.keys} - {None}
            values = {self.project.partitions.values(key) for key in previous_keys}
            assert staging.read_self == self._tokens(self.states[version - 1]["b"], values)

    def _read_values(self, staging: Staging) -> set[Any] | None:
        partitions, mapping = self.project.partitions, self.project.shape.mapping
        if mapping == "all" or partitions.definition is None:
            return None
        keys = {str(key) for key in staging.keys}
        if mapping == "previous":
            keys |= {previous for previous in map(partitions.previous_key, keys) if previous is not None}
        return {partitions.values(key) for key in keys}

    def _tokens(self, rows: frozenset[Row], values: set[Any] | None) -> frozenset[int]:
        return frozenset(row.token for row in rows if values is None or row.values in values)

    def _events(self, run: Run, of_type: dg.DagsterEventType) -> Iterator[Any]:
        for record in self.instance.get_records_for_run(run.run_id, of_type=of_type).records:
            yield record.asset_materialization or record.asset_observation

    def _materialized(self, run: Run) -> set[str]:
        return {
            event.asset_key.to_user_string() for event in self._events(run, dg.DagsterEventType.ASSET_MATERIALIZATION)
        }

    def _check_events(self, run: Run) -> None:
        """Assert that each materialization names the version that published its table."""
        for event in self._events(run, dg.DagsterEventType.ASSET_MATERIALIZATION):
            table = event.asset_key.path[-1]
            if event.asset_key.path[0] == "shop":
                staging = self.latest_staging(run, table)
                assert staging is not None
                assert event.metadata["lakehouse_version"].value == staging.version, f"{table} of {run.run_id[:8]}"

    def _check_successful(self, run: Run) -> None:
        reports_undone = self._reports_undone(run)
        for table in TABLES:
            if f"shop/{table}" not in run.selection:
                continue
            staging = self.latest_staging(run, table)
            assert staging is not None and staging.version is not None, (
                f"{table} of successful run {run.run_id[:8]} is not visible"
            )
            is_visible = frozenset(staging.rows) <= self.states[self.lake.latest_version()][table]
            was_published_before = self._publishing_run_id(staging.version) != run.run_id
            if not is_visible and was_published_before and not self._is_replaced(staging, table):
                assert reports_undone or f"shop/{table}" not in self._published_tables(run), (
                    f"{table} was undone, but no event reports that"
                )

    def _publishing_run_id(self, version: int) -> str:
        """Return the ID of the run that committed a version."""
        (info,) = [info for info in self.lake.history() if info.version == version]
        return str(info.run_id)

    def _reports_undone(self, run: Run) -> bool:
        events = [
            *self._events(run, dg.DagsterEventType.ASSET_MATERIALIZATION),
            *self._events(run, dg.DagsterEventType.ASSET_OBSERVATION),
        ]
        return any("undone_by_version" in event.metadata for event in events)

    def _published_tables(self, run: Run) -> set[str]:
        """Return the tables whose publishing step was started in a run."""
        steps = {
            record.event_log_entry.dagster_event.step_key
            for record in self.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_START).records
        }
        names = {key for key in run.selection if key.replace("/", "__") in steps}
        return {f"shop/{table}" for table in TABLES if (self.project.publisher_of(table) or f"shop/{table}") in names}

    def _is_replaced(self, staging: Staging, table: str) -> bool:
        """Whether a later publication, rather than a rollback, removed rows of a staged output."""
        assert staging.version is not None
        rows = frozenset(staging.rows)
        for version in range(staging.version + 1, self.lake.latest_version() + 1):
            if not rows <= self.states[version][table]:
                return version not in self.targets
        return False

    def _check_failed(self, run: Run, before: int) -> None:
        versions = {info.version for info in self.lake.history() if info.version > before and info.run_id == run.run_id}
        reported = {
            event.metadata["lakehouse_version"].value
            for event in self._events(run, dg.DagsterEventType.ASSET_MATERIALIZATION)
            if "lakehouse_version" in event.metadata
        }
        may_be_unreported = run.was_killed or run.fault_point.startswith("after")
        assert versions <= reported or may_be_unreported, (
            f"failed run {run.run_id[:8]} committed {versions} and reported {reported}"
        )

    def _check_progress(self, run: Run) -> None:
        """Assert that an undisturbed, complete run succeeds, and that a run without its publish assets fails."""
        project = self.project
        tables = [table for table in TABLES if f"shop/{table}" in run.selection]
        lacks_publisher = any((project.publisher_of(table) or "") not in ("", *run.selection) for table in tables)
        is_valid = project.partitions.is_valid or all(project.replaces_whole_table(table) for table in tables)
        if run.parent is None and (lacks_publisher or not is_valid) and tables:
            assert not run.is_successful, "no step of the run publishes its tables"
        is_complete = set(tables) == set(TABLES) and not lacks_publisher
        may_fail = run.check_fails and project.shape.has_check
        is_undisturbed = run.fault is None and "fault at" not in run.error and not run.was_killed and not may_fail
        if run.parent is None and is_complete and is_undisturbed and is_valid:
            assert run.is_successful, f"{run.run_id[:8]} failed: {run.error}"
        is_blocked = may_fail and "fault" not in run.error and not run.was_killed and run.parent is None
        if is_blocked and project.publisher_of("a"):
            stagings = [
                staging for staging in project.stagings if staging.run_id == run.run_id and staging.table == "a"
            ]
            assert all(staging.version is None for staging in stagings), (
                "a failed blocking check did not prevent the publication"
            )


def _failures(result: Any) -> Iterator[str]:
    for event in result.all_events:
        if event.is_step_failure:
            error = event.step_failure_data.error
            yield f"{event.step_key}: {(error.cause or error).message.strip()}"


def run_scenario(lake: Lakehouse, seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 8) -> Scenario | None:
    """Run random actions. Return None if the project is rejected when its definitions load."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    if shape.is_serializable:
        lake.alter_definition(isolation_level=IsolationLevel.SERIALIZABLE)
    project = Project(shape, lake)
    try:
        _JOBS[lake.root] = project.definitions().resolve_job_def("everything")
    except InvalidInputError:
        assert not project.partitions.is_valid, f"seed {seed}: {shape} is rejected"
        return None
    with dg.instance_for_test(overrides=_NO_LOGS) as instance, project.publishing(monkeypatch):
        scenario = Scenario(project, instance, rng)
        base = lake.latest_version()
        scenario.states[base] = scenario.states[0]
        try:
            for _ in range(steps):
                scenario.step()
        except BaseException:
            print(f"seed {seed}: {shape}", *scenario.log, sep="\n")
            raise
    del _JOBS[lake.root]
    return scenario


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (21, 25))])
def test_tables_of_successful_runs_are_visible(lakes: Lakes, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.local()
    assert run_scenario(lake, seed, monkeypatch, steps=6) is not None
    check_lake(lake)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_random_runs_match_model(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    seed, n_projects = random.SystemRandom().randrange(1 << 32), 200
    counts: Counter[str] = Counter()
    for number in range(n_projects):
        scenario = run_scenario(lakes.local(str(number)), seed + number, monkeypatch)
        counts.update({"rejected": 1} if scenario is None else scenario.counts)
    record_property(SUMMARY_PROPERTY, ", ".join(f"{count} {name}" for name, count in counts.items()))
    assert counts["successful"] > n_projects
