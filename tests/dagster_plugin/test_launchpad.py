"""What the launchpad shows of each job of operations, and refuses: asked of Dagster as its pages ask, by GraphQL.

``python -m tests.dagster_plugin.test_launchpad`` writes the files in tests/golden/launchpad anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from trinitylake_ops.dagster_plugin.ops.jobs import build_jobs
from trinitylake_ops.maintenance import Budget
from trinitylake_ops.operations.declared.scheduled import ApplyLimits, scheduled_operations

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "golden" / "launchpad"
ANY_LIMITS = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
JOBS = sorted(
    [job.name for job in build_jobs()]
    + [operation.job for operation in scheduled_operations(ANY_LIMITS, Budget()).values()]
)

SCHEMA = """
query($job: PipelineSelector!) {
  runConfigSchemaOrError(selector: $job) {
    ... on RunConfigSchema {
      rootDefaultYaml
      rootConfigType {
        ... on CompositeConfigType { fields { name description isRequired } }
      }
    }
  }
}
"""
LAUNCH = """
mutation($run: ExecutionParams!) {
  launchRun(executionParams: $run) {
    __typename
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""


class Launchpad:
    """The jobs of definitions.py on a Dagster instance."""

    def __init__(self, workspace: WorkspaceProcessContext):
        self._workspace = workspace
        self.instance = workspace.instance

    def ask(self, query: str, **variables: Any) -> Any:
        answer = execute_dagster_graphql(self._workspace.create_request_context(), query, variables)
        assert not answer.errors, answer.errors
        return next(iter(answer.data.values()))

    def schema(self, job: str) -> Any:
        return self.ask(SCHEMA, job=selector(job))

    def launch(self, job: str, config: dict[str, Any]) -> Any:
        return self.ask(LAUNCH, run={"selector": selector(job), "runConfigData": config})


def selector(job: str) -> dict[str, str]:
    return {"repositoryLocationName": "here", "repositoryName": "__repository__", "pipelineName": job}


@contextmanager
def opened_launchpad() -> Iterator[Launchpad]:
    origin = InProcessCodeLocationOrigin(
        LoadableTargetOrigin(python_file=str(REPOSITORY / "definitions.py"), working_directory=str(REPOSITORY)),
        location_name="here",
    )
    with (
        dg.instance_for_test() as instance,
        WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget(origin)) as workspace,
    ):
        yield Launchpad(workspace)


@pytest.fixture(scope="module")
def launchpad() -> Iterator[Launchpad]:
    with opened_launchpad() as opened:
        yield opened


@pytest.mark.parametrize("job", JOBS)
def test_the_launchpad_shows_each_option_with_its_default(launchpad: Launchpad, job: str) -> None:
    schema = launchpad.schema(job)
    fields, shown = schema["rootConfigType"]["fields"], schema["rootDefaultYaml"]
    assert shown == (GOLDEN / f"{job}.yaml").read_text()
    assert {option["name"] for option in fields} == {*yaml.safe_load(shown)}
    for option in fields:
        assert not option["isRequired"]
        assert option["description"] and option["description"].endswith(".")


def test_there_is_a_file_for_each_job() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == JOBS


@pytest.mark.parametrize(
    ("job", "config", "said"),
    [
        ("rollback", {}, "to has to be given, it is empty"),
        ("export_full", {"name": "x", "retain_days": -1.0}, "retain_days: Input should be greater than or equal to 0"),
        ("export_full", {"name": "17"}, "export name '17' is digits only"),
        ("export_full", {"name": "x", "retain_days": 1e-9}, "retain_days is 1e-09, less than a millisecond"),
        ("rollback", {"to": "x" * 5000}, "to has 5000 characters, more than 4096"),
        ("rollback", {"to": "3", "tables": ["a\n.b"]}, "contains the control character U+000A"),
        ("purge_apply", {"approved_by": "Ada Lovelace", "approved_digest": "no"}, "'no' is no digest of a plan"),
    ],
    ids=["empty", "range", "name", "moment", "long", "table", "digest"],
)
def test_a_wrong_value_is_refused_before_there_is_a_run(
    launchpad: Launchpad, job: str, config: dict[str, Any], said: str
) -> None:
    answer = launchpad.launch(job, config)
    assert answer["__typename"] == "PythonError"
    assert answer["message"].startswith("dagster._core.errors.DagsterInvalidConfigError: ")
    assert said in answer["message"]
    assert answer["message"].strip().count("\n") == 0
    assert launchpad.instance.get_runs() == []


def test_what_is_no_option_is_refused_before_there_is_a_run(launchpad: Launchpad) -> None:
    answer = launchpad.launch("export_minimal", {"name": "x", "definitions": True})
    assert answer["__typename"] == "RunConfigValidationInvalid"
    assert 'unexpected config entry "definitions"' in answer["errors"][0]["message"]
    assert launchpad.instance.get_runs() == []


@pytest.mark.parametrize("job", ["rollback", "compact", "lakehouse_checks", "observe_lakehouse"])
def test_nobody_points_a_job_at_another_lakehouse(launchpad: Launchpad, job: str) -> None:
    answer = launchpad.launch(job, {"resources": {"lakehouse": {"config": {"root": "memory://other/"}}}})
    assert answer["__typename"] == "RunConfigValidationInvalid"
    assert 'unexpected config entry "resources"' in answer["errors"][0]["message"]
    assert launchpad.instance.get_runs() == []


@pytest.mark.parametrize(
    ("job", "option", "given"),
    [
        ("export_minimal", "name", {"env": "LAKE_KEY"}),
        ("rollback", "tables", [{"env": "LAKE_KEY"}]),
        ("verify", "max_requests", {"env": "LAKE_KEY"}),
        ("verify", "deep", {"env": "LAKE_KEY"}),
    ],
    ids=["text", "list", "number", "flag"],
)
def test_an_option_does_not_read_the_environment(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch, job: str, option: str, given: Any
) -> None:
    monkeypatch.setenv("LAKE_KEY", "nobody-may-see-this")
    answer = launchpad.launch(job, {option: given})
    assert answer["__typename"] == "RunConfigValidationInvalid"
    assert "nobody-may-see-this" not in str(answer)
    assert launchpad.instance.get_runs() == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with opened_launchpad() as launchpad_now:
        for name in JOBS:
            (GOLDEN / f"{name}.yaml").write_text(launchpad_now.schema(name)["rootDefaultYaml"])
