"""Test that text from other writers is escaped in the plugin's Markdown."""

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


def table_row(value: object) -> str:
    lines = (markdown_table(("value",), [(value,)]).value or "").split("\n")
    assert len(lines) == 3
    return lines[2]


@pytest.mark.parametrize(
    ("text", "rendered"),
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
    ids=["image", "url", "url without scheme", "html", "line breaks", "punctuation", "emphasis", "invisible", "long"],
)
def test_table_cell_is_escaped(text: str, rendered: str) -> None:
    assert table_row(text) == rendered


def test_long_table_is_truncated() -> None:
    text = markdown_table(("n",), [(n,) for n in range(100_000)]).value or ""
    assert text.count("\n") == MAX_DETAIL_ROWS + 3
    assert text.endswith(f"\n{100_000 - MAX_DETAIL_ROWS} more rows")


_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
#: GitHub's Markdown creates links from such text, even after backslashes.
_AUTOLINK = re.compile(r"https?://|www\.|\w@\w", re.IGNORECASE)
_MARKUP_CHARS = "ab1 @w_*~`[](){}!<>&;#|\\\\:/.-=\n\"'"


def rendered_cells(text: str) -> list[list[tuple[str, str]]]:
    """Return the type and text of each element that a Markdown parser finds in each cell of a table."""
    tokens = _PARSER.parse(text)
    rows = [token for token in tokens if token.level > 0 and token.type == "inline"]
    return [[(child.type, child.content) for child in token.children or []] for token in rows]


@given(st.lists(st.text(_MARKUP_CHARS) | st.text(), min_size=3, max_size=3))
@example(["<script>alert(1)</script>", "[a](javascript:alert(1))", "![](http://x/y.png)"])
@example(["\\|", "a\\", "|"])
@example(["`https://a.b\\|c`d", "www.a.b|", "\\`\\a@b.c\\|"])
@example(["``", "`", "&#60;b&#62;"])
@example(["_a_", "__a__b", "*a*"])
def test_any_text_is_rendered_literally(texts: list[str]) -> None:
    """No link, image or tag is created from the text, and each cell contains its complete text."""
    rendered = rendered_cells(markdown_table(("n", "n", "n"), [texts]).md_str)[3:]
    assert {kind for cell in rendered for kind, _ in cell} <= {"text", "code_inline"}
    assert not [text for cell in rendered for kind, text in cell if kind == "text" and _AUTOLINK.search(text)]
    expected = [visible(" ".join(text.splitlines())).strip() for text in texts]
    assert ["".join(text for _, text in cell) for cell in rendered] == expected


def test_link_text_is_escaped() -> None:
    ((link_start, text, link_end),) = rendered_cells(
        markdown_table(("n",), [(Link("a](http://evil) *b*", "/runs/1"),)]).md_str
    )[1:]
    assert (link_start[0], text, link_end[0]) == ("link_open", ("text", "a](http://evil) *b*"), "link_close")


def test_column_description_is_truncated() -> None:
    column = Column(id=1, name="n", type=DataType.INT8, properties={DOC: "x" * 1_000_000})
    (rendered,) = column_schema(TableDef(id="t", schema=Schema(columns=(column,)))).columns
    assert rendered.description == "x" * MAX_CELL_CHARS + "..."
