"""The tree listing is the architecture: docs/architecture.md shows each folder, and no folder shows too much."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trinitylake_ops"
MOST_MODULES = 12


def folders() -> list[Path]:
    return sorted(file.parent for file in PACKAGE.rglob("__init__.py") if "generated" not in file.parts)


def modules_of(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("__"))


def listing() -> str:
    """Return what docs/architecture.md has to say: each folder, its first line, and its modules."""
    lines = []
    for folder in folders():
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        name = "  " * (len(folder.relative_to(ROOT).parts) - 1) + f"{folder.name}/"
        lines += [f"{name:<18} {text.splitlines()[0]}".rstrip(), f"{'':<20} {', '.join(modules_of(folder))}".rstrip()]
    return "\n".join(lines)


def test_every_folder_says_what_it_is() -> None:
    for folder in folders():
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_no_folder_shows_more_than_twelve_modules() -> None:
    assert {
        folder.name: len(modules_of(folder)) for folder in folders() if len(modules_of(folder)) > MOST_MODULES
    } == {}


def test_the_documented_listing_is_that_of_the_package() -> None:
    assert listing() in (ROOT / "docs" / "architecture.md").read_text()


def test_nearly_all_files_and_functions_are_short() -> None:
    """Of 20 files, 19 have 350 lines at most; of 20 functions, 19 have 40."""
    files = [file for file in PACKAGE.rglob("*.py") if "generated" not in file.parts]
    functions = [
        node.end_lineno - node.lineno + 1
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert _p95([len(file.read_text().splitlines()) for file in files]) <= 350
    assert _p95(functions) <= 40


def _p95(lengths: list[int]) -> int:
    return sorted(lengths)[len(lengths) * 95 // 100]
