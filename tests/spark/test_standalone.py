"""Test operations on S3 with a standalone cluster whose workers share no folder, and kill a worker during each step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.s3_server import S3Server
from tests.spark.cluster import REPOSITORY, Cluster
from tests.spark.cluster_program import ROUNDS, ROWS
from trinitylake_ops import Lakehouse, operations

pytestmark = [pytest.mark.debian_packages, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with two workers on separate mounts. Mounting requires root privileges."""
    running_cluster = Cluster(tmp_path)
    try:
        running_cluster.start(2)
        yield running_cluster
    finally:
        running_cluster.stop()


def test_operations_complete_when_workers_are_killed(cluster: Cluster, radosgw: S3Server, tmp_path: Path) -> None:
    root, target = radosgw.fresh_root(), radosgw.fresh_root("target")
    command = [sys.executable, "-m", "tests.spark.cluster_program", cluster.url, root, target]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with (
        open(tmp_path / "driver.log", "w") as errors,
        subprocess.Popen(command, stderr=errors, cwd=REPOSITORY, env=environment, **pipes) as driver,
    ):
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write(json.dumps(radosgw.storage_options))
        driver.stdin.close()
        lines: list[str] = []
        killed: list[str] = []

        def kill(number: int, step: str, after_seconds: float = 0.3) -> None:
            killed.append(step)
            threading.Timer(after_seconds, cluster.kill_worker, [number]).start()
            cluster.add_worker()

        for line in driver.stdout:
            lines.append(line.strip())
            if line.startswith("published 2"):
                kill(0, "pipeline")
            elif line.startswith("copied") and "export" not in killed:
                kill(1, "export", 0.0)
            elif line.startswith("deleted") and "purge" not in killed:
                kill(2, "purge")
    log = (tmp_path / "driver.log").read_text()
    assert driver.returncode == 0, (lines[-5:], re.findall(r".*Error.*", log)[:10], log[-1000:])
    assert killed == ["pipeline", "export", "purge"]
    results = json.loads(lines[-1])
    assert results["rows"] == ROUNDS * ROWS
    same_digest, files, copied = results["export"]
    assert same_digest
    assert copied == files - 1, "the root is not copied, but written when the version is committed"
    planned, deleted, remaining, is_complete, stopped = results["purge"]
    assert (deleted, remaining, is_complete, stopped) == (planned, 0, True, None)
    assert planned > 60
    assert results["findings"] == []
    assert "a deleting task was lost" in log
    copy = Lakehouse.open(target, radosgw.storage_options)
    assert operations.verify(copy, deep=True).is_clean
    assert operations.verify(Lakehouse.open(root, radosgw.storage_options), deep=True).is_clean
