"""``spark-submit`` with what ``make package`` makes, on workers that have a Python of the version and nothing else."""

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
#: What differs from run to run.
OF_ITS_TIME = ("digest", "now_ms", "cost")


def submitted(
    words: list[str], cwd: Path, environment: dict[str, str], timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    submit = [str(SPARK_HOME / "bin/spark-submit"), "--driver-memory", "600m", "--conf", "spark.ui.enabled=false"]
    return subprocess.run([*submit, *words], cwd=cwd, env=environment, text=True, capture_output=True, timeout=timeout)


def shown(text: str) -> dict[str, object]:
    # Spark passes on what its program says on standard error, too, on standard output.
    report: dict[str, object] = json.JSONDecoder().raw_decode(text)[0]
    return {name: value for name, value in report.items() if name not in OF_ITS_TIME}


@pytest.mark.soak
def test_the_job_under_spark_submit(tmp_path: Path) -> None:
    """On this machine: the arguments are those of the command, and so are output and exit codes."""
    root = f"file://{tmp_path}/lake/"
    aging = Aging.on(open_storage(root, {"fsync": "false"}))
    grow(aging, 3)
    local = [sys.executable, "-m", "trinitylake_ops.cli", "--root", root, "verify", "--json"]
    expected = subprocess.run(local, env=environment(), text=True, capture_output=True, check=True)
    spark = ["--master", "local[2]", str(JOB), "--root"]
    ran = submitted([*spark, root, "verify", "--engine", "spark", "--json"], tmp_path, environment())
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert shown(ran.stdout) == shown(expected.stdout)
    failed = submitted([*spark, f"file://{tmp_path}/none/", "verify", "--engine", "spark"], tmp_path, environment())
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
    made = Cluster(tmp_path, tmp_path / "bare")
    try:
        made.start(2)
        yield made
    finally:
        made.stop()


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(900)
def test_workers_that_have_only_python(cluster: Cluster, dist: Path, radosgw: S3Server, tmp_path: Path) -> None:
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
    known = {
        "TRINITYLAKE_STORAGE_OPTIONS": ",".join(f"{key}={value}" for key, value in radosgw.storage_options.items())
    }
    here = bare_environment(cluster.bare, environment(**known))
    here["PYSPARK_PYTHON"] = "./environment/bin/python"
    work = tmp_path / "dist"
    shutil.copytree(dist, work)
    events = tmp_path / "events"
    events.mkdir()
    words = ["--master", cluster.url, "--py-files", "trinitylake_ops.zip"]
    words += ["--archives", "environment.tar.gz#environment", "--conf", "spark.executor.memory=512m"]
    words += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.cores.max=2"]
    words += ["--conf", "spark.scheduler.minRegisteredResourcesRatio=1"]  # both have joined
    words += [
        "--conf",
        "spark.eventLog.enabled=true",
        "--conf",
        "spark.eventLog.compress=false",
        "--conf",
        f"spark.eventLog.dir=file://{events}",
    ]
    words += ["trinitylake_job.py", "--root", root]
    for command in (["orphans"], ["verify", "--deep"]):
        local = [sys.executable, "-m", "trinitylake_ops.cli", "--root", root, *command, "--json"]
        expected = subprocess.run(local, env=environment(**known), text=True, capture_output=True, check=True)
        ran = submitted([*words, *command, "--json", "--engine", "spark"], work, here)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert shown(ran.stdout) == shown(expected.stdout)
        assert len(shown(ran.stdout)) > 4
    applications = [[path.read_bytes() for path in folder.rglob("*") if path.is_file()] for folder in events.iterdir()]
    assert len(applications) == 2
    ended = [sum(log.count(b'"Event":"SparkListenerTaskEnd"') for log in logs) for logs in applications]
    assert ended == [2, 2], "each command lists by a job, in a task of each worker"
    seen = [*itertools.chain(*applications), *(path.read_bytes() for path in tmp_path.glob("*.log"))]
    assert not any(secret.encode() in log for log in seen)
    storage.write(node, b"no node")
    found = submitted([*words, "verify", "--engine", "spark"], work, here)
    assert found.returncode == 1, "a command that finds something says so to whoever submitted it"
    failed = submitted([*words[:-1], radosgw.fresh_root(), "verify", "--engine", "spark"], work, here)
    assert failed.returncode == 4
    assert len(failed.stdout.splitlines()) == 1 and failed.stdout.startswith("Error: there is no lakehouse at s3://")
    assert "Traceback" not in failed.stderr
