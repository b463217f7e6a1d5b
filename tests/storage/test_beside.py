"""The thread for what nobody waits for: equal work once, all of it before the process ends or forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TransientError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import MemoryStorage, StorageWrapper, beside, drop_memory_root

pytestmark = pytest.mark.beside


class Counted:
    """Work that counts how often it is done, and holds up the thread until it may end."""

    def __init__(self) -> None:
        self.n_done = 0
        self.may_end = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        self.n_done += 1


def test_equal_work_that_waits_is_done_once() -> None:
    first, second = Counted(), Counted()
    second.may_end.set()
    beside.put(first)
    assert first.has_begun.wait(60)
    for _ in range(10):
        beside.put(second)
    beside.put(first)
    assert not beside.flush(0.01), "the first is on its way"
    first.may_end.set()
    assert beside.flush(60)
    assert (first.n_done, second.n_done) == (2, 1)


def test_work_that_fails_is_logged_and_others_are_done(caplog: pytest.LogCaptureFixture) -> None:
    after = Counted()
    after.may_end.set()

    def fail() -> None:
        raise OSError("the disk is on fire")

    beside.put(fail)
    beside.put(after)
    assert beside.flush(60)
    assert after.n_done == 1
    assert "the disk is on fire" in caplog.text


class SlowHint(StorageWrapper):
    """Holds back the hint until it is let go."""

    def __init__(self, inner: MemoryStorage):
        super().__init__(inner)
        self.let_go = threading.Event()
        self.hints: list[bytes] = []
        self.fails = False

    def write(self, path: str, data: bytes) -> None:
        assert path == HINT_PATH
        assert self.let_go.wait(60)
        self.hints.append(data)
        if self.fails:
            raise TransientError("no", path=path)
        self.inner.write(path, data)


@pytest.fixture
def storage() -> SlowHint:
    drop_memory_root("memory://beside/")
    return SlowHint(MemoryStorage("memory://beside/"))


def commit(lake: Lakehouse, number: int) -> None:
    with lake.transaction() as txn:
        txn.create_namespace(f"n{number}")


def test_no_commit_waits_for_its_hint_and_of_many_the_last_is_written(storage: SlowHint) -> None:
    lake = Lakehouse.create(storage.root, storage=storage)
    for number in range(20):
        commit(lake, number)
    assert lake.snapshot().version == 20
    assert storage.hints == []
    storage.let_go.set()
    assert beside.flush(60)
    assert storage.hints[-1] == b"20"
    assert len(storage.hints) <= 2, "the one on its way, and the last"
    check_lake(Lakehouse(storage))


def test_a_hint_that_fails_is_counted_and_the_commit_stands(storage: SlowHint) -> None:
    storage.let_go.set()
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
how = sys.argv[2]
if how == "exit":
    sys.exit(3)
if how == "error":
    raise ValueError
if how == "fork":
    child = os.fork()
    if child == 0:  # what its parent had to do is not its own
        hint = open(sys.argv[1] + "/_latest_hint.txt").read()
        os._exit(0 if hint == "30" else 1)
    _, status = os.waitpid(child, 0)
    os.kill(os.getpid(), 9) if status == 0 else sys.exit(1)
if how == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("error", 1), ("end", 0), ("fork", -signal.SIGKILL)])
def test_the_hint_is_written_before_a_process_ends_or_forks(tmp_path: Path, how: str, code: int) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), how], capture_output=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert (tmp_path / HINT_PATH).read_text() == "30"


def test_a_killed_process_leaves_the_hint_behind_and_nothing_else(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), "kill"], capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL
    lake = Lakehouse.open(str(tmp_path))
    assert lake.latest_version() == 30
    check_lake(lake)
    commit(lake, 1)
    assert beside.flush(60)
    assert (tmp_path / HINT_PATH).read_text() == "31"


def test_a_child_works_beside_by_a_thread_of_its_own(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path))
    commit(lake, 1)
    child = os.fork()
    if child == 0:
        commit(lake, 2)
        os._exit(0 if beside.flush(60) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / HINT_PATH).read_text() == "2"
    assert lake.latest_version() == 2
