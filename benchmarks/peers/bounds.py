"""Required ratios to the peers, and the measured ones."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.figures import Figures, times
from benchmarks.peers.measure import OURS_OBSTORE, OURS_S3FS, S3_METRICS
from benchmarks.peers.reasons import reason
from benchmarks.report import table

#: Peers without versions and without concurrent writers.
_WITHOUT_VERSIONS = ("slatedb",)
_MIN_RATIO = 2.0
_MIN_RATIO_ICECHUNK = 50.0

#: Maximum milliseconds of our engine on S3, with 1,000 objects and 20 ms per request.
_MAX_S3_MS = {"lookup": 110.0, "list": 150.0}


def bounds(figures: Figures) -> list[str]:
    """Return the lines of a table of ratios, and of one for S3."""
    rows = []
    for description, metric, peer, minimum, ratio in _required_ratios(figures):
        is_met = "yes" if ratio >= minimum else f"**no**: {reason(metric, peer)}"
        rows.append([f"{description}, compared with {peer}", f"{minimum:g}", times(ratio), is_met])
    return [*table(["metric", "at least", "measured", "met"], rows), *_on_s3(figures)]


def _on_s3(figures: Figures) -> Iterator[str]:
    rows = []
    for metric, max_ms in _MAX_S3_MS.items():
        for peer in (OURS_S3FS, OURS_OBSTORE):
            if (seconds := figures.s3_seconds(metric, peer)) is not None:
                is_met = "yes" if 1000 * seconds <= max_ms else "**no**"
                rows.append([f"{S3_METRICS[metric]}, {peer}", f"{max_ms:g}", f"{1000 * seconds:.0f}", is_met])
    if rows:
        yield from ("", *table(["ms on S3", "at most", "measured", "met"], rows))


def _required_ratios(figures: Figures) -> Iterator[tuple[str, str, str, float, float]]:
    largest = figures.measured.options.sizes[-1]
    for peer in figures.peers(largest):
        ratio = figures.ratio("commit", largest, peer)
        if ratio is not None and peer not in _WITHOUT_VERSIONS:
            minimum = _MIN_RATIO_ICECHUNK if peer == "icechunk" else _MIN_RATIO
            yield f"commit among {largest:,}", "commit", peer, minimum, ratio
    for size in figures.measured.options.sizes:
        for peer in figures.peers(size):
            if (ratio := figures.ratio("lookup", size, peer)) is not None:
                yield f"cold lookup among {size:,}", "lookup", peer, _MIN_RATIO, ratio
    if (ratio := figures.freed_ratio("icechunk")) is not None:
        yield "files reclaimed per second", "freed", "icechunk", _MIN_RATIO, ratio
