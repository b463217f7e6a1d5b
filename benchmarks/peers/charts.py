"""The pictures: ratios as bars, and a commit on S3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes

from benchmarks.peers.figures import METRICS, Figures


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
    """Draw milliseconds, and requests with the rounds among them."""
    commits = figures.on_s3
    peers, places = list(commits), range(len(commits))
    axes[0].barh(places, [1000 * median(one.seconds for one in commits[peer]) for peer in peers])
    axes[0].set_title("ms of a commit on S3")
    for what, width in (("requests", 0.8), ("rounds", 0.4)):
        axes[1].barh(places, [median(getattr(one, what) for one in commits[peer]) for peer in peers], width, label=what)
    axes[1].set_title("requests of a commit, and rounds")
    axes[1].legend()
    for each in axes:
        each.set_yticks(places, peers)
        each.invert_yaxis()
