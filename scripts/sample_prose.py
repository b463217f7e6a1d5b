"""Print random sentences and identifiers of the project for review, and count words to avoid.

Run from the project's root: ``.venv/bin/python -m scripts.sample_prose``. Read each sentence and each name as a
newcomer would. At most 3 of 100 sentences and 2 of 60 identifiers may look odd; fix them, and sample again with another
``--seed``. ``--under PATH`` samples only files below a path, and ``--words`` lists all uses of the words to avoid.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

N_SENTENCES, N_IDENTIFIERS = 100, 60

#: Words to avoid, as whole-word patterns, by the plain term that replaces them.
WORDS = {
    "report, emit": r"tell|tells|told|telling",
    "is, exists": r"stand|stands|stood|standing",
    "value, text": r"said|says",
    "check, inspect": r"look|looks|looked",
    "the writer, the reader": r"who|whoever",
    "next to, in parallel": r"beside",
    "again, from scratch": r"anew",
    "no process, a process": r"nobody|somebody|everybody",
    "fix, repair": r"mend|mends|mended|mending",
    "indefinitely": r"for ever",
    "roll back": r"take back|takes back|taken back|took back",
    "maintenance": r"upkeep",
    "location": r"place|places",
    "external location": r"elsewhere",
    "dedicated, or nothing": r"of its own|of their own|of one's own",
    "best-effort write": r"jot|jots",
    "now": r"by now|as it was",
    "while": r"so long as|as long as",
}
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`'\"])")
#: A blank line, a list item, a section of a docstring, or an entry of such a section.
_PARAGRAPH_END = re.compile(
    r"\n\s*\n|\n(?=\s*[-*] )|\n(?=\s*(?:\w+|\*{0,2}\w+): )|\n\s*(?:Args|Returns|Yields|Raises):\n"
)
_GENERATED = ("_pb2.py", "_pb2.pyi", "known_schemas.json")
_MIN_WORDS = 4


@dataclass(frozen=True)
class Text:
    """A piece of prose or an identifier, and its location as ``FILE:LINE``."""

    location: str
    text: str


def main() -> None:
    """Print the counts and the sample."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sample_prose", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="repeat the sample with this seed")
    parser.add_argument("--under", default=".", help="sample only files below this path")
    parser.add_argument("--words", action="store_true", help="list the words to avoid instead of a sample")
    options = parser.parse_args()
    files = tracked_files(options.under)
    prose = [text for file in files for text in prose_of(file)]
    if options.words:
        _print_words(prose)
        return
    _print_counts(prose, files)
    seed = options.seed if options.seed is not None else random.randrange(10_000)
    rng = random.Random(seed)
    print(f"\n{N_SENTENCES} sentences (seed {seed})")
    sentences = [sentence for text in prose for sentence in sentences_of(text)]
    for sentence in rng.sample(sentences, min(N_SENTENCES, len(sentences))):
        print(f"- {sentence.text}   [{sentence.location}]")
    print(f"\n{N_IDENTIFIERS} identifiers")
    names = {name.text: name.location for file in files for name in identifiers_of(file)}
    for text in rng.sample(sorted(names), min(N_IDENTIFIERS, len(names))):
        print(f"- {text}   [{names[text]}]")


def tracked_files(under: str) -> list[Path]:
    """Return the tracked Markdown and Python files below a path, without generated files."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", under], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [
        Path(name)
        for name in names
        if name.endswith((".md", ".py")) and not name.endswith(_GENERATED) and "benchmarks/results/" not in name
    ]


def prose_of(file: Path) -> Iterator[Text]:
    """Yield the paragraphs of a page, or the docstrings, comments and messages of a module."""
    source = file.read_text()
    if file.suffix == ".md":
        yield from _paragraphs(file, _FENCE.sub("", source))
        return
    tree = ast.parse(source)
    docstrings = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            docstring = node.body[0]
            docstrings.add(docstring.lineno)
            yield Text(f"{file}:{docstring.lineno}", text)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno not in docstrings and id(node) not in parts:
            text = _literal(node)
            if file.parts[0] != "tests" and text.count(" ") >= _MIN_WORDS and "\n" not in text:
                yield Text(f"{file}:{node.lineno}", text)
    yield from _comments(file, source)


def sentences_of(text: Text) -> list[Text]:
    """Split prose into sentences of at least four words."""
    return [
        Text(text.location, sentence)
        for paragraph in _PARAGRAPH_END.split(text.text)
        for sentence in _SENTENCE_END.split(" ".join(line.strip() for line in paragraph.splitlines()))
        if len(sentence.split()) >= _MIN_WORDS and not sentence.startswith("|")
    ]


def identifiers_of(file: Path) -> Iterator[Text]:
    """Yield the names that a module defines: classes, functions, parameters, variables and fields."""
    if file.suffix != ".py":
        return
    yield Text(str(file), file.stem)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield Text(f"{file}:{node.lineno}", node.name)
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield Text(f"{file}:{node.lineno}", node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name != "_":
                yield Text(f"{file}:{node.lineno}", name)


def _paragraphs(file: Path, source: str) -> Iterator[Text]:
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|#] )", source):
        if paragraph.strip():
            line = source[: source.find(paragraph)].count("\n") + 1
            yield Text(f"{file}:{line}", paragraph.strip())


def _literal(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


def _comments(file: Path, source: str) -> Iterator[Text]:
    """Yield comments. Comments on consecutive lines are joined."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa", "#!")):
            continue
        if lines and token.start[0] != last + 1:
            yield Text(f"{file}:{first}", " ".join(lines))
            lines = []
        if not lines:
            first = token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#:").strip())
    if lines:
        yield Text(f"{file}:{first}", " ".join(lines))


def _print_counts(prose: list[Text], files: list[Path]) -> None:
    areas = {"package": ("trinitylake_ops",), "tests": ("tests",), "docs": ("docs", "README.md", "CHANGELOG.md")}
    n_words = Counter[str]()
    counts: dict[str, Counter[str]] = {area: Counter() for area in areas}
    for text in prose:
        top = text.location.split(":")[0].split("/")[0]
        area = next((area for area, tops in areas.items() if top in tops), None)
        if area is None:
            continue
        n_words[area] += len(text.text.split())
        for plain, spellings in WORDS.items():
            counts[area][plain] += len(re.findall(rf"\b(?:{spellings})\b", text.text, re.IGNORECASE))
    print(f"{len(files)} files; words of prose: " + ", ".join(f"{area} {n_words[area]:,}" for area in areas))
    print(f"{'':45}" + "".join(f"{area:>10}" for area in areas))
    for plain, spellings in WORDS.items():
        print(
            f"{spellings.split('|')[0] + ' -> ' + plain:45}" + "".join(f"{counts[area][plain]:>10}" for area in areas)
        )
    print(f"{'per 10,000 words':45}" + "".join(f"{_rate(counts[area], n_words[area]):>10.1f}" for area in areas))


def _rate(counts: Counter[str], n_words: int) -> float:
    return counts.total() / max(n_words, 1) * 10_000


def _print_words(prose: list[Text]) -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(WORDS.values())})\b", re.IGNORECASE)
    for text in prose:
        for match in pattern.finditer(text.text):
            start, end = max(match.start() - 60, 0), match.end() + 40
            print(f"{text.location}: {text.text[start:end]!r}")


if __name__ == "__main__":
    main()
