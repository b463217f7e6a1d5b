"""What others wrote is text in what the plugin shows."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from trinitylake_ops.dagster_plugin.metadata import column_schema, markdown_table
from trinitylake_ops.declarations.rendering import MAX_CELL_CHARS, MAX_DETAIL_ROWS, Link
from trinitylake_ops.format.definitions import Column, DataType, Schema, TableDef
from trinitylake_ops.iceberg.types import DOC
from trinitylake_ops.operations.rendering import visible


def row_of(value: object) -> str:
    lines = (markdown_table(("of",), [(value,)]).value or "").split("\n")
    assert len(lines) == 3
    return lines[2]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("![a](https://example.com/seen.png)", "| `![a](https://example.com/seen.png)` |"),
        ("see https://example.com/a?b=c|d now", "| see `https://example.com/a?b=c`\\|d now |"),
        ("WWW.example.com, a.b@example.com", "| `WWW.example.com,` `a.b@example.com` |"),
        ("<img src=x>", "| \\<img src=x> |"),
        ("one\r\ntwo\rthree\u2028four", "| one two three four |"),
        ("a|b\\c`d`", "| a\\|b\\\\c\\`d\\` |"),
        ("__init__ of *all* ~~ops~~ &lt; a_b & c", "| \\_\\_init\\_\\_ of \\*all\\* \\~\\~ops\\~\\~ \\&lt; a_b & c |"),
        ("\x1b[2J\u202egpj", "| \\\\x1b\\[2J\\\\u202egpj |"),
        ("x" * (MAX_CELL_CHARS + 1), f"| {'x' * MAX_CELL_CHARS}... |"),
    ],
    ids=["picture", "address", "without a scheme", "html", "lines", "marks", "emphasis", "invisible", "long"],
)
def test_a_cell_is_text(written: str, shown: str) -> None:
    assert row_of(written) == shown


def test_a_long_table_is_cut_off() -> None:
    text = markdown_table(("n",), [(n,) for n in range(100_000)]).value or ""
    assert text.count("\n") == MAX_DETAIL_ROWS + 3
    assert text.endswith(f"\n{100_000 - MAX_DETAIL_ROWS} more rows")


_READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
#: GitHub's Markdown links these in text, whatever backslashes are before them.
_LINKED = re.compile(r"https?://|www\.|\w@\w", re.IGNORECASE)
_MEANING = "ab1 @w_*~`[](){}!<>&;#|\\\\:/.-=\n\"'"


def drawn(text: str) -> list[list[tuple[str, str]]]:
    """Return what a reader of Markdown draws in each cell of a table: kinds of things, and their text."""
    tokens = _READER.parse(text)
    rows = [token for token in tokens if token.level > 0 and token.type == "inline"]
    return [[(child.type, child.content) for child in token.children or []] for token in rows]


@given(st.lists(st.text(_MEANING) | st.text(), min_size=3, max_size=3))
@example(["<script>alert(1)</script>", "[a](javascript:alert(1))", "![](http://x/y.png)"])
@example(["\\|", "a\\", "|"])
@example(["`https://a.b\\|c`d", "www.a.b|", "\\`\\a@b.c\\|"])
@example(["``", "`", "&#60;b&#62;"])
@example(["_a_", "__a__b", "*a*"])
def test_any_text_is_drawn_as_it_is(texts: list[str]) -> None:
    """No link, picture or tag comes of it, it leaves no cell, and nothing of it is swallowed."""
    shown = drawn(markdown_table(("n", "n", "n"), [texts]).md_str)[3:]
    assert {kind for cell in shown for kind, _ in cell} <= {"text", "code_inline"}
    assert not [text for cell in shown for kind, text in cell if kind == "text" and _LINKED.search(text)]
    wanted = [visible(" ".join(text.splitlines())).strip() for text in texts]
    assert ["".join(text for _, text in cell) for cell in shown] == wanted


def test_the_text_of_a_link_does_not_end_it() -> None:
    ((opened, text, closed),) = drawn(markdown_table(("n",), [(Link("a](http://evil) *b*", "/runs/1"),)]).md_str)[1:]
    assert (opened[0], text, closed[0]) == ("link_open", ("text", "a](http://evil) *b*"), "link_close")


def test_a_description_of_a_column_is_cut() -> None:
    column = Column(id=1, name="n", type=DataType.INT8, properties={DOC: "x" * 1_000_000})
    (shown,) = column_schema(TableDef(id="t", schema=Schema(columns=(column,)))).columns
    assert shown.description == "x" * MAX_CELL_CHARS + "..."
