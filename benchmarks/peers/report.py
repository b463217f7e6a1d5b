"""The results as Markdown and charts: each metric compared with ours at the same durability, in the same run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.peers.bounds import bounds
from benchmarks.peers.charts import draw_ratios, draw_s3
from benchmarks.peers.figures import METRICS, Figures, times
from benchmarks.peers.measure import (
    BY_CATALOG,
    BY_CATALOG_SYNCED,
    OURS,
    OURS_SYNCED,
    PEERS,
    S3_METRICS,
    SQLITE,
    SQLITE_SYNCED,
    Measured,
)
from benchmarks.peers.reasons import reason
from benchmarks.report import plot, table

_METHOD = (
    "One run of `python -m benchmarks.peers`. Each peer runs in a separate process, and the peers take turns in"
    " alternating order. A ratio is the peer's median divided by ours, in the same turns and at the same durability;"
    " for rates it is the inverse. Above 1 we are faster. Cold means that everything is opened from scratch, with a"
    " warm page cache."
)


def lines(measured: Measured, folder: Path) -> Iterator[str]:
    """Yield the lines of the report, and write its charts to a folder."""
    figures = Figures(measured)
    sizes = " and ".join(f"{size:,}" for size in measured.options.sizes)
    yield from ("# Comparison with peers", "", f"{_METHOD} Objects: {sizes}.", "", _versions(measured), "")
    yield from ("## What is compared", "", *_peers_table(measured), "")
    for size in measured.options.sizes:
        yield from (f"## Among {size:,} objects", "", *_metrics(figures, size), "")
    chart = plot(
        "peers",
        lambda axes: draw_ratios(axes, figures),
        len(measured.options.sizes),
        height=5.6,
        folder=folder,
    )
    yield from (chart, "")
    yield from ("## Old versions", "", *_old_versions(figures), "")
    yield from ("## Many writers", "", *_writers(figures), "")
    yield from ("## Through pyiceberg", "", *_by_pyiceberg(figures), "")
    if measured.s3_calls:
        yield from ("## On S3", "", *_on_s3(figures))
        yield from (plot("peers_s3", lambda axes: draw_s3(axes, figures), len(S3_METRICS), folder=folder), "")
    yield from ("## Requirements", "", *bounds(figures), "")
    yield from ("## Where peers are faster, and why", "", *_slower_metrics(figures), "")
    yield from ("## Not measured", "", *_not_measured(measured))


def _versions(measured: Measured) -> str:
    versions: dict[str, str] = {}
    for info in measured.peer_infos.values():
        versions.update(info.versions)
    packages = ", ".join(f"{package} {version}" for package, version in sorted(versions.items(), key=str))
    machine = f"{os.cpu_count()} cores, load {measured.load_average:.1f} at the start"
    return f"Versions: {packages}; Python {platform.python_version()}; {machine}."


def _peers_table(measured: Measured) -> list[str]:
    rows = [
        [peer, info.object_kind, info.commit_kind, info.durability, OURS_SYNCED if info.is_synced else OURS]
        for peer, info in measured.peer_infos.items()
        if peer in PEERS
    ]
    return _text_table(["peer", "object", "commit", "durability", "compared with"], rows)


def _text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose columns are aligned to the left."""
    return [line.replace("---:", "---") for line in table(columns, rows)]


def _metrics(figures: Figures, size: int) -> list[str]:
    rows = []
    for peer in figures.peers(size):
        cells = []
        for metric in METRICS:
            seconds, ratio = figures.seconds(metric, size, peer), figures.ratio(metric, size, peer)
            text = "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
            cells.append(text if ratio is None else f"**{times(ratio)}** ({text})")
        rows.append([peer, *cells])
    return table(["peer", *(METRICS[metric] for metric in METRICS)], rows)


def _old_versions(figures: Figures) -> list[str]:
    measured, size = figures.measured, figures.measured.first
    rows = []
    for peer, n_versions in measured.versions.items():
        opened = figures.seconds("old_version", size, peer)
        spent, files = figures.seconds("expire", size, peer), measured.files.get(peer)
        cells = [peer, f"{n_versions:,}", _cell(opened and 1000 * opened, figures.ratio("old_version", size, peer))]
        if spent is None or files is None:
            cells += ["-", "-", "-"]
        else:
            cells += [f"{files:,}", _cell(spent, figures.ratio("expire", size, peer), digits=2)]
            cells += [_cell(files / spent if files else None, figures.freed_ratio(peer), digits=0)]
        rows.append(cells)
    return [
        f"Commits of one object each among {size:,}. A version in the middle is opened from scratch, and an object is"
        " looked up in it. Then all versions except the latest are reclaimed, without retention periods (by a clock"
        " that is ahead, or by a retention of zero). Files count as reclaimed if they were deleted or, like our sealed"
        " roots, truncated.",
        "",
        *table(
            ["peer", "versions", "open an old version, ms", "files reclaimed", "seconds", "files reclaimed per second"],
            rows,
        ),
    ]


def _cell(value: float | None, ratio: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    text = f"{value:,.{digits}f}"
    return text if ratio is None else f"**{times(ratio)}** ({text})"


def _writers(figures: Figures) -> list[str]:
    options = figures.measured.options
    rows = []
    for peer in figures.peers(figures.measured.first):
        cells = []
        for kind in ("threads", "processes"):
            written = figures.measured.written.get((kind, peer))
            if written is None:
                cells += ["-", "-"]
            else:
                cells += [_cell(written.commits / written.seconds, figures.written_ratio(kind, peer), digits=0)]
                cells += [f"{written.conflicts / max(1, written.commits + written.conflicts):.0%}"]
        if cells != ["-"] * 4:
            rows.append([peer, *cells])
    return [
        f"Commits per second of {options.threads} threads of one process, and of {options.processes} processes, for"
        f" {options.writing_seconds:g} s, each changing separate objects. A commit that was rejected because of"
        " another writer's commit counts as a conflict.",
        "",
        *table(
            ["peer", f"{options.threads} threads", "conflicts", f"{options.processes} processes", "conflicts"], rows
        ),
    ]


def _by_pyiceberg(figures: Figures) -> list[str]:
    size = figures.measured.first
    rows = []
    for durability, ours, other in (
        ("synced", BY_CATALOG_SYNCED, SQLITE_SYNCED),
        ("not synced", BY_CATALOG, SQLITE),
    ):
        pair = [figures.seconds("commit", size, peer) for peer in (ours, other)]
        if pair[0] is not None and pair[1] is not None:
            rows.append(
                [durability, *(f"{1000 * seconds:.1f}" for seconds in pair if seconds), f"**{pair[1] / pair[0]:.2f}**"]
            )
    return [
        f"The same pyiceberg calls with both catalogs: load a table and set a property; {size:,} tables.",
        "",
        *table(["durability", "our catalog, ms", "pyiceberg + SQLite, ms", "ratio"], rows),
    ]


def _on_s3(figures: Figures) -> Iterator[str]:
    options = figures.measured.options
    yield (
        f"One process and {options.s3_objects:,} objects on a radosgw; a proxy delays each request by"
        f" {1000 * REQUEST_SECONDS:.0f} ms. A writer changes objects that it has changed before; the first change of a"
        " table by a process costs us one more round trip. A cold read opens everything from scratch, except for"
        " connections that a client keeps in its process, as ours does. Requests and round trips are counted from the"
        " proxy's log: round trips are the longest chain of requests in which each arrived after the response to the"
        " previous one, until the call returned. Background requests came later. Cells contain the median, and the"
        " maximum in parentheses if it differs. Ratios are relative to the faster of our clients."
    )
    for metric, description in S3_METRICS.items():
        rows = []
        for peer, calls in figures.on_s3(metric).items():
            milliseconds = 1000 * median(call.seconds for call in calls)
            counts = (
                _median_and_max([getattr(call, field) for call in calls])
                for field in ("requests", "rounds", "background")
            )
            rows.append([peer, _cell(milliseconds, figures.s3_ratio(metric, peer), digits=0), *counts])
        yield from ("", *table([description, "ms", "requests", "round trips", "background"], rows))
    yield ""


def _median_and_max(values: Sequence[int]) -> str:
    return f"{median(values):g}" + (f" ({max(values)})" if max(values) != median(values) else "")


def _slower_metrics(figures: Figures) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for metric, description, peer, ratio in figures.all_ratios():
        if ratio < 1:
            by_reason.setdefault((description, reason(metric, peer)), []).append(f"{peer} {times(ratio)}")
    if not by_reason:
        return ["None in this run."]
    rows = [[description, "; ".join(peers), reason_text] for (description, reason_text), peers in by_reason.items()]
    return _text_table(["metric", "peer and ratio", "reason"], rows)


def _not_measured(measured: Measured) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (metric, size, peer), skip_reason in measured.skip_reasons.items():
        at = f" at {size:,}" if skip_reason.startswith(("failed", "measured with")) else ""
        by_reason.setdefault((peer, skip_reason), []).append(f"{_METRIC_NAMES.get(metric, metric)}{at}")
    if not by_reason:
        return ["Everything was measured."]
    rows = [[peer, ", ".join(dict.fromkeys(names)), skip_reason] for (peer, skip_reason), names in by_reason.items()]
    return _text_table(["peer", "metric", "reason"], rows)


_METRIC_NAMES: Mapping[str, str] = {
    **METRICS,
    "load": "bulk load",
    "old_version": "opening an old version",
    "expire": "reclaiming versions",
    "threads": "many threads",
    "processes": "many processes",
    "s3": "S3",
}
