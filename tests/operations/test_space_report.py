"""Test the HTML report of space: a treemap with proportional areas, and tables without untrusted markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lakes import Lakes
from tests.operations.changes import append_rows, overwrite_rows
from tests.operations.html_pages import parse_page
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.operations import SpaceReport
from trinitylake_ops.operations.space.report import Amount, NamespaceSpace, SpaceByUse, TableSpace, size_text
from trinitylake_ops.reports import space_chart, space_page
from trinitylake_ops.reports.treemap import Item, Rectangle, draw_treemap, squarified

HOSTILE = "<script>alert('x')</script>\"'&amp;\u202egpj.exe\x00{{ 7 * 7 }}]]>--><svg onload=x>"
KINDS = {"a": "first", "b": "second"}


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lakehouse = lakes.memory()
    append_rows(lakehouse, "ns.u")
    overwrite_rows(lakehouse, "ns.t")
    return lakehouse


@pytest.fixture
def report(lake: Lakehouse) -> SpaceReport:
    return operations.measure_space(lake)


def test_page_contains_tables_and_commands(report: SpaceReport) -> None:
    page = parse_page(space_page(report))
    assert page.headline == report.headline
    assert {row[0] for row in page.rows("table", "latest version")} == {"ns.t", "ns.u"}
    assert [row[0] for row in page.rows("namespace")] == ["ns"]
    assert [int(row[0]) for row in page.rows("version")] == [row.version for row in reversed(report.growth)]
    assert page.rows("command")[0][0] == "trim"
    assert "trim" in page.text


def test_chart_is_well_formed_and_shows_all_uses(report: SpaceReport) -> None:
    root = ET.fromstring(space_chart(report))
    classes = {element.get("class") for element in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert {"current", "older", "group"} <= classes


def test_hostile_names_are_escaped(report: SpaceReport) -> None:
    tables = tuple(replace(table, namespace=HOSTILE, table=HOSTILE, damage=HOSTILE) for table in report.tables)
    namespaces = tuple(replace(namespace, namespace=HOSTILE) for namespace in report.namespaces)
    hostile = replace(report, root=HOSTILE, tables=tables, namespaces=namespaces, damaged={HOSTILE: HOSTILE})
    page = parse_page(space_page(hostile))
    assert "script" not in {tag for tag, _ in page.elements}
    ET.fromstring(space_chart(hostile))


def test_page_of_large_lakehouse_is_small(report: SpaceReport) -> None:
    use = SpaceByUse(current=Amount(3, 10_000))
    template = TableSpace(
        namespace="n",
        table="t",
        is_dropped=False,
        use=use,
        data=use.current,
        small=use.current,
        deletes=use.current,
        trimmable=use.current,
        damage="",
        advice=(),
    )
    tables = tuple(replace(template, namespace=f"n{number % 500}", table=f"t{number}") for number in range(20_000))
    namespaces = tuple(
        NamespaceSpace(
            namespace=f"n{number}", tables=40, use=use, small=use.current, deletes=use.current, trimmable=use.current
        )
        for number in range(500)
    )
    page = space_page(replace(report, tables=tables, namespaces=namespaces, n_tables=len(tables)))
    parse_page(page)
    assert len(page) < 1_000_000


@given(st.lists(st.integers(1, 1 << 50), max_size=40))
def test_areas_are_proportional_and_inside(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    place = Rectangle(5, 7, 300, 200)
    rectangles = squarified(sizes, place)
    assert len(rectangles) == len(sizes)
    for size, rectangle in zip(sizes, rectangles, strict=True):
        assert rectangle.area == pytest.approx(size / sum(sizes) * place.area, rel=1e-6, abs=1e-6)
        assert rectangle.x >= place.x - 1e-6 and rectangle.y >= place.y - 1e-6
        assert rectangle.x + rectangle.width <= place.x + place.width + 1e-6
        assert rectangle.y + rectangle.height <= place.y + place.height + 1e-6
    assert not any(overlap(one, two) for at, one in enumerate(rectangles) for two in rectangles[at + 1 :])


def overlap(one: Rectangle, two: Rectangle) -> bool:
    width = min(one.x + one.width, two.x + two.width) - max(one.x, two.x)
    height = min(one.y + one.height, two.y + two.height) - max(one.y, two.y)
    return width > 1e-6 and height > 1e-6 and width * height > 1e-3


@pytest.mark.parametrize("groups", [[], [("g", [])], [("g", [Item("i", "i", {"a": 0})])]])
def test_nothing_is_drawn_without_sizes(groups: Sequence[tuple[str, Sequence[Item]]]) -> None:
    treemap = draw_treemap(groups, KINDS)
    assert (treemap.groups, treemap.legend) == ((), {})


def test_parts_divide_a_cell() -> None:
    (group,) = draw_treemap([("g", [Item("i", "i", {"a": 1, "b": 3})])], KINDS).groups
    (cell,) = group.cells
    first, second = cell.parts
    assert [part.kind for part in cell.parts] == ["a", "b"]
    assert second.place.width == pytest.approx(3 * first.place.width)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1 << 70, "1,180.6 EB"),
    ],
)
def test_size_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
