"""The drawing of a timeline: where each mark goes, in units of the picture. Pure arithmetic, no text markup.

One axis, the versions, evenly spaced, since commits come in bursts: times are written below it. Beyond MOST_BARS
versions a bar stands for a round number of them, its height divided among their states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.pages.timeline import Timeline, TimelineVersion, VersionState
from trinitylake_ops.pages.wording import clipped, counted, size, utc
from trinitylake_ops.versions.snapshot import utc_datetime

WIDTH = 1120.0
MOST_BARS = 160
_WIDEST_BAR = 124.0
_BAR_HEIGHT = 46.0
_LEAST_HEIGHT = 3.0
_BYTES_HEIGHT = 84.0
_FLAG_ROW = 19.0
_MOST_FLAG_ROWS = 3
_MOST_FLAGS = 40
_MOST_ARCS = 8
_ARC_HEIGHT = 34.0
_CHAR_WIDTH = 6.7
_TIME_LEVELS: Sequence[tuple[str, Callable[[str], str]]] = (
    # How much of 2026-01-31T12:30:45 tells two periods apart, and what is written where one begins.
    ("year", lambda time: time[:4]),
    ("month", lambda time: time[:7]),
    ("day", lambda time: time[:10]),
    ("hour", lambda time: time[:13]),
    ("minute", lambda time: time[:16]),
    ("second", lambda time: time[:19]),
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: so much of one state."""

    state: VersionState
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One version, or as many as share a bar, inclusive; ``title`` says it in words."""

    x: float
    width: float
    title: str
    segments: tuple[Segment, ...]
    bytes_height: float = 0.0
    bytes_title: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis."""

    x: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True, slots=True)
class Flag:
    """An export at its version; ``text_y`` is None where there is no room for its name."""

    x: float
    text_x: float
    text_y: float | None
    anchor: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Arc:
    """A rollback: from its version to the one whose content came back; a point where nobody knows which."""

    path: str
    head: str
    title: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A small sign below a bar."""

    kind: str
    x: float
    title: str


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a state looks like, and how many versions have it."""

    x: float
    state: VersionState
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The drawing; all ``*_y`` are tops, downwards."""

    width: float
    height: float
    axis_width: float
    bars_y: float
    bar_height: float
    marks_y: float
    axis_y: float
    bytes_y: float | None
    bytes_height: float
    most_bytes: str
    versions_per_bar: int
    bars: tuple[Bar, ...]
    version_ticks: tuple[Tick, ...]
    time_ticks: tuple[Tick, ...]
    flags: tuple[Flag, ...]
    arcs: tuple[Arc, ...]
    marks: tuple[Dot, ...]
    left_out: tuple[str, ...]


def draw(
    timeline: Timeline,
    *,
    bytes_by_version: Mapping[int, int] | None = None,
    findings_by_version: Mapping[int, int] | None = None,
) -> Chart:
    """Draw a timeline; with the bytes that each version wrote and a plan frees, as bars below it."""
    axis = _Axis(timeline)
    flags, rows, unflagged = _flags(timeline, axis)
    arcs, undrawn = _arcs(timeline, axis)
    arcs_y = rows * _FLAG_ROW + 6
    bars_y = arcs_y + (_ARC_HEIGHT + 6 if arcs else 0)
    marks = _marks(timeline, axis, findings_by_version or {})
    marks_y = bars_y + _BAR_HEIGHT + 11
    axis_y = bars_y + _BAR_HEIGHT + (16 if marks else 0)
    bytes_y = axis_y + 66 if bytes_by_version else None
    bars, most_bytes = _bars(timeline, axis, bars_y, bytes_by_version or {})
    left_out = [counted(unflagged, "more export is not drawn", "more exports are not drawn")] if unflagged else []
    left_out += [counted(undrawn, "older rollback is not drawn", "older rollbacks are not drawn")] if undrawn else []
    return Chart(
        width=WIDTH,
        height=(axis_y + 44) if bytes_y is None else bytes_y + _BYTES_HEIGHT + 6,
        axis_width=axis.width,
        bars_y=bars_y,
        bar_height=_BAR_HEIGHT,
        marks_y=marks_y,
        axis_y=axis_y,
        bytes_y=bytes_y,
        bytes_height=_BYTES_HEIGHT,
        most_bytes=size(most_bytes),
        versions_per_bar=axis.per_bar,
        bars=bars,
        version_ticks=_version_ticks(axis),
        time_ticks=_time_ticks(timeline, axis),
        flags=flags,
        arcs=tuple(_arc_path(arc, arcs_y, bars_y) for arc in arcs),
        marks=marks,
        left_out=tuple(left_out),
    )


def legend(texts: Mapping[VersionState, str]) -> tuple[LegendEntry, ...]:
    """Place what is to be said of states side by side."""
    entries = []
    x = 0.0
    for state, text in texts.items():
        entries.append(LegendEntry(x, state, text))
        x += 28 + len(text) * _CHAR_WIDTH + 18
    return tuple(entries)


class _Axis:
    """Where versions stand."""

    def __init__(self, timeline: Timeline):
        self.first = timeline.first
        self.last = timeline.latest.number
        self.per_bar = _round_up((self.last - self.first + 1) / MOST_BARS)
        self.n_bars = (self.last - self.first) // self.per_bar + 1
        self.bar_width = min(_WIDEST_BAR, WIDTH / self.n_bars)
        self.width = self.n_bars * self.bar_width

    def bar_of(self, version: int) -> int:
        return (version - self.first) // self.per_bar

    def middle(self, version: int) -> float:
        """The middle of the bar in which a version is."""
        return (self.bar_of(version) + 0.5) * self.bar_width

    def versions(self, bar: int) -> range:
        start = self.first + bar * self.per_bar
        return range(start, min(start + self.per_bar, self.last + 1))


def _round_up(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is no less."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if factor * step >= least:
                return factor * step
        step *= 10


def _bars(
    timeline: Timeline, axis: _Axis, top: float, bytes_by_version: Mapping[int, int]
) -> tuple[tuple[Bar, ...], int]:
    bytes_by_bar: Counter[int] = Counter()
    for version, size_bytes in bytes_by_version.items():
        bytes_by_bar[min(max(axis.bar_of(version), 0), axis.n_bars - 1)] += size_bytes
    most_bytes = max(bytes_by_bar.values(), default=0)
    gap = min(2.0, axis.bar_width * 0.14)
    bars = []
    for number in range(axis.n_bars):
        span = axis.versions(number)
        versions = timeline.versions[span.start - axis.first : span.stop - axis.first]
        size_bytes = bytes_by_bar[number]
        bars.append(
            Bar(
                x=number * axis.bar_width + gap / 2,
                width=axis.bar_width - gap,
                title=_bar_title(versions),
                segments=_segments(versions, top),
                bytes_height=max(1.5, _BYTES_HEIGHT * size_bytes / most_bytes) if size_bytes else 0.0,
                bytes_title=f"{_span(span)}: {size(size_bytes)}",
            )
        )
    return tuple(bars), most_bytes


def _span(span: range) -> str:
    return f"version {span[0]}" if len(span) == 1 else f"versions {span[0]:,} to {span[-1]:,}"


def _bar_title(versions: Sequence[TimelineVersion]) -> str:
    if len(versions) == 1:
        (version,) = versions
        time = "" if version.record.created_at_ms is None else f", {utc(version.record.created_at_ms)}"
        what = f": {version.record.operation}" if version.record.operation else ""
        return f"version {version.number}{time}{what}; {version.state}: {version.why}"
    counts = Counter(version.state for version in versions)
    shown = ", ".join(f"{counts[state]:,} {state}" for state in VersionState if counts[state])
    times = [version.record.created_at_ms for version in versions if version.record.created_at_ms is not None]
    period = f", {utc(times[0])} to {utc(times[-1])}" if times else ""
    return f"versions {versions[0].number:,} to {versions[-1].number:,}{period}: {shown}"


def _segments(versions: Sequence[TimelineVersion], top: float) -> tuple[Segment, ...]:
    """Divide a bar among the states of its versions; of each a little is seen."""
    counts = Counter(version.state for version in versions)
    room = _BAR_HEIGHT - _LEAST_HEIGHT * len(counts)
    segments = []
    y = top
    for state in VersionState:
        if counts[state]:
            height = _LEAST_HEIGHT + room * counts[state] / len(versions)
            segments.append(Segment(state, y, height))
            y += height
    return tuple(segments)


def _version_ticks(axis: _Axis) -> tuple[Tick, ...]:
    longest = len(f"{axis.last:,}") * _CHAR_WIDTH + 14
    step = _round_up(longest / axis.bar_width * axis.per_bar)
    start = -(-axis.first // step) * step
    ticks = [axis.first, *range(start, axis.last + 1, step), axis.last]
    shown: list[Tick] = []
    last_x = axis.middle(axis.last)
    for version in dict.fromkeys(ticks):
        x = axis.middle(version)
        is_end = version in (axis.first, axis.last)
        if is_end or (x - axis.middle(axis.first) >= longest and last_x - x >= longest):
            half = len(f"{version:,}") * _CHAR_WIDTH / 2
            anchor, x = ("start", 0.0) if x < half else ("end", WIDTH) if x > WIDTH - half else ("middle", x)
            if not (version == axis.first and version != axis.last and last_x - x < longest):
                shown.append(Tick(x, f"{version:,}", anchor))
    return tuple(shown)


def _time_ticks(timeline: Timeline, axis: _Axis) -> tuple[Tick, ...]:
    """Label the first version of each period, as fine as there are some of them, as far as there is room."""
    dated = [version for version in timeline.versions if version.record.created_at_ms is not None]
    times = [utc_datetime(version.record.created_at_ms or 0).isoformat() for version in dated]
    if not dated:
        return ()
    for name, period in _TIME_LEVELS:
        begins = [at for at in range(len(dated)) if at == 0 or period(times[at]) != period(times[at - 1])]
        if len(begins) >= min(4, len(dated)) or name == "second":
            return _spaced(axis, [(dated[at].number, _time_label(name, times[at])) for at in begins])
    raise AssertionError


def _time_label(level: str, time: str) -> str:
    if level in ("year", "month", "day"):
        return time[:10]
    return f"{time[5:10]} {time[11:16]}" if level in ("hour", "minute") else f"{time[5:10]} {time[11:19]}"


def _spaced(axis: _Axis, labels: Iterable[tuple[int, str]]) -> tuple[Tick, ...]:
    shown: list[Tick] = []
    free_x = 0.0
    for version, text in labels:
        x = axis.bar_of(version) * axis.bar_width
        width = len(text) * _CHAR_WIDTH
        if x >= free_x and x + width <= WIDTH:
            shown.append(Tick(x, text, "start"))
            free_x = x + width + 16
    return tuple(shown)


def _flags(timeline: Timeline, axis: _Axis) -> tuple[tuple[Flag, ...], int, int]:
    """Return the exports, how many rows their names take, and how many are not drawn; the newest are."""
    named = [(version.number, name) for version in timeline.versions for name in version.exports]
    free_x = [0.0] * _MOST_FLAG_ROWS
    placed: list[tuple[float, float, int | None, str, str, str]] = []
    for version, name in named[-_MOST_FLAGS:]:
        x = axis.middle(version)
        text = clipped(name, 28)
        width = len(text) * _CHAR_WIDTH + 14
        start = x if x + width <= WIDTH else x - width
        row = next((row for row, free in enumerate(free_x) if start >= free), None)
        if row is not None:
            free_x[row] = start + width + 8
        anchor, text_x = ("start", x + 7) if start == x else ("end", x - 7)
        placed.append((x, text_x, row, anchor, text, f"version {version} is exported as {clipped(name, 100)}"))
    rows = max((row + 1 for _, _, row, *_ in placed if row is not None), default=1 if placed else 0)
    flags = [
        Flag(x, text_x, None if row is None else (row + 1) * _FLAG_ROW - 5, anchor, text, title)
        for x, text_x, row, anchor, text, title in placed
    ]
    return tuple(flags), rows, len(named) - len(placed)


def _arcs(timeline: Timeline, axis: _Axis) -> tuple[list[tuple[float, float, str]], int]:
    rollbacks = [version for version in timeline.versions if version.record.rollback_from is not None]
    arcs = []
    for version in rollbacks[-_MOST_ARCS:]:
        to, from_x = version.record.rollback_to, axis.middle(version.number)
        is_shown = to is not None and timeline.at(to) is not None
        where = f"the content of version {to}" if to is not None else "an earlier version"
        title = f"version {version.number} rolled back from version {version.record.rollback_from} to {where}"
        arcs.append((from_x, axis.middle(to) if is_shown and to is not None else from_x, title))
    return arcs, len(rollbacks) - len(arcs)


def _arc_path(arc: tuple[float, float, str], top: float, bottom: float) -> Arc:
    from_x, to_x, title = arc
    low, high = bottom - 3, top + 3
    if from_x == to_x:
        to_x = max(0.0, from_x - 16)
    path = f"M{from_x:.1f} {low:.1f}C{from_x:.1f} {high - 6:.1f} {to_x:.1f} {high - 6:.1f} {to_x:.1f} {low - 4:.1f}"
    head = f"M{to_x - 4.5:.1f} {low - 7:.1f}L{to_x + 4.5:.1f} {low - 7:.1f}L{to_x:.1f} {low + 1:.1f}Z"
    return Arc(path, head, title)


def _marks(timeline: Timeline, axis: _Axis, findings: Mapping[int, int]) -> tuple[Dot, ...]:
    """Mark bars with versions of other programs and with findings, once each."""
    foreign: Counter[int] = Counter(axis.bar_of(version.number) for version in timeline.versions if version.is_foreign)
    found: Counter[int] = Counter()
    for version, number in findings.items():
        if timeline.at(version) is not None:
            found[axis.bar_of(version)] += number
    marks = []
    for bar in sorted({*foreign, *found}):
        middle = (bar + 0.5) * axis.bar_width
        both = bool(foreign[bar] and found[bar])
        span = _span(axis.versions(bar))
        if foreign[bar]:
            title = f"{span}: {counted(foreign[bar], 'version')} written by another program"
            marks.append(Dot("foreign", middle - (5 if both else 0), title))
        if found[bar]:
            marks.append(Dot("finding", middle + (5 if both else 0), f"{span}: {counted(found[bar], 'finding')}"))
    return tuple(marks)
