"""A writer that sleeps before it creates its root, while the version that it would create expires and is purged."""

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

pytestmark = pytest.mark.local_only("chooses its places itself")

DAY_MS = 24 * 3_600_000


class _Later(StorageWrapper):
    """A storage whose clock is ahead."""

    def __init__(self, inner: Storage, shift_ms: int):
        super().__init__(inner)
        self.shift_ms = shift_ms

    def now_ms(self) -> int:
        return self.inner.now_ms() + self.shift_ms


class _FallsAsleep(_Later):
    """Stops its process before it sends a root. When the process resumes, a day has passed."""

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
    stalled_on = lake.latest_version()

    def write(report: Callable[[str], None]) -> None:
        own = Lakehouse(_FallsAsleep(lake.storage, 0))
        txn = own.transaction()
        txn.alter_table("n0", "a", table(n="stalled"))
        try:
            report(f"committed {txn.commit()}")
        except TransactionExpiredError as error:
            report(f"refused: {error}")

    child = fork(write, time_limit_seconds=60)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    for number in range(1, 9):
        with lake.transaction() as txn:
            for namespace in range(12):
                txn.alter_table(f"n{namespace}", "b", table(n=str(number)))
    later = Lakehouse(_Later(lake.storage, DAY_MS // 2))
    keeping = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=2, protected_ms=0)
    operations.plan_expiration(later, keeping).execute()
    later = Lakehouse(_Later(lake.storage, DAY_MS))
    assert operations.plan_purge(later).execute().files > 0
    latest = later.latest_version()
    states = {info.version: info.state for info in later.history()}
    assert states[stalled_on] == states[stalled_on + 1] == "sealed"
    later.close()
    before = {info.path: lake.storage.read(info.path) for info in lake.storage.list("_")}

    os.kill(child.pid, signal.SIGCONT)
    code, (outcome,) = child.finish()
    assert code == 0
    assert outcome.startswith("refused: transaction expired")
    assert later.latest_version() == latest
    assert {path: lake.storage.read(path) for path in before} == before
    assert operations.verify(later).is_clean
