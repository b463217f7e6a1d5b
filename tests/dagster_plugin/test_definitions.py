"""definitions.py, as Dagster's code server loads it, and the launchpad of its jobs."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.credentials.canaries import ACCESS_KEY_ID, SECRET_ACCESS_KEY, leaks, leaks_in_files
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

REPOSITORY = Path(__file__).parents[2]
ROOT_VARIABLE = "TRINITYLAKE_ROOT"


def load(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "--python-file", "definitions.py"]
    environment = {**os.environ, "DAGSTER_HOME": str(folder), ROOT_VARIABLE: str(folder / "lake"), **variables}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def test_a_code_server_can_load_it(tmp_path: Path) -> None:
    done = load(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (ROOT_VARIABLE, f"s3://{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}@bucket/lake", "'root' is not shown"),
        (OPTIONS_VARIABLE, f"endpoint=https://user:{SECRET_ACCESS_KEY}@host", "'endpoint' must be"),
    ],
)
def test_credentials_are_refused_unseen_when_it_is_loaded(tmp_path: Path, variable: str, value: str, said: str) -> None:
    done = load(tmp_path, **{variable: value})
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert leaks(done.stdout + done.stderr) == []
    assert leaks_in_files(tmp_path) == []


FREEING = ("trim", "expire", "purge", "orphans")


def maintenance() -> dg.Definitions:
    lakehouse = TrinityLakeResource(root="memory://never-made/")
    return dg.Definitions.merge(maintenance_definitions(), dg.Definitions(resources={"lakehouse": lakehouse}))


def test_operations_are_jobs_and_the_lakehouse_is_an_asset() -> None:
    definitions = maintenance()
    names = {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}
    planned = {f"{name}_{step}" for name in (*FREEING, "repair") for step in ("plan", "apply")}
    assert (
        names
        == {"rollback", "export", "restore", "repair_hint", "compact", "verify", "undelete", "reconcile"} | planned
    )
    assert {spec.key for spec in definitions.resolve_all_asset_specs()} == {LAKEHOUSE_KEY}
    assert all(definitions.resolve_job_def(name).tags["dagster/max_retries"] == "0" for name in names)


@pytest.mark.parametrize(
    ("job", "config"),
    [
        ("rollback", {}),
        ("rollback", {"ops": {"run_rollback": {"config": {"to": "1", "tables": "a.b"}}}}),
        ("rollback", {"ops": {"run_rollback": {"config": {"to": "1", "unknown": 1}}}}),
        ("export", {"ops": {"run_export": {"config": {"name": "x", "retain_days": "long"}}}}),
        *((f"{name}_apply", {}) for name in (*FREEING, "repair")),
        ("undelete", {}),
        ("expire_plan", {"ops": {"run_expire_plan": {"config": {"keep_last": "many"}}}}),
        ("purge_plan", {"ops": {"run_purge_plan": {"config": {"max_seconds": 1}}}}),
        ("verify", {"ops": {"run_verify": {"config": {"deep": "very"}}}}),
    ],
)
def test_a_wrong_configuration_fails_before_anything_runs(job: str, config: dict[str, object]) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError):
        maintenance().resolve_job_def(job).execute_in_process(run_config=config)


def test_no_lakehouse_is_one_clear_failure() -> None:
    result = maintenance().resolve_job_def("verify").execute_in_process(raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert failure.step_failure_data.user_failure_data is not None
    description = failure.step_failure_data.user_failure_data.description
    assert description == "there is no lakehouse at memory://never-made/; create one with init"
