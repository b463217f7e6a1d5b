"""docs/internals/architecture.md lists each folder and module of the package; only named modules delete files."""

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
    """Return what docs/internals/architecture.md has to say: each folder, its first line, and its modules."""
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
    assert listing() in (ROOT / "docs" / "internals" / "architecture.md").read_text()


#: The modules, or the packages by a slash at the end, that send deletes to a storage, and what they delete.
DELETES = {
    "access/table_owners.py": "registrations of other lakehouses under a table root that the operator claims",
    "iceberg/io/file_io.py": "files that PyIceberg, and the modules of iceberg below, wrote and name",
    "iceberg/io/output_file.py": "its own files of a failed change",
    "iceberg/table_change.py": "its own files of a failed change",
    "iceberg/write/data_files.py": "its own data files that no version names",
    "operations/executor.py": "what gc/delete decided, in this process",
    "operations/gc/delete.py": "existing files of a lakehouse",
    "operations/lease.py": "leases older than the one that it took",
    "operations/metadata_rewrites.py": "its own metadata files of a failed operation",
    "spark/executor_tasks.py": "what gc/delete decided, in tasks of Spark",
    "transaction/": "its own files of failed attempts, its own saved transactions, lapsed requests for a slot",
}
#: The operations that discard files which they wrote themselves, by the function of failed commits.
DISCARDS = {
    "operations/clones/refresh.py": "its manifest, if an earlier attempt had committed another one",
    "operations/gc/expire.py": "its plan file, if the expiry was not committed",
    "operations/metadata_rewrites.py": "its metadata files, if the operation was not committed",
    "transaction/": "files of failed attempts",
}
_SENDS_DELETES = ("delete", "delete_many", "delete_batch")


def _callers(names: tuple[str, ...], kind: type[ast.Attribute] | type[ast.Name]) -> set[str]:
    """Return the modules outside storage that call a method, or a function, of these names."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = {one.attr if isinstance(one, ast.Attribute) else one.id for one in calls if isinstance(one, kind)}
        if called.intersection(names):
            found.add(path.relative_to(PACKAGE).as_posix())
    return {path for path in found if not path.startswith("storage/")}


def _entries(modules: set[str], known: dict[str, str]) -> set[str]:
    """Return modules as the entries of a table that contain them, and by their own paths if none does."""
    return {
        next((one for one in known if path == one or path.startswith(f"{one.rstrip('/')}/")), path) for path in modules
    }


def test_only_known_modules_delete_files() -> None:
    assert _entries(_callers(_SENDS_DELETES, ast.Attribute), DELETES) == set(DELETES)
    assert _entries(_callers(("discard",), ast.Name), DISCARDS) == set(DISCARDS)
