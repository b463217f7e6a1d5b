"""What others wrote is text in what the plugin shows."""

from __future__ import annotations

import pytest

from trinitylake_ops.dagster_plugin.metadata import MAX_CELL_CHARS, MAX_DETAIL_ROWS, markdown_table


def row_of(value: object) -> str:
    lines = (markdown_table(("of",), [(value,)]).value or "").split("\n")
    assert len(lines) == 3
    return lines[2]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("![a](https://example.com/seen.png)", "| !\\[a](https://example.com/seen.png) |"),
        ("<img src=x>", "| \\<img src=x> |"),
        ("one\r\ntwo\rthree\u2028four", "| one two three four |"),
        ("a|b\\c`d`", "| a\\|b\\\\c\\`d\\` |"),
        ("\x1b[2J\u202egpj", "| \\\\x1b\\[2J\\\\u202egpj |"),
        ("x" * (MAX_CELL_CHARS + 1), f"| {'x' * MAX_CELL_CHARS}... |"),
    ],
    ids=["picture", "html", "lines", "marks", "invisible", "long"],
)
def test_a_cell_is_text(written: str, shown: str) -> None:
    assert row_of(written) == shown


def test_a_long_table_is_cut_off() -> None:
    text = markdown_table(("n",), [(n,) for n in range(100_000)]).value or ""
    assert text.count("\n") == MAX_DETAIL_ROWS + 3
    assert text.endswith(f"\n{100_000 - MAX_DETAIL_ROWS} more rows")
