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
from benchmarks.peers.wire import Asked

#: What is measured at each size.
METRICS: Mapping[str, str] = {
    "commit": "commit",
    "lookup": "cold lookup",
    "list": "list",
    "load": "bulk load",
}
_OWN = (OURS, OURS_SYNCED, BY_CATALOG, BY_CATALOG_SYNCED, OURS_S3FS, OURS_OBSTORE)


def times(ratio: float) -> str:
    """Return a ratio with two digits where it is small."""
    return f"{ratio:,.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


class Figures:
    """A run, seen through its medians."""

    def __init__(self, measured: Measured):
        self.measured = measured

    def peers(self, size: int) -> list[str]:
        """Return all that were measured at a size, ours first; our catalog has a table of its own."""
        measured = {peer for _, n_objects, peer in self.measured.seconds if n_objects == size}
        return [peer for peer in PEERS if peer in measured and peer not in (BY_CATALOG, BY_CATALOG_SYNCED)]

    def seconds(self, metric: str, size: int, peer: str) -> float | None:
        """Return the median of a metric."""
        found = self.measured.seconds.get((metric, size, peer))
        return median(found) if found else None

    def beside(self, peer: str) -> str | None:
        """Return which of ours has the peer's durability; None for our own and for absent ones."""
        if peer in _OWN or peer not in self.measured.abouts:
            return None
        return OURS_SYNCED if self.measured.abouts[peer].is_synced else OURS

    def ratio(self, metric: str, size: int, peer: str) -> float | None:
        """Return the peer's seconds by ours."""
        ours, theirs = self.beside(peer), self.seconds(metric, size, peer)
        own = self.seconds(metric, size, ours) if ours else None
        return theirs / own if theirs and own else None

    def freed_ratio(self, peer: str) -> float | None:
        """Return our freed files a second by the peer's."""
        ours = self.beside(peer)
        rates = [self._freed_rate(each) for each in (ours, peer)] if ours else []
        return rates[0] / rates[1] if rates and rates[0] and rates[1] else None

    def _freed_rate(self, peer: str) -> float | None:
        spent, files = self.seconds("expire", self.measured.first, peer), self.measured.files.get(peer)
        return files / spent if files and spent else None

    def written_ratio(self, how: str, peer: str) -> float | None:
        """Return our commits a second by the peer's."""
        ours = self.beside(peer)
        pair = [self.measured.written.get((how, each)) for each in (ours, peer)] if ours else []
        rates = [one.commits / one.seconds for one in pair if one]
        return rates[0] / rates[1] if len(rates) == 2 and rates[1] else None

    def on_s3(self, metric: str) -> dict[str, list[Asked]]:
        """Return what a metric asked of S3, ours first."""
        asked = self.measured.asked
        return {peer: asked[metric, peer] for peer in ON_S3 if (metric, peer) in asked}

    def s3_seconds(self, metric: str, peer: str) -> float | None:
        """Return the median of a metric on S3."""
        found = self.measured.asked.get((metric, peer))
        return median(one.seconds for one in found) if found else None

    def s3_ratio(self, metric: str, peer: str) -> float | None:
        """Return the peer's seconds on S3 by those of the faster of our clients."""
        own = [found for one in (OURS_S3FS, OURS_OBSTORE) if (found := self.s3_seconds(metric, one))]
        theirs = self.s3_seconds(metric, peer)
        return theirs / min(own) if theirs and own and peer not in _OWN else None

    def all_ratios(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield metric, words for it, peer and ratio of all that was compared."""
        for metric, words, peer, ratio in self._each_ratio():
            if ratio is not None:
                yield metric, words, peer, ratio

    def _each_ratio(self) -> Iterator[tuple[str, str, str, float | None]]:
        measured, first = self.measured, self.measured.first
        for size in measured.options.sizes:
            for metric, words in METRICS.items():
                for peer in self.peers(size):
                    yield metric, f"{words}, {size:,} objects", peer, self.ratio(metric, size, peer)
        for peer in measured.versions:
            yield "old_version", "opening an old version", peer, self.ratio("old_version", first, peer)
            yield "expire", "freeing versions, seconds", peer, self.ratio("expire", first, peer)
            yield "freed", "freeing versions, files a second", peer, self.freed_ratio(peer)
        for how, peer in measured.written:
            yield how, f"many {how}", peer, self.written_ratio(how, peer)
        for metric, peer in measured.asked:
            yield f"s3 {metric}", f"{S3_METRICS[metric]} on S3", peer, self.s3_ratio(metric, peer)
