"""A writer is paused before it creates its root, while the version that it would create expires and is purged."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lakes import Lakes, table
from tests.operations.changes import small_sizes
from tests.processes import fork
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import TransactionExpiredError
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.storage import Storage, StorageWrapper

pytestmark = pytest.mark.local_only("creates its own lakehouse")

DAY_MS = 24 * 3_600_000


class _ClockAhead(StorageWrapper):
    """A storage whose clock is ahead."""

    def __init__(self, inner: Storage, shift_ms: int):
        super().__init__(inner)
        self.shift_ms = shift_ms

    def now_ms(self) -> int:
        return self.inner.now_ms() + self.shift_ms


class _PausedBeforeRoot(_ClockAhead):
    """A storage that stops the process before it creates a root. Its clock is a day ahead when the process resumes."""

    def create(self, path: str, data: bytes) -> None:
        if parse_root_path(path) is not None and not self.shift_ms:
            os.kill(os.getpid(), signal.SIGSTOP)
            self.shift_ms = DAY_MS
        self.inner.create(path, data)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.debian_packages)])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lakehouse]:
    server: S3Server | None = request.getfixturevalue("radosgw") if request.param == "s3" else None
    lakes = Lakes(tmp_path, server)
    yield lakes.local(order=4, txn_ttl_millis=60_000, **small_sizes(4))
    lakes.finish()


def test_stalled_writer_never_creates_a_purged_version(lake: Lakehouse) -> None:
    for number in range(12):
        with lake.transaction() as txn:
            txn.create_namespace(f"n{number}")
            for name in ("a", "b", "c"):
                txn.create_table(f"n{number}", name, table(n="0"))
    base_version = lake.latest_version()

    def write(report: Callable[[str], None]) -> None:
        stalled_lake = Lakehouse(_PausedBeforeRoot(lake.storage, 0))
        txn = stalled_lake.transaction()
        txn.alter_table("n0", "a", table(n="stalled"))
        try:
            report(f"committed {txn.commit()}")
        except TransactionExpiredError as error:
            report(f"rejected: {error}")

    child = fork(write, time_limit_seconds=60)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    for number in range(1, 9):
        with lake.transaction() as txn:
            for namespace in range(12):
                txn.alter_table(f"n{namespace}", "b", table(n=str(number)))
    later_lake = Lakehouse(_ClockAhead(lake.storage, DAY_MS // 2))
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=2, protected_ms=0)
    operations.plan_expiration(later_lake, policy).execute()
    later_lake = Lakehouse(_ClockAhead(lake.storage, DAY_MS))
    assert operations.plan_purge(later_lake).execute().files > 0
    latest = later_lake.latest_version()
    states = {info.version: info.state for info in later_lake.history()}
    assert states[base_version] == states[base_version + 1] == "sealed"
    later_lake.close()
    files_before = {info.path: lake.storage.read(info.path) for info in lake.storage.list("_")}

    os.kill(child.pid, signal.SIGCONT)
    exit_code, (outcome,) = child.finish()
    assert exit_code == 0
    assert outcome.startswith("rejected: transaction expired")
    assert later_lake.latest_version() == latest
    assert {path: lake.storage.read(path) for path in files_before} == files_before
    assert operations.verify(later_lake).is_clean
