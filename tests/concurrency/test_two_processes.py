"""Processes that commit to one lakehouse at the same time, in a folder or on S3."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.lakes import Lakes, check_version, table, unreferenced_paths
from tests.processes import fork
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.format.file_names import HINT_PATH, parse_hint

Report = Callable[[str], None]
#: Commits per process. A commit takes longer on a server.
N_COMMITS, N_COMMITS_ON_S3 = 200, 80


def _new_lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.local(order=8, is_watched=False)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    return lake


def _table_creator(shared_lake: Lakehouse, worker: int, n_commits: int) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        lake = Lakehouse(shared_lake.storage)
        for number in range(n_commits):
            with lake.transaction() as txn:
                txn.create_table("ns", f"w{worker}-{number:03d}", table(worker=str(worker)))
            report(f"{txn.committed_version} {txn.id}")

    return work


@pytest.mark.forks
@pytest.mark.timeout(600)
def test_two_processes_lose_no_commit(lakes: Lakes) -> None:
    lake = _new_lake(lakes)
    n_commits = N_COMMITS if lakes.server is None else N_COMMITS_ON_S3
    children = [fork(_table_creator(lake, worker, n_commits), time_limit_seconds=500) for worker in range(2)]
    results = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in results] == [0, 0]

    acknowledged = dict(line.split() for _, lines in results for line in lines)
    latest = lake.latest_version()
    assert latest == 2 * n_commits + 1
    assert len(acknowledged) == 2 * n_commits, "no two commits were acknowledged with the same version"
    assert lake.snapshot().tables("ns") == [f"w{w}-{n:03d}" for w in range(2) for n in range(n_commits)]
    infos = {info.version: info for info in lake.history()}
    for version, transaction_id in acknowledged.items():
        assert infos[int(version)].members == (transaction_id,)
    members = [member for info in infos.values() for member in info.members]
    assert len(members) == len(set(members)) == latest
    assert len({info.commit_id for info in infos.values()}) == latest + 1

    # The hint may be stale if the slower process wrote it last, but never ahead. The next commit updates it.
    hint = parse_hint(lake.storage.read(HINT_PATH))
    assert hint is not None
    assert 0 < hint <= latest
    lake.alter_definition(properties={"done": "yes"})
    lake.close()
    assert lake.storage.read(HINT_PATH) == str(latest + 1).encode()

    for version in [*range(0, latest, 25), latest]:
        snapshot = check_version(lake, version)
        assert len(snapshot.tables("ns") if version else []) == max(0, version - 1), "each commit added one table"
    assert unreferenced_paths(lake) == set(), "failed attempts left no files"
    transactions_of_first = {line.split()[1] for line in results[0][1]}
    is_by_first = [acknowledged[str(version)] in transactions_of_first for version in range(2, latest + 1)]
    assert any(a != b for a, b in itertools.pairwise(is_by_first)), "commits of the two processes interleave"


def _counting_writer(shared_lake: Lakehouse) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        lake = Lakehouse(shared_lake.storage)
        for _ in range(25):
            txn = lake.transaction()
            number = int(txn.table("ns", "counter").properties["n"])
            txn.alter_table("ns", "counter", table(n=str(number + 1)))
            try:
                report(f"committed {txn.commit()} {txn.id}")
            except CommitConflictError as error:
                assert error.conflicts
                report(f"conflict {error.latest_version} {txn.id}")

    return work


@pytest.mark.forks
def test_concurrent_updates_of_one_table_commit_or_conflict(lakes: Lakes) -> None:
    lake = _new_lake(lakes)
    with lake.transaction() as txn:
        txn.create_table("ns", "counter", table(n="0"))
    results = [child.finish() for child in [fork(_counting_writer(lake)) for _ in range(4)]]
    assert [exit_code for exit_code, _ in results] == [0] * 4
    reports = [line.split() for _, lines in results for line in lines]
    assert len(reports) == 100
    committed = {transaction_id: int(version) for outcome, version, transaction_id in reports if outcome == "committed"}
    assert lake.latest_version() == 2 + len(committed)
    members = {info.version: info.members for info in lake.history(len(committed))}
    assert members == {version: (transaction_id,) for transaction_id, version in committed.items()}
    assert lake.snapshot().table("ns", "counter").properties == {"n": str(len(committed))}, "no increment is lost"
    assert len(committed) < 100, "some transactions conflicted"
    for version in range(lake.latest_version() + 1):
        check_version(lake, version)
    assert unreferenced_paths(lake) == set()
