"""Several workers publish tables exactly once, even if they race or are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from tests.faults import Fault, FaultyStorage, fail, kill, lose_response
from tests.lakes import Lakes, seal
from tests.processes import fork
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError, CommitOutcomeUnknownError, InvalidInputError, UnreachableError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once, published_version
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.storage import open_storage

pytestmark = pytest.mark.usefixtures("fixed_requests")

ID = publication_id("run", "asset")


def staged_tables(local_lake: Lakehouse) -> list[StagedTable]:
    rows = pa.table({"n": [1, 2, 3]})
    return [stage_arrow(local_lake, rows, "ns", name, mode="append") for name in ("a", "b")]


def commit_unrelated(local_lake: Lakehouse, name: str = "other") -> None:
    with local_lake.transaction() as txn:
        txn.create_namespace(name)


@pytest.fixture
def local_lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def publications(local_lake: Lakehouse) -> list[int]:
    return [info.version for info in local_lake.history() if ID in info.members]


def test_second_attempt_finds_first_publication(local_lake: Lakehouse) -> None:
    tables = staged_tables(local_lake)
    first = publish_once(local_lake, tables, ID, run_id="r", message="m", properties={"asset": "a"})
    assert (first.version, first.was_published) == (1, False)
    commit_unrelated(local_lake)
    repeated = publish_once(local_lake, tables, ID)
    assert (repeated.version, repeated.was_published) == (1, True)
    seal(local_lake, 1)
    assert publish_once(local_lake, tables, ID).version == 1, "the root of a purged version still has the id"
    assert published_version(local_lake, ID, 0) == 1
    assert published_version(local_lake, ID, 1) is None


def test_other_publication_of_same_tables_conflicts(local_lake: Lakehouse) -> None:
    tables = staged_tables(local_lake)
    publish_once(local_lake, tables, ID)
    with pytest.raises(CommitConflictError):
        publish_once(local_lake, tables, publication_id("another run", "asset"))
    assert local_lake.latest_version() == 1


def test_repeated_run_keeps_published_tables_and_adds_restaged_ones(local_lake: Lakehouse) -> None:
    """A partly repeated run takes the tables that it does not stage again from the earlier publication."""
    first, second = staged_tables(local_lake)
    publish_once(local_lake, [first, second], ID)
    repeated = stage_arrow(local_lake, pa.table({"n": [4]}), "ns", "a", mode="append")
    other = publication_id("another run", "asset")
    assert publish_once(local_lake, [repeated, second], other).version == 2
    assert publish_once(local_lake, [repeated, second], other).was_published
    assert local_lake.latest_version() == 2
    assert {(change.kind, change.table) for change in local_lake.diff(1, 2)} == {("changed", "a")}
    concurrent_append = stage_arrow(local_lake, pa.table({"n": [5]}), "ns", "b", mode="append")
    publish_once(local_lake, [concurrent_append], publication_id("others"))
    with pytest.raises(CommitConflictError, match=r"ns\.b"):
        publish_once(local_lake, [repeated, second], publication_id("a third run", "asset"))


def test_empty_publication_is_rejected(local_lake: Lakehouse) -> None:
    with pytest.raises(InvalidInputError):
        publish_once(local_lake, [], ID)
    with pytest.raises(InvalidInputError):
        publish_once(local_lake, staged_tables(local_lake), "no-uuid")


def test_publication_ids_of_different_names_differ() -> None:
    assert (
        len({publication_id("a", "b"), publication_id("a\nb"), publication_id("ab"), publication_id("a", "", "b")}) == 4
    )


@pytest.mark.parametrize(
    "fault",
    [
        lose_response(1, kind="create", path_part=root_path(1)),
        lose_response(1, kind="create", path_part=root_path(2)),
        fail(1, UnreachableError, kind="create", path_part=root_path(1)),
    ],
    ids=["lost response", "no fault", "failed request"],
)
def test_attempt_after_a_storage_fault_publishes_once(local_lake: Lakehouse, fault: Fault) -> None:
    tables = staged_tables(local_lake)
    faulty = Lakehouse(FaultyStorage(local_lake.storage, [fault]))
    try:
        publish_once(faulty, tables, ID)
    except UnreachableError:
        assert publications(local_lake) == []
    assert publish_once(local_lake, tables, ID).version == 1
    assert publications(local_lake) == [1]


def test_next_attempt_resolves_unknown_outcome(local_lake: Lakehouse) -> None:
    tables = staged_tables(local_lake)
    faults = [
        lose_response(1, kind="create", path_part=root_path(1)),
        fail(2, UnreachableError, kind="read", path_part=root_path(1), times=100),
    ]
    with pytest.raises(CommitOutcomeUnknownError):
        publish_once(Lakehouse(FaultyStorage(local_lake.storage, faults)), tables, ID)
    repeated = publish_once(local_lake, tables, ID)
    assert (repeated.version, repeated.was_published) == (1, True)


def in_killed_process(function: Callable[[], object]) -> None:
    status, _ = fork(lambda _: function() and None).finish()
    assert status == -signal.SIGKILL


@pytest.mark.forks
@pytest.mark.parametrize("timing", ["before", "after"])
def test_worker_killed_during_commit_publishes_once(local_lake: Lakehouse, timing: str) -> None:
    tables = staged_tables(local_lake)

    def publish_and_die() -> None:
        fault = kill(1, timing, kind="create", path_part=root_path(1))  # type: ignore[arg-type]
        publish_once(Lakehouse(FaultyStorage(local_lake.storage, [fault])), tables, ID)

    in_killed_process(publish_and_die)
    commit_unrelated(local_lake)
    publication = publish_once(local_lake, tables, ID)
    assert publication.was_published == (timing == "after")
    assert publications(local_lake) == [publication.version]


@pytest.mark.forks
def test_worker_killed_after_commit_publishes_once(local_lake: Lakehouse) -> None:
    tables = staged_tables(local_lake)

    def publish_and_die() -> None:
        publish_once(Lakehouse(local_lake.storage), tables, ID)
        os.kill(os.getpid(), signal.SIGKILL)

    in_killed_process(publish_and_die)
    assert publish_once(local_lake, tables, ID).was_published
    assert publications(local_lake) == [1]


def test_racing_workers_publish_once(local_lake: Lakehouse) -> None:
    for number in range(10):
        rows = pa.table({"n": [number]})
        tables = [stage_arrow(local_lake, rows, "ns", name, mode="append") for name in ("a", "b")]
        publication = publication_id("run", str(number))
        workers = [Lakehouse(open_storage(local_lake.root, local_lake.storage_options)) for _ in range(4)]

        def publish(worker: Lakehouse, number: int = number) -> tuple[int, bool]:
            if number % 2:
                commit_unrelated(worker, f"o{number}-{id(worker)}")
            published = publish_once(worker, tables, publication)  # noqa: B023
            return published.version, published.was_published

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(publish, workers))
        assert len({version for version, _ in results}) == 1
        assert sum(not was_published for _, was_published in results) == 1
        versions = [info.version for info in local_lake.history() if publication in info.members]
        assert versions == [results[0][0]]


def test_concurrent_publications_create_one_namespace(local_lake: Lakehouse) -> None:
    first, second = staged_tables(local_lake)
    pending = [second]

    def publish_second_table(_latest: object) -> None:
        if pending:
            publish_once(local_lake, [pending.pop()], publication_id("other", "asset"))

    assert publish_once(local_lake, [first], ID, require=publish_second_table).version == 2
    assert all(local_lake.snapshot().has_table("ns", name) for name in ("a", "b"))
