"""Sixteen real processes that commit to one lakehouse, while some are killed and others stopped for a while."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lakes import Lakes, table
from tests.processes import Child, fork
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import CommitAttemptsExhaustedError, CommitConflictError

Report = Callable[[str], None]

pytestmark = pytest.mark.local_only("chooses its places itself")

N_WRITERS = 16
N_SHARED_TABLES = 4
CONTENDED = 0.3  # of all transactions change a table that others change, too
SECONDS, SOAK_SECONDS = 20, 300


def places() -> Iterator[object]:
    """Place and seconds: the short runs, and the long ones for ``make soak``."""
    for place in ("local", "s3"):
        marks = [] if place == "local" else [pytest.mark.debian_packages]
        yield pytest.param(place, SECONDS, marks=[*marks, pytest.mark.timeout(200)], id=place)
        soak = [*marks, pytest.mark.soak, pytest.mark.timeout(1_800)]
        yield pytest.param(place, SOAK_SECONDS, marks=soak, id=f"{place}-long")


@pytest.fixture
def made(request: pytest.FixtureRequest, place: str, tmp_path: Path) -> Iterator[Lakehouse]:
    """A lakehouse with a counter for each writer and some that they share."""
    server: S3Server | None = request.getfixturevalue("radosgw") if place == "s3" else None
    lakes = Lakes(tmp_path, server)
    lake = lakes.local(order=8, is_watched=False)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in itertools.chain(map(_own, range(N_WRITERS)), map(_shared, range(N_SHARED_TABLES))):
            txn.create_table("ns", name, table(n="0"))
    yield lake
    lakes.finish()


def _own(writer: int) -> str:
    return f"own{writer:02}"


def _shared(number: int) -> str:
    return f"shared{number}"


def _count_up(made: Lakehouse, writer: int, incarnation: int, seconds: float) -> Callable[[Report], None]:
    """Count tables up until the time is over; reports every outcome that is known."""

    def work(report: Report) -> None:
        chance = random.Random(f"{writer} {incarnation}")
        lake = Lakehouse(made.storage)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_shared = chance.random() < CONTENDED
            name = _shared(chance.randrange(N_SHARED_TABLES)) if is_shared else _own(writer)
            txn = lake.transaction()
            number = int(txn.table("ns", name).properties["n"])
            txn.alter_table("ns", name, table(n=str(number + 1)))
            try:
                report(f"won {txn.commit()} {txn.id} {name}")
            except (CommitConflictError, CommitAttemptsExhaustedError):
                report(f"lost 0 {txn.id} {name}")

    return work


@pytest.mark.parametrize(("place", "seconds"), list(places()))
def test_nothing_is_lost_or_doubled(made: Lakehouse, place: str, seconds: int) -> None:
    """Every third writer is killed once and starts again, every other third is stopped now and then."""
    chance = random.Random(place)
    end = time.monotonic() + seconds
    children = {
        writer: fork(_count_up(made, writer, 0, seconds), time_limit_seconds=seconds + 120)
        for writer in range(N_WRITERS)
    }
    killed: list[Child] = []
    to_kill = [writer for writer in children if writer % 3 == 0]
    to_stop = [writer for writer in children if writer % 3 == 1]
    while (rest := end - time.monotonic()) > 1:
        time.sleep(min(rest, seconds / 20))
        if to_kill:
            writer = to_kill.pop()
            os.kill(children[writer].pid, signal.SIGKILL)
            killed.append(children[writer])
            children[writer] = fork(
                _count_up(made, writer, 1, end - time.monotonic()), time_limit_seconds=seconds + 120
            )
        stopped = chance.choice(to_stop)
        os.kill(children[stopped].pid, signal.SIGSTOP)
        time.sleep(min(1.0, seconds / 20))
        os.kill(children[stopped].pid, signal.SIGCONT)

    ended = {writer: child.finish() for writer, child in children.items()}
    assert {writer: code for writer, (code, _) in ended.items()} == dict.fromkeys(range(N_WRITERS), 0)
    dead = [child.finish() for child in killed]
    assert [code for code, _ in dead] == [-signal.SIGKILL] * len(killed)
    reports = [line.split() for _, lines in (*ended.values(), *dead) for line in lines]

    infos = {info.version: info for info in made.history()}
    places_of = Counter(member for info in infos.values() for member in info.members)
    assert set(places_of.values()) == {1}, "no transaction is there twice"
    for outcome, version, transaction_id, _ in reports:
        if outcome == "won":
            assert transaction_id in infos[int(version)].members
        else:
            assert transaction_id not in places_of
    snapshot = made.snapshot()
    counters = {name: int(snapshot.table("ns", name).properties["n"]) for name in snapshot.tables("ns")}
    assert sum(counters.values()) == len(places_of) - 1, "each commit counted one table up by one"
    won = Counter(name for outcome, _, _, name in reports if outcome == "won")
    assert all(counters[name] >= count for name, count in won.items())
    assert any(outcome == "lost" for outcome, *_ in reports), "they did contend"
    undisturbed = [writer for writer in range(N_WRITERS) if writer % 3 == 2]
    shares = [sum(line.startswith("won") for line in ended[writer][1]) for writer in undisturbed]
    assert min(shares) * 4 >= sum(shares) / len(shares), f"nobody starves: {shares}"

    report = maintenance.verify(made)
    assert report.is_clean, report.findings
