"""Sessions start quietly, and no JVM of theirs is left, however the process that started them ends."""

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

def slow(elements):
    for element in elements:
        with open(element, "wb", buffering=0) as written:
            for _ in range(600):
                written.write(b"x")
                time.sleep(0.1)
        yield b""

folder, how = Path(sys.argv[1]), sys.argv[2]
with session_scope("ends") as spark:
    assert spark.range(3).count() == 3
    if how == "fails":
        raise LookupError("no such thing")
    if how == "works":
        run_in_tasks(spark, "write for long", slow, [str(folder / "written").encode()], 1)
"""


def started(folder: Path, how: str) -> subprocess.Popen[str]:
    """Start the program with a mark in its environment, which its children have, too."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), how],
        env=environment(SPARK_TEST_MARK=str(folder)),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def marked(folder: Path) -> dict[int, str]:
    """Return the processes that the program started, and itself: id -> name of its program."""
    mark = f"SPARK_TEST_MARK={folder}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended, or is another user's
                continue
    return found


def left_after(folder: Path, seconds: float) -> dict[int, str]:
    """Return what is left when so much time has passed, or nothing as soon as nothing is."""
    until_s = time.monotonic() + seconds
    while (left := marked(folder)) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


@pytest.mark.soak
@pytest.mark.parametrize(("how", "told"), [("ends", ""), ("fails", "LookupError: no such thing")])
def test_a_session_is_quiet_and_stops_with_its_block(tmp_path: Path, how: str, told: str) -> None:
    program = started(tmp_path, how)
    out, errors = program.communicate(timeout=120)
    assert out == ""
    assert errors.strip().rpartition("\n")[2] == told
    assert "WARN" not in errors and "Setting default log level" not in errors
    assert program.returncode == (1 if told else 0)
    assert left_after(tmp_path, 60) == {}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_jvm_is_left_by_a_process_that_is_ended(tmp_path: Path, end: signal.Signals) -> None:
    program = started(tmp_path, "works")
    wait_for(tmp_path / "written", 240)
    assert "java" in marked(tmp_path).values()
    program.send_signal(end)
    program.communicate(timeout=60)
    assert program.returncode == -end
    assert left_after(tmp_path, 120) == {}
    assert (tmp_path / "written").stat().st_size < 500


@pytest.mark.soak
def test_a_command_that_fails_leaves_no_jvm(tmp_path: Path) -> None:
    """It fails once its session runs: the option is looked at by what runs in it."""
    words = ["--root", f"file://{tmp_path}/lake/", "--storage-option", "fsync=false"]
    trinitylake = [sys.executable, "-m", "trinitylake_ops.cli", *words]
    env = environment(SPARK_TEST_MARK=str(tmp_path))
    subprocess.run([*trinitylake, "init"], env=env, check=True, capture_output=True)
    command = [*trinitylake, "orphans", "--engine", "spark", "--apply", "0" * 64]
    ran = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)
    assert ran.returncode not in (0, 1)
    assert "Traceback" not in ran.stderr
    assert left_after(tmp_path, 60) == {}
