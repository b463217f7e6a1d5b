"""Test the approver: in Dagster+ the user who launched the run, otherwise the person named in the options."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from tests.lakes import Lakes
from tests.operations.changes import create
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import TrinityLakeResource, build_jobs
from trinitylake_ops.operations import plan_repair

USER = {"user": "ada@example.com"}


class Jobs:
    """The jobs of a lakehouse with an outdated hint, which an approved plan repairs."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance):
        self.lake = lake
        self.instance = instance

    def apply(self, approved_by: str | None, **tags: str) -> dg.ExecuteInProcessResult:
        resource = TrinityLakeResource(root=self.lake.root)
        definitions = dg.Definitions(jobs=build_jobs(), resources={"lakehouse": resource})
        config = {"approval": {"digest": plan_repair(self.lake).digest, "approved_by": approved_by}}
        job = definitions.resolve_job_def("repair")
        return job.execute_in_process(instance=self.instance, run_config=config, tags=tags, raise_on_error=False)


@pytest.fixture
def jobs(lakes: Lakes) -> Iterator[Jobs]:
    lake = lakes.local()
    create(lake, "ns", "t")
    with dg.instance_for_test() as instance:
        yield Jobs(lake, instance)


def failure_description(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert failure.step_failure_data.user_failure_data is not None
    return str(failure.step_failure_data.user_failure_data.description)


def approver(result: dg.ExecuteInProcessResult) -> object:
    assert result.success
    (output,) = [event for event in result.all_events if event.is_successful_output]
    return output.step_output_data.metadata["approved_by"].value


def test_approver_is_signed_in_user_in_dagster_plus(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", "prod")
    assert approver(jobs.apply("", **USER)) == "ada@example.com"
    assert approver(jobs.apply(None, **USER)) == "ada@example.com"
    assert approver(jobs.apply("ada@example.com", **USER)) == "ada@example.com"
    assert failure_description(jobs.apply("Bob", **USER)) == (
        "approved_by='Bob' does not match the signed-in user 'ada@example.com'; leave approved_by out"
    )
    assert failure_description(jobs.apply("")) == (
        "approved_by is required: no user launched this run; name the approver"
    )
    assert approver(jobs.apply("Bob")) == "Bob"


def test_user_tag_is_ignored_outside_of_dagster_plus(jobs: Jobs) -> None:
    assert approver(jobs.apply("Bob", **USER)) == "Bob"
    with pytest.raises(dg.DagsterInvalidConfigError, match="approved_by is required"):
        jobs.apply("", **USER)
