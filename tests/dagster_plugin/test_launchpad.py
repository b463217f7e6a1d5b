"""Test the defaults and the validation of each operation job's launchpad, with the UI's GraphQL queries.

``python -m tests.dagster_plugin.test_launchpad`` rewrites the files in tests/golden/launchpad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

from trinitylake_ops.declarations.registry import ALL

REPOSITORY = Path(__file__).parents[2]
LOCATION = Path(__file__).with_name("all_operations.py")
GOLDEN = REPOSITORY / "tests" / "golden" / "launchpad"
JOBS = sorted(operation.job for operation in ALL)

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
    ... on PythonError { message className stack cause { message } }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""


class Launchpad:
    """The jobs of a code location with all operations, on a Dagster instance."""

    def __init__(self, workspace: WorkspaceProcessContext):
        self._workspace = workspace
        self.instance = workspace.instance

    def query(self, query: str, **variables: Any) -> Any:
        response = execute_dagster_graphql(self._workspace.create_request_context(), query, variables)
        assert not response.errors, response.errors
        return next(iter(response.data.values()))

    def schema(self, job: str) -> Any:
        return self.query(SCHEMA, job=selector(job))

    def launch(self, job: str, config: dict[str, Any]) -> Any:
        return self.query(LAUNCH, run={"selector": selector(job), "runConfigData": config})


def selector(job: str) -> dict[str, str]:
    return {"repositoryLocationName": "operations", "repositoryName": "__repository__", "pipelineName": job}


@contextmanager
def open_launchpad() -> Iterator[Launchpad]:
    origin = InProcessCodeLocationOrigin(
        LoadableTargetOrigin(python_file=str(LOCATION), working_directory=str(REPOSITORY)),
        location_name="operations",
    )
    with (
        dg.instance_for_test() as instance,
        WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget(origin)) as workspace,
    ):
        yield Launchpad(workspace)


@pytest.fixture(scope="module")
def launchpad() -> Iterator[Launchpad]:
    with open_launchpad() as module_launchpad:
        yield module_launchpad


@pytest.mark.parametrize("job", JOBS)
def test_launchpad_shows_options_with_defaults(launchpad: Launchpad, job: str) -> None:
    schema = launchpad.schema(job)
    fields, default_yaml = schema["rootConfigType"]["fields"], schema["rootDefaultYaml"]
    assert default_yaml == (GOLDEN / f"{job}.yaml").read_text()
    assert {*yaml.safe_load(default_yaml)} <= {option["name"] for option in fields if not option["isRequired"]}
    for option in fields:
        assert option["description"] and option["description"].endswith(".")


def test_each_job_has_golden_file() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == JOBS


@pytest.mark.parametrize(
    ("job", "config", "message"),
    [
        ("export", {"name": " "}, "name must not be empty"),
        ("export", {"name": "x", "retain_for": "0d"}, "retain_for: '0d' "),
        ("export", {"name": "17"}, "export name '17' "),
        ("export", {"name": "x", "retain_for": "1e3d"}, "retain_for: '1e3d' is not a duration"),
        ("export", {"name": "x", "level": "minimal", "namespaces": ["a"]}, "namespaces: a minimal export"),
        ("rollback", {"to": {"export": "x" * 5000}}, "name has 5000 characters, more than 4096"),
        ("rollback", {"to": {"version": 3}, "tables": ["a\n.b"]}, "contains the control character U+000A"),
        ("purge", {"approval": {"approved_by": "Ada Lovelace", "digest": "no"}}, "'no' is not a digest of a plan"),
        ("purge", {"approval": {"approved_by": " ", "digest": f"3-{'0' * 64}"}}, "approved_by is required"),
        ("expire", {"unattended": True, "keep_last": 3}, "keep_last: an unattended run uses"),
    ],
    ids=["empty", "range", "name", "duration", "level", "long", "table", "digest", "approver", "unattended"],
)
def test_invalid_value_is_rejected_in_one_line_before_run_is_created(
    launchpad: Launchpad, job: str, config: dict[str, Any], message: str
) -> None:
    response = launchpad.launch(job, config)
    assert (response["__typename"], response["className"]) == ("PythonError", "DagsterInvalidConfigError")
    assert message in response["message"]
    assert ("\n" in response["message"], response["stack"], response["cause"]) == (False, [], None)
    assert launchpad.instance.get_runs() == []


@pytest.mark.parametrize(
    ("job", "config", "message"),
    [
        ("rollback", {}, 'Missing required config entry "to"'),
        ("rollback", {"to": {}}, "Must specify a field at path root:to"),
        ("rollback", {"to": {"version": 3, "last_passed": True}}, "You can only specify a single field"),
        ("rollback", {"to": {"version": "the last"}}, 'is not valid for expected type "Int"'),
        ("export", {}, 'Missing required config entry "name"'),
        ("export", {"name": None}, "Value at path root:name must not be None"),
        ("export", {"name": "x", "level": "huge"}, "Value at path root:level not in enum type"),
        ("undelete", {"versions": None}, "Value at path root:versions must not be None"),
        ("expire", {"max_age": 7}, 'is not valid for expected type "String"'),
        ("expire", {"approval": {"digest": f"3-{'0' * 64}"}}, 'Missing required config entry "approved_by"'),
        ("expire", {"approval": {"digest": f"3-{'0' * 64}", "approved_by": None}}, "approved_by must not be None"),
    ],
)
def test_schema_rejects_missing_values_and_wrong_types(
    launchpad: Launchpad, job: str, config: dict[str, Any], message: str
) -> None:
    response = launchpad.launch(job, config)
    assert response["__typename"] == "RunConfigValidationInvalid"
    assert message in response["errors"][0]["message"]
    assert "\n" not in response["errors"][0]["message"]
    assert launchpad.instance.get_runs() == []


def test_unknown_option_is_rejected_before_run_is_created(launchpad: Launchpad) -> None:
    response = launchpad.launch("restore", {"name": "x", "definitions": True})
    assert response["__typename"] == "RunConfigValidationInvalid"
    assert 'unexpected config entry "definitions"' in response["errors"][0]["message"]
    assert launchpad.instance.get_runs() == []


@pytest.mark.parametrize("job", ["rollback", "compact", "check", "observe"])
def test_run_cannot_select_another_lakehouse(launchpad: Launchpad, job: str) -> None:
    response = launchpad.launch(job, {"resources": {"lakehouse": {"config": {"root": "memory://other/"}}}})
    assert response["__typename"] == "RunConfigValidationInvalid"
    assert 'unexpected config entry "resources"' in response["errors"][0]["message"]
    assert launchpad.instance.get_runs() == []


@pytest.mark.parametrize(
    ("job", "option", "value"),
    [
        ("export", "name", {"env": "LAKE_KEY"}),
        ("rollback", "tables", [{"env": "LAKE_KEY"}]),
        ("verify", "max_requests", {"env": "LAKE_KEY"}),
        ("verify", "deep", {"env": "LAKE_KEY"}),
    ],
    ids=["text", "list", "number", "flag"],
)
def test_option_cannot_read_environment(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch, job: str, option: str, value: Any
) -> None:
    monkeypatch.setenv("LAKE_KEY", "secret-value")
    response = launchpad.launch(job, {option: value})
    assert response["__typename"] == "RunConfigValidationInvalid"
    assert "secret-value" not in str(response)
    assert launchpad.instance.get_runs() == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with open_launchpad() as launchpad_to_record:
        for name in JOBS:
            (GOLDEN / f"{name}.yaml").write_text(launchpad_to_record.schema(name)["rootDefaultYaml"])
