"""Search of a stream's epochs in the history, its extent, and lost checkpoints."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.lakes import Lakes, seal
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import ConflictError
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publish_once
from trinitylake_ops.iceberg.write.stream_epochs import QUERY_ID, Epoch, EpochGuard, EpochLookup
from trinitylake_ops.iceberg.write.stream_epochs import find_epoch as find
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROWS = "1:00ff"


@pytest.fixture
def local(lakes: Lakes) -> Lakehouse:
    return lakes.memory()


def commit_epoch(lake: Lakehouse, epoch: int, stream: str = "s", query: str | None = None) -> int:
    staged = stage_arrow(lake, pa.table({"n": [epoch]}), "ns", stream, mode="append")
    properties = None if query is None else {QUERY_ID: query}
    return publish_once(lake, [staged], Epoch(stream, epoch, ROWS).publication, properties=properties).version


def find_epoch(lake: Lakehouse, stream: str, epoch: int, query: str | None = None) -> EpochLookup:
    return find(lake, Epoch(stream, epoch, ROWS, query))


def commit_others(lake: Lakehouse, count: int) -> None:
    for number in range(count):
        with lake.transaction() as txn:
            txn.create_namespace(f"other{lake.latest_version()}-{number}")


def test_epoch_is_found_at_any_version(local: Lakehouse) -> None:
    commit_others(local, 3)
    assert find_epoch(local, "s", 0).version is None
    assert commit_epoch(local, 0) == 4
    commit_epoch(local, 0, "another")
    commit_others(local, 20)
    assert find_epoch(local, "s", 0).version == 4
    commit = find_epoch(local, "s", 1)
    assert (commit.version, commit.searched_to) == (None, local.latest_version())
    version = commit_epoch(local, 1)
    assert find_epoch(local, "s", 1).version == version
    commit_others(local, 1)
    seal(local, version)
    assert find_epoch(local, "s", 1).version == version, "the root of a purged version still has the id"


def test_epoch_is_found_without_pin(local: Lakehouse) -> None:
    find_epoch(local, "s", 0)
    version = commit_epoch(local, 0)
    commit_others(local, 2)
    (pin,) = [info.path for info in local.storage.list("_ops/txn-")]
    local.storage.delete(pin)
    assert find_epoch(local, "s", 0).version == version
    assert find_epoch(local, "t", 0).version is None


def test_continuing_stream_reads_few_roots(local: Lakehouse) -> None:
    commit_others(local, 40)
    find_epoch(local, "s", 0)
    commit_epoch(local, 0)
    meter = MeteredStorage(local.storage)
    find_epoch(Lakehouse(meter), "s", 1)
    assert meter.snapshot().requests["read"] < 10


def test_reset_checkpoint_is_rejected(local: Lakehouse) -> None:
    for epoch in range(3):
        commit_epoch(local, epoch)
    with pytest.raises(ConflictError):
        find_epoch(local, "s", 0)


def test_other_query_is_rejected_for_any_epoch(local: Lakehouse) -> None:
    """The first epochs of two streams with one id, or of a stream with a lost checkpoint, have the same number."""
    version = commit_epoch(local, 0, query="one")
    commit_others(local, 1)
    for epoch in (0, 1):
        with pytest.raises(ConflictError, match="'s'"):
            find_epoch(local, "s", epoch, "two")
    assert find_epoch(local, "s", 0, "one").version == version
    assert find_epoch(local, "s", 1, "one").version is None
    commit_epoch(local, 1)
    assert find_epoch(local, "s", 2, "one").version is None, "by an earlier release, which did not say"


def test_epoch_with_other_rows_is_rejected_even_if_its_version_was_purged(local: Lakehouse) -> None:
    """The checkpoint was reset by one epoch, and the source has new rows."""
    version = commit_epoch(local, 0)
    other_epoch = Epoch("s", 0, "2:00ff")
    with pytest.raises(ConflictError) as caught:
        find(local, other_epoch)
    assert caught.value.version == version
    commit_others(local, 1)
    seal(local, version)
    with pytest.raises(ConflictError):
        find(local, other_epoch)
    assert find_epoch(local, "s", 0).version == version


def test_concurrent_epoch_with_other_rows_is_rejected(local: Lakehouse) -> None:
    epoch = Epoch("s", 0, "2:00ff")
    guard = EpochGuard(epoch, find(local, epoch).searched_to)
    staged = stage_arrow(local, pa.table({"n": [1, 2]}), "ns", "s", mode="append")
    commit_epoch(local, 0)
    with pytest.raises(ConflictError) as caught:
        publish_once(local, [staged], epoch.publication, require=guard)
    assert type(caught.value) is ConflictError
    assert local.latest_version() == 1
