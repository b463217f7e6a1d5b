"""Run maintenance jobs on a lakehouse in this process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import dagster as dg

from tests.dagster_plugin.metadata_values import plain
from tests.local_clock import HOUR_MS, LocalClock
from tests.operations.changes import alter, content, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource

APPROVER = "Ada Lovelace"


def approved(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run configuration that applies a plan with approval, from the metadata of the planning run."""
    config: dict[str, Any] = plan["configuration"]
    return {**config, "approval": {**config["approval"], "approved_by": APPROVER}}


def approved_rollback(lake: Lakehouse, version: int) -> dict[str, Any]:
    """Return the run configuration that rolls a lakehouse back to a version with approval."""
    digest = operations.plan_rollback(lake, str(version)).digest
    return {"to": {"version": version}, "approval": {"digest": digest, "approved_by": APPROVER}}


class JobOutcome:
    """The metadata or the error of a run of a job with one op."""

    def __init__(self, result: dg.ExecuteInProcessResult, names: LakehouseNames = ONLY):
        self.run_id = result.run_id
        self.success = result.success
        self.materializations: list[Mapping[str, Any]] = []
        self.error = ""
        self.metadata: dict[str, Any] = {}
        for event in result.all_events:
            if event.is_step_materialization:
                materialization = event.step_materialization_data.materialization
                assert materialization.asset_key == names.lakehouse_key
                self.materializations.append(_values(materialization.metadata))
            elif event.is_successful_output:
                self.metadata = _values(event.step_output_data.metadata)
            elif event.is_step_failure:
                data = event.step_failure_data
                self.error = str(data.error)
                if data.user_failure_data is not None:
                    self.error = data.user_failure_data.description or ""
                    self.metadata = _values(data.user_failure_data.metadata)


def _values(metadata: Mapping[str, dg.MetadataValue]) -> dict[str, Any]:
    return plain(metadata)


def old_lake(folder: Path, clock: LocalClock) -> Lakehouse:
    """Return a local lakehouse of three commits, one hour later: all versions but the latest may expire."""
    lake = Lakehouse.create(
        str(folder / "lake"),
        {"fsync": "false"},
        maximum_version_age_millis=HOUR_MS // 2,
        minimum_versions_to_keep=1,
        txn_ttl_millis=60_000,
    )
    create(lake, "ns", "t")
    for _ in range(2):
        alter(lake, "ns", "t")
    clock.forward()
    return lake


class Jobs:
    """The maintenance jobs of a local lakehouse, one hour after its last commit."""

    def __init__(
        self,
        folder: Path,
        clock: LocalClock,
        instance: dg.DagsterInstance | None = None,
        engine: Literal["local", "spark"] = "local",
    ) -> None:
        self.clock = clock
        self.instance = instance
        self._engine = engine
        self.bind(old_lake(folder, clock))

    def at(self, root: str) -> Jobs:
        """Return the jobs of a copy of the lakehouse at another root."""
        jobs = copy.copy(self)
        jobs.bind(Lakehouse.open(root, self.lake.storage_options))
        return jobs

    def bind(self, lake: Lakehouse) -> None:
        """Define the jobs of a lakehouse."""
        self.lake = lake
        settings = StorageSettings(fsync="false")
        resource = TrinityLakeResource(root=lake.root, storage_options=settings, engine=self._engine)
        self._definitions = dg.Definitions(
            jobs=build_jobs(operations="all"), resources={"lakehouse": resource}, executor=dg.in_process_executor
        )

    def run(self, job: str, **config: Any) -> JobOutcome:
        definition = self._definitions.resolve_job_def(job)
        return JobOutcome(
            definition.execute_in_process(run_config=config, instance=self.instance, raise_on_error=False)
        )

    def must_run(self, job: str, **config: Any) -> JobOutcome:
        outcome = self.run(job, **config)
        assert outcome.success, outcome.error
        return outcome

    def expire_all(self) -> None:
        """Expire all versions but the latest, and advance the clock past their grace period."""
        operations.plan_expiration(self.lake).execute()
        self.clock.forward()

    def plan(self, name: str, /, **options: Any) -> dict[str, Any]:
        """Return the metadata of a planning run, and assert that it changes nothing."""
        before = content(self.lake)
        outcome = self.must_run(name, **options)
        assert content(self.lake) == before
        assert outcome.materializations == []
        return outcome.metadata

    def apply(self, plan: Mapping[str, Any], name: str) -> JobOutcome:
        """Approve a plan, and run the job that applies it."""
        return self.run(name, **approved(plan))

    def apply_digest(self, name: str, digest: str, /, **options: Any) -> JobOutcome:
        """Run a job with an approved digest, which may belong to another plan."""
        return self.run(name, approval={"digest": digest, "approved_by": APPROVER}, **options)

    def must_apply(self, name: str, /, **options: Any) -> JobOutcome:
        outcome = self.apply(self.plan(name, **options), name)
        assert outcome.success, outcome.error
        return outcome
