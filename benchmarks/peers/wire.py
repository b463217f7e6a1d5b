"""Requests and round trips of a call to an S3 server, from the log of a proxy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.peers.peer import TimedCall
from tests.proxy import FaultyProxy, WireFault, delay_response


@dataclass(frozen=True)
class WireCall:
    """One call: seconds, requests and round trips until it returned, and requests in the background."""

    seconds: float
    requests: int
    rounds: int
    background: int


def slow() -> WireFault:
    """Return a fault that delays each request by 20 ms."""
    return delay_response(times=None, seconds=REQUEST_SECONDS)


def wire_call(proxy: FaultyProxy, timed: TimedCall, mark: str) -> WireCall:
    """Return the requests of a call from the log.

    Args:
        proxy: The proxy.
        timed: The start and end of the call.
        mark: A text in the target of each request of the call.
    """
    exchanges = [exchange for exchange in proxy.log if mark in exchange.target]
    foreground = [exchange for exchange in exchanges if exchange.arrived_s <= timed.ended_s]
    spans = [
        (exchange.arrived_s, exchange.responded_s)
        for exchange in foreground
        if exchange.responded_s and exchange.responded_s <= timed.ended_s
    ]
    return WireCall(timed.seconds, len(foreground), longest_chain(spans), len(exchanges) - len(foreground))


def longest_chain(spans: Iterable[tuple[float, float]]) -> int:
    """Return the length of the longest chain of spans in which each starts after the previous one ended."""
    length, end = 0, float("-inf")
    for start, ended in sorted(spans, key=lambda span: span[1]):
        if start > end:
            length, end = length + 1, ended
    return length
