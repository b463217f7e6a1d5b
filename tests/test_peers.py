"""The benchmark of peers: it runs, counts round trips on the wire, and reports correct ratios."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.peers.figures import Figures
from benchmarks.peers.measure import ON_S3, OURS, OURS_OBSTORE, OURS_SYNCED, PEERS, QUICK, SQLITE, Measured, Run
from benchmarks.peers.peer import About, Place, Timed, Written
from benchmarks.peers.report import lines
from benchmarks.peers.wire import Asked, asked, longest_chain, slow
from benchmarks.peers.workers import Worker, WorkerError
from tests.proxy import FaultyProxy
from tests.request_budgets import budget
from tests.servers.s3_server import S3Server

SMALL = replace(QUICK, sizes=(30,), versions=4, turns=2, list_turns=2, s3_turns=2, threads=2)


@pytest.mark.soak
def test_quick_run_measures_and_reports_missing_peers(tmp_path: Path) -> None:
    run = Run(tmp_path / "data", SMALL, [OURS, SQLITE, "icechunk"])
    run.local()
    measured = run.measured
    for metric in ("commit", "lookup", "list"):
        for peer in (OURS, SQLITE):
            assert len(measured.seconds[metric, 30, peer]) == 2
    assert (measured.versions[OURS], measured.written["processes", OURS].conflicts) == (4, 0)
    assert measured.files[OURS] > 0
    assert measured.written["threads", SQLITE].commits > 0
    assert not [why for why in measured.why_not.values() if why.startswith("failed")]
    text = "\n".join(lines(measured, tmp_path))
    assert (tmp_path / "peers.png").stat().st_size > 0
    assert "the catalog has no versions" in text
    if find_spec("icechunk") is None:
        assert "| icechunk | bulk load | icechunk is not installed |" in text
    else:
        assert "commit among 30, beside icechunk" in text


@pytest.mark.debian_packages
def test_warm_commit_on_s3_takes_its_budgeted_round_trips_on_the_wire(tmp_path: Path, radosgw: S3Server) -> None:
    run = Run(tmp_path / "data", SMALL, [OURS_OBSTORE])
    try:
        run.on_s3(radosgw)
    finally:
        radosgw.delete_all(f"s3://{radosgw.bucket}/on-s3-")
    commits = run.measured.asked["commit", OURS_OBSTORE]
    # Requests that are sent together reach the proxy one after the other where the machine is busy.
    expected = budget("begin, warm").rounds + budget("commit a changed table").rounds
    assert min(one.rounds for one in commits) == expected
    assert all(one.seconds > 3 * 0.020 for one in commits), "each round waits for the proxy"
    assert "ours, obstore" in "\n".join(lines(run.measured, tmp_path))
    assert (tmp_path / "peers_s3.png").stat().st_size > 0


def test_worker_errors_are_reported(tmp_path: Path) -> None:
    with Worker(PEERS[SQLITE], tmp_path / "log") as worker:
        with pytest.raises(WorkerError, match="load or attach comes first"):
            worker.call("commit")
        worker.call("load", Place(tmp_path), 3)
        assert worker.call("lookup").seconds > 0, "it goes on"
    assert "load or attach comes first" in (tmp_path / "log").read_text()


def test_longest_chain_ignores_overlapping_requests() -> None:
    assert longest_chain([]) == 0
    assert longest_chain([(0, 1), (0, 1), (0.5, 2)]) == 1
    assert longest_chain([(0, 9), (1, 2), (3, 4), (3.5, 5), (6, 7)]) == 3
    assert longest_chain([(0, 1), (1, 2)]) == 1, "a request cannot follow an answer at the same moment"


@pytest.mark.debian_packages
def test_rounds_are_those_of_the_proxys_log(radosgw: S3Server) -> None:
    """A busy machine may send one after another what is meant to go together, so the shortest chain counts."""
    found = [_requests_in_three_rounds(radosgw) for _ in range(5)]
    assert {(one.requests, one.beside) for one in found} == {(7, 1)}
    assert min(one.rounds for one in found) == 3


def _requests_in_three_rounds(radosgw: S3Server) -> Asked:
    with FaultyProxy(radosgw.endpoint) as proxy, ThreadPoolExecutor(4) as pool:
        proxy.begin(slow())
        client = S3Server("radosgw", proxy.url, radosgw.folder).client
        bucket = radosgw.bucket
        begun = time.monotonic()
        for n_together in (4, 1, 2):
            list(pool.map(lambda n: client.list_objects_v2(Bucket=bucket, Prefix=f"wire-{n}"), range(n_together)))
        ended = time.monotonic()
        client.list_objects_v2(Bucket=bucket, Prefix="wire-after")
        return asked(proxy, Timed(begun, ended), "wire-")


def measured_by_hand() -> Measured:
    """We take 1 s and free 10 files, a peer takes 2 s and frees 10; both synced or not alike."""
    found = Measured(replace(QUICK, sizes=(10,)))
    for peer, seconds in ((OURS, 1.0), (OURS_SYNCED, 4.0), ("delta", 2.0)):
        found.abouts[peer] = About({}, "row", "an update", "-", peer == OURS_SYNCED, {}, None)
        for metric in ("commit", "expire"):
            found.seconds[metric, 10, peer] = [seconds]
        found.files[peer] = 10
        found.written["threads", peer] = Written(int(100 / seconds), 0, 1.0)
        found.versions[peer] = 5
    return found


@pytest.mark.parametrize(("is_synced", "ratio"), [(False, 2.0), (True, 0.5)])
def test_a_ratio_above_one_says_that_we_are_faster_at_the_same_durability(is_synced: bool, ratio: float) -> None:
    measured = measured_by_hand()
    measured.abouts["delta"] = replace(measured.abouts["delta"], is_synced=is_synced)
    figures = Figures(measured)
    found = (
        figures.ratio("commit", 10, "delta"),
        figures.freed_ratio("delta"),
        figures.written_ratio("threads", "delta"),
    )
    assert found == (ratio, ratio, ratio)
    assert figures.ratio("commit", 10, OURS) is None


def test_report_explains_slower_results(tmp_path: Path) -> None:
    measured = measured_by_hand()
    measured.seconds["commit", 10, "delta"] = [0.5]
    text = "\n".join(lines(measured, tmp_path))
    assert "| commit, 10 objects | delta 0.50 | not explained yet |" in text
    assert "| commit among 10, beside delta | 2 | 0.50 | **no**: not explained yet |" in text
    measured.asked = {("commit", OURS_OBSTORE): [Asked(0.2, 5, 3, 1)], ("commit", "slatedb"): [Asked(0.1, 1, 1, 0)]}
    assert "| a commit on S3 | slatedb 0.50 | one request" in "\n".join(lines(measured, tmp_path))


def test_every_peer_on_s3_is_known() -> None:
    assert {name for name in ON_S3 if not name.startswith("ours")} <= set(PEERS)
