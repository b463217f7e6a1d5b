"""The page of ``compare``: what changed in a clone, in its parent, or in both."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.maintenance.clones.compare import ComparedObject, Comparison
from trinitylake_ops.maintenance.clones.three_way import ChangedOn
from trinitylake_ops.maintenance.differences.deltas import TableDelta
from trinitylake_ops.pages.content import Figure, Heading, Step
from trinitylake_ops.pages.rendering import render_comparison
from trinitylake_ops.pages.wording import clipped, counted, size

_MOST_ROWS = 500
_LONGEST_NAME_CHARS = 120
_LONGEST_COLUMNS_CHARS = 300
#: In the order in which a reader needs them.
_SECTIONS = (
    (ChangedOn.BOTH, "Changed on both sides: to be decided before a promotion"),
    (ChangedOn.CLONE, "Changed in the clone alone: what a promotion brings"),
    (ChangedOn.PARENT, "Changed in the parent alone: what a refresh brings"),
    (ChangedOn.SAME, "The same on both sides since the shared version"),
)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One object, and what each side did to it."""

    name: str
    clone: str
    parent: str


@dataclass(frozen=True, slots=True)
class ComparedSection:
    """The objects that changed on one side; ``left_out`` counts those that are not listed."""

    title: str
    rows: tuple[ComparedRow, ...]
    left_out: int


def comparison_page(comparison: Comparison, now_ms: int) -> str:
    """Return a page of a comparison; reads nothing."""
    conflicts = len(comparison.on(ChangedOn.BOTH))
    promote = f"trinitylake promote {comparison.name}"
    step = Step("To see what a promotion would do:", promote)
    if conflicts:
        step = Step("Decide on each object below that changed on both sides, by --ours or --theirs:", promote)
    heading = Heading(
        subject="compare",
        root=comparison.root,
        now_ms=now_ms,
        headline=clipped(comparison.headline, 300),
        tone="warn" if conflicts else "good",
        steps=(step,),
    )
    figures = (
        Figure(
            "In the clone alone", f"{len(comparison.on(ChangedOn.CLONE)):,}", f"version {comparison.clone_version:,}"
        ),
        Figure("In the parent alone", f"{len(comparison.on(ChangedOn.PARENT)):,}", f"version {comparison.version:,}"),
        Figure("In both", f"{conflicts:,}", f"since version {comparison.shared_version:,}", heading.tone),
    )
    sections = [_section(comparison, side, title) for side, title in _SECTIONS]
    return render_comparison(heading, figures, [section for section in sections if section.rows])


def _section(comparison: Comparison, side: ChangedOn, title: str) -> ComparedSection:
    found = comparison.on(side)
    return ComparedSection(title, tuple(map(_row, found[:_MOST_ROWS])), max(0, len(found) - _MOST_ROWS))


def _row(one: ComparedObject) -> ComparedRow:
    name = one.name if one.table is not None else f"namespace {one.name}"
    return ComparedRow(
        clipped(name, _LONGEST_NAME_CHARS), _text(one.in_clone, one.clone), _text(one.in_parent, one.parent)
    )


def _text(kind: str | None, delta: TableDelta | None) -> str:
    """Return what a side did: the kind of change, and the numbers that differ."""
    if kind is None:
        return ""
    parts = [kind]
    if delta is not None and delta.rows_added is not None and delta.rows_removed is not None:
        parts += [f"{sign}{counted(rows, 'row')}" for sign, rows in _signed(delta.rows_added, delta.rows_removed)]
        parts += [f"{sign}{size(bytes_)}" for sign, bytes_ in _signed(delta.bytes_added or 0, delta.bytes_removed or 0)]
    if delta is not None and delta.schema:
        parts.append(clipped(f"columns {'; '.join(delta.schema)}", _LONGEST_COLUMNS_CHARS))
    return ", ".join(parts)


def _signed(added: int, removed: int) -> list[tuple[str, int]]:
    return [(sign, number) for sign, number in (("+", added), ("−", removed)) if number]
