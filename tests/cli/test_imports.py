"""Imports of commands: heavy modules are imported only if a command needs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake

HEAVY_MODULES = (
    "dagster", "hdfs_native", "jinja2", "obstore", "pandas", "pyarrow", "pydantic", "pyiceberg", "pyspark", "rich",
    "s3fs",
)  # fmt: skip
#: Modules that read commands may import for a local lakehouse.
READ_COMMANDS = {"pyarrow", "rich"}


def imported_modules(*arguments: str) -> set[str]:
    """Run the command line in a separate process, and return the heavy modules that it imported."""
    code = (
        "import sys\nfrom trinitylake_ops.cli import main\ntry:\n    main()\n"
        f"finally:\n    print('LOADED', *[name for name in {HEAVY_MODULES!r} if name in sys.modules], file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return set(process.stderr.rpartition("LOADED")[2].split())


@pytest.fixture
def root(tmp_path: Path) -> str:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    with lake.transaction() as transaction:
        transaction.create_namespace("ns")
    return lake.root


def test_help_imports_no_heavy_modules() -> None:
    assert imported_modules("--help") == set()
    assert imported_modules("--version") == set()


@pytest.mark.parametrize("command", [["log"], ["ls"], ["ls", "ns"], ["show"], ["diff", "0", "1"], ["tree"]])
def test_read_commands_do_not_import_iceberg(root: str, command: list[str]) -> None:
    assert imported_modules("--root", root, *command) <= READ_COMMANDS


@pytest.mark.parametrize("command", [["repair-hint", "--check-only"], ["exports"], ["undelete", "-h"]])
def test_generated_commands_do_not_import_iceberg(root: str, command: list[str]) -> None:
    assert imported_modules("--root", root, *command) <= {*READ_COMMANDS, "pydantic"}


def test_operations_do_not_import_pandas() -> None:
    """Every Dagster process imports all operations, and importing pandas would take a third of that time."""
    code = "import sys, trinitylake_ops.declarations.registry; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_lists_each_command_with_its_summary() -> None:
    help_text = trinitylake.get_help(trinitylake.make_context("trinitylake", [], resilient_parsing=True))
    for name, command in trinitylake.commands.items():
        assert f"{name} " in help_text
        assert command.name == name
        assert " ".join(command.get_short_help_str(100).split()) in " ".join(help_text.split())


def test_help_lists_each_command_in_one_section() -> None:
    help_text = trinitylake.get_help(trinitylake.make_context("trinitylake", [], resilient_parsing=True))
    titles = re.findall(r"^([A-Z][a-z ]+):$", help_text, flags=re.MULTILINE)
    sections = ["Inspect", "Change", "Maintain", "Reclaim space", "Exports", "Branches", "Repair", "Serve"]
    assert titles == ["Options", *sections]
    commands = help_text.partition("Inspect:")[2].partition("Examples:")[0]
    assert sorted(re.findall(r"^  ([a-z-]+) ", commands, flags=re.MULTILINE)) == sorted(trinitylake.commands)
