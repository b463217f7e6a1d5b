"""The pictures: ratios as bars, and what each metric takes on S3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes

from benchmarks.peers.figures import METRICS, Figures
from benchmarks.peers.measure import S3_METRICS


def draw_ratios(axes: Sequence[Axes], figures: Figures) -> None:
    """Draw for each size how many times our seconds each peer takes."""
    for each, size in zip(axes, figures.measured.options.sizes, strict=True):
        peers = [peer for peer in figures.peers(size) if figures.beside(peer)]
        for shift, (metric, words) in enumerate(METRICS.items()):
            found = [(place, figures.ratio(metric, size, peer)) for place, peer in enumerate(peers)]
            known = [(place + 0.2 * shift, ratio - 1) for place, ratio in found if ratio is not None]
            each.barh([place for place, _ in known], [length for _, length in known], 0.19, left=1, label=words)
        each.set_xscale("log")
        each.axvline(1, color="black", linewidth=1)
        each.set_yticks([place + 0.3 for place in range(len(peers))], peers)
        each.invert_yaxis()
        each.set_title(f"times as long as ours, {size:,} objects")
    axes[0].legend(loc="lower left", fontsize=7)


def draw_s3(axes: Sequence[Axes], figures: Figures) -> None:
    """Draw the milliseconds of each metric, with its rounds written beside."""
    for each, (metric, words) in zip(axes, S3_METRICS.items(), strict=True):
        asked = figures.on_s3(metric)
        milliseconds = [1000 * median(one.seconds for one in calls) for calls in asked.values()]
        bars = each.barh(range(len(asked)), milliseconds)
        each.bar_label(
            bars, [f"{median(one.rounds for one in calls):g} rounds" for calls in asked.values()], fontsize=7
        )
        each.margins(x=0.25)
        each.set_title(f"ms of {words} on S3")
        each.set_yticks(range(len(asked)), list(asked), fontsize=7)
        each.invert_yaxis()
