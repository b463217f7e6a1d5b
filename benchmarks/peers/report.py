"""The results as Markdown and pictures: each figure beside ours at the same durability, in the same run."""

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

_HOW = (
    "One run of `python -m benchmarks.peers`. Each peer runs in a process of its own, and they take turns, in one order"
    " and backwards. A ratio is the peer's median by ours of the same turns and at the same durability: above 1 we are"
    " faster. Ratios of rates are the other way round, so that above 1 we are faster there, too. Cold means that"
    " everything is opened anew; the page cache is warm."
)


def lines(measured: Measured, folder: Path) -> Iterator[str]:
    """Yield the lines; pictures go to the folder."""
    figures = Figures(measured)
    sizes = " and ".join(f"{size:,}" for size in measured.options.sizes)
    yield from ("# Beside its peers", "", f"{_HOW} Objects: {sizes}.", "", _versions(measured), "")
    yield from ("## What is compared", "", *_compared(measured), "")
    for size in measured.options.sizes:
        yield from (f"## Among {size:,} objects", "", *_metrics(figures, size), "")
    picture = plot(
        "peers",
        lambda axes: draw_ratios(axes, figures),
        len(measured.options.sizes),
        height=5.6,
        folder=folder,
    )
    yield from (picture, "")
    yield from ("## Old versions", "", *_old_versions(figures), "")
    yield from ("## Many writers", "", *_writers(figures), "")
    yield from ("## By pyiceberg's interface", "", *_by_pyiceberg(figures), "")
    if measured.asked:
        yield from ("## On S3", "", *_on_s3(figures))
        yield from (plot("peers_s3", lambda axes: draw_s3(axes, figures), len(S3_METRICS), folder=folder), "")
    yield from ("## What has to hold", "", *bounds(figures), "")
    yield from ("## What we lose, and why", "", *_lost(figures), "")
    yield from ("## What is not measured", "", *_not_measured(measured))


def _versions(measured: Measured) -> str:
    found: dict[str, str] = {}
    for about in measured.abouts.values():
        found.update(about.versions)
    listed = ", ".join(f"{package} {version}" for package, version in sorted(found.items(), key=str))
    machine = f"{os.cpu_count()} cores, a load of {measured.load_average:.1f} when it began"
    return f"Versions: {listed}; Python {platform.python_version()}; {machine}."


def _compared(measured: Measured) -> list[str]:
    rows = [
        [peer, about.object_kind, about.commit_kind, about.durability, OURS_SYNCED if about.is_synced else OURS]
        for peer, about in measured.abouts.items()
        if peer in PEERS
    ]
    listed = table(["peer", "an object is a", "a commit", "durability", "beside"], rows)
    return [line.replace("---:", "---") for line in listed]


def _metrics(figures: Figures, size: int) -> list[str]:
    rows = []
    for peer in figures.peers(size):
        cells = []
        for metric in METRICS:
            seconds, ratio = figures.seconds(metric, size, peer), figures.ratio(metric, size, peer)
            shown = "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
            cells.append(shown if ratio is None else f"**{times(ratio)}** ({shown})")
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
        f"Commits of one object each among {size:,}. A version in the middle is opened anew and an object looked up in"
        " it. Then all versions but the latest are freed: the waits that an operator keeps are left out by a clock that"
        " is ahead, or by a retention of nothing. Freed is a file that is gone, or smaller than it was, as our sealed"
        " roots are.",
        "",
        *table(["peer", "versions", "open an old one, ms", "files freed", "seconds", "files freed a second"], rows),
    ]


def _cell(value: float | None, ratio: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    shown = f"{value:,.{digits}f}"
    return shown if ratio is None else f"**{times(ratio)}** ({shown})"


def _writers(figures: Figures) -> list[str]:
    options = figures.measured.options
    rows = []
    for peer in figures.peers(figures.measured.first):
        cells = []
        for how in ("threads", "processes"):
            found = figures.measured.written.get((how, peer))
            if found is None:
                cells += ["-", "-"]
            else:
                cells += [_cell(found.commits / found.seconds, figures.written_ratio(how, peer), digits=0)]
                cells += [f"{found.conflicts / max(1, found.commits + found.conflicts):.0%}"]
        if cells != ["-"] * 4:
            rows.append([peer, *cells])
    return [
        f"Commits a second of {options.threads} threads of one process, and of {options.processes} processes, for"
        f" {options.writing_seconds:g} s, each changing objects of its own. What met another writer's commit and was"
        " refused counts as a conflict.",
        "",
        *table(
            ["peer", f"{options.threads} threads", "conflicts", f"{options.processes} processes", "conflicts"], rows
        ),
    ]


def _by_pyiceberg(figures: Figures) -> list[str]:
    size = figures.measured.first
    rows = []
    for what, ours, other in (
        ("synced", BY_CATALOG_SYNCED, SQLITE_SYNCED),
        ("not synced", BY_CATALOG, SQLITE),
    ):
        pair = [figures.seconds("commit", size, peer) for peer in (ours, other)]
        if pair[0] is not None and pair[1] is not None:
            rows.append([what, *(f"{1000 * one:.1f}" for one in pair if one), f"**{pair[1] / pair[0]:.2f}**"])
    return [
        f"The same call of pyiceberg on both catalogs: it loads a table and sets a property; {size:,} tables.",
        "",
        *table(["durability", "our catalog, ms", "pyiceberg + SQLite, ms", "ratio"], rows),
    ]


def _on_s3(figures: Figures) -> Iterator[str]:
    options = figures.measured.options
    yield (
        f"One process among {options.s3_objects:,} objects on a radosgw, {1000 * REQUEST_SECONDS:.0f} ms added to each"
        " request by a proxy. A writer changes objects that it has changed before: the first change of a table by a"
        " process costs us one round more. A cold read opens everything anew, but for the connections that a client"
        " keeps in its process, as ours does. Requests and rounds are"
        " counted from the proxy's log alone: rounds are the longest chain of requests in which each arrived after the"
        " one before was answered, until the call returned. Beside is what came after. Median, and most in brackets"
        " where it differs. The ratio is beside the faster of our clients."
    )
    for metric, words in S3_METRICS.items():
        rows = []
        for peer, calls in figures.on_s3(metric).items():
            milliseconds = 1000 * median(one.seconds for one in calls)
            counts = (
                _middle_and_most([getattr(one, what) for one in calls]) for what in ("requests", "rounds", "beside")
            )
            rows.append([peer, _cell(milliseconds, figures.s3_ratio(metric, peer), digits=0), *counts])
        yield from ("", *table([words, "ms", "requests", "rounds", "beside"], rows))
    yield ""


def _middle_and_most(values: Sequence[int]) -> str:
    return f"{median(values):g}" + (f" ({max(values)})" if max(values) != median(values) else "")


def _lost(figures: Figures) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for metric, what, peer, ratio in figures.all_ratios():
        if ratio < 1:
            by_reason.setdefault((what, reason(metric, peer)), []).append(f"{peer} {times(ratio)}")
    if not by_reason:
        return ["Nothing in this run."]
    rows = [[what, "; ".join(peers), why] for (what, why), peers in by_reason.items()]
    return [line.replace("---:", "---") for line in table(["what", "beside, and the ratio", "why"], rows)]


def _not_measured(measured: Measured) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (metric, size, peer), why in measured.why_not.items():
        at = f" at {size:,}" if why.startswith(("failed", "measured with")) else ""
        by_reason.setdefault((peer, why), []).append(f"{_NAMES.get(metric, metric)}{at}")
    if not by_reason:
        return ["Nothing was left out."]
    rows = [[peer, ", ".join(dict.fromkeys(what)), why] for (peer, why), what in by_reason.items()]
    return [line.replace("---:", "---") for line in table(["peer", "what", "why"], rows)]


_NAMES: Mapping[str, str] = {
    **METRICS,
    "load": "bulk load",
    "old_version": "opening an old version",
    "expire": "freeing versions",
    "threads": "many threads",
    "processes": "many processes",
    "s3": "S3",
}
