"""Test that sessions start without warnings and leave no JVM behind, no matter how their process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.spark_deployments.spark_processes import REPOSITORY, environment, wait_for

PROGRAM = """
import sys, time
from pathlib import Path
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.spark.runtime.task_jobs import run_in_tasks

def write_slowly(elements):
    for element in elements:
        with open(element, "wb", buffering=0) as file:
            for _ in range(600):
                file.write(b"x")
                time.sleep(0.1)
        yield b""

folder, action = Path(sys.argv[1]), sys.argv[2]
with session_scope("program") as spark:
    assert spark.range(3).count() == 3
    if action == "fail":
        raise LookupError("no such thing")
    if action == "write":
        run_in_tasks(spark, "write slowly", write_slowly, [str(folder / "written").encode()], 1)
"""


def start_program(folder: Path, action: str) -> subprocess.Popen[str]:
    """Start the program with an environment variable that identifies it and its child processes."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), action],
        env=environment(SPARK_TEST_MARK=str(folder)),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def marked_processes(folder: Path) -> dict[int, str]:
    """Return the names of the program and its descendants by process id."""
    mark = f"SPARK_TEST_MARK={folder}".encode()
    processes: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    processes[int(entry.name)] = (entry / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended or belongs to another user
                continue
    return processes


def remaining_processes(folder: Path, seconds: float) -> dict[int, str]:
    """Wait until no marked process is running, and return the processes that are still running after a timeout."""
    deadline_s = time.monotonic() + seconds
    while (remaining := marked_processes(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return remaining


@pytest.mark.soak
@pytest.mark.parametrize(("action", "last_line"), [("end", ""), ("fail", "LookupError: no such thing")])
def test_session_is_quiet_and_stops_with_its_block(tmp_path: Path, action: str, last_line: str) -> None:
    program = start_program(tmp_path, action)
    output, errors = program.communicate(timeout=120)
    assert output == ""
    assert errors.strip().rpartition("\n")[2] == last_line
    assert "WARN" not in errors and "Setting default log level" not in errors
    assert program.returncode == (1 if last_line else 0)
    assert remaining_processes(tmp_path, 60) == {}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_process_leaves_no_jvm(tmp_path: Path, end_signal: signal.Signals) -> None:
    program = start_program(tmp_path, "write")
    wait_for(tmp_path / "written", 240)
    assert "java" in marked_processes(tmp_path).values()
    program.send_signal(end_signal)
    program.communicate(timeout=60)
    assert program.returncode == -end_signal
    assert remaining_processes(tmp_path, 120) == {}
    assert (tmp_path / "written").stat().st_size < 500


@pytest.mark.soak
def test_failed_command_leaves_no_jvm(tmp_path: Path) -> None:
    """The command fails after the session has started, because the digest is checked in the session."""
    options = ["--root", f"file://{tmp_path}/lake/", "--storage-option", "fsync=false"]
    trinitylake = [sys.executable, "-m", "trinitylake_ops.cli", *options]
    env = environment(SPARK_TEST_MARK=str(tmp_path))
    subprocess.run([*trinitylake, "init"], env=env, check=True, capture_output=True)
    command = [*trinitylake, "orphans", "--engine", "spark", "--apply", "0" * 64]
    process = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)
    assert process.returncode not in (0, 1)
    assert "Traceback" not in process.stderr
    assert remaining_processes(tmp_path, 60) == {}
