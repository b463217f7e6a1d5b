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
    completed = subprocess.run(
        command,
        input=json.dumps(canaries.options_with_credentials),
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folders["temporary"])},
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    assert DONE in completed.stdout
    assert "marker-of-the-test" in completed.stdout, "the output includes plans"
    assert "3 copied" in completed.stdout, "the stream copied the rows"
    assert completed.stdout.count("rejected:") == 4, completed.stdout
    assert "Traceback" in completed.stderr, "the failures of tasks are logged"
    event_log = b"".join(path.read_bytes() for path in folders["event-logs"].rglob("*") if path.is_file())
    assert b"SparkListenerTaskEnd" in event_log
    assert b"trinitylake_table_scan" in event_log
    assert b"BatchScan trinitylake" in event_log
    assert leaks(output) == []
    assert leaks_in_files(tmp_path) == []
