"""The HTML report of ``space``: a treemap of all tables, and tables of what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.operations.space.report import (
    Amount,
    NamespaceSpace,
    SpaceByUse,
    SpaceReport,
    TableSpace,
    unreached_texts,
)
from trinitylake_ops.operations.space.uses import SpaceUse
from trinitylake_ops.reports.chart import counted, size, truncate, utc
from trinitylake_ops.reports.content import Heading, Metric, Step
from trinitylake_ops.reports.rendering import render_space, render_treemap
from trinitylake_ops.reports.treemap import Item, Treemap, draw_treemap
from trinitylake_ops.versions.snapshot import epoch_ms

_LONGEST_CHARS = 300
_LONGEST_NAME_CHARS = 120
_MOST_NAMESPACES = 60
_MOST_TABLES = 400
_LABELS: Mapping[str, str] = {
    SpaceUse.CURRENT: "latest version",
    SpaceUse.OLDER: "older versions",
    SpaceUse.EXPORTS: "exports",
    SpaceUse.CLONES: "clones",
    SpaceUse.EXPIRABLE: "can expire",
    SpaceUse.EXPIRED: "expired",
}


@dataclass(frozen=True, slots=True)
class SpaceTable:
    """A table of the report. The cells after the first are numbers, unless ``is_text`` is set."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    #: The text to show if the table has no rows.
    empty: str = ""
    #: The columns that contain text, by position.
    text_columns: tuple[int, ...] = ()


def space_page(report: SpaceReport) -> str:
    """Return the report of the space of a lakehouse. Reads nothing."""
    heading = Heading(
        subject="space",
        root=report.root,
        now_ms=epoch_ms(report.now),
        headline=truncate(report.headline, _LONGEST_CHARS),
        steps=tuple(Step("", truncate(command, _LONGEST_CHARS)) for command in report.commands),
    )
    tables = (_reclaimable(report), _largest(report), _namespaces(report), _growth(report), _problems(report))
    return render_space(heading, _metrics(report), tables, _treemap(report))


def space_chart(report: SpaceReport) -> str:
    """Return the treemap of a report as an SVG file. Reads nothing."""
    return render_treemap(_treemap(report), truncate(report.headline, _LONGEST_CHARS))


def _treemap(report: SpaceReport) -> Treemap:
    listed: dict[str, list[TableSpace]] = {}
    for table in report.tables[:_MOST_TABLES]:
        listed.setdefault(table.namespace, []).append(table)
    groups = [
        (truncate(namespace.namespace, _LONGEST_NAME_CHARS), _items(namespace, listed.get(namespace.namespace, [])))
        for namespace in report.namespaces[:_MOST_NAMESPACES]
    ]
    others = report.namespaces[_MOST_NAMESPACES:]
    if others:
        use = sum((namespace.use for namespace in others), SpaceByUse())
        groups.append(("other namespaces", [_item(counted(len(others), "namespace"), use)]))
    groups.append(("catalog", [_item("nodes, definitions and roots", report.catalog)]))
    return draw_treemap(groups, _LABELS)


def _items(namespace: NamespaceSpace, tables: list[TableSpace]) -> list[Item]:
    items = [_item(truncate(table.table, _LONGEST_NAME_CHARS), table.use) for table in tables]
    n_others = namespace.tables - len(tables)
    if n_others > 0:
        rest = namespace.use - sum((table.use for table in tables), SpaceByUse())
        items.append(_item(counted(n_others, "other table"), rest))
    return items


def _item(label: str, use: SpaceByUse) -> Item:
    sizes_bytes = {kind.value: use.of_use(kind).bytes for kind in SpaceUse}
    total = use.total
    parts = [f"{_LABELS[kind]} {size(number)}" for kind, number in sizes_bytes.items() if number]
    title = f"{label}: {size(total.bytes)} in {counted(total.files, 'file')}; {', '.join(parts)}"
    return Item(label, title, sizes_bytes)


def _metrics(report: SpaceReport) -> tuple[Metric, ...]:
    total, use = report.total, report.use
    figures = [
        Metric("All files", size(total.bytes), counted(total.files, "file")),
        Metric("Latest version", size(use.current.bytes), counted(use.current.files, "file")),
        Metric("Older versions", size(use.older.bytes), counted(use.older.files, "file")),
    ]
    for label, amount in (("Exports", use.exports), ("Clones", use.clones)):
        figures += [Metric(label, size(amount.bytes), counted(amount.files, "file"))] if amount.files else []
    deletable = report.deletable
    figures += [
        Metric("Deletable", size(deletable.bytes), counted(deletable.files, "file")),
        Metric("Small files", f"{report.small.files:,}", f"of {counted(report.data.files, 'data file')}"),
        Metric("Delete files", f"{report.deletes.files:,}", size(report.deletes.bytes)),
        Metric("Tables", f"{report.n_tables:,}", f"and {report.uncounted_tables:,} not counted"),
    ]
    for label, measured in (("Orphans", report.unreached.orphans), ("Staged", report.unreached.staged)):
        figures += [] if measured is None else [Metric(label, size(measured.bytes), counted(measured.files, "file"))]
    return tuple(figures)


_USES = tuple(_LABELS[use] for use in SpaceUse)


def _sizes(use: SpaceByUse) -> tuple[str, ...]:
    return tuple(_size(use.of_use(kind)) for kind in SpaceUse)


def _size(amount: Amount) -> str:
    return size(amount.bytes) if amount.files else ""


def _reclaimable(report: SpaceReport) -> SpaceTable:
    rows = tuple(
        (
            item.command,
            size(item.amount.bytes),
            f"{item.amount.files:,}",
            "" if item.deletable_at is None else utc(epoch_ms(item.deletable_at)),
            item.why,
        )
        for item in report.reclaimable
    )
    columns = ("command", "bytes", "files", "deleted from", "why")
    return SpaceTable("What can be reclaimed", columns, rows, "Nothing.", (3, 4))


def _largest(report: SpaceReport) -> SpaceTable:
    rows = tuple(
        (
            truncate(table.name, _LONGEST_NAME_CHARS),
            *_sizes(table.use),
            f"{table.small.files:,}",
            f"{table.deletes.files:,}",
            "; ".join(truncate(advice.command, _LONGEST_NAME_CHARS) for advice in table.advice),
        )
        for table in report.tables[:_MOST_TABLES]
    )
    columns = ("table", *_USES, "small files", "delete files", "what helps")
    return SpaceTable("Largest tables", columns, rows, "None.", (len(columns) - 1,))


def _namespaces(report: SpaceReport) -> SpaceTable:
    rows = tuple(
        (truncate(namespace.namespace, _LONGEST_NAME_CHARS), f"{namespace.tables:,}", *_sizes(namespace.use))
        for namespace in report.namespaces[:_MOST_TABLES]
    )
    return SpaceTable("Namespaces", ("namespace", "tables", *_USES), rows, "None.")


def _growth(report: SpaceReport) -> SpaceTable:
    rows = tuple(
        (f"{row.version:,}", utc(epoch_ms(row.created_at)), size(row.needed.bytes), size(row.added.bytes))
        for row in reversed(report.growth)
    )
    return SpaceTable("Newest versions", ("version", "time", "needed", "added"), rows, "None.", (1,))


def _problems(report: SpaceReport) -> SpaceTable:
    rows = [
        (truncate(name, _LONGEST_NAME_CHARS), truncate(why, _LONGEST_CHARS))
        for name, why in list(report.damaged.items())[:_MOST_TABLES]
    ]
    rows += [("", truncate(text, _LONGEST_CHARS)) for text in unreached_texts(report.unreached)]
    if report.unreadable_definitions:
        rows.append(("", f"{counted(report.unreadable_definitions, 'definition')} cannot be read"))
    return SpaceTable("Not counted", ("table", "why"), tuple(rows), "Nothing.", (1,))
