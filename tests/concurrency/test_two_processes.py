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
#: Commits of each process; on a server a commit takes longer.
N_COMMITS, N_COMMITS_ON_S3 = 200, 80


def _new_lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.local(order=8, is_watched=False)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    return lake


def _create_tables(shared_lake: Lakehouse, worker: int, n_commits: int) -> Callable[[Report], None]:
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
    children = [fork(_create_tables(lake, worker, n_commits), time_limit_seconds=500) for worker in range(2)]
    ended = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in ended] == [0, 0]

    acknowledged = dict(line.split() for _, lines in ended for line in lines)
    latest = lake.latest_version()
    assert latest == 2 * n_commits + 1
    assert len(acknowledged) == 2 * n_commits, "no version was acknowledged to two commits"
    assert lake.snapshot().tables("ns") == [f"w{w}-{n:03d}" for w in range(2) for n in range(n_commits)]
    infos = {info.version: info for info in lake.history()}
    for version, transaction_id in acknowledged.items():
        assert infos[int(version)].members == (transaction_id,)
    members = [member for info in infos.values() for member in info.members]
    assert len(members) == len(set(members)) == latest
    assert len({info.commit_id for info in infos.values()}) == latest + 1

    # A late hint of the slower process may be below the latest version, never above; the next commit fixes it.
    hint = parse_hint(lake.storage.read(HINT_PATH))
    assert hint is not None
    assert 0 < hint <= latest
    lake.alter_definition(properties={"done": "yes"})
    lake.close()
    assert lake.storage.read(HINT_PATH) == str(latest + 1).encode()

    for version in [*range(0, latest, 25), latest]:
        snapshot = check_version(lake, version)
        assert len(snapshot.tables("ns") if version else []) == max(0, version - 1), "each commit added one table"
    assert unreferenced_paths(lake) == set(), "attempts that lost a race left no file"
    of_first = {line.split()[1] for line in ended[0][1]}
    interleaved = [acknowledged[str(version)] in of_first for version in range(2, latest + 1)]
    assert any(a != b for a, b in itertools.pairwise(interleaved)), "they did run side by side"


def _count_up(shared_lake: Lakehouse) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        lake = Lakehouse(shared_lake.storage)
        for _ in range(25):
            txn = lake.transaction()
            number = int(txn.table("ns", "counter").properties["n"])
            txn.alter_table("ns", "counter", table(n=str(number + 1)))
            try:
                report(f"won {txn.commit()} {txn.id}")
            except CommitConflictError as error:
                assert error.conflicts
                report(f"lost {error.latest_version} {txn.id}")

    return work


@pytest.mark.forks
def test_concurrent_updates_of_one_table_win_once_or_conflict(lakes: Lakes) -> None:
    lake = _new_lake(lakes)
    with lake.transaction() as txn:
        txn.create_table("ns", "counter", table(n="0"))
    ended = [child.finish() for child in [fork(_count_up(lake)) for _ in range(4)]]
    assert [exit_code for exit_code, _ in ended] == [0] * 4
    reports = [line.split() for _, lines in ended for line in lines]
    assert len(reports) == 100
    won = {transaction_id: int(version) for outcome, version, transaction_id in reports if outcome == "won"}
    assert lake.latest_version() == 2 + len(won)
    members = {info.version: info.members for info in lake.history(len(won))}
    assert members == {version: (transaction_id,) for transaction_id, version in won.items()}
    assert lake.snapshot().table("ns", "counter").properties == {"n": str(len(won))}, "no increment is lost"
    assert len(won) < 100, "they did contend"
    for version in range(lake.latest_version() + 1):
        check_version(lake, version)
    assert unreferenced_paths(lake) == set()
