"""Test the pipeline and the operations on a real S3 server, and that Dagster stores none of its credentials."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import duckdb
import polars as pl
import pytest
from pyspark.sql import SparkSession

from tests.credentials.canaries import (
    ACCESS_KEY_ID,
    SECRET_ACCESS_KEY,
    WRONG_SECRET_ACCESS_KEY,
    leaks,
    leaks_in_files,
)
from tests.credentials.server import CanaryServer, canary_server
from tests.dagster_plugin.maintenance_jobs import approved_rollback
from tests.dagster_plugin.pipeline import MONTHLY_TABLES, Pipeline
from tests.lakes import check_lake
from trinitylake_ops.dagster_plugin.resources import SecretVariables, StorageSettings, TrinityLakeResource
from trinitylake_ops.errors import StoragePermissionError

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
VARIABLES = SecretVariables(access_key_id="CANARY_KEY", secret_access_key="CANARY_SECRET")


@pytest.fixture(scope="module")
def canaries(request: pytest.FixtureRequest) -> Iterator[CanaryServer]:
    yield from canary_server(request.config)


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_KEY", ACCESS_KEY_ID)
        patch.setenv("CANARY_SECRET", SECRET_ACCESS_KEY)
        yield patch


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test(temp_dir=str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


def lakehouse_at(root: str, canaries: CanaryServer) -> TrinityLakeResource:
    settings = StorageSettings(**canaries.options)
    return TrinityLakeResource(root=root, storage_options=settings, secret_options_from_env=VARIABLES)


@pytest.fixture(scope="module")
def pipeline(
    spark: SparkSession,
    sample_folder: Path,
    canaries: CanaryServer,
    environment: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
) -> Pipeline:
    """A lakehouse with the reference tables and the data of January."""
    loaded_pipeline = Pipeline(lakehouse_at(canaries.root, canaries), sample_folder, instance)
    loaded_pipeline.initial_load()
    loaded_pipeline.monthly_load("2013-01-01")
    return loaded_pipeline


def test_monthly_runs_publish_tables_on_s3(pipeline: Pipeline) -> None:
    pipeline.monthly_load("2013-02-01")
    assert [info.operation for info in pipeline.lake().history()] == ["publish", "publish", "publish", "init"]
    for version, rows in ((2, 1000), (3, 2000)):
        assert pipeline.query("flights", "SELECT count(*) FROM t", version) == [(rows,)]
    for name in MONTHLY_TABLES:
        files = pipeline.data_files(name)
        assert files
        assert all(path.startswith(pipeline.lake().root) for path in files)


def test_duckdb_and_polars_read_two_versions_on_s3(pipeline: Pipeline) -> None:
    for version, rows in ((2, 1000), (3, 2000)):
        scan = pipeline.table("flights", version).scan()
        connection: duckdb.DuckDBPyConnection = scan.to_duckdb("flights")
        assert connection.execute("SELECT count(*) FROM flights").fetchall() == [(rows,)]
        polars = scan.to_polars()
        assert isinstance(polars, pl.DataFrame)
        assert len(polars) == rows


def test_operation_jobs_run_on_s3(pipeline: Pipeline) -> None:
    pipeline.must_run("rollback", **approved_rollback(pipeline.lake(), 2))
    assert pipeline.query("flights", "SELECT count(*) FROM t") == [(1000,)]
    assert pipeline.lake().diff(2, 4) == []
    pipeline.must_run("export", name="kept", level="minimal", version=3)
    assert pipeline.lake().snapshot("kept").version == 3
    pipeline.lake().close()
    pipeline.lake().storage.write("_latest_hint.txt", b"garbage")
    pipeline.must_run("repair_hint")
    assert pipeline.lake().storage.read("_latest_hint.txt") == str(pipeline.lake().latest_version()).encode()
    pipeline.must_run("verify")
    check_lake(pipeline.lake())


def test_job_runs_in_separate_process(pipeline: Pipeline, canaries: CanaryServer, tmp_path: Path) -> None:
    """Run definitions.py in a process that is configured only by environment variables."""
    command = [sys.executable, "-m", "dagster", "job", "execute", "--python-file", "definitions.py", "--job", "verify"]
    environment = {**os.environ, **canaries.environment, "DAGSTER_HOME": str(tmp_path)}
    completed = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    assert "RUN_SUCCESS" in completed.stderr
    assert leaks(completed.stdout + completed.stderr) == []
    assert any(tmp_path.rglob("*.db"))
    assert leaks_in_files(tmp_path) == []


def failures(result: dg.ExecuteInProcessResult) -> list[str]:
    return [str(event.step_failure_data.error) for event in result.all_events if event.is_step_failure]


def test_revoked_credentials_fail_with_clear_message(pipeline: Pipeline, environment: pytest.MonkeyPatch) -> None:
    with environment.context() as patch:
        patch.setenv("CANARY_SECRET", WRONG_SECRET_ACCESS_KEY)
        for job in ("verify", "repair_hint"):
            (failure,) = failures(pipeline.run(job))
            assert StoragePermissionError.__name__ in failure
            assert "the credentials are invalid" in failure
        publish_failures = failures(pipeline.run("monthly_load", "2013-01-01"))
        assert publish_failures
        assert all(StoragePermissionError.__name__ in failure for failure in publish_failures)
        patch.delenv("CANARY_SECRET")
        (failure,) = failures(pipeline.run("verify"))
        assert "is not set in this process" in failure
    pipeline.must_run("verify")


def test_missing_bucket_fails_with_clear_message(pipeline: Pipeline, canaries: CanaryServer) -> None:
    missing_bucket = Pipeline(lakehouse_at("s3://no-such-bucket-of-the-tests/", canaries), Path(), pipeline.instance)
    (failure,) = failures(missing_bucket.run("verify"))
    assert "the bucket 'no-such-bucket-of-the-tests' does not exist" in failure


def test_stored_files_and_events_contain_no_credentials(pipeline: Pipeline) -> None:
    """Search everything that the runs of this module stored in Dagster and in the bucket. Must be the last test."""
    runs = pipeline.instance.get_run_records()
    assert len(runs) >= 10
    n_events = 0
    for record in runs:
        run = record.dagster_run
        assert leaks(f"{dg.serialize_value(run)} {run.run_config} {run.tags}") == []
        for entry in pipeline.instance.all_logs(run.run_id):
            n_events += 1
            assert leaks(f"{dg.serialize_value(entry)} {entry.user_message} {record!r}") == []
    assert n_events > 200
    home = Path(pipeline.instance.root_directory)
    assert any(path.is_file() for path in home.rglob("*.db"))
    assert leaks_in_files(home) == []
    assert leaks(repr(pipeline.lakehouse)) == []
    storage = pipeline.lake().storage
    paths = [info.path for info in storage.list() if not info.path.endswith(".parquet")]
    assert len(paths) > 30
    assert [leaks(data) for data in storage.read_many(paths) if leaks(data)] == []
