"""Draw the diagrams of docs/concepts.md: ``.venv/bin/python -m scripts.draw_concepts``.

A test compares the committed diagrams with the output of this script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

_INK, _QUIET, _PAPER = "#1f2937", "#6b7280", "#ffffff"
_NEW, _OLD, _PURGED, _WARN = "#bbf7d0", "#dbeafe", "#e5e7eb", "#fed7aa"


class Drawing:
    """An SVG of boxes, arrows and text with an opaque background, so that it is readable in any theme."""

    def __init__(self, width: int, height: int, title: str):
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
            ' font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{_INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{_PAPER}"/>',
        ]

    def box(self, x: float, y: float, text: str, fill: str = _OLD, width: float = 76, height: float = 34) -> None:
        """Draw a box centered at a point, with text in it."""
        self._parts.append(
            f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="6"'
            f' fill="{fill}" stroke="{_INK}"/>'
        )
        self.label(x, y + 5, text)

    def label(self, x: float, y: float, text: str, anchor: str = "middle", fill: str = _INK, weight: str = "") -> None:
        """Write a line of text."""
        bold = f' font-weight="{weight}"' if weight else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{bold}>{escape(text)}</text>'
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, is_dashed: bool = False, has_tip: bool = True
    ) -> None:
        """Draw a line from one point to another."""
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        tip = ' marker-end="url(#tip)"' if has_tip else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{_INK}" stroke-width="1.4"{dashes}{tip}/>'
        )

    def text(self) -> str:
        """Return the SVG."""
        return "\n".join([*self._parts, "</svg>", ""])


def commit() -> str:
    """Draw two versions that share files, and two writers of which one creates the next root."""
    drawing = Drawing(900, 400, "How a commit works: new files, then a root file that is created if absent")
    for text, y in {"roots": 105, "nodes": 195, "definitions": 285, "table files": 365}.items():
        drawing.label(30, y, text, "start", _QUIET)
    drawing.label(240, 40, "version 41", weight="bold")
    drawing.label(440, 40, "version 42", weight="bold")
    drawing.label(720, 40, "two writers, one file name", weight="bold")
    for x1, y1, x2, y2 in (
        (240, 117, 200, 173), (240, 117, 300, 173), (440, 117, 210, 174), (440, 117, 440, 173),
        (200, 207, 200, 263), (300, 207, 300, 263), (440, 207, 310, 264), (440, 207, 440, 263),
        (200, 297, 200, 343), (300, 297, 300, 343), (440, 297, 440, 343),
    ):  # fmt: skip
        drawing.arrow(x1, y1, x2, y2)
    for x, y, text, fill in (
        (240, 100, "R(41)", _OLD), (440, 100, "R(42)", _NEW), (200, 190, "n1", _OLD), (300, 190, "n2", _OLD),
        (440, 190, "n3", _NEW), (200, 280, "d1", _OLD), (300, 280, "d2", _OLD), (440, 280, "d3", _NEW),
        (200, 360, "t1", _OLD), (300, 360, "t2", _OLD), (440, 360, "t3", _NEW),
    ):  # fmt: skip
        drawing.box(x, y, text, fill)
    drawing.box(640, 180, "writer A", _OLD, 90)
    drawing.box(800, 180, "writer B", _OLD, 90)
    drawing.box(720, 100, "R(42)", _NEW)
    drawing.arrow(645, 162, 690, 119)
    drawing.arrow(795, 162, 750, 119, is_dashed=True)
    drawing.label(640, 220, "created:")
    drawing.label(640, 240, "committed")
    drawing.label(800, 220, "exists:")
    drawing.label(800, 240, "check for conflicts,")
    drawing.label(800, 260, "retry as R(43)")
    drawing.box(600, 320, "", _NEW, 24, 18)
    drawing.label(620, 325, "new in version 42", "start")
    drawing.box(600, 352, "", _OLD, 24, 18)
    drawing.label(620, 357, "from earlier versions, unchanged", "start")
    return drawing.text()


def expiry() -> str:
    """Draw versions from old to new: purged, expired, and kept by a rule."""
    drawing = Drawing(
        900, 300, "What expires: versions that no rule keeps. A purge deletes the files that only they need."
    )
    states = [
        ("1", _PURGED, "purged"), ("2", _PURGED, "purged"), ("3", _WARN, "expired"), ("4", _WARN, "expired"),
        ("5", _NEW, "an export"), ("6", _WARN, "expires"), ("7", _WARN, "expires"), ("8", _NEW, "recent"),
        ("9", _NEW, "recent"), ("10", _NEW, "the latest"),
    ]  # fmt: skip
    for index, (name, fill, state) in enumerate(states):
        x = 60 + 82 * index
        drawing.box(x, 120, name, fill, 60, 44)
        drawing.label(x, 164, state, fill=_QUIET)
        if index:
            drawing.arrow(x - 52, 120, x - 32, 120)
    for first, last, text in (
        (0, 1, "files are deleted"),
        (2, 3, "can be undeleted"),
        (7, 9, "kept by a rule"),
    ):
        x1, x2 = 30 + 82 * first, 90 + 82 * last
        drawing.arrow(x1, 82, x2, 82, has_tip=False)
        drawing.label((x1 + x2) / 2, 70, text)
    drawing.label(60 + 82 * 4, 70, "kept by name")
    drawing.label(60 + 82 * 5.5, 70, "next to expire")
    drawing.label(30, 34, "older", "start", _QUIET)
    drawing.label(868, 34, "newer", "end", _QUIET)
    for index, (name, effect) in enumerate(
        (("trim", "expires snapshots"), ("expire", "expires versions"), ("purge", "deletes their files"),
         ("orphans", "deletes orphans"))
    ):  # fmt: skip
        x = 110 + 214 * index
        drawing.box(x, 226, name, _OLD, 92)
        drawing.label(x, 266, effect, fill=_QUIET)
        if index:
            drawing.arrow(x - 166, 226, x - 50, 226)
    return drawing.text()


def branches() -> str:
    """Draw a lakehouse and a clone that is created, refreshed and promoted."""
    drawing = Drawing(900, 270, "Branches: a clone starts as a version of its parent and is promoted as one version")
    drawing.label(30, 65, "parent", "start", weight="bold")
    drawing.label(30, 85, "s3://bucket/lake", "start", _QUIET)
    drawing.label(30, 205, "clone", "start", weight="bold")
    drawing.label(30, 225, "s3://dev/feature-x", "start", _QUIET)
    parent_versions = [("11", _OLD, 220), ("12", _OLD, 320), ("13", _OLD, 470), ("14", _OLD, 600), ("15", _NEW, 760)]
    clone_versions = [("0", _OLD, 370), ("1", _NEW, 460), ("2", _NEW, 550), ("3", _NEW, 650)]
    for versions, y in ((parent_versions, 75), (clone_versions, 210)):
        for index, (name, fill, x) in enumerate(versions):
            drawing.box(x, y, name, fill, 56)
            if index:
                drawing.arrow(versions[index - 1][2] + 30, y, x - 30, y)
    drawing.arrow(328, 93, 362, 191)
    drawing.label(335, 150, "clone", "end")
    drawing.arrow(606, 93, 644, 191)
    drawing.label(616, 150, "refresh", "end")
    drawing.arrow(662, 192, 748, 94)
    drawing.label(716, 160, "promote: one version", "start")
    drawing.label(440, 255, "green: committed in the clone; creating the clone copied no table files", fill=_QUIET)
    return drawing.text()


PICTURES: Mapping[str, Callable[[], str]] = {
    "concept-branches.svg": branches,
    "concept-commit.svg": commit,
    "concept-expiry.svg": expiry,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
