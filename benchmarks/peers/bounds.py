"""What has to hold beside the peers, and what was found."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.figures import Figures, times
from benchmarks.peers.measure import OURS_OBSTORE, OURS_S3FS, S3_METRICS
from benchmarks.peers.reasons import reason
from benchmarks.report import table

#: Peers that keep versions and let many commit; slatedb does neither.
_NO_LAKEHOUSE = ("slatedb",)
_TIMES = 2.0
_TIMES_ICECHUNK = 50.0


#: What ours may take on S3 at most, with 1,000 objects and 20 ms a request.
_MOST_S3_MS = {"lookup": 110.0, "list": 150.0}


def bounds(figures: Figures) -> list[str]:
    """Return the lines of a table, and of one for S3."""
    rows = []
    for what, metric, peer, least, found in _found(figures):
        holds = "yes" if found >= least else f"**no**: {reason(metric, peer)}"
        rows.append([f"{what}, beside {peer}", f"{least:g}", times(found), holds])
    return [*table(["what", "at least", "found", "holds"], rows), *_on_s3(figures)]


def _on_s3(figures: Figures) -> Iterator[str]:
    rows = []
    for metric, most_ms in _MOST_S3_MS.items():
        for peer in (OURS_S3FS, OURS_OBSTORE):
            if (found := figures.s3_seconds(metric, peer)) is not None:
                holds = "yes" if 1000 * found <= most_ms else "**no**"
                rows.append([f"{S3_METRICS[metric]}, {peer}", f"{most_ms:g}", f"{1000 * found:.0f}", holds])
    if rows:
        yield from ("", *table(["ms on S3", "at most", "found", "holds"], rows))


def _found(figures: Figures) -> Iterator[tuple[str, str, str, float, float]]:
    largest = figures.measured.options.sizes[-1]
    for peer in figures.peers(largest):
        ratio = figures.ratio("commit", largest, peer)
        if ratio is not None and peer not in _NO_LAKEHOUSE:
            least = _TIMES_ICECHUNK if peer == "icechunk" else _TIMES
            yield f"commit among {largest:,}", "commit", peer, least, ratio
    for size in figures.measured.options.sizes:
        for peer in figures.peers(size):
            if (ratio := figures.ratio("lookup", size, peer)) is not None:
                yield f"cold lookup among {size:,}", "lookup", peer, _TIMES, ratio
    if (ratio := figures.freed_ratio("icechunk")) is not None:
        yield "files freed a second", "freed", "icechunk", _TIMES, ratio
