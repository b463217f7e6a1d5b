"""Render reports as HTML, and write them to files atomically."""

from __future__ import annotations

import functools
import os
import stat
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinitylake_ops.errors import StorageError
from trinitylake_ops.operations.rendering import visible
from trinitylake_ops.reports.chart import Chart
from trinitylake_ops.reports.content import Heading, Metric, Page
from trinitylake_ops.reports.timeline import VersionState


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trinitylake_ops.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = _pixels
    return environment


def _shown(value: object) -> object:
    """Escape control characters in text, because other programs may have written it."""
    return visible(value) if type(value) is str else value


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def render_page(page: Page) -> str:
    """Render a report as one self-contained HTML document."""
    return _environment().get_template("page.html.jinja").render(page=page, heading=page.heading, chart=page.chart)


def render_comparison(heading: Heading, figures: Sequence[Metric], sections: Sequence[object]) -> str:
    """Render a comparison report as one self-contained HTML document.

    Args:
        heading: The heading.
        figures: The metrics.
        sections: The sections, as ``ComparedSection`` of ``reports/versions.py``.
    """
    template = _environment().get_template("comparison.html.jinja")
    return template.render(heading=heading, figures=figures, sections=sections)


def render_status(sections: Sequence[object], silent: Sequence[str], refresh_seconds: int) -> str:
    """Render the status report of lakehouses as one self-contained HTML document.

    Args:
        sections: The lakehouses, as ``Section`` of ``reports/status.py``.
        silent: The names of lakehouses that do not respond.
        refresh_seconds: The refresh interval of the browser; 0 disables refreshing.
    """
    template = _environment().get_template("status.html.jinja")
    return template.render(sections=sections, silent=silent, refresh_seconds=refresh_seconds)


def render_space(heading: Heading, figures: Sequence[Metric], tables: Sequence[object], treemap: object) -> str:
    """Render the report of space as one self-contained HTML document.

    Args:
        heading: The heading.
        figures: The metrics.
        tables: The tables, as ``SpaceTable`` of ``reports/space.py``.
        treemap: The treemap, as ``Treemap`` of ``reports/treemap.py``.
    """
    template = _environment().get_template("space.html.jinja")
    return template.render(heading=heading, figures=figures, tables=tables, treemap=treemap)


def render_treemap(treemap: object, headline: str) -> str:
    """Render a treemap as one SVG file.

    Args:
        treemap: The treemap, as ``Treemap`` of ``reports/treemap.py``.
        headline: The title of the image.
    """
    return _environment().get_template("treemap_picture.svg.jinja").render(treemap=treemap, headline=headline)


def render_chart(chart: Chart, states: Mapping[VersionState, str], headline: str) -> str:
    """Render a chart as one SVG file.

    Args:
        chart: The chart.
        states: The labels of the states in the legend.
        headline: The headline above the chart.
    """
    template = _environment().get_template("picture.svg.jinja")
    return template.render(chart=chart, states=states, headline=headline)


_DOCTYPE = b"<!doctype html>"


def check_page_path(path: str | os.PathLike[str]) -> None:
    """Check, before long work starts, that a report can be written to a path. Nothing is written.

    Raises StorageError if the folder is missing or not writable, or if the path exists and is not a report.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    try:
        has_folder, exists = folder.is_dir(), target.exists()
    except OSError as error:  # for example an invalid file name
        raise _error(path, error.strerror or str(error)) from error
    if not has_folder:
        raise _error(path, f"folder {str(folder)!r} does not exist")
    if exists and not target.is_file():
        raise _error(path, "the path exists and is not a file; choose another name")
    if exists and not _is_page(target):
        raise _error(path, "the file exists and is not an HTML report; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _error(path, f"folder {str(folder)!r} is not writable")


def _is_page(path: Path) -> bool:
    """Whether a file is empty or an HTML report, so that a wrong path cannot overwrite a file of a lakehouse."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_DOCTYPE)).lower() in (b"", _DOCTYPE)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def write_page(path: str | os.PathLike[str], page: str) -> None:
    """Write a report to a file atomically. A symbolic link is followed.

    Args:
        path: The file.
        page: The report, as HTML.

    Raises:
        StorageError: If writing fails, or if ``check_page_path`` rejects the path.
    """
    check_page_path(path)
    target = Path(os.path.realpath(path))
    # The temporary name does not contain the target's name, which may already have the maximum length.
    temporary = target.with_name(f".page-{uuid.uuid4()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _error(path: str | os.PathLike[str], reason: str) -> StorageError:
    return StorageError(f"cannot write report {os.fspath(path)!r}: {reason}")
