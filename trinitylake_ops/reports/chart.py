"""Charts of versions, and the formatting of values.

This module computes positions and produces no markup. The axis shows evenly spaced versions instead of time, because
commits come in bursts; times are shown as labels below the axis. With more than MAX_BARS versions, each bar represents
a round number of versions, and its height is divided among their states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from rich.filesize import decimal

from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.rendering import visible
from trinitylake_ops.reports.timeline import Timeline, TimelineVersion, VersionState
from trinitylake_ops.versions.snapshot import utc_datetime, utc_of

_MAX_RANGES = 8


def utc(time_ms: int) -> str:
    """Format a time in UTC."""
    return f"{utc_of(time_ms):%Y-%m-%d %H:%M:%S} UTC"


def size(size_bytes: int) -> str:
    """Format a size with its unit."""
    return str(decimal(size_bytes))


def counted(number: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: 1 version, 2 versions.

    Args:
        number: The number.
        one: The singular of the noun.
        many: The plural, or None to append an s to the singular.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def truncate(text: str, max_chars: int) -> str:
    """Return untrusted text as one truncated line with escaped control characters.

    Args:
        text: The text.
        max_chars: The maximum length.
    """
    escaped = visible(text[:max_chars])
    return escaped if len(escaped) <= max_chars and len(text) <= max_chars else escaped[: max_chars - 1] + "…"


def listed(parts: Sequence[str]) -> str:
    """Join parts as a list in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def ago(duration_ms: int) -> str:
    """Format how long ago a time was, in a single unit."""
    seconds = duration_ms // 1000
    for name, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{counted(seconds // length, name)} ago"
    return "just now" if seconds < 60 else "1 minute ago"


def ranges(versions: Iterable[int]) -> str:
    """Format versions as ranges, newest first. Only the first ranges are listed."""
    ranges = VersionRanges.of(versions).ranges
    texts = [f"{first:,}" if first == last else f"{first:,}–{last:,}" for first, last in reversed(ranges)]
    more = len(texts) - _MAX_RANGES
    return ", ".join(texts[:_MAX_RANGES]) + (f" and {counted(more, 'range')} more" if more > 0 else "")


def span(versions: range) -> str:
    """Format consecutive versions: version 3, versions 3 to 5."""
    return f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]:,} to {versions[-1]:,}"


WIDTH = 1120.0
MAX_BARS = 160
_MAX_BAR_WIDTH = 124.0
_BAR_HEIGHT = 46.0
_MIN_HEIGHT = 3.0
_BYTES_HEIGHT = 84.0
_FLAG_ROW = 19.0
_MAX_FLAG_ROWS = 3
_MAX_FLAGS = 40
_MAX_ARCS = 8
_ARC_HEIGHT = 34.0
_CHAR_WIDTH = 6.7
#: For each period from year to second: the length of the prefix of 2026-01-31T12:30:45 that identifies it, and the part
#: of the timestamp that is the label at the start of such a period.
_PERIODS = ((4, slice(10)), (7, slice(10)), (10, slice(10)), (13, slice(5, 16)), (16, slice(5, 16)), (19, slice(5, 19)))


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a bar for one state."""

    state: VersionState
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar for one version or several consecutive versions, which ``title`` describes."""

    x: float
    width: float
    title: str
    segments: tuple[Segment, ...]
    bytes_height: float = 0.0
    bytes_title: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on the axis."""

    x: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True, slots=True)
class Flag:
    """An export at its version. ``text_y`` is None if there is no space for its name."""

    x: float
    text_x: float
    text_y: float | None
    anchor: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Arc:
    """A rollback, from its version to the restored version. The arc is short if the restored version is unknown."""

    from_x: float
    to_x: float
    title: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A small mark below a bar."""

    kind: str
    x: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The chart. All ``*_y`` are top edges, measured downwards."""

    width: float
    height: float
    axis_width: float
    arcs_y: float
    bars_y: float
    bar_height: float
    marks_y: float
    axis_y: float
    bytes_y: float | None
    bytes_height: float
    max_bytes: str
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
    """Draw a timeline.

    Args:
        timeline: The versions.
        bytes_by_version: The bytes that each version wrote and that a plan reclaims, drawn as bars below the versions.
        findings_by_version: The number of findings of each version.
    """
    axis = _Axis(timeline)
    flags, rows, unflagged = _flags(timeline, axis)
    arcs, omitted_arcs = _arcs(timeline, axis)
    arcs_y = rows * _FLAG_ROW + 6
    bars_y = arcs_y + (_ARC_HEIGHT + 6 if arcs else 0)
    marks = _marks(timeline, axis, findings_by_version or {})
    marks_y = bars_y + _BAR_HEIGHT + 11
    axis_y = bars_y + _BAR_HEIGHT + (16 if marks else 0)
    bytes_y = axis_y + 66 if bytes_by_version else None
    bars, max_bytes = _bars(timeline, axis, bars_y, bytes_by_version or {})
    left_out = (
        (unflagged, "more export is not shown", "more exports are not shown"),
        (omitted_arcs, "older rollback is not shown", "older rollbacks are not shown"),
    )
    return Chart(
        width=WIDTH,
        height=(axis_y + 44) if bytes_y is None else bytes_y + _BYTES_HEIGHT + 6,
        axis_width=axis.width,
        arcs_y=arcs_y,
        bars_y=bars_y,
        bar_height=_BAR_HEIGHT,
        marks_y=marks_y,
        axis_y=axis_y,
        bytes_y=bytes_y,
        bytes_height=_BYTES_HEIGHT,
        max_bytes=size(max_bytes),
        versions_per_bar=axis.per_bar,
        bars=bars,
        version_ticks=_version_ticks(axis),
        time_ticks=_time_ticks(timeline, axis),
        flags=flags,
        arcs=arcs,
        marks=marks,
        left_out=tuple(counted(number, one, many) for number, one, many in left_out if number),
    )


class _Axis:
    """The positions of versions."""

    def __init__(self, timeline: Timeline):
        self.first = timeline.first
        self.last = timeline.latest.number
        self.per_bar = _round_up((self.last - self.first + 1) / MAX_BARS)
        self.n_bars = (self.last - self.first) // self.per_bar + 1
        self.bar_width = min(_MAX_BAR_WIDTH, WIDTH / self.n_bars)
        self.width = self.n_bars * self.bar_width

    def bar_of(self, version: int) -> int:
        return (version - self.first) // self.per_bar

    def middle(self, version: int) -> float:
        """Return the middle of the bar that contains a version."""
        return (self.bar_of(version) + 0.5) * self.bar_width

    def versions(self, bar: int) -> range:
        start = self.first + bar * self.per_bar
        return range(start, min(start + self.per_bar, self.last + 1))


def _round_up(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``least``."""
    return int(next(step for power in count() for step in (10**power, 2 * 10**power, 5 * 10**power) if step >= least))


def _bars(
    timeline: Timeline, axis: _Axis, top: float, bytes_by_version: Mapping[int, int]
) -> tuple[tuple[Bar, ...], int]:
    bytes_by_bar: Counter[int] = Counter()
    for version, size_bytes in bytes_by_version.items():
        bytes_by_bar[min(max(axis.bar_of(version), 0), axis.n_bars - 1)] += size_bytes
    max_bytes = max(bytes_by_bar.values(), default=0)
    gap = min(2.0, axis.bar_width * 0.14)
    bars = []
    for number in range(axis.n_bars):
        numbers = axis.versions(number)
        versions = timeline.versions[numbers.start - axis.first : numbers.stop - axis.first]
        size_bytes = bytes_by_bar[number]
        bars.append(
            Bar(
                x=number * axis.bar_width + gap / 2,
                width=axis.bar_width - gap,
                title=_bar_title(versions),
                segments=_segments(versions, top),
                bytes_height=max(1.5, _BYTES_HEIGHT * size_bytes / max_bytes) if size_bytes else 0.0,
                bytes_title=f"{span(numbers)}: {size(size_bytes)}",
            )
        )
    return tuple(bars), max_bytes


def _bar_title(versions: Sequence[TimelineVersion]) -> str:
    if len(versions) == 1:
        (version,) = versions
        time = "" if version.record.created_at_ms is None else f", {utc(version.record.created_at_ms)}"
        operation = f": {version.record.operation}" if version.record.operation else ""
        return f"version {version.number}{time}{operation}; {version.state}: {version.why}"
    counts = Counter(version.state for version in versions)
    state_counts = ", ".join(f"{counts[state]:,} {state}" for state in VersionState if counts[state])
    times = [version.record.created_at_ms for version in versions if version.record.created_at_ms is not None]
    period = f", {utc(times[0])} to {utc(times[-1])}" if times else ""
    return f"{span(range(versions[0].number, versions[-1].number + 1))}{period}: {state_counts}"


def _segments(versions: Sequence[TimelineVersion], top: float) -> tuple[Segment, ...]:
    """Divide a bar among the states of its versions, so that each state is visible."""
    counts = Counter(version.state for version in versions)
    room = _BAR_HEIGHT - _MIN_HEIGHT * len(counts)
    segments = []
    y = top
    for state in VersionState:
        if counts[state]:
            height = _MIN_HEIGHT + room * counts[state] / len(versions)
            segments.append(Segment(state, y, height))
            y += height
    return tuple(segments)


def _version_ticks(axis: _Axis) -> tuple[Tick, ...]:
    """Label the last version, the first version if there is space, and round numbers in between."""
    longest = len(f"{axis.last:,}") * _CHAR_WIDTH + 14
    step = _round_up(longest / axis.bar_width * axis.per_bar)
    first_x, last_x = axis.middle(axis.first), axis.middle(axis.last)
    ticks: list[Tick] = []
    for version in dict.fromkeys((axis.first, *range(-(-axis.first // step) * step, axis.last, step), axis.last)):
        x = axis.middle(version)
        is_free = last_x - x >= longest and (version == axis.first or x - first_x >= longest)
        if is_free or version == axis.last:
            half = len(f"{version:,}") * _CHAR_WIDTH / 2
            anchor, x = ("start", 0.0) if x < half else ("end", WIDTH) if x > WIDTH - half else ("middle", x)
            ticks.append(Tick(x, f"{version:,}", anchor))
    return tuple(ticks)


def _time_ticks(timeline: Timeline, axis: _Axis) -> tuple[Tick, ...]:
    """Label the first version of each period, if there is space. The period is chosen to produce several labels."""
    times = [
        (version.number, utc_datetime(version.record.created_at_ms).isoformat())
        for version in timeline.versions
        if version.record.created_at_ms is not None
    ]
    labels: list[tuple[int, str]] = []
    for length, label_slice in _PERIODS:
        labels = [
            (version, time[label_slice])
            for (_, before), (version, time) in pairwise([(-1, ""), *times])
            if time[:length] != before[:length]
        ]
        if len(labels) >= min(4, len(times)):
            break
    return _space_ticks(axis, labels)


def _space_ticks(axis: _Axis, labels: Iterable[tuple[int, str]]) -> tuple[Tick, ...]:
    ticks: list[Tick] = []
    free_x = 0.0
    for version, text in labels:
        x = axis.bar_of(version) * axis.bar_width
        width = len(text) * _CHAR_WIDTH
        if x >= free_x and x + width <= WIDTH:
            ticks.append(Tick(x, text.replace("T", " "), "start"))
            free_x = x + width + 16
    return tuple(ticks)


def _flags(timeline: Timeline, axis: _Axis) -> tuple[tuple[Flag, ...], int, int]:
    """Return the newest exports, the number of rows for their names, and the number of exports that are not shown."""
    named = [(version.number, name) for version in timeline.versions for name in version.exports]
    free_x = [0.0] * _MAX_FLAG_ROWS
    flags: list[Flag] = []
    rows = min(1, len(named))
    for version, name in named[-_MAX_FLAGS:]:
        x = axis.middle(version)
        text = truncate(name, 28)
        width = len(text) * _CHAR_WIDTH + 14
        is_right = x + width <= WIDTH
        start = x if is_right else x - width
        row = next((row for row, free in enumerate(free_x, 1) if start >= free), None)
        if row is not None:
            free_x[row - 1] = start + width + 8
            rows = max(rows, row)
        flags.append(
            Flag(
                x=x,
                text_x=x + 7 if is_right else x - 7,
                text_y=None if row is None else row * _FLAG_ROW - 5,
                anchor="start" if is_right else "end",
                text=text,
                title=f"version {version} is exported as {truncate(name, 100)}",
            )
        )
    return tuple(flags), rows, len(named) - len(flags)


def _arcs(timeline: Timeline, axis: _Axis) -> tuple[tuple[Arc, ...], int]:
    """Return the newest rollbacks, and the number of rollbacks that are not shown."""
    rollbacks = [version for version in timeline.versions if version.record.rollback_from is not None]
    arcs = []
    for version in rollbacks[-_MAX_ARCS:]:
        to, from_x = version.record.rollback_to, axis.middle(version.number)
        to_x = from_x if to is None or timeline.at(to) is None else axis.middle(to)
        where = f"the content of version {to}" if to is not None else "an earlier version"
        title = f"version {version.number} rolled back from version {version.record.rollback_from} to {where}"
        arcs.append(Arc(from_x, to_x if to_x != from_x else max(0.0, from_x - 16), title))
    return tuple(arcs), len(rollbacks) - len(arcs)


def _marks(timeline: Timeline, axis: _Axis, findings: Mapping[int, int]) -> tuple[Dot, ...]:
    """Mark bars that contain findings, or versions that other programs wrote."""
    foreign = Counter(axis.bar_of(version.number) for version in timeline.versions if version.is_foreign)
    counts = Counter({version: number for version, number in findings.items() if timeline.at(version) is not None})
    with_findings = Counter(axis.bar_of(version) for version in counts.elements())
    marks = []
    for bar in sorted({*foreign, *with_findings}):
        middle = (bar + 0.5) * axis.bar_width
        aside = 5 if foreign[bar] and with_findings[bar] else 0
        where = span(axis.versions(bar))
        if foreign[bar]:
            title = f"{where}: {counted(foreign[bar], 'version')} written by another program"
            marks.append(Dot("foreign", middle - aside, title))
        if with_findings[bar]:
            marks.append(Dot("finding", middle + aside, f"{where}: {counted(with_findings[bar], 'finding')}"))
    return tuple(marks)
