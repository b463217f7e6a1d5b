"""Shared code of the benchmarks: statistics, Markdown tables and plots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"

mpl.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})


@dataclass(frozen=True)
class Spread:
    """Median, mean and 99th percentile."""

    median: float
    mean: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of at least two values."""
        return cls(
            statistics.median(values),
            statistics.mean(values),
            statistics.quantiles(values, n=100, method="inclusive")[98],
        )

    def cells(self, scale: float = 1, digits: int = 2) -> list[str]:
        """Return the three values as table cells."""
        return [f"{value * scale:.{digits}f}" for value in (self.median, self.mean, self.p99)]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table. The first column is left-aligned, the others are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]


def write_result(name: str, lines: Iterable[str], folder: Path = RESULTS) -> None:
    """Print a result and write it to ``NAME.md`` in a folder."""
    text = "\n".join([*lines, ""])
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def plot(
    name: str,
    draw: Callable[[Sequence[Axes]], None],
    n_axes: int = 1,
    width: float = 5.2,
    height: float = 3.4,
    folder: Path = RESULTS,
) -> str:
    """Draw charts side by side into ``NAME.png`` and return the Markdown line that shows them.

    Args:
        name: The name of the file without its suffix.
        draw: Draws into the axes.
        n_axes: The number of charts.
        width: The width of each chart in inches.
        height: The height in inches.
        folder: The folder of the file.
    """
    figure = Figure(figsize=(width * n_axes, height), layout="constrained")
    draw([figure.add_subplot(1, n_axes, number + 1) for number in range(n_axes)])
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
    return f"![{name.replace('_', ' ')}]({name}.png)"


def by_tables(axes: Axes, title: str, lines: Mapping[str, Mapping[int, float]], bound: float | None = None) -> None:
    """Draw lines by number of tables, and an upper bound. The legend of more than four lines is outside the chart."""
    for label, points in lines.items():
        style = "o--" if label.startswith("predicted") else "o-"
        axes.plot(list(points), list(points.values()), style, label=label, markersize=3.5)
    if bound is not None:
        axes.axhline(bound, color="black", linestyle=":", label=f"bound {bound:g}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tables")
    axes.set_title(title)
    axes.legend(**({"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(lines) > 4 else {}))


def by_writers(axes: Sequence[Axes], label: str, lines: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Draw a chart for each title, with lines by number of writers. ``label`` names the horizontal axis."""
    for chart, (title, cases) in zip(axes, lines.items(), strict=True):
        for case, points in cases.items():
            chart.plot(list(points), list(points.values()), "o-", label=case, markersize=3.5)
        chart.set_xscale("log", base=2)
        chart.set_ylim(bottom=0)
        chart.set_xlabel(label)
        chart.set_title(title)


def seconds(call: Callable[[], object]) -> float:
    """Return the elapsed seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call in all threads."""
    started = time.process_time()
    call()
    return time.process_time() - started
