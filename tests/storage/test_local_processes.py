"""Processes that race for files in one local folder or are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from trinitylake_ops.storage import LocalStorage

REPOSITORY = Path(__file__).parents[2]
N_PROCESSES = 8
N_ROUNDS = 25

WRITING_PROGRAM = """
import sys
from trinitylake_ops.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
data = b"0123456789abcdef" * (4 << 20)
print("ready", flush=True)
storage.create("large/created", data)
storage.write("large/overwritten", data)
"""

DYING_PROGRAM = """
import os, signal, sys
from trinitylake_ops.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
original_write = os.write
def write_half(descriptor, data):
    original_write(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = write_half
getattr(storage, sys.argv[2])("large/" + sys.argv[2], b"x" * (8 << 20))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def send_line(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line)
    worker.stdin.flush()


def read_line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def stop(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.communicate()


def test_concurrent_creates_in_8_processes_have_one_winner(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/lake/"
    workers = [start("-m", "tests.storage.create_worker", root, str(number)) for number in range(N_PROCESSES)]
    try:
        assert {read_line(worker) for worker in workers} == {"ready"}
        storage = LocalStorage(root)
        all_winners = []
        for round_number in range(N_ROUNDS):
            name = f"round-{round_number}/name"  # creating the folder is also a race
            start_ns = time.monotonic_ns() + 2_000_000
            for worker in workers:
                send_line(worker, f"{name} {start_ns}\n")
            outcomes = [read_line(worker) for worker in workers]
            assert sorted(outcomes) == ["FileExistsAlreadyError"] * (N_PROCESSES - 1) + ["won"]
            winner = outcomes.index("won")
            assert storage.read(name) == str(winner).encode() * 50_000
            all_winners.append(winner)
        assert len(set(all_winners)) > 1, "the processes did not race"
        assert len(list(storage.list())) == N_ROUNDS
        assert list(storage.list("_ops/tmp/")) == []
    finally:
        for worker in workers:
            stop(worker)


def test_kill_during_a_write_leaves_no_visible_file(tmp_path: Path) -> None:
    storage = LocalStorage(f"file://{tmp_path}/lake/")
    storage.write("large/write", b"old")
    for operation in ("create", "write"):
        worker = start("-c", DYING_PROGRAM, storage.root, operation)
        worker.communicate(timeout=30)
        assert worker.returncode == -9
    assert [(file.path, file.size_bytes) for file in storage.list()] == [("large/write", 3)]
    assert [file.size_bytes for file in storage.list("_ops/tmp/")] == [4 << 20, 4 << 20]
    storage.create("large/create", b"new")  # temporary files of killed processes have no effect
    storage.write("large/write", b"newer")
    assert storage.read_many(["large/create", "large/write"]) == [b"new", b"newer"]


def test_kill_at_any_time_leaves_only_complete_files(tmp_path: Path) -> None:
    n_killed_while_writing = 0
    for delay_ms in (0, 5, 10, 20, 40):
        storage = LocalStorage(f"file://{tmp_path}/lake-{delay_ms}/")
        storage.write("large/overwritten", b"old")
        worker = start("-c", WRITING_PROGRAM, storage.root)
        try:
            assert read_line(worker) == "ready"
            deadline = time.monotonic() + 10
            while not list(storage.list("_ops/tmp/")) and time.monotonic() < deadline:
                assert worker.poll() is None
            time.sleep(delay_ms / 1000)
        finally:
            stop(worker)
        sizes = {file.path: file.size_bytes for file in storage.list("large/")}
        assert sizes.pop("large/created", 64 << 20) == 64 << 20
        assert sizes.pop("large/overwritten") in (3, 64 << 20)
        assert sizes == {}
        n_killed_while_writing += any(file.size_bytes < 64 << 20 for file in storage.list("_ops/tmp/"))
    assert n_killed_while_writing > 0
