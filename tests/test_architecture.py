"""The list of modules in docs/internals/architecture.md is complete, and only the modules named here delete files."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trinitylake_ops"


def package_folders() -> list[Path]:
    return sorted(file.parent for file in PACKAGE.rglob("__init__.py"))


def modules_of(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("__"))


def module_list() -> str:
    """Return the expected module list: each folder with the first line of its docstring, and its modules."""
    lines = []
    for folder in package_folders():
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        name = "  " * (len(folder.relative_to(ROOT).parts) - 1) + f"{folder.name}/"
        lines += [f"{name:<18} {text.splitlines()[0]}".rstrip(), f"{'':<20} {', '.join(modules_of(folder))}".rstrip()]
    return "\n".join(lines)


def test_every_folder_has_docstring() -> None:
    for folder in package_folders():
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_architecture_page_lists_all_modules() -> None:
    assert module_list() in (ROOT / "docs" / "internals" / "architecture.md").read_text()


#: What each module deletes from a storage. A path with a trailing slash means all modules of a folder.
DELETES = {
    "access/table_owners.py": "registrations of other lakehouses under a table root that the operator claims",
    "iceberg/io/file_io.py": "files that PyIceberg or a module of iceberg/ wrote and asks to delete",
    "iceberg/io/output_file.py": "its own files after a failed change",
    "iceberg/table_change.py": "its own files after a failed change",
    "iceberg/write/data_files.py": "its own data files that no version refers to",
    "operations/executor.py": "files that gc/delete selected, in this process",
    "operations/gc/delete.py": "existing files of a lakehouse",
    "operations/lease.py": "leases older than the lease that it acquired",
    "operations/metadata_rewrites.py": "its own metadata files after a failed operation",
    "operations/space/update.py": "files of the space summary that its newest index does not name, after an hour",
    "spark/executor_tasks.py": "files that gc/delete selected, in Spark tasks",
    "transaction/": "its own files of failed attempts, its own saved transactions, lapsed requests for a slot",
}
#: What each module deletes of the files that it wrote itself, with the function for failed commits.
DISCARDS = {
    "operations/clones/refresh.py": "its manifest, if an earlier attempt had committed another one",
    "operations/gc/expire.py": "its plan file, if the expiration was not committed",
    "operations/metadata_rewrites.py": "its metadata files, if the operation was not committed",
    "transaction/": "files of failed attempts",
}
_DELETE_METHODS = ("delete", "delete_many", "delete_batch")


def _callers(names: tuple[str, ...], node_type: type[ast.Attribute] | type[ast.Name]) -> set[str]:
    """Return the modules outside storage/ that call a method or a function with one of these names."""
    callers = set()
    for path in PACKAGE.rglob("*.py"):
        callees = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = {
            callee.attr if isinstance(callee, ast.Attribute) else callee.id
            for callee in callees
            if isinstance(callee, node_type)
        }
        if called.intersection(names):
            callers.add(path.relative_to(PACKAGE).as_posix())
    return {path for path in callers if not path.startswith("storage/")}


def _entries(modules: set[str], table: dict[str, str]) -> set[str]:
    """Return the entry of the table that contains each module, or the path of the module if there is none."""
    return {
        next((entry for entry in table if path == entry or path.startswith(f"{entry.rstrip('/')}/")), path)
        for path in modules
    }


def test_only_listed_modules_delete_files() -> None:
    assert _entries(_callers(_DELETE_METHODS, ast.Attribute), DELETES) == set(DELETES)
    assert _entries(_callers(("discard",), ast.Name), DISCARDS) == set(DISCARDS)
