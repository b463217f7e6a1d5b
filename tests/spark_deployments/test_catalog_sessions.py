"""The catalog beyond ``build_session``: a program under ``spark-submit``, and a session of Spark Connect."""

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
    "told": [
        ["VersionNotFoundError", "version 99 does not exist; the latest is 4"],
        ["ExportNotFoundError", "there is no export 'none'; exports: none"],
        ["IllegalArgumentException", "VersionNotFoundError: version 99 does not exist; the latest is 4"],
    ],
    "messages": ["create the lakehouse", "create namespace a", "write a.t", "write a.t", "write a.t"],
}


def figures(words: list[str], cwd: Path) -> dict[str, Any]:
    ran = subprocess.run(words, cwd=cwd, env=environment(), text=True, capture_output=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.soak
def test_a_program_under_spark_submit(tmp_path: Path) -> None:
    """The JVM runs before the program does, so it has no jar of ours when it starts."""
    submit = [str(SPARK_HOME / "bin/spark-submit"), "--master", "local[2]", "--driver-memory", "600m"]
    submit += ["--conf", "spark.ui.enabled=false", "--conf", f"spark.sql.warehouse.dir={tmp_path}/warehouse"]
    assert figures([*submit, str(PROGRAM), f"file://{tmp_path}/lake/"], tmp_path) == EXPECTED


@pytest.mark.soak
def test_a_session_of_spark_connect(tmp_path: Path) -> None:
    with connect_server(tmp_path) as remote:
        for name in ("one", "two"):  # sessions of one server
            words = [sys.executable, str(PROGRAM), f"file://{tmp_path}/{name}/", remote]
            assert figures(words, tmp_path) == EXPECTED
