"""Medians and ratios of a run: above 1 we are faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from benchmarks.peers.measure import (
    BY_CATALOG,
    BY_CATALOG_SYNCED,
    ON_S3,
    OURS,
    OURS_OBSTORE,
    OURS_S3FS,
    OURS_SYNCED,
    PEERS,
    S3_METRICS,
    Measured,
)
from benchmarks.peers.wire import WireCall

#: The metrics at each size.
METRICS: Mapping[str, str] = {
    "commit": "commit",
    "lookup": "cold lookup",
    "list": "list",
    "load": "bulk load",
}
_OUR_ENGINES = (OURS, OURS_SYNCED, BY_CATALOG, BY_CATALOG_SYNCED, OURS_S3FS, OURS_OBSTORE)


def times(ratio: float) -> str:
    """Format a ratio, with two significant digits if it is small."""
    return f"{ratio:,.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


class Figures:
    """Medians and ratios of a run."""

    def __init__(self, measured: Measured):
        self.measured = measured

    def peers(self, size: int) -> list[str]:
        """Return the peers measured at a size, ours first. Our pyiceberg catalog has a separate table."""
        measured = {peer for _, n_objects, peer in self.measured.seconds if n_objects == size}
        return [peer for peer in PEERS if peer in measured and peer not in (BY_CATALOG, BY_CATALOG_SYNCED)]

    def seconds(self, metric: str, size: int, peer: str) -> float | None:
        """Return the median of a metric."""
        values = self.measured.seconds.get((metric, size, peer))
        return median(values) if values else None

    def baseline(self, peer: str) -> str | None:
        """Return our engine with the peer's durability, or None for our engines and for absent peers."""
        if peer in _OUR_ENGINES or peer not in self.measured.peer_infos:
            return None
        return OURS_SYNCED if self.measured.peer_infos[peer].is_synced else OURS

    def ratio(self, metric: str, size: int, peer: str) -> float | None:
        """Return the peer's seconds divided by ours."""
        ours, peer_seconds = self.baseline(peer), self.seconds(metric, size, peer)
        our_seconds = self.seconds(metric, size, ours) if ours else None
        return peer_seconds / our_seconds if peer_seconds and our_seconds else None

    def freed_ratio(self, peer: str) -> float | None:
        """Return our rate of reclaimed files divided by the peer's."""
        ours = self.baseline(peer)
        rates = [self._freed_rate(engine) for engine in (ours, peer)] if ours else []
        return rates[0] / rates[1] if rates and rates[0] and rates[1] else None

    def _freed_rate(self, peer: str) -> float | None:
        spent, files = self.seconds("expire", self.measured.first, peer), self.measured.files.get(peer)
        return files / spent if files and spent else None

    def written_ratio(self, kind: str, peer: str) -> float | None:
        """Return our commits per second divided by the peer's."""
        ours = self.baseline(peer)
        pair = [self.measured.written.get((kind, engine)) for engine in (ours, peer)] if ours else []
        rates = [written.commits / written.seconds for written in pair if written]
        return rates[0] / rates[1] if len(rates) == 2 and rates[1] else None

    def on_s3(self, metric: str) -> dict[str, list[WireCall]]:
        """Return the S3 calls of a metric by peer, ours first."""
        s3_calls = self.measured.s3_calls
        return {peer: s3_calls[metric, peer] for peer in ON_S3 if (metric, peer) in s3_calls}

    def s3_seconds(self, metric: str, peer: str) -> float | None:
        """Return the median of a metric on S3."""
        values = self.measured.s3_calls.get((metric, peer))
        return median(call.seconds for call in values) if values else None

    def s3_ratio(self, metric: str, peer: str) -> float | None:
        """Return the peer's seconds on S3 divided by those of the faster of our clients."""
        our_seconds = [seconds for client in (OURS_S3FS, OURS_OBSTORE) if (seconds := self.s3_seconds(metric, client))]
        peer_seconds = self.s3_seconds(metric, peer)
        return peer_seconds / min(our_seconds) if peer_seconds and our_seconds and peer not in _OUR_ENGINES else None

    def all_ratios(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield metric, its description, peer and ratio of all comparisons."""
        for metric, description, peer, ratio in self._each_ratio():
            if ratio is not None:
                yield metric, description, peer, ratio

    def _each_ratio(self) -> Iterator[tuple[str, str, str, float | None]]:
        measured, first = self.measured, self.measured.first
        for size in measured.options.sizes:
            for metric, description in METRICS.items():
                for peer in self.peers(size):
                    yield metric, f"{description}, {size:,} objects", peer, self.ratio(metric, size, peer)
        for peer in measured.versions:
            yield "old_version", "opening an old version", peer, self.ratio("old_version", first, peer)
            yield "expire", "reclaiming versions, seconds", peer, self.ratio("expire", first, peer)
            yield "freed", "reclaiming versions, files per second", peer, self.freed_ratio(peer)
        for kind, peer in measured.written:
            yield kind, f"many {kind}", peer, self.written_ratio(kind, peer)
        for metric, peer in measured.s3_calls:
            yield f"s3 {metric}", f"{S3_METRICS[metric]} on S3", peer, self.s3_ratio(metric, peer)
