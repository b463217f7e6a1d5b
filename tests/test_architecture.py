"""docs/architecture.md lists each folder of the package with its modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trinitylake_ops"


def folders() -> list[Path]:
    return sorted(file.parent for file in PACKAGE.rglob("__init__.py"))


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


def test_the_documented_listing_is_that_of_the_package() -> None:
    assert listing() in (ROOT / "docs" / "architecture.md").read_text()
