"""The fault-injecting storage behaves as the crash tests require."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import FaultyStorage, Request, fail, lose_response
from trinitylake_ops.errors import AmbiguousWriteError, StorageFullError, TransientError
from trinitylake_ops.storage import LocalStorage

KILLED_PROGRAM = """
import sys
from tests.faults import FaultyStorage, kill
from trinitylake_ops.storage import LocalStorage
storage = FaultyStorage(LocalStorage(sys.argv[1]), [kill(int(sys.argv[2]), sys.argv[3])])
storage.create("1", b"x")
storage.write("2", b"x")
storage.delete("1")
print("alive")
"""


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(f"file://{tmp_path}/lake/", fsync=False)


def test_requests_are_logged_and_numbered(local: LocalStorage) -> None:
    storage = FaultyStorage(local, concurrency=1)
    storage.create_many({"a": b"", "b": b""})
    storage.exists("c")
    list(storage.list("a"))
    storage.now_ms()
    assert storage.log == (
        Request(1, "create", "a"),
        Request(2, "create", "b"),
        Request(3, "stat", "c"),
        Request(4, "list", "a"),
    )


def test_fault_occurs_before_or_after_the_effect(local: LocalStorage) -> None:
    storage = FaultyStorage(local, [fail(1, TransientError), fail(2, StorageFullError, "after"), lose_response(3)])
    for name, error, exists in (("1", TransientError, False), ("2", StorageFullError, True)):
        with pytest.raises(error):
            storage.create(name, b"x")
        assert local.exists(name) == exists
    with pytest.raises(AmbiguousWriteError):
        storage.delete("2")
    assert not local.exists("2")
    storage.create("2", b"x")


def test_fault_matches_a_kind_or_path(local: LocalStorage) -> None:
    storage = FaultyStorage(local, [fail(2, TransientError, kind="write", path_part="hint", times=2)])
    storage.write("hint", b"1")
    storage.write("other", b"1")
    storage.exists("hint")
    for _ in range(2):
        with pytest.raises(TransientError):
            storage.write("hint", b"2")
    storage.write("hint", b"3")
    assert local.read("hint") == b"3"


def test_listing_fails_at_its_end(local: LocalStorage) -> None:
    storage = FaultyStorage(local, [fail(2, TransientError, "after")])
    storage.create("a", b"")
    files = storage.list()
    assert next(files).path == "a"
    with pytest.raises(TransientError):
        next(files)


@pytest.mark.parametrize(
    ("at", "timing", "remaining_paths"),
    [
        (1, "before", []),
        (1, "after", ["1"]),
        (2, "before", ["1"]),
        (2, "after", ["1", "2"]),
        (3, "before", ["1", "2"]),
        (3, "after", ["2"]),
        (4, "before", ["2"]),
    ],
)
def test_process_is_killed_before_or_after_a_request(
    local: LocalStorage, at: int, timing: str, remaining_paths: list[str]
) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", KILLED_PROGRAM, local.root, str(at), timing],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (completed.returncode, completed.stdout) == ((0, "alive\n") if at > 3 else (-9, ""))
    assert sorted(file.path for file in local.list()) == remaining_paths
