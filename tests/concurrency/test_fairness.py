"""Processes of unequal speed that commit to one lakehouse continuously: none starves."""

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

pytestmark = pytest.mark.local_only("measures how writers of one machine share it")

SECONDS = 8
N_FAST = 4
FAST_S, SLOW_S = 0.004, 0.02  # latency of each request


class Distant(StorageWrapper):
    """A storage with a fixed latency."""

    def __init__(self, inner: Storage, seconds: float):
        super().__init__(inner)
        self._seconds = seconds

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        time.sleep(self._seconds)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        time.sleep(self._seconds)
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        time.sleep(self._seconds)
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        time.sleep(self._seconds)
        self.inner.write(path, data)

    def delete(self, path: str) -> None:
        time.sleep(self._seconds)
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        time.sleep(self._seconds)
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        time.sleep(self._seconds)
        return self.inner.list(prefix)


def _commit(storage: Storage, name: str) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        lake = Lakehouse(storage)
        end, number = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            number += 1
            with lake.transaction() as txn:
                txn.alter_table("ns", name, table(n=str(number)))
            report(str(txn.committed_version))

    return work


def test_slow_writer_does_not_starve(lakes: Lakes) -> None:
    """An attempt of the slow writer takes longer than complete commits of the others."""
    lake = lakes.local(order=8, is_watched=False)
    names = ["slow", *(f"fast{number}" for number in range(N_FAST))]
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in names:
            txn.create_table("ns", name, table(n="0"))
    seconds = {name: SLOW_S if name == "slow" else FAST_S for name in names}
    children = {
        name: fork(_commit(Distant(lake.storage, seconds[name]), name), time_limit_seconds=SECONDS + 60)
        for name in names
    }
    ended = {name: child.finish() for name, child in children.items()}
    assert {code for code, _ in ended.values()} == {0}, ended
    commits = {name: len(lines) for name, (_, lines) in ended.items()}
    # The fast writers yield to the slow one, so that it commits several times. Without that it would commit at most
    # once.
    assert commits["slow"] >= 3, commits
