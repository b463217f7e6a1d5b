"""The chart of versions: each version is shown once, and labels do not overlap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.reports import chart as charts
from trinitylake_ops.reports.chart import MAX_BARS, WIDTH, ago, draw, ranges, truncate
from trinitylake_ops.reports.timeline import VersionState, timeline


@given(
    first=st.integers(0, 2**32 - 5_000),
    states=st.lists(st.booleans(), min_size=1, max_size=2_000),
    spacing_ms=st.sampled_from([0, 1, 1_000, 60_000, 3_600_000, 86_400_000, 40 * 86_400_000]),
)
def test_chart_shows_every_version_once_without_overlapping_labels(
    first: int, states: list[bool], spacing_ms: int
) -> None:
    records = [
        VersionRecord(
            version=first + index, created_at_ms=index * spacing_ms, commit_id=str(index), is_sealed=is_sealed
        )
        for index, is_sealed in enumerate(states)
    ]
    versions = timeline(records, None)
    chart = draw(versions, bytes_by_version={first: 7, first + len(states) - 1: 3})
    assert len(chart.bars) <= MAX_BARS
    assert (len(chart.bars) - 1) * chart.versions_per_bar < len(states) <= len(chart.bars) * chart.versions_per_bar
    for bar, following in itertools.pairwise(chart.bars):
        assert bar.x + bar.width <= following.x + 1e-6
    assert chart.bars[0].x >= 0
    assert chart.bars[-1].x + chart.bars[-1].width <= WIDTH + 1e-6
    for bar in chart.bars:
        assert sum(segment.height for segment in bar.segments) == pytest.approx(chart.bar_height)
    assert sum(bar.bytes_height > 0 for bar in chart.bars) == len({0, (len(states) - 1) // chart.versions_per_bar})
    for ticks in (chart.version_ticks, chart.time_ticks):
        assert ticks
        boxes = sorted(map(_box, ticks))
        assert all(right <= left for (_, right), (left, _) in itertools.pairwise(boxes)), ticks
    assert chart.version_ticks[-1].text == f"{first + len(states) - 1:,}"


def _box(tick: charts.Tick) -> tuple[float, float]:
    width = len(tick.text) * 6.0
    start = {"start": 0.0, "middle": -width / 2, "end": -width}[tick.anchor]
    return tick.x + start, tick.x + start + width


def test_every_state_is_visible_in_bars_of_many_versions() -> None:
    records = [
        VersionRecord(version=index, created_at_ms=index, commit_id=str(index), is_readable=index != 19_000)
        for index in range(20_000)
    ]
    chart = draw(timeline(records, None), findings_by_version={19_000: 3})
    heights = {segment.state: segment.height for bar in chart.bars for segment in bar.segments}
    assert heights.keys() == {VersionState.KEPT, VersionState.LATEST, VersionState.UNREADABLE}
    assert min(heights.values()) >= 3
    (mark,) = chart.marks
    assert mark.title == "versions 19,000 to 19,199: 3 findings"


def test_ranges_ages_and_labels_are_formatted() -> None:
    assert ranges([5, 4, 3, 9]) == "9, 3–5"
    assert ranges(range(0, 40, 2)) == "38, 36, 34, 32, 30, 28, 26, 24 and 12 ranges more"
    assert [ago(seconds * 1000) for seconds in (0, 59, 60, 119, 120, 7_200, 172_800)] == [
        *("just now", "just now", "1 minute ago", "1 minute ago"),
        *("2 minutes ago", "2 hours ago", "2 days ago"),
    ]
    assert truncate("abc", 3) == "abc"
    assert truncate("abcd", 3) == "ab…"
    assert truncate("\u202e", 3) == "\\u…"
