"""Test shared features of plans and reports: JSON, escaped tables, digests and costs."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from rich.console import Console

from tests.lakes import table
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import Column, DataType, LakehouseDef, Schema
from trinitylake_ops.operations.base import MeteredLakehouse, digest_of
from trinitylake_ops.operations.rendering import (
    Document,
    Table,
    cell,
    change_rows,
    jsonable,
    new_table,
    table_text,
    visible,
)
from trinitylake_ops.versions.history import Change
from trinitylake_ops.versions.snapshot import utc_of


@dataclass(frozen=True, kw_only=True)
class SampleDocument(Document):
    text: str
    hidden: str = field(default="secret", repr=False)

    def table(self) -> Table:
        return new_table("Sample", "text", rows=[(self.text,)])


def test_hidden_fields_are_not_shown() -> None:
    sample = SampleDocument(text="ü")
    assert sample.to_dict() == {"text": "ü"}
    assert json.loads(sample.to_json()) == {"text": "ü"}
    assert str(sample) == "Sample\ntext\nü"


def test_values_are_converted_to_json() -> None:
    assert jsonable(datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)) == "2026-01-02T03:04:05.678+00:00"
    column = Column(id=1, name="c", type=DataType.INT8, unknown_fields=b"\x01")
    rendered = jsonable(Schema(columns=(column,)))
    assert rendered["columns"][0]["type"] == "int8"
    assert rendered["columns"][0]["unknown_fields"] == "AQ=="
    assert "unknown_fields" not in rendered
    definition = jsonable(LakehouseDef(id="x"))
    assert definition["isolation_level"] == "snapshot"
    assert json.loads(json.dumps(definition)) == definition


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("plain ü 漢", "plain ü 漢"),
        ("[red]markup[/red] [/]", "[red]markup[/red] [/]"),
        (":smile: \\[x]", ":smile: \\[x]"),
        ("a\x1b[31mred\x07", "a\\x1b[31mred\\x07"),
        ("new\r\nline\ttab", "new\\r\\nline\\ttab"),
        ("c1\x9b31m", "c1\\x9b31m"),
        ("right\u202eto left\u200b", "right\\u202eto left\\u200b"),
        ("\u2028\ud800", "\\u2028\\ud800"),
    ],
)
def test_text_is_rendered_completely_and_escaped(text: str, rendered: str) -> None:
    assert visible(text) == rendered
    table = new_table(f"Title {text}", "column", rows=[(text,)])
    assert table_text(table, 1_000).splitlines() == [f"Title {rendered}", "column", rendered]


def test_tables_are_not_truncated() -> None:
    long_text = "x" * 5_000
    assert long_text in table_text(new_table("", "a", "b", rows=[(long_text, 1), (None, "")]), 100_000)
    narrow_text = table_text(new_table("", "a", rows=[("y" * 100,)]), 30)
    assert narrow_text.count("y") == 100, "the text is wrapped and not truncated"
    assert table_text(new_table("Empty", "a"), 80) == "Empty"
    assert table_text(new_table("", "a"), 80) == "a"


def test_cells_format_values() -> None:
    assert cell(None).plain == ""
    assert cell(0).plain == "0"
    assert cell(datetime(2026, 1, 2, tzinfo=UTC)).plain == "2026-01-02 00:00:00.000Z"


def test_change_rows_format_changes() -> None:
    rows = change_rows([Change("added", "a"), Change("removed", "a.b", "c")])
    assert rows == [("added", "namespace a"), ("removed", "a.b.c")]


def test_digests_differ_by_content() -> None:
    contents: list[tuple[object, ...]] = [(), ("a",), ("a", "b"), (["a", "b"],)]
    digests = [digest_of(*base, *content) for base in ((1, "id"), (2, "id"), (1, "other")) for content in contents]
    assert len(set(digests)) == len(digests)
    assert digest_of(1, "id", {"a": 1, "b": "ü"}) == digest_of(1, "id", {"b": "ü", "a": 1})
    version, _, checksum = digest_of(17, "id", "x").partition("-")
    assert (version, len(checksum)) == ("17", 64)


def test_times_outside_the_calendar_are_formatted() -> None:
    assert utc_of(1_700_000_000_123) == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert utc_of(-5).year == 1970
    assert utc_of(2**63 - 1).year == 9999


def test_cost_counts_only_the_operation(lake: Lakehouse) -> None:
    metered = MeteredLakehouse(lake)
    with metered.lake.transaction() as txn:
        txn.create_namespace("a")
        txn.create_table("a", "t", table())
    lake.snapshot()
    cost = metered.cost()
    assert cost.requests["create"] == 3, "two definitions and a root"
    assert cost.total_requests == sum(cost.requests.values())
    assert cost.bytes_written > 0 < cost.bytes_read
    assert 0 < cost.rounds <= cost.total_requests
    assert cost.duration_ms >= 0


def test_every_report_and_plan_serializes(lake: Lakehouse) -> None:
    documents = [
        operations.plan_rollback(lake, 0),
        operations.plan_export(lake, "x"),
        operations.inspect_hint(lake),
        operations.verify(lake),
    ]
    for document in documents:
        assert json.loads(document.to_json()) == document.to_dict()
        assert str(document)


def test_table_keeps_raw_values_until_it_is_rendered() -> None:
    table = new_table("T\x1b", "name", "n", rows=[("a\x07", 1), ("b", None)])
    assert (table.columns, table.rows) == (("name", "n"), (("a\x07", 1), ("b", None)))
    assert str(table).splitlines() == ["T\\x1b", "name   n", "a\\x07  1", "b"]
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(table)
    assert [line.rstrip() for line in console.export_text().splitlines()] == str(table).splitlines()
