"""Charts of the results: ratios, and milliseconds on S3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes

from benchmarks.peers.figures import METRICS, Figures
from benchmarks.peers.measure import S3_METRICS


def draw_ratios(axes: Sequence[Axes], figures: Figures) -> None:
    """Draw the ratios of the peers' seconds to ours, for each size."""
    for chart, size in zip(axes, figures.measured.options.sizes, strict=True):
        peers = [peer for peer in figures.peers(size) if figures.baseline(peer)]
        for shift, (metric, description) in enumerate(METRICS.items()):
            ratios = [(row, figures.ratio(metric, size, peer)) for row, peer in enumerate(peers)]
            known = [(row + 0.2 * shift, ratio - 1) for row, ratio in ratios if ratio is not None]
            chart.barh([row for row, _ in known], [length for _, length in known], 0.19, left=1, label=description)
        chart.set_xscale("log")
        chart.axvline(1, color="black", linewidth=1)
        chart.set_yticks([row + 0.3 for row in range(len(peers))], peers)
        chart.invert_yaxis()
        chart.set_title(f"multiple of our time, {size:,} objects")
    axes[0].legend(loc="lower left", fontsize=7)


def draw_s3(axes: Sequence[Axes], figures: Figures) -> None:
    """Draw the milliseconds of each metric, labeled with its round trips."""
    for chart, (metric, description) in zip(axes, S3_METRICS.items(), strict=True):
        calls_by_peer = figures.on_s3(metric)
        milliseconds = [1000 * median(call.seconds for call in calls) for calls in calls_by_peer.values()]
        bars = chart.barh(range(len(calls_by_peer)), milliseconds)
        chart.bar_label(
            bars,
            [f"{median(call.rounds for call in calls):g} round trips" for calls in calls_by_peer.values()],
            fontsize=7,
        )
        chart.margins(x=0.25)
        chart.set_title(f"{description} on S3, ms")
        chart.set_yticks(range(len(calls_by_peer)), list(calls_by_peer), fontsize=7)
        chart.invert_yaxis()
