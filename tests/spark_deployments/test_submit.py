"""Test ``spark-submit`` with the output of ``make package``, on workers that have only Python."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operations.aging import Aging, grow
from tests.servers.s3_server import S3Server
from tests.spark.cluster import Cluster, bare_environment
from tests.spark_deployments.spark_processes import REPOSITORY, SPARK_HOME, environment
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.storage import open_storage

JOB = REPOSITORY / "deploy/spark/trinitylake_job.py"
#: Fields that differ between runs.
VARYING_FIELDS = ("digest", "now_ms", "cost")


def spark_submit(
    arguments: list[str], cwd: Path, environment: dict[str, str], timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    submit = [str(SPARK_HOME / "bin/spark-submit"), "--driver-memory", "600m", "--conf", "spark.ui.enabled=false"]
    return subprocess.run(
        [*submit, *arguments], cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout
    )


def stable_report(text: str) -> dict[str, object]:
    """Return the fields of a JSON report that are equal in each run."""
    # The report is only the first part of the text, because Spark also writes standard error to standard output.
    report: dict[str, object] = json.JSONDecoder().raw_decode(text)[0]
    return {name: value for name, value in report.items() if name not in VARYING_FIELDS}


@pytest.mark.soak
def test_job_matches_command_under_spark_submit(tmp_path: Path) -> None:
    """On this machine, the job has the same arguments, output and exit codes as the command."""
    root = f"file://{tmp_path}/lake/"
    aging = Aging.on(open_storage(root, {"fsync": "false"}))
    grow(aging, 3)
    local = [sys.executable, "-m", "trinitylake_ops.cli", "--root", root, "verify", "--json"]
    expected = subprocess.run(local, env=environment(), text=True, capture_output=True, check=True)
    spark = ["--master", "local[2]", str(JOB), "--root"]
    process = spark_submit([*spark, root, "verify", "--engine", "spark", "--json"], tmp_path, environment())
    assert process.returncode == 0, process.stderr[-2000:]
    assert stable_report(process.stdout) == stable_report(expected.stdout)
    failed = spark_submit([*spark, f"file://{tmp_path}/none/", "verify", "--engine", "spark"], tmp_path, environment())
    assert failed.returncode == 4
    assert failed.stdout == f"Error: there is no lakehouse at file://{tmp_path}/none/; create one with init\n"
    assert "Traceback" not in failed.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "dist"
    subprocess.run(
        [REPOSITORY / "scripts/package.sh", str(folder)],
        env={**environment(), "PYTHON": sys.executable},
        check=True,
        timeout=280,
    )
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    running_cluster = Cluster(tmp_path, tmp_path / "bare")
    try:
        running_cluster.start(2)
        yield running_cluster
    finally:
        running_cluster.stop()


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(900)
def test_workers_need_only_python(cluster: Cluster, dist: Path, radosgw: S3Server, tmp_path: Path) -> None:
    assert cluster.bare is not None
    python = str(cluster.bare / "bin/python")
    for module in ("trinitylake_ops", "pyarrow", "pyspark"):
        assert (
            subprocess.run([python, "-c", f"import {module}"], capture_output=True, env={}, cwd=tmp_path).returncode
            == 1
        )
    root = radosgw.fresh_root()
    storage = open_storage(root, radosgw.storage_options)
    aging = Aging.on(storage)
    grow(aging, 4)
    node = min(info.path for info in storage.list() if "-node-" in info.path)
    storage.create(new_node_path(), b"left behind")
    secret = radosgw.storage_options["secret_access_key"]
    storage_variables = {
        "TRINITYLAKE_STORAGE_OPTIONS": ",".join(f"{key}={value}" for key, value in radosgw.storage_options.items())
    }
    driver_environment = bare_environment(cluster.bare, environment(**storage_variables))
    driver_environment["PYSPARK_PYTHON"] = "./environment/bin/python"
    work = tmp_path / "dist"
    shutil.copytree(dist, work)
    events = tmp_path / "events"
    events.mkdir()
    arguments = ["--master", cluster.url, "--py-files", "trinitylake_ops.zip"]
    arguments += ["--archives", "environment.tar.gz#environment", "--conf", "spark.executor.memory=512m"]
    arguments += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.cores.max=2"]
    arguments += ["--conf", "spark.scheduler.minRegisteredResourcesRatio=1"]  # wait until both workers have registered
    arguments += [
        "--conf",
        "spark.eventLog.enabled=true",
        "--conf",
        "spark.eventLog.compress=false",
        "--conf",
        f"spark.eventLog.dir=file://{events}",
    ]
    arguments += ["trinitylake_job.py", "--root", root]
    for command in (["orphans"], ["verify", "--deep"]):
        local = [sys.executable, "-m", "trinitylake_ops.cli", "--root", root, *command, "--json"]
        expected = subprocess.run(
            local, env=environment(**storage_variables), text=True, capture_output=True, check=True
        )
        process = spark_submit([*arguments, *command, "--json", "--engine", "spark"], work, driver_environment)
        assert process.returncode == 0, process.stderr[-3000:]
        assert stable_report(process.stdout) == stable_report(expected.stdout)
        assert len(stable_report(process.stdout)) > 4
    applications = [[path.read_bytes() for path in folder.rglob("*") if path.is_file()] for folder in events.iterdir()]
    assert len(applications) == 2
    task_counts = [sum(log.count(b'"Event":"SparkListenerTaskEnd"') for log in logs) for logs in applications]
    assert task_counts == [2, 2], "each command lists files in one job with a task on each worker"
    logged = [*itertools.chain(*applications), *(path.read_bytes() for path in tmp_path.glob("*.log"))]
    assert not any(secret.encode() in log for log in logged)
    storage.write(node, b"no node")
    failed_verify = spark_submit([*arguments, "verify", "--engine", "spark"], work, driver_environment)
    assert failed_verify.returncode == 1, "the exit code reports the findings"
    failed = spark_submit(
        [*arguments[:-1], radosgw.fresh_root(), "verify", "--engine", "spark"], work, driver_environment
    )
    assert failed.returncode == 4
    assert len(failed.stdout.splitlines()) == 1 and failed.stdout.startswith("Error: there is no lakehouse at s3://")
    assert "Traceback" not in failed.stderr
