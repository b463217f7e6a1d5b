"""definitions.py, as Dagster's code server loads it, and the launchpad of its jobs."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource

REPOSITORY = Path(__file__).parents[2]


def test_a_code_server_can_load_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "--python-file", "definitions.py"]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path), "TRINITYLAKE_ROOT": str(tmp_path / "lake")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "lake").exists()


def maintenance() -> dg.Definitions:
    lakehouse = TrinityLakeResource(root="memory://never-made/")
    return dg.Definitions.merge(maintenance_definitions(), dg.Definitions(resources={"lakehouse": lakehouse}))


def test_operations_are_jobs_and_the_lakehouse_is_an_asset() -> None:
    definitions = maintenance()
    names = {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}
    assert names == {"rollback", "export_minimal", "repair_hint", "verify"}
    assert {spec.key for spec in definitions.resolve_all_asset_specs()} == {LAKEHOUSE_KEY}
    assert all(definitions.resolve_job_def(name).tags["dagster/max_retries"] == "0" for name in names)


@pytest.mark.parametrize(
    ("job", "config"),
    [
        ("rollback", {}),
        ("rollback", {"ops": {"run_rollback": {"config": {"to": "1", "tables": "a.b"}}}}),
        ("rollback", {"ops": {"run_rollback": {"config": {"to": "1", "unknown": 1}}}}),
        ("export_minimal", {"ops": {"run_export_minimal": {"config": {"name": "x", "retain_days": "long"}}}}),
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
