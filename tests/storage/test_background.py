"""The background thread coalesces equal tasks, and completes all tasks before an exit or fork."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TransientError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, StorageWrapper, background, drop_memory_root
from trinitylake_ops.transaction.pacing import Fairness


class CountedTask:
    """A task that counts its runs, and blocks the thread until it may finish."""

    def __init__(self) -> None:
        self.n_runs = 0
        self.may_finish = threading.Event()
        self.has_started = threading.Event()

    def __call__(self) -> None:
        self.has_started.set()
        assert self.may_finish.wait(60)
        self.n_runs += 1


def test_equal_queued_tasks_run_once() -> None:
    first, second = CountedTask(), CountedTask()
    second.may_finish.set()
    background.submit(first)
    assert first.has_started.wait(60)
    for _ in range(10):
        background.submit(second)
    background.submit(first)
    assert not background.drain(0.01), "the first task is running"
    first.may_finish.set()
    assert background.drain(60)
    assert (first.n_runs, second.n_runs) == (2, 1)


def test_busy_background_thread_is_not_woken() -> None:
    first, second = CountedTask(), CountedTask()
    second.may_finish.set()
    background.submit(first)
    assert first.has_started.wait(60)
    with mock.patch.object(threading.Condition, "notify_all") as wake:
        background.submit(second)
    assert not wake.called
    first.may_finish.set()
    assert background.drain(60)
    assert second.n_runs == 1


def test_failed_background_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    next_task = CountedTask()
    next_task.may_finish.set()

    def fail() -> None:
        raise OSError("the disk failed")

    background.submit(fail)
    background.submit(next_task)
    assert background.drain(60)
    assert next_task.n_runs == 1
    assert "the disk failed" in caplog.text


def test_background_thread_is_replaced_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = background.ThreadRunner()
    tasks = [CountedTask() for _ in range(3)]
    for task in tasks:
        task.may_finish.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        runner.submit(tasks[0])
        assert tasks[0].n_runs == 1, "without a thread, the task runs inline"

    def die() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    runner.submit(die)
    assert runner.drain(60)
    runner.submit(tasks[1])
    assert runner.drain(60)
    assert tasks[1].n_runs == 1


def test_drain_waits_only_for_earlier_tasks() -> None:
    runner = background.ThreadRunner()
    first_task, later_task = CountedTask(), CountedTask()
    runner.submit(first_task)
    assert first_task.has_started.wait(60)
    drainer = threading.Thread(target=lambda: results.append(runner.drain(60)))
    results: list[bool] = []
    drainer.start()
    while runner.n_draining == 0:
        drainer.join(0.01)
    runner.submit(later_task)
    first_task.may_finish.set()
    drainer.join(60)
    assert results == [True]
    assert later_task.n_runs == 0
    later_task.may_finish.set()
    assert runner.drain(60)


def test_drain_does_not_wait_twice_for_a_stuck_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "DRAIN_TIMEOUT_S", 0.01)
    runner = background.ThreadRunner()
    stuck_task = CountedTask()
    runner.submit(stuck_task)
    assert stuck_task.has_started.wait(60)
    assert not runner.drain(0.01)
    assert not runner.drain(3600), "the second drain returns immediately"
    stuck_task.may_finish.set()
    while stuck_task.n_runs == 0:
        assert stuck_task.may_finish.wait(60)
    later_task = CountedTask()
    later_task.may_finish.set()
    runner.submit(later_task)
    while later_task.n_runs == 0:
        runner.drain(0.005)


def test_slot_request_polls_do_not_accumulate() -> None:
    fairness, storage = Fairness(), MeteredStorage(MemoryStorage("memory://background/"))
    stuck_task = CountedTask()
    background.submit(stuck_task)
    assert stuck_task.has_started.wait(60)
    for _ in range(100):
        fairness.poll_periodically(storage)
    stuck_task.may_finish.set()
    with storage.measure() as measured:
        assert background.drain(60)
    assert measured.counts.requests == {"list": 1}


class SlowHint(StorageWrapper):
    """A storage that delays writes of the hint until it may write."""

    def __init__(self, inner: MemoryStorage):
        super().__init__(inner)
        self.may_write = threading.Event()
        self.hints: list[bytes] = []
        self.fails = False

    def write(self, path: str, data: bytes) -> None:
        assert path == HINT_PATH
        assert self.may_write.wait(60)
        self.hints.append(data)
        if self.fails:
            raise TransientError("injected", path=path)
        self.inner.write(path, data)


@pytest.fixture
def storage() -> SlowHint:
    drop_memory_root("memory://background/")
    return SlowHint(MemoryStorage("memory://background/"))


def commit(lake: Lakehouse, number: int) -> None:
    with lake.transaction() as txn:
        txn.create_namespace(f"n{number}")


def test_hint_updates_are_asynchronous_and_coalesced(storage: SlowHint) -> None:
    lake = Lakehouse.create(storage.root, storage=storage)
    for number in range(20):
        commit(lake, number)
    assert lake.snapshot().version == 20
    assert storage.hints == []
    storage.may_write.set()
    assert background.drain(60)
    assert storage.hints[-1] == b"20"
    assert len(storage.hints) <= 2, "the update that was running, and the last update"
    check_lake(Lakehouse(storage))


def test_failed_hint_update_does_not_affect_the_commit(storage: SlowHint) -> None:
    storage.may_write.set()
    storage.fails = True
    lake = Lakehouse.create(storage.root, storage=storage)
    commit(lake, 1)
    assert lake.failed_hint_writes >= 1
    assert Lakehouse(storage).latest_version() == 1


PROGRAM = """
import os, sys
from trinitylake_ops import Lakehouse
lake = Lakehouse.open(sys.argv[1]) if len(sys.argv) > 3 else Lakehouse.create(sys.argv[1])
for number in range(30):
    with lake.transaction() as txn:
        txn.create_namespace(f"{sys.argv[2]}-{number}")
ending = sys.argv[2]
if ending == "exit":
    sys.exit(3)
if ending == "error":
    raise ValueError
if ending == "fork":
    child = os.fork()
    if child == 0:  # the parent wrote the hint before it forked
        hint = open(sys.argv[1] + "/_latest_hint.txt").read()
        os._exit(0 if hint == "30" else 1)
    _, status = os.waitpid(child, 0)
    os.kill(os.getpid(), 9) if status == 0 else sys.exit(1)
if ending == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("ending", "exit_code"), [("exit", 3), ("error", 1), ("end", 0), ("fork", -signal.SIGKILL)])
def test_hint_is_written_before_a_process_ends_or_forks(tmp_path: Path, ending: str, exit_code: int) -> None:
    completed = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), ending], capture_output=True, check=False)
    assert completed.returncode == exit_code, completed.stderr
    assert (tmp_path / HINT_PATH).read_text() == "30"


def test_killed_process_leaves_only_a_stale_hint(tmp_path: Path) -> None:
    completed = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), "kill"], capture_output=True, check=False)
    assert completed.returncode == -signal.SIGKILL
    lake = Lakehouse.open(str(tmp_path))
    assert lake.latest_version() == 30
    check_lake(lake)
    commit(lake, 1)
    assert background.drain(60)
    assert (tmp_path / HINT_PATH).read_text() == "31"


def test_forked_child_starts_its_own_background_thread(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path))
    commit(lake, 1)
    child = os.fork()
    if child == 0:
        commit(lake, 2)
        os._exit(0 if background.drain(60) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / HINT_PATH).read_text() == "2"
    assert lake.latest_version() == 2


def test_background_hint_does_not_recreate_a_deleted_lakehouse(tmp_path: Path) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        lake = Lakehouse.create(str(folder), {"fsync": "false"})
        commit(lake, 1)
        (folder / HINT_PATH).unlink(missing_ok=True)
        folder.rename(tmp_path / "moved")
        assert background.drain(60)
        commit(Lakehouse.open(str(tmp_path / "moved")), 2)
        assert background.drain(60)
        assert not folder.exists()
        shutil.rmtree(tmp_path / "moved")


def test_closed_lakehouse_writes_nothing(tmp_path: Path) -> None:
    for number in range(10):
        lake = Lakehouse.create(str(tmp_path / str(number)), {"fsync": "false"})
        commit(lake, 1)
        lake.close()
        assert (tmp_path / str(number) / HINT_PATH).read_text() == "1"
        shutil.rmtree(tmp_path / str(number))
    assert list(tmp_path.iterdir()) == []
