"""Test the catalog without ``build_session``: in a program under ``spark-submit``, and with Spark Connect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark_deployments.spark_processes import REPOSITORY, SPARK_HOME, connect_server, environment

PROGRAM = REPOSITORY / "tests/spark_deployments/catalog_program.py"
EXPECTED: dict[str, Any] = {
    "counts": [11, 10, 5, 8],
    "versions": 4,
    "errors": [
        ["VersionNotFoundError", "version 99 does not exist; the latest is 4"],
        ["ExportNotFoundError", "there is no export 'none'; exports: none"],
        ["IllegalArgumentException", "VersionNotFoundError: version 99 does not exist; the latest is 4"],
    ],
    "messages": ["create the lakehouse", "create namespace a", "write a.t", "write a.t", "write a.t"],
}


def run_program(command: list[str], cwd: Path) -> dict[str, Any]:
    process = subprocess.run(command, cwd=cwd, env=environment(), text=True, capture_output=True, timeout=280)
    assert process.returncode == 0, process.stderr[-3000:]
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


@pytest.mark.soak
def test_catalog_in_program_under_spark_submit(tmp_path: Path) -> None:
    """The JVM starts before the program, so the jar of the catalog is not on its class path."""
    submit = [str(SPARK_HOME / "bin/spark-submit"), "--master", "local[2]", "--driver-memory", "600m"]
    submit += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.sql.warehouse.dir={tmp_path}/warehouse"]
    assert run_program([*submit, str(PROGRAM), f"file://{tmp_path}/lake/"], tmp_path) == EXPECTED


@pytest.mark.soak
def test_catalog_in_spark_connect_session(tmp_path: Path) -> None:
    with connect_server(tmp_path) as remote:
        for name in ("first", "second"):  # two sessions of the same server
            command = [sys.executable, str(PROGRAM), f"file://{tmp_path}/{name}/", remote]
            assert run_program(command, tmp_path) == EXPECTED
