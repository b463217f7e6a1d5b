"""Tests of the comparison with other table formats: a small run, round trips on the wire, and ratios."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.peers.figures import Figures
from benchmarks.peers.measure import ON_S3, OURS, OURS_OBSTORE, OURS_SYNCED, PEERS, QUICK, SQLITE, Measured, Run
from benchmarks.peers.peer import Location, PeerInfo, TimedCall, WriteTotals
from benchmarks.peers.report import lines
from benchmarks.peers.wire import WireCall, longest_chain, slow, wire_call
from benchmarks.peers.workers import Worker, WorkerError
from tests.proxy import FaultyProxy
from tests.request_budgets import budget
from tests.servers.s3_server import S3Server

SMALL = replace(QUICK, sizes=(30,), versions=4, turns=2, list_turns=2, s3_turns=2, threads=2)


@pytest.mark.soak
def test_small_run_reports_measurements_and_absent_peers(tmp_path: Path) -> None:
    run = Run(tmp_path / "data", SMALL, [OURS, SQLITE, "icechunk"])
    run.local()
    measured = run.measured
    for metric in ("commit", "lookup", "list"):
        for peer in (OURS, SQLITE):
            assert len(measured.seconds[metric, 30, peer]) == 2
    assert (measured.versions[OURS], measured.written["processes", OURS].conflicts) == (4, 0)
    assert measured.files[OURS] > 0
    assert measured.written["threads", SQLITE].commits > 0
    assert not [reason for reason in measured.skip_reasons.values() if reason.startswith("failed")]
    text = "\n".join(lines(measured, tmp_path))
    assert (tmp_path / "peers.png").stat().st_size > 0
    assert "the catalog has no versions" in text
    if find_spec("icechunk") is None:
        assert "| icechunk | bulk load | icechunk is not installed |" in text
    else:
        assert "commit among 30, compared with icechunk" in text


@pytest.mark.debian_packages
def test_warm_commit_on_s3_takes_budgeted_round_trips_on_the_wire(tmp_path: Path, radosgw: S3Server) -> None:
    run = Run(tmp_path / "data", SMALL, [OURS_OBSTORE])
    try:
        run.on_s3(radosgw)
    finally:
        radosgw.delete_all(f"s3://{radosgw.bucket}/on-s3-")
    commits = run.measured.s3_calls["commit", OURS_OBSTORE]
    # On a busy machine, parallel requests may reach the proxy one after another.
    expected = budget("begin, warm").rounds + budget("commit a changed table").rounds
    assert min(call.rounds for call in commits) == expected
    assert all(call.seconds > 3 * 0.020 for call in commits), "the proxy delays each round trip"
    assert "ours, obstore" in "\n".join(lines(run.measured, tmp_path))
    assert (tmp_path / "peers_s3.png").stat().st_size > 0


def test_worker_reports_failed_call_and_continues(tmp_path: Path) -> None:
    with Worker(PEERS[SQLITE], tmp_path / "log") as worker:
        with pytest.raises(WorkerError, match="load or attach comes first"):
            worker.call("commit")
        worker.call("load", Location(tmp_path), 3)
        assert worker.call("lookup").seconds > 0
    assert "load or attach comes first" in (tmp_path / "log").read_text()


def test_longest_chain_excludes_overlapping_spans() -> None:
    assert longest_chain([]) == 0
    assert longest_chain([(0, 1), (0, 1), (0.5, 2)]) == 1
    assert longest_chain([(0, 9), (1, 2), (3, 4), (3.5, 5), (6, 7)]) == 3
    assert longest_chain([(0, 1), (1, 2)]) == 1, "a request that is sent at the time of a response does not follow it"


@pytest.mark.debian_packages
def test_wire_call_counts_round_trips_of_proxy_log(radosgw: S3Server) -> None:
    """The shortest chain of several runs counts, because a busy machine may serialize parallel requests."""
    calls = [_requests_in_three_rounds(radosgw) for _ in range(5)]
    assert {(call.requests, call.background) for call in calls} == {(7, 1)}
    assert min(call.rounds for call in calls) == 3


def _requests_in_three_rounds(radosgw: S3Server) -> WireCall:
    with FaultyProxy(radosgw.endpoint) as proxy, ThreadPoolExecutor(4) as pool:
        proxy.begin(slow())
        client = S3Server("radosgw", proxy.url, radosgw.folder).client
        bucket = radosgw.bucket
        started = time.monotonic()
        for n_parallel in (4, 1, 2):
            list(pool.map(lambda n: client.list_objects_v2(Bucket=bucket, Prefix=f"wire-{n}"), range(n_parallel)))
        ended = time.monotonic()
        client.list_objects_v2(Bucket=bucket, Prefix="wire-after")
        return wire_call(proxy, TimedCall(started, ended), "wire-")


def example_measurements() -> Measured:
    """Return measurements in which delta takes twice as long as ours, and half as long as ours with synced writes."""
    measured = Measured(replace(QUICK, sizes=(10,)))
    for peer, seconds in ((OURS, 1.0), (OURS_SYNCED, 4.0), ("delta", 2.0)):
        measured.peer_infos[peer] = PeerInfo({}, "row", "an update", "-", peer == OURS_SYNCED, {}, None)
        for metric in ("commit", "expire"):
            measured.seconds[metric, 10, peer] = [seconds]
        measured.files[peer] = 10
        measured.written["threads", peer] = WriteTotals(int(100 / seconds), 0, 1.0)
        measured.versions[peer] = 5
    return measured


@pytest.mark.parametrize(("is_synced", "ratio"), [(False, 2.0), (True, 0.5)])
def test_ratio_compares_peer_with_ours_at_same_durability(is_synced: bool, ratio: float) -> None:
    measured = example_measurements()
    measured.peer_infos["delta"] = replace(measured.peer_infos["delta"], is_synced=is_synced)
    figures = Figures(measured)
    ratios = (
        figures.ratio("commit", 10, "delta"),
        figures.freed_ratio("delta"),
        figures.written_ratio("threads", "delta"),
    )
    assert ratios == (ratio, ratio, ratio)
    assert figures.ratio("commit", 10, OURS) is None


def test_report_lists_slower_metrics_with_reasons(tmp_path: Path) -> None:
    measured = example_measurements()
    measured.seconds["commit", 10, "delta"] = [0.5]
    text = "\n".join(lines(measured, tmp_path))
    assert "| commit, 10 objects | delta 0.50 | not explained yet |" in text
    assert "| commit among 10, compared with delta | 2 | 0.50 | **no**: not explained yet |" in text
    measured.s3_calls = {
        ("commit", OURS_OBSTORE): [WireCall(0.2, 5, 3, 1)],
        ("commit", "slatedb"): [WireCall(0.1, 1, 1, 0)],
    }
    assert "| a commit on S3 | slatedb 0.50 | one request" in "\n".join(lines(measured, tmp_path))


def test_peers_on_s3_are_known_peers() -> None:
    assert {name for name in ON_S3 if not name.startswith("ours")} <= set(PEERS)
