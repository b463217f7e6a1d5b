"""From content to HTML. The templates escape all that they are given, and show invisible characters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinitylake_ops.maintenance.plans.document import visible
from trinitylake_ops.pages.chart import Chart
from trinitylake_ops.pages.content import Figure, Heading, Page
from trinitylake_ops.pages.timeline import VersionState


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trinitylake_ops.pages", "templates"),
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


def render_comparison(heading: Heading, figures: Sequence[Figure], sections: Sequence[object]) -> str:
    """Return a page of a comparison as one HTML document.

    Sections have a title, rows, and a count of those left out.
    """
    template = _environment().get_template("comparison.html.jinja")
    return template.render(heading=heading, figures=figures, sections=sections)


def render_status(sections: Sequence[object], silent: Sequence[str], refresh_seconds: int) -> str:
    """Return a page of the state of lakehouses as one HTML document. Sections are those of ``pages/status.py``."""
    template = _environment().get_template("status.html.jinja")
    return template.render(sections=sections, silent=silent, refresh_seconds=refresh_seconds)


def render_picture(chart: Chart, states: Mapping[VersionState, str], headline: str) -> str:
    """Return a chart under its headline and the labels of its states, as one SVG file."""
    template = _environment().get_template("picture.svg.jinja")
    return template.render(chart=chart, states=states, headline=headline)
