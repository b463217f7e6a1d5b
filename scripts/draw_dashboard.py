"""Draw a Grafana dashboard from its JSON and the responses of Prometheus to its queries, without Grafana.

Positions, titles, legends, units, thresholds and stacking come from the JSON, and the colors from Grafana's palette.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "dashboard.png"

_COLUMNS = 24
_UNIT_PIXELS = (62, 38)
_DPI = 100
_HEAD_UNITS = 1.2
_GAP_UNITS = 0.12
_COLORS = (
    *("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300"),
    *("#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477", "#b7dbab", "#f4d598", "#70dbed", "#f9ba8f"),
)
_NAMED_COLORS = {"green": "#56a64b", "red": "#e02f44"}
_PAPER, _EDGE, _INK, _FAINT = "#f4f5f5", "#d8d9da", "#24292e", "#6e7780"
#: Legends: the width of the picture and the gap between names, in characters, and the maximum number of rows.
_CHARACTERS, _NAME_GAP, _LEGEND_ROWS = 290, 4, 3
_SCALE_WIDTH = 0.033
#: Steps of units: the smallest value of a step, its divisor and its suffix.
_UNITS: Mapping[str, Sequence[tuple[float, float, str]]] = {
    "s": ((86_400, 86_400, " d"), (3_600, 3_600, " h"), (60, 60, " min"), (1, 1, " s"), (0, 1e-3, " ms")),
    "bytes": ((2**30, 2**30, " GiB"), (2**20, 2**20, " MiB"), (2**10, 2**10, " KiB"), (0, 1, " B")),
    "Bps": ((1e9, 1e9, " GB/s"), (1e6, 1e6, " MB/s"), (1e3, 1e3, " kB/s"), (0, 1, " B/s")),
    "percentunit": ((0, 0.01, " %"),),
    "ops": ((0, 1, " ops/s"),),
    "reqps": ((0, 1, " req/s"),),
    "short": ((1e6, 1e6, " Mil"), (1e3, 1e3, " K"), (0, 1, "")),
    "none": ((0, 1, ""),),
}


@dataclass(frozen=True)
class Series:
    """One line: its name, and its values by time in seconds since 1970."""

    name: str
    values: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Window:
    """The time range of the dashboard and the scrape interval of Prometheus, in seconds."""

    begin: float
    end: float
    scrape: float
    points: int = 200

    @property
    def step(self) -> float:
        """The time between two points, in seconds."""
        return max(1.0, (self.end - self.begin) / self.points)

    def expand(self, expression: str) -> str:
        """Return an expression with Grafana's variables replaced, for all lakehouses."""
        rate = max(self.step + self.scrape, 4 * self.scrape)
        return expression.replace("$__rate_interval", f"{math.ceil(rate)}s").replace("$lakehouse", ".*")


def _free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(folder: Path, target: str, scrape_s: int) -> Iterator[str]:
    """Run a Prometheus that scrapes a server, and yield its URL."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("prometheus is not installed")
    job = {"job_name": "trinitylake", "scrape_interval": f"{scrape_s}s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
    url = f"127.0.0.1:{_free_port()}"
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [program, *arguments, f"--web.listen-address={url}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait()


def query_series(url: str, window: Window, target: Mapping[str, Any]) -> list[Series]:
    """Query Prometheus for the series of a panel."""
    times = {"start": window.begin, "end": window.end, "step": window.step}
    query = urllib.parse.urlencode({"query": window.expand(target["expr"]), **times})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as response:
        results = json.load(response)["data"]["result"]
    series = []
    for result in results:
        values = [(float(time_s), float(value)) for time_s, value in result["values"]]
        series.append(Series(legend(target["legendFormat"], result["metric"]), values))
    return sorted(series, key=lambda item: item.name)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series from a template such as ``{{lakehouse}} {{what}}``, or Grafana's default."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template).strip() or "Value"


def format_value(value: float, unit: str) -> str:
    """Return a value with three digits and its unit."""
    if math.isinf(value) or math.isnan(value):
        return "∞" if value > 0 else "-"
    steps = _UNITS[unit]
    _, divisor, suffix = next(step for step in steps if abs(value) >= step[0] or step is steps[-1])
    number = value / divisor
    return f"{number:.0f}{suffix}" if abs(number) >= 100 else f"{number:.3g}{suffix}"


def draw(
    dashboard: Mapping[str, Any],
    query: Callable[[Mapping[str, Any]], list[Series]],
    window: Window,
    note: str,
    path: Path,
) -> int:
    """Draw all panels into a PNG file.

    Args:
        dashboard: The JSON of the dashboard.
        query: Runs the query of a target and returns its series.
        window: The time range.
        note: A text in the upper right corner.
        path: The PNG file.

    Returns:
        The number of panels with data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    size = (_COLUMNS * _UNIT_PIXELS[0] / _DPI, (rows + _HEAD_UNITS) * _UNIT_PIXELS[1] / _DPI)
    figure = Figure(figsize=size, dpi=_DPI, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    total = rows + _HEAD_UNITS
    figure.text(0.006, 1 - 0.45 / total, dashboard["title"], fontsize=15, color=_INK, va="center", weight="bold")
    figure.text(0.994, 1 - 0.45 / total, note, fontsize=9, color=_FAINT, va="center", ha="right")
    n_with_data = 0
    for panel in dashboard["panels"]:
        position = panel["gridPos"]
        left, top = position["x"] / _COLUMNS, 1 - (_HEAD_UNITS + position["y"]) / total
        if panel["type"] == "row":
            figure.text(0.006, top - 0.5 / total, panel["title"], fontsize=11, color=_INK, va="center", weight="bold")
            continue
        width, height = position["w"] / _COLUMNS, position["h"] / total
        axes = _frame(figure, panel["title"], (left, top - height, width, height), total)
        panel_series = [series for target in panel["targets"] for series in query(target)]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if not panel_series:
            axes.axis("off")
            axes.text(0.5, 0.5, "No data", ha="center", va="center", color=_FAINT, transform=axes.transAxes)
        elif panel["type"] == "stat":
            _stat(axes, panel_series, unit, panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
        else:
            stacking = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"]
            _lines(axes, panel_series, unit, window, is_stacked=stacking != "none")
        n_with_data += bool(panel_series)
    figure.savefig(path)
    return n_with_data


def _frame(figure: Figure, title: str, box: tuple[float, float, float, float], total: float) -> Axes:
    """Draw the frame and the title of a panel, and return the axes in it."""
    from matplotlib.patches import FancyBboxPatch

    left, bottom, width, height = box
    gap = (_GAP_UNITS * _UNIT_PIXELS[1] / _UNIT_PIXELS[0] / _COLUMNS, _GAP_UNITS / total)
    corner = (left + gap[0], bottom + gap[1])
    style: dict[str, Any] = {"boxstyle": "square,pad=0", "facecolor": "white", "edgecolor": _EDGE}
    style["transform"] = figure.transFigure
    figure.add_artist(FancyBboxPatch(corner, width - 2 * gap[0], height - 2 * gap[1], zorder=-1, **style))
    figure.text(left + 3 * gap[0], bottom + height - 0.65 / total, title, fontsize=9, color=_INK, va="center")
    inner = (left + 3 * gap[0], bottom + 0.35 / total, width - 6 * gap[0], height - 1.5 / total)
    return figure.add_axes(inner)


def _stat(axes: Axes, panel_series: Sequence[Series], unit: str, steps: Sequence[Mapping[str, Any]]) -> None:
    """Draw the last value in the color of its threshold, above a line of all values."""
    series = panel_series[0]
    last = series.values[-1][1]
    exceeded = [step["color"] for step in steps if step["value"] is None or last >= step["value"]]
    color = _NAMED_COLORS[exceeded[-1]]
    values = [value if math.isfinite(value) else 0.0 for _, value in series.values]
    axes.axis("off")
    axes.fill_between(range(len(values)), values, color=color, alpha=0.15, linewidth=0)
    axes.plot(values, color=color, linewidth=1)
    axes.set_ylim(0, max([*values, 1e-9]) * 3)
    axes.margins(x=0)
    axes.text(
        0.5,
        0.62,
        format_value(last, unit),
        fontsize=24,
        color=color,
        transform=axes.transAxes,
        ha="center",
        va="center",
    )


def _lines(axes: Axes, panel_series: Sequence[Series], unit: str, window: Window, *, is_stacked: bool) -> None:
    """Draw lines over time with a legend below."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    times_s = sorted({time_s for series in panel_series for time_s, _ in series.values})
    times = [datetime.fromtimestamp(time_s, UTC) for time_s in times_s]
    floor = [0.0] * len(times_s)
    for number, series in enumerate(panel_series):
        values = {time_s: value for time_s, value in series.values if math.isfinite(value)}
        color = _COLORS[number % len(_COLORS)]
        if is_stacked:
            top = [below + values.get(time_s, 0.0) for below, time_s in zip(floor, times_s, strict=True)]
            axes.fill_between(times, floor, top, color=color, alpha=0.35, linewidth=0)
            axes.plot(times, top, color=color, linewidth=1, label=series.name)
            floor = top
        else:
            line = [values.get(time_s, math.nan) for time_s in times_s]
            axes.plot(times, line, color=color, linewidth=1, label=series.name)
    is_all_zero = not any(value for series in panel_series for _, value in series.values)
    axes.set_ylim(bottom=0, top=1 if is_all_zero else None)
    axes.set_xlim(datetime.fromtimestamp(window.begin, UTC), datetime.fromtimestamp(window.end, UTC))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, unit)))
    locator = AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.tick_params(labelsize=7, colors=_FAINT, length=0)
    axes.grid(color="#ececed", linewidth=0.7)
    for side in axes.spines.values():
        side.set_visible(False)
    _legend(axes, width=int(_CHARACTERS * axes.get_position().width))


def _legend(axes: Axes, width: int) -> None:
    """Draw a legend below the axes, with a width in characters, and shrink the axes accordingly."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names))
    n_columns = max(1, min(len(names), width // (longest + _NAME_GAP)))
    n_shown = n_columns * _LEGEND_ROWS
    if len(names) > n_shown:
        names = [*names[: n_shown - 1], f"and {len(names) - n_shown + 1} more"]
    names = [name if len(name) <= width - _NAME_GAP else f"{name[: width - _NAME_GAP]}…" for name in names]
    axes.legend(
        handles[: len(names)], names, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=n_columns, fontsize=6.5,
        frameon=False, borderaxespad=0, columnspacing=1, handlelength=1, labelcolor=_INK,
    )  # fmt: skip
    box = axes.get_position()
    legend_height = (0.45 + 0.38 * math.ceil(len(names) / n_columns)) * _UNIT_PIXELS[1] / axes.figure.bbox.height
    axes.set_position(
        (box.x0 + _SCALE_WIDTH, box.y0 + legend_height, box.width - _SCALE_WIDTH, box.height - legend_height)
    )
