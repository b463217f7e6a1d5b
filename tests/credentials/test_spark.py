"""Output of Spark jobs on S3: plans, settings, event logs, failed tasks, and all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.credentials.canaries import leaks, leaks_in_files
from tests.credentials.server import CanaryServer
from tests.credentials.spark_program import DONE

pytestmark = pytest.mark.debian_packages

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_spark_shows_no_credentials(canaries: CanaryServer, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("event-logs", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    command = [sys.executable, "-m", "tests.credentials.spark_program", canaries.root, str(folders["event-logs"])]
    done = subprocess.run(
        command,
        input=json.dumps(canaries.options_with_credentials),
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folders["temporary"])},
    )
    seen = done.stdout + done.stderr
    assert done.returncode == 0, seen
    assert DONE in done.stdout
    assert "marker-of-the-test" in done.stdout, "plans are among it"
    assert "3 copied" in done.stdout, "by a stream"
    assert done.stdout.count("refused:") == 4, done.stdout
    assert "Traceback" in done.stderr, "so are the failures of tasks"
    logged = b"".join(path.read_bytes() for path in folders["event-logs"].rglob("*") if path.is_file())
    assert b"SparkListenerTaskEnd" in logged
    assert b"trinitylake_table_scan" in logged
    assert b"BatchScan trinitylake" in logged
    assert leaks(seen) == []
    assert leaks_in_files(tmp_path) == []
