"""Test that Dagster's code server loads definitions.py, and how its jobs validate run configurations."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._cli import main
from dagster._cli.config_scaffolder import scaffold_job_config
from dagster._core.system_config.objects import ResolvedRunConfig

from tests.credentials.canaries import ACCESS_KEY_ID, SECRET_ACCESS_KEY, leaks, leaks_in_files
from tests.processes import fork
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.declarations.planned import PlannedOptions
from trinitylake_ops.declarations.registry import ALL
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

REPOSITORY = Path(__file__).parents[2]
ROOT_VARIABLE = "TRINITYLAKE_ROOT"
LIMITS = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))


def validate_definitions(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "--python-file", "definitions.py"]
    environment = {**os.environ, "DAGSTER_HOME": str(folder), ROOT_VARIABLE: str(folder / "lake"), **variables}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def validate_definitions_in_fork(folder: Path, **variables: str) -> tuple[int, str]:
    """Validate the definitions in a forked process, and return its status and output."""
    output = folder / "output"

    def work(_report: Callable[[str], None]) -> None:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
        os.environ.update({"DAGSTER_HOME": str(folder), ROOT_VARIABLE: str(folder / "lake"), **variables})
        os.chdir(REPOSITORY)
        warnings.simplefilter("ignore")  # like in a new process
        sys.argv = ["dagster", "definitions", "validate", "--python-file", "definitions.py"]
        main()

    status, _ = fork(work).finish()
    return status, output.read_text()


def test_code_server_loads_definitions(tmp_path: Path) -> None:
    completed = validate_definitions(tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (ROOT_VARIABLE, f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake", "'root' is invalid"),
        (OPTIONS_VARIABLE, f"endpoint=https://user:{SECRET_ACCESS_KEY}@host", "'endpoint' must be"),
    ],
)
def test_credentials_in_environment_are_rejected_without_their_values(
    tmp_path: Path, variable: str, value: str, message: str
) -> None:
    status, output = validate_definitions_in_fork(tmp_path, **{variable: value})
    assert status != 0
    assert message in output
    assert leaks(output) == []
    assert leaks_in_files(tmp_path) == []


PLANNED_JOBS = sorted(
    operation.job for operation in ALL if operation.options and issubclass(operation.options, PlannedOptions)
)
JOBS_WITH_NAME = ("restore", "drop_export", "promote", "refresh_clone", "drop_clone")
REQUIRED_OPTIONS = {
    "rollback": {"to": {"version": 1}},
    "drop_namespace": {"namespace": "x"},
    "prune_exports": {"pattern": "x"},
    **{name: {"name": "x"} for name in JOBS_WITH_NAME},
}
DIGEST = f"3-{'0' * 64}"
APPROVAL = {"approval": {"digest": DIGEST, "approved_by": "Ada Lovelace"}}


@pytest.fixture(scope="module")
def maintenance_jobs() -> dg.Definitions:
    lakehouse = TrinityLakeResource(root="memory://missing/")
    return dg.Definitions(jobs=build_jobs(operations="all", limits=LIMITS), resources={"lakehouse": lakehouse})


def test_operation_jobs_are_not_retried(maintenance_jobs: dg.Definitions) -> None:
    names = {job.name for job in maintenance_jobs.resolve_all_job_defs() if not job.name.startswith("__")}
    assert names == {operation.job for operation in ALL}
    assert all(maintenance_jobs.resolve_job_def(name).tags["dagster/max_retries"] == "0" for name in names)


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as test_instance:
        yield test_instance


@pytest.mark.parametrize(
    ("job", "config", "message"),
    [
        ("restore", {"name": " "}, "name must not be empty"),
        ("rollback", {"to": {"version": -1}}, "version: Input should be greater than or equal to 0, but it is -1"),
        ("rollback", {"to": {"version": 1}, "tables": ["orders"]}, "'orders' is not a table name; use NAMESPACE.TABLE"),
        ("rollback", {"to": {"version": 1}, "namespaces": ["a b"]}, "namespace name 'a b' contains a space"),
        ("export", {"name": "17"}, "export name '17' "),
        ("export", {"name": "x", "target": "s3://KEY:secret@bucket/lake"}, "target is not a valid root"),
        ("export", {"name": "x", "retain_for": "30"}, "retain_for: '30' is not a duration"),
        ("export", {"name": "x", "retain_for": "999999999d"}, "retain_for: '999999999d' is longer than 1,000,000 days"),
        ("export", {"name": "x", "definitions": True}, "definitions: the level minimal determines them"),
        ("restore", {"name": "x", "tables": ["abc"]}, "'abc' is not a table name"),
        ("expire", {"max_age": "-1d"}, "max_age: '-1d' is not a duration"),
        ("expire", {"max_age": "1.5d"}, "max_age: "),
        ("trim", {"keep_last": -2}, "keep_last: Input should be greater than or equal to 0, but it is -2"),
        ("purge", {"grace": "a week"}, "grace: 'a week' is not a duration"),
        ("orphans", {"older_than": ""}, "older_than: "),
        ("purge", {**APPROVAL, "max_requests": 0}, "max_requests: Input should be greater than"),
        ("orphans", {**APPROVAL, "requests_per_second": -1.0}, "requests_per_second: Input should be"),
        ("purge", {**APPROVAL, "unattended": True}, "the run also has an approval"),
        ("purge", {"unattended": True, "grace": "0d"}, "grace: an unattended run uses"),
        ("repair", {"unattended": True, "to_last_good": True}, "to_last_good changes what readers see"),
        *(
            (
                name,
                {**REQUIRED_OPTIONS.get(name, {}), "approval": {"digest": DIGEST, "approved_by": " "}},
                "approved_by is required",
            )
            for name in PLANNED_JOBS
        ),
        ("expire", {"approval": {"digest": "ok", "approved_by": "Ada"}}, "digest: 'ok' is not a digest of a plan"),
        (
            "expire",
            {"approval": {"digest": DIGEST, "approved_by": "A" * 4096}},
            "is not a valid name; use at most 64",
        ),
        ("expire", {"approval": {"digest": DIGEST, "approved_by": "Ada\n"}}, "is not a valid name"),
        ("undelete", {"versions": ""}, "versions must not be empty"),
        ("undelete", {"versions": "all of them"}, "invalid version ranges 'all of them'; use a format such as 3-90,95"),
        ("verify", {"max_seconds": -1.0}, "max_seconds: "),
    ],
)
def test_invalid_values_are_rejected_before_run_is_created(
    maintenance_jobs: dg.Definitions, instance: dg.DagsterInstance, job: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError) as raised:
        maintenance_jobs.resolve_job_def(job).execute_in_process(run_config=config, instance=instance)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "A" * 65 not in str(raised.value)
    assert instance.get_runs() == []


@pytest.mark.parametrize(
    ("job", "config"),
    [
        ("rollback", {}),
        ("rollback", {"to": {"version": 1}, "tables": "a.b"}),
        ("rollback", {"to": {"version": 1}, "unknown": 1}),
        ("rollback", {"to": {"export": {"env": "HOME"}}}),
        ("rollback", {"to": {"version": 1.5}}),
        ("rollback", {"to": {"version": 1}, "resources": {"lakehouse": {"config": {"root": "memory://another/"}}}}),
        ("export", {"name": "x", "version": "latest"}),
        ("drop_export", {}),
        ("undelete", {}),
        ("expire", {"keep_last": "many"}),
        ("expire", {"approval": {"digest": DIGEST}}),
        ("verify", {"deep": "very"}),
    ],
)
def test_unknown_options_are_rejected(maintenance_jobs: dg.Definitions, job: str, config: dict[str, object]) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError):
        maintenance_jobs.resolve_job_def(job).execute_in_process(run_config=config)


@pytest.mark.parametrize("only_required", [True, False])
def test_scaffolded_configuration_is_accepted_or_clearly_rejected(
    maintenance_jobs: dg.Definitions, only_required: bool
) -> None:
    """Test the output of ``dagster job scaffold_config``, except the flags and zeros that it sets."""
    for job in maintenance_jobs.resolve_all_job_defs():
        config = scaffold_job_config(job, skip_non_required=only_required)
        assert not any(value for name, value in config.items() if name not in ("to", "before", "after", "level"))
        assert only_required or all(config.get(name) is None for name in ("unattended", "approval", "keep_last"))
        try:
            ResolvedRunConfig.build(job, {name: value for name, value in config.items() if name != "level"})
        except dg.DagsterInvalidConfigError as error:
            assert re.search("must not be empty|You can only specify a single field", str(error))


def test_null_selects_default(maintenance_jobs: dg.Definitions) -> None:
    ResolvedRunConfig.build(maintenance_jobs.resolve_job_def("expire"), {"max_age": None, "keep_last": None})
    ResolvedRunConfig.build(maintenance_jobs.resolve_job_def("verify"), {"deep": None, "max_seconds": None})
    with pytest.raises(dg.DagsterInvalidConfigError, match='Missing required config entry "to"'):
        ResolvedRunConfig.build(maintenance_jobs.resolve_job_def("rollback"), {})


def test_missing_lakehouse_fails_with_clear_message(maintenance_jobs: dg.Definitions) -> None:
    result = maintenance_jobs.resolve_job_def("verify").execute_in_process(raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert failure.step_failure_data.user_failure_data is not None
    description = failure.step_failure_data.user_failure_data.description
    assert description == "there is no lakehouse at memory://missing/; create one with init"
