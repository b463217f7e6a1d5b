"""What a commit or a read asks of an S3 server, by the log of a proxy: how many requests, and how many in a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.peers.peer import Timed
from tests.proxy import FaultyProxy, WireFault, delay_answer


@dataclass(frozen=True)
class Asked:
    """Of one call: seconds, requests, rounds before it returned, and requests that came after."""

    seconds: float
    requests: int
    rounds: int
    beside: int


def slow() -> WireFault:
    """Return what makes each request take 20 ms more."""
    return delay_answer(times=None, seconds=REQUEST_SECONDS)


def asked(proxy: FaultyProxy, timed: Timed, mark: str) -> Asked:
    """Return what the log shows of a call; ``mark`` is in the target of each of its requests."""
    own = [exchange for exchange in proxy.log if mark in exchange.target]
    within = [one for one in own if one.arrived_s <= timed.ended_s]
    waited = [(one.arrived_s, one.answered_s) for one in within if one.answered_s and one.answered_s <= timed.ended_s]
    return Asked(timed.seconds, len(within), longest_chain(waited), len(own) - len(within))


def longest_chain(spans: Iterable[tuple[float, float]]) -> int:
    """Return how many spans at most follow each other, each begun after the one before had ended."""
    length, end = 0, float("-inf")
    for begun, ended in sorted(spans, key=lambda span: span[1]):
        if begun > end:
            length, end = length + 1, ended
    return length
