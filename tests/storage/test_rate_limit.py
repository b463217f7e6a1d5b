"""Rate limiting of requests."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest

from tests.lakes import local_storage
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.meter import PacedStorage


def test_threads_share_the_rate(tmp_path: Path) -> None:
    storage = local_storage(tmp_path)
    storage.create("a", b"x")
    paced_storage = PacedStorage(storage, 50)
    started_s = time.monotonic()
    threads = [threading.Thread(target=lambda: [paced_storage.read("a") for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started_s >= 19 / 50


def test_request_after_a_pause_does_not_wait(tmp_path: Path) -> None:
    paced_storage = PacedStorage(local_storage(tmp_path), 20)
    paced_storage.exists("a")
    time.sleep(0.1)
    started_s = time.monotonic()
    paced_storage.exists("a")
    assert time.monotonic() - started_s < 0.04
    assert list(paced_storage.list()) == []


def test_pickled_copy_keeps_the_rate(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(PacedStorage(local_storage(tmp_path), 3)))
    assert (copy.requests_per_second, copy.inner.root) == (3, copy.root)


def test_rate_must_be_above_zero(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        PacedStorage(local_storage(tmp_path), 0)
