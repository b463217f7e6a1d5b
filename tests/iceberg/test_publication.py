"""Tables are published exactly once by several workers, after kills and in races."""

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


def staged_tables(local: Lakehouse) -> list[StagedTable]:
    rows = pa.table({"n": [1, 2, 3]})
    return [stage_arrow(local, rows, "ns", name, mode="append") for name in ("a", "b")]


def commit_other(local: Lakehouse, name: str = "other") -> None:
    with local.transaction() as txn:
        txn.create_namespace(name)


@pytest.fixture
def local(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def publications(local: Lakehouse) -> list[int]:
    return [info.version for info in local.history() if ID in info.members]


def test_second_attempt_finds_first_publication(local: Lakehouse) -> None:
    tables = staged_tables(local)
    first = publish_once(local, tables, ID, run_id="r", message="m", properties={"asset": "a"})
    assert (first.version, first.was_published) == (1, False)
    commit_other(local)
    repeated = publish_once(local, tables, ID)
    assert (repeated.version, repeated.was_published) == (1, True)
    seal(local, 1)
    assert publish_once(local, tables, ID).version == 1, "the root of a purged version still has the id"
    assert published_version(local, ID, 0) == 1
    assert published_version(local, ID, 1) is None


def test_other_publication_of_same_tables_conflicts(local: Lakehouse) -> None:
    tables = staged_tables(local)
    publish_once(local, tables, ID)
    with pytest.raises(CommitConflictError):
        publish_once(local, tables, publication_id("another run", "asset"))
    assert local.latest_version() == 1


def test_repeated_run_keeps_published_tables_and_adds_restaged_ones(local: Lakehouse) -> None:
    """A partly repeated run adopts the tables that it does not stage again from the earlier publication."""
    first, second = staged_tables(local)
    publish_once(local, [first, second], ID)
    repeated = stage_arrow(local, pa.table({"n": [4]}), "ns", "a", mode="append")
    other = publication_id("another run", "asset")
    assert publish_once(local, [repeated, second], other).version == 2
    assert publish_once(local, [repeated, second], other).was_published
    assert local.latest_version() == 2
    assert {(change.kind, change.table) for change in local.diff(1, 2)} == {("changed", "a")}
    moved = stage_arrow(local, pa.table({"n": [5]}), "ns", "b", mode="append")
    publish_once(local, [moved], publication_id("others"))
    with pytest.raises(CommitConflictError, match=r"ns\.b"):
        publish_once(local, [repeated, second], publication_id("a third run", "asset"))


def test_empty_publication_is_rejected(local: Lakehouse) -> None:
    with pytest.raises(InvalidInputError):
        publish_once(local, [], ID)
    with pytest.raises(InvalidInputError):
        publish_once(local, staged_tables(local), "no-uuid")


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
    ids=["lost-answer", "nothing-there", "refused"],
)
def test_attempt_after_a_storage_fault_publishes_once(local: Lakehouse, fault: Fault) -> None:
    tables = staged_tables(local)
    faulty = Lakehouse(FaultyStorage(local.storage, [fault]))
    try:
        publish_once(faulty, tables, ID)
    except UnreachableError:
        assert publications(local) == []
    assert publish_once(local, tables, ID).version == 1
    assert publications(local) == [1]


def test_next_attempt_resolves_unknown_outcome(local: Lakehouse) -> None:
    tables = staged_tables(local)
    faults = [
        lose_response(1, kind="create", path_part=root_path(1)),
        fail(2, UnreachableError, kind="read", path_part=root_path(1), times=100),
    ]
    with pytest.raises(CommitOutcomeUnknownError):
        publish_once(Lakehouse(FaultyStorage(local.storage, faults)), tables, ID)
    repeated = publish_once(local, tables, ID)
    assert (repeated.version, repeated.was_published) == (1, True)


def in_killed_process(function: Callable[[], object]) -> None:
    status, _ = fork(lambda _: function() and None).finish()
    assert status == -signal.SIGKILL


@pytest.mark.forks
@pytest.mark.parametrize("moment", ["before", "after"])
def test_worker_killed_during_commit_publishes_once(local: Lakehouse, moment: str) -> None:
    tables = staged_tables(local)

    def publish_and_die() -> None:
        fault = kill(1, moment, kind="create", path_part=root_path(1))  # type: ignore[arg-type]
        publish_once(Lakehouse(FaultyStorage(local.storage, [fault])), tables, ID)

    in_killed_process(publish_and_die)
    commit_other(local)
    publication = publish_once(local, tables, ID)
    assert publication.was_published == (moment == "after")
    assert publications(local) == [publication.version]


@pytest.mark.forks
def test_worker_killed_after_commit_publishes_once(local: Lakehouse) -> None:
    tables = staged_tables(local)

    def publish_and_die() -> None:
        publish_once(Lakehouse(local.storage), tables, ID)
        os.kill(os.getpid(), signal.SIGKILL)

    in_killed_process(publish_and_die)
    assert publish_once(local, tables, ID).was_published
    assert publications(local) == [1]


def test_racing_workers_publish_once(local: Lakehouse) -> None:
    for number in range(10):
        rows = pa.table({"n": [number]})
        tables = [stage_arrow(local, rows, "ns", name, mode="append") for name in ("a", "b")]
        publication = publication_id("run", str(number))
        workers = [Lakehouse(open_storage(local.root, local.storage_options)) for _ in range(4)]

        def publish(worker: Lakehouse, number: int = number) -> tuple[int, bool]:
            if number % 2:
                commit_other(worker, f"o{number}-{id(worker)}")
            published = publish_once(worker, tables, publication)  # noqa: B023
            return published.version, published.was_published

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(publish, workers))
        assert len({version for version, _ in results}) == 1
        assert sum(not was_published for _, was_published in results) == 1
        versions = [info.version for info in local.history() if publication in info.members]
        assert versions == [results[0][0]]


def test_concurrent_publications_create_one_namespace(local: Lakehouse) -> None:
    first, second = staged_tables(local)
    meanwhile = [second]

    def publish_the_other(_latest: object) -> None:
        if meanwhile:
            publish_once(local, [meanwhile.pop()], publication_id("other", "asset"))

    assert publish_once(local, [first], ID, require=publish_the_other).version == 2
    assert all(local.snapshot().has_table("ns", name) for name in ("a", "b"))
