"""Test sessions of Spark Connect on a separate server: supported operations, rejected settings, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.operations.aging import Aging, grow
from tests.spark_deployments.connect_program import SECRET
from tests.spark_deployments.spark_processes import REPOSITORY, connect_server, environment, grows, wait_for
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.runtime.addresses import check_remote
from trinitylake_ops.spark.session import build_session
from trinitylake_ops.storage import open_storage


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def remote(server_folder: Path) -> Iterator[str]:
    """The address of a server that attempts each task up to twice."""
    with connect_server(server_folder, "local[2,2]") as address:
        yield address


def start_program(remote: str, folder: Path, *steps: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark_deployments.connect_program", remote, str(folder), *steps],
        env=environment(),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_steps(remote: str, folder: Path, *steps: str) -> dict[str, Any]:
    process = start_program(remote, folder, *steps)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-3000:]
    results: dict[str, Any] = json.loads(output)
    return results


@pytest.mark.soak
def test_operations_and_data_frames(remote: str, server_folder: Path, tmp_path: Path) -> None:
    results = run_steps(remote, tmp_path, "jobs", "operations", "frames")
    assert results["jobs"] == {
        "lengths": True,
        "errors": [
            ["FileMissingError", "it was deleted (path 'a/b')"],
            ["JobFailedError", "cannot read: LookupError: no such thing"],
        ],
        "attempts": [1],
        "deletes": [True, ["a"], ["a"]],
    }
    operations = results["operations"]
    assert operations["slots"] == 2
    assert operations["verify"] == [True, 1]
    copied, is_clean = operations["export"]
    assert is_clean and copied > 5
    for operation, min_files in (("purge", 6), ("orphans", 1)):
        planned, deleted, is_complete = operations[operation]
        assert planned == deleted >= min_files
        assert is_complete
    assert operations["findings"] == 0
    assert results["frames"] == {
        "Spark's reader": 200,
        "our reader": 50,
        "at a version": 100,
        "metadata": 4,
        "source": 200,
        "views": [200, 4],
        "compacted": [2],
        "after": 200,
    }
    logs = [path.read_bytes() for path in server_folder.rglob("*") if path.is_file()]
    assert any(b"SparkListenerConnectOperationStarted" in log for log in logs), "the event log contains the plans"
    assert not any(SECRET in log for log in logs)


@pytest.mark.soak
def test_streams_writes_and_functions(remote: str, tmp_path: Path) -> None:
    assert run_steps(remote, tmp_path, "streams")["streams"] == {"function": 50, "stream": 50}


@pytest.mark.soak
@pytest.mark.parametrize("end_signal", [signal.SIGINT, signal.SIGKILL])
def test_tasks_stop_after_client_ends(remote: str, tmp_path: Path, end_signal: signal.Signals) -> None:
    client = start_program(remote, tmp_path, "write_for_a_minute")
    wait_for(tmp_path / "written")
    client.send_signal(end_signal)
    client.communicate(timeout=60)
    assert client.returncode == -end_signal
    for _ in range(15):
        if not grows(tmp_path / "written", 1.0):
            break
    assert not grows(tmp_path / "written", 1.0)
    assert (tmp_path / "written").stat().st_size < 300


def run_command(root: str, *arguments: str, setup_code: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{setup_code}\nfrom trinitylake_ops.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, "--root", root, "--storage-option", "fsync=false", *arguments],
        env=environment(),
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.soak
def test_command_output_equals_local_engine(remote: str, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/lake/"
    grow(Aging.on(open_storage(root, {"fsync": "false"})), 3)
    processes = [
        run_command(root, "orphans", "--json", *arguments)
        for arguments in ((), ("--engine", "spark", "--spark-remote", remote))
    ]
    reports = [json.loads(process.stdout) for process in processes]
    for report in reports:
        del report["digest"], report["now_ms"]
    assert reports[1] == reports[0]
    assert (processes[1].returncode, processes[1].stderr) == (0, processes[0].stderr)


INVALID_OPTIONS = {
    "with a master": (
        ["--spark-remote", "sc://127.0.0.1:1", "--spark-master", "local[2]"],
        "",
        "--spark-master and --spark-remote",
    ),
    "without spark": (["--engine", "local", "--spark-remote", "sc://h"], "", "--engine spark"),
    "address": (["--spark-remote", "spark://h:1"], "", "use sc://HOST:PORT"),
    "token": (["--spark-remote", "sc://h:1/;token=secret"], "", "set SPARK_CONNECT_AUTHENTICATE_TOKEN"),
    "no server": (
        ["--spark-remote", "sc://127.0.0.1:1"],
        "from trinitylake_ops.spark.runtime import connect; connect.RESPONSE_SECONDS = 1.0",
        "cannot connect to 127.0.0.1:1: no Spark Connect server responded within 1 s",
    ),
    "no client": (
        ["--spark-remote", "sc://127.0.0.1:1"],
        "import sys; sys.modules['grpc'] = None",
        "grpc is not installed: it is part of the extra 'connect'; run pip install '.[connect]' in a clone of"
        " trinitylake-ops",
    ),
}


@pytest.mark.parametrize("invalid", INVALID_OPTIONS)
def test_invalid_options_fail_with_one_line(tmp_path: Path, invalid: str) -> None:
    root = f"file://{tmp_path}/lake/"
    Lakehouse.create(root, {"fsync": "false"})
    arguments, setup_code, message = INVALID_OPTIONS[invalid]
    if setup_code:
        process = run_command(root, "verify", "--engine", "spark", *arguments, setup_code=setup_code)
        code, errors = process.returncode, process.stderr
    else:
        result = CliRunner().invoke(trinitylake, ["--root", root, "verify", "--engine", "spark", *arguments])
        code, errors = result.exit_code, f"{result.stderr}{result.exception}"
    assert code != 0
    assert message in errors
    assert "Traceback" not in errors and "secret" not in errors
    assert len(process.stderr.splitlines() if setup_code else str(result.exception).splitlines()) == 1


@pytest.mark.soak
def test_server_settings_cannot_be_set(remote: str) -> None:
    process = run_command(
        "memory://none",
        setup_code=(
            "import sys\nfrom trinitylake_ops.errors import InvalidInputError\n"
            "from trinitylake_ops.spark import session_scope\n"
            "try:\n"
            f"    with session_scope(remote={remote!r}, **{{'spark.executor.memory': '1g'}}): pass\n"
            "except InvalidInputError as error:\n    print(error)\n"
            f"with session_scope(remote={remote!r}, **{{'spark.sql.shuffle.partitions': 7}}) as spark:\n"
            f"    with session_scope(remote={remote!r}, **{{'spark.sql.shuffle.partitions': 3}}) as shared:\n"
            "        print(shared is spark, shared.conf.get('spark.sql.shuffle.partitions'))\n"
            "    print(spark.conf.get('spark.sql.shuffle.partitions'), spark.conf.get('spark.sql.session.timeZone'))\n"
            "sys.exit()"
        ),
    )
    assert process.stderr == ""
    error, *settings = process.stdout.splitlines()
    assert error.startswith("spark.executor.memory cannot be set for a session at 127.0.0.1:")
    assert settings == ["True 3", "7 UTC"]


def test_remote_addresses_are_validated() -> None:
    assert check_remote("sc://h") == "h:15002"
    assert check_remote("sc://h:7/;use_ssl=true;user_id=u") == "h:7"
    for invalid in ("", "h:1", "sc://", "sc://h:x", "sc://u:p@h:1", "sc://h/;x=1;Token=t"):
        with pytest.raises(InvalidInputError):
            check_remote(invalid)
    with pytest.raises(InvalidInputError):
        build_session(remote="http://h")
    assert "SPARK_CONNECT_MODE_ENABLED" not in os.environ
