"""Render reports as HTML, and write them as a whole or not at all."""

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
    """Return text with control characters as escapes, for any text in a page, whoever wrote it."""
    return visible(value) if type(value) is str else value


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def render_page(page: Page) -> str:
    """Return a page as one HTML document that refers to nothing beyond itself."""
    return _environment().get_template("page.html.jinja").render(page=page, heading=page.heading, chart=page.chart)


def render_comparison(heading: Heading, figures: Sequence[Metric], sections: Sequence[object]) -> str:
    """Return a page of a comparison as one HTML document.

    Sections have a title, rows, and a count of those left out.
    """
    template = _environment().get_template("comparison.html.jinja")
    return template.render(heading=heading, figures=figures, sections=sections)


def render_status(sections: Sequence[object], silent: Sequence[str], refresh_seconds: int) -> str:
    """Return a page of the state of lakehouses as one HTML document. Sections are those of ``reports/status.py``."""
    template = _environment().get_template("status.html.jinja")
    return template.render(sections=sections, silent=silent, refresh_seconds=refresh_seconds)


def render_chart(chart: Chart, states: Mapping[VersionState, str], headline: str) -> str:
    """Return a chart under its headline and the labels of its states, as one SVG file."""
    template = _environment().get_template("picture.svg.jinja")
    return template.render(chart=chart, states=states, headline=headline)


_BEGINNING = b"<!doctype html>"


def check_page_path(path: str | os.PathLike[str]) -> None:
    """Check, before long work, that a page can be written to a path. Nothing is written.

    Raises StorageError if its folder is missing or cannot be written to, or if something other than a page is there.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    try:
        is_there, is_something = folder.is_dir(), target.exists()
    except OSError as error:  # for example a name that no file can have
        raise _error(path, error.strerror or str(error)) from error
    if not is_there:
        raise _error(path, f"there is no folder {str(folder)!r}")
    if is_something and not target.is_file():
        raise _error(path, "what stands there is no file; choose another name")
    if is_something and not _is_page(target):
        raise _error(path, "the file that stands there is no page, and may be needed; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _error(path, f"the folder {str(folder)!r} cannot be written to")


def _is_page(path: Path) -> bool:
    """Whether a file is empty or begins as a page does. A wrong name must not cost a file of a lakehouse."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_BEGINNING)).lower() in (b"", _BEGINNING)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def write_page(path: str | os.PathLike[str], page: str) -> None:
    """Write a page to a file, whole or not at all. A symbolic link is followed.

    Raises StorageError, also in the cases of ``check_page_path``.
    """
    check_page_path(path)
    target = Path(os.path.realpath(path))
    # The temporary name does not contain the target's, which may be as long as names can be.
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
    return StorageError(f"the page {os.fspath(path)!r} cannot be written: {reason}")
