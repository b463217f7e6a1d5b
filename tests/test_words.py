"""Sentences of docstrings, comments, messages and pages are short. Whether they can be read, a reader has to say."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinitylake_ops.storage.options import redact_assignments

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "trinitylake_ops"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py") if path.parent.name != "generated"})
#: Beside the log of long runs, whose entries name a command and all that it did in one sentence.
PAGES = [
    path
    for folder in (
        PROJECT,
        PROJECT / "docs",
        PROJECT / "docs" / "concepts",
        PROJECT / "docs" / "decisions",
        PROJECT / "docs" / "operations",
        PROJECT / "docs" / "storages",
        PACKAGE / "format",
    )
    for path in sorted(folder.glob("*.md"))
    if path.name != "soak.md"
]
MOST_WORDS = 25
_END = re.compile(r"(?<!\.\.)[.?!][\"'`)\]*]*(?=\s|$)")
#: Messages have one line, where a semicolon ends a sentence, too. Texts of more lines are lists and tables.
_END_IN_MESSAGE = re.compile(r"(?<!\.\.)[.?!;][\"'`)\]*]*(?=\s|$)|\n")
_ITEM = re.compile(r"\A\s*(?:[-*]|\d+\.)\s")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Code, tables, pictures and headings are left out; items stand alone."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
    text = re.sub(r"::\n\n(?:[ \t]+.*\n?|\n)+", ".\n\n", text)
    for block in re.split(r"\n\s*\n", text):
        if "====" in block:
            continue
        for item in re.split(r"\n(?=\s*(?:[-*#]|\d+\.|\|)\s)", block):
            if not re.match(r"\s*[|#]", item):
                yield from _END.sub("\0", re.sub(r"\s+", " ", _ITEM.sub("", item))).split("\0")


def n_words(sentence: str) -> int:
    """Return how many words a sentence has: runs without white space that hold a letter or digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield inspect.cleandoc(text)


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module: lines that follow each other as one."""
    lines: list[str] = []
    last = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("#: "))
            last = token.start
    yield "\n".join(lines)


def messages(node: ast.AST) -> Iterator[str]:
    """Yield all texts of a module but its docstrings: errors, findings, log, help, descriptions.

    The parts of a text are joined, and each value within it counts as one word.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    values: list[ast.AST] = []
    text = _joined(node, values)
    if text is None:
        values = list(ast.iter_child_nodes(node))
    else:
        yield text
    for value in values:
        yield from messages(value)


def _joined(node: ast.AST, values: list[ast.AST]) -> str | None:
    """Return a text with a word for each value within it, None if a node is no text. Gathers the values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_joined(part, values) or "" for part in parts)
        case ast.FormattedValue(value=value):
            values.append(value)
            return "value"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found: list[ast.AST] = []
            texts = [_joined(part, found) for part in (left, right)]
            if texts != [None, None]:
                values += found + [part for part, text in zip((left, right), texts, strict=True) if text is None]
                return "".join("value" if text is None else text for text in texts)
    return None


def too_long(text: str) -> list[str]:
    return [sentence.strip() for sentence in sentences(text) if n_words(sentence) > MOST_WORDS]


def too_long_in_messages(source: str) -> list[str]:
    return [
        sentence.strip()
        for text in messages(ast.parse(source))
        for sentence in _END_IN_MESSAGE.split(text)
        if n_words(sentence) > MOST_WORDS
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PROJECT)))
def test_sentences_of_docstrings_and_comments_are_short(folder: Path) -> None:
    found = {
        f"{path.name}: {sentence}"
        for path in folder.glob("*.py")
        for text in (*docstrings(path.read_text()), *comments(path.read_text()))
        for sentence in too_long(text)
    }
    assert found == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PROJECT)))
def test_sentences_of_messages_are_short(folder: Path) -> None:
    found = {
        f"{path.name}: {sentence}"
        for path in folder.glob("*.py")
        for sentence in too_long_in_messages(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PROJECT)))
def test_no_message_has_words_that_are_taken_for_credentials(folder: Path) -> None:
    """The command line prints asterisks for them."""
    texts = {text for path in folder.glob("*.py") for text in messages(ast.parse(path.read_text()))}
    assert {text for text in texts if redact_assignments(text) != text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_sentences_of_pages_are_short(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_long_sentences_are_noticed() -> None:
    long = " ".join(["word"] * 26) + "."
    assert too_long(f"Short. {long} Short again.") == [long[:-1]]
    assert too_long(f"- one\n- {long}\n") == [long[:-1]]
    assert too_long(f"| {long} |\n\n```\n{long}\n```\n`{long}`") == []
    assert too_long(f"Run::\n\n    {long}\n\nAnd {' '.join(['word'] * 24)}.") == []
    assert list(comments("x = 1  # one\n# two\n# three\n")) == ["", "one", "two\nthree"]
    assert list(docstrings('"""Page."""\n\n\ndef f():\n    """Part."""\n')) == ["Page.", "Part."]


def test_long_sentences_of_messages_are_noticed() -> None:
    words = " ".join(["word"] * 24)
    assert too_long_in_messages(f'"""{words} {words}."""\nraise Error("one {words}; one {words}. One {words}")') == []
    assert too_long_in_messages(f'logger.warning("{words}"\n " %s and", x)') == [f"{words} %s and"]
    assert too_long_in_messages(f'raise Error(f"{words} {{x!r}}:{{y}} and")') == [f"{words} value:value and"]
    assert too_long_in_messages(f'found.warn("code", "two " + x + (" {words}" if y else ""))') == []
    assert too_long_in_messages(f'found.warn("code", "two " + x + " {words}")') == [f"two value {words}"]
    assert too_long_in_messages(f'Field(description="some " + ", ".join("one two {words}" for _ in x))') == [
        f"one two {words}"
    ]
    assert too_long_in_messages(f"raise Error(f'one {{x or \"one two {words}\"}}')") == [f"one two {words}"]
