"""Finding the epochs of a stream in the history, how many roots this reads, and lost checkpoints."""

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
def memory_lake(lakes: Lakes) -> Lakehouse:
    return lakes.memory()


def commit_epoch(lake: Lakehouse, epoch: int, stream: str = "s", query: str | None = None) -> int:
    staged = stage_arrow(lake, pa.table({"n": [epoch]}), "ns", stream, mode="append")
    properties = None if query is None else {QUERY_ID: query}
    return publish_once(lake, [staged], Epoch(stream, epoch, ROWS).publication, properties=properties).version


def find_epoch(lake: Lakehouse, stream: str, epoch: int, query: str | None = None) -> EpochLookup:
    return find(lake, Epoch(stream, epoch, ROWS, query))


def commit_unrelated(lake: Lakehouse, count: int) -> None:
    for number in range(count):
        with lake.transaction() as txn:
            txn.create_namespace(f"other{lake.latest_version()}-{number}")


def test_epoch_is_found_at_any_version(memory_lake: Lakehouse) -> None:
    commit_unrelated(memory_lake, 3)
    assert find_epoch(memory_lake, "s", 0).version is None
    assert commit_epoch(memory_lake, 0) == 4
    commit_epoch(memory_lake, 0, "another")
    commit_unrelated(memory_lake, 20)
    assert find_epoch(memory_lake, "s", 0).version == 4
    lookup = find_epoch(memory_lake, "s", 1)
    assert (lookup.version, lookup.searched_to) == (None, memory_lake.latest_version())
    version = commit_epoch(memory_lake, 1)
    assert find_epoch(memory_lake, "s", 1).version == version
    commit_unrelated(memory_lake, 1)
    seal(memory_lake, version)
    assert find_epoch(memory_lake, "s", 1).version == version, "the root of a purged version still has the id"


def test_epoch_is_found_without_pin(memory_lake: Lakehouse) -> None:
    find_epoch(memory_lake, "s", 0)
    version = commit_epoch(memory_lake, 0)
    commit_unrelated(memory_lake, 2)
    (pin,) = [info.path for info in memory_lake.storage.list("_ops/txn-")]
    memory_lake.storage.delete(pin)
    assert find_epoch(memory_lake, "s", 0).version == version
    assert find_epoch(memory_lake, "t", 0).version is None


def test_continuing_stream_reads_few_roots(memory_lake: Lakehouse) -> None:
    commit_unrelated(memory_lake, 40)
    find_epoch(memory_lake, "s", 0)
    commit_epoch(memory_lake, 0)
    meter = MeteredStorage(memory_lake.storage)
    find_epoch(Lakehouse(meter), "s", 1)
    assert meter.snapshot().requests["read"] < 10


def test_reset_checkpoint_is_rejected(memory_lake: Lakehouse) -> None:
    for epoch in range(3):
        commit_epoch(memory_lake, epoch)
    with pytest.raises(ConflictError):
        find_epoch(memory_lake, "s", 0)


def test_epoch_of_other_query_is_rejected(memory_lake: Lakehouse) -> None:
    """Epochs restart at the same number if two queries share a stream id or a stream loses its checkpoint."""
    version = commit_epoch(memory_lake, 0, query="one")
    commit_unrelated(memory_lake, 1)
    for epoch in (0, 1):
        with pytest.raises(ConflictError, match="'s'"):
            find_epoch(memory_lake, "s", epoch, "two")
    assert find_epoch(memory_lake, "s", 0, "one").version == version
    assert find_epoch(memory_lake, "s", 1, "one").version is None
    commit_epoch(memory_lake, 1)
    assert find_epoch(memory_lake, "s", 2, "one").version is None, "earlier releases did not record the query"


def test_epoch_with_other_rows_is_rejected_even_if_its_version_was_purged(memory_lake: Lakehouse) -> None:
    """The checkpoint was set back by one epoch, and the source has new rows."""
    version = commit_epoch(memory_lake, 0)
    other_epoch = Epoch("s", 0, "2:00ff")
    with pytest.raises(ConflictError) as caught:
        find(memory_lake, other_epoch)
    assert caught.value.version == version
    commit_unrelated(memory_lake, 1)
    seal(memory_lake, version)
    with pytest.raises(ConflictError):
        find(memory_lake, other_epoch)
    assert find_epoch(memory_lake, "s", 0).version == version


def test_concurrent_epoch_with_other_rows_is_rejected(memory_lake: Lakehouse) -> None:
    epoch = Epoch("s", 0, "2:00ff")
    guard = EpochGuard(epoch, find(memory_lake, epoch).searched_to)
    staged = stage_arrow(memory_lake, pa.table({"n": [1, 2]}), "ns", "s", mode="append")
    commit_epoch(memory_lake, 0)
    with pytest.raises(ConflictError) as caught:
        publish_once(memory_lake, [staged], epoch.publication, require=guard)
    assert type(caught.value) is ConflictError
    assert memory_lake.latest_version() == 1
