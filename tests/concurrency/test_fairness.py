"""Processes of unequal speed commit to one lakehouse continuously, and none of them starves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.lakes import Lakes, table
from tests.processes import fork
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper

Report = Callable[[str], None]

pytestmark = pytest.mark.local_only("measures how writers on one machine share a lakehouse")

DURATION_S = 8
N_FAST = 4
FAST_LATENCY_S, SLOW_LATENCY_S = 0.004, 0.02  # per request


class SlowStorage(StorageWrapper):
    """A storage with a fixed latency."""

    def __init__(self, inner: Storage, latency_s: float):
        super().__init__(inner)
        self._latency_s = latency_s

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        time.sleep(self._latency_s)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        time.sleep(self._latency_s)
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        time.sleep(self._latency_s)
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        time.sleep(self._latency_s)
        self.inner.write(path, data)

    def delete(self, path: str) -> None:
        time.sleep(self._latency_s)
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        time.sleep(self._latency_s)
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        time.sleep(self._latency_s)
        return self.inner.list(prefix)


def _committing_writer(storage: Storage, name: str) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        lake = Lakehouse(storage)
        deadline, number = time.monotonic() + DURATION_S, 0
        while time.monotonic() < deadline:
            number += 1
            with lake.transaction() as txn:
                txn.alter_table("ns", name, table(n=str(number)))
            report(str(txn.committed_version))

    return work


def test_slow_writer_does_not_starve(lakes: Lakes) -> None:
    """One attempt of the slow writer takes longer than a complete commit of a fast writer."""
    lake = lakes.local(order=8, is_watched=False)
    names = ["slow", *(f"fast{number}" for number in range(N_FAST))]
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in names:
            txn.create_table("ns", name, table(n="0"))
    children = {}
    for name in names:
        storage = SlowStorage(lake.storage, SLOW_LATENCY_S if name == "slow" else FAST_LATENCY_S)
        children[name] = fork(_committing_writer(storage, name), time_limit_seconds=DURATION_S + 60)
    results = {name: child.finish() for name, child in children.items()}
    assert {exit_code for exit_code, _ in results.values()} == {0}, results
    commits = {name: len(lines) for name, (_, lines) in results.items()}
    # The fast writers yield to the slow one. Without this, it would commit at most once.
    assert commits["slow"] >= 3, commits
