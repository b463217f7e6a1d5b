"""Test that hostile text in a lakehouse controls no terminal and breaks neither JSON nor HTML reports."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_commands import Cli, cli, logging_as_it_was
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationBatch, ExportLevel, ExportRecord, TableDef
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import COMMIT_INFO
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import LocalStorage

__all__ = ["cli", "logging_as_it_was"]

#: Clearing the screen, setting a title, a C1 control, a forged line, and right-to-left text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07\x9b31m\rError: none\nDone\u202egpj.exe\u2028\u200b"
#: The part of it that names may contain.
NAME = "evil\x9b31m\u202egpj\u200b"
#: The part of it that file names may contain.
FILE = "evil\x1b[2J\x9b\nx\u202e"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """The root of a lakehouse in which all names, messages and references are hostile."""
    folder = tmp_path / "lake"
    lake = Lakehouse.create(f"file://{folder}/", properties={HOSTILE: HOSTILE}, minimum_versions_to_keep=1)
    append_rows(lake, "ns.t")
    with lake.transaction(message=HOSTILE, run_id=HOSTILE, properties={HOSTILE: HOSTILE}, operation=HOSTILE) as txn:
        txn.create_namespace(NAME, {HOSTILE: HOSTILE})
        txn.create_table(NAME, NAME, TableDef(properties={HOSTILE: HOSTILE}, format_properties={HOSTILE: HOSTILE}))
        lost = {METADATA_LOCATION: f"tables/{FILE}/metadata/1.json".replace("\n", "")}
        txn.create_table(NAME, "lost", TableDef(format_properties=lost, id="lost"))
    operations.plan_export(lake, NAME).execute()
    with lake.transaction() as txn:
        txn.drop_table(NAME, "lost")
    _forge(lake)
    for path in (FILE, f"tables/{FILE}/data/{FILE}", f"0000/0000/0000/00000000-{FILE}", f"_ops/{FILE}"):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    return lake.root


def _forge(lake: Lakehouse) -> None:
    """Write records and a committer with values that this package never writes."""
    with lake.transaction() as txn:
        definition = txn.base.definition
        export = ExportRecord(name=HOSTILE, version=1, level=ExportLevel.MINIMAL, target_uri="", root_location=FILE)
        batch = ExpirationBatch(id=HOSTILE, versions="0", plan_path=f"_ops/{FILE}", digest=HOSTILE)
        changed = replace(definition, exports=(*definition.exports, export), expirations=(batch,))
        txn.alter_definition(changed)
    path = root_path(lake.latest_version())
    node = decode_node(lake.storage.read(path), path)
    info = {
        "operation": HOSTILE,
        "message": HOSTILE,
        "user": HOSTILE,
        "host": HOSTILE,
        "engine": HOSTILE,
        "run_id": HOSTILE,
    }
    info |= {"approved_by": HOSTILE, "members": [HOSTILE], "properties": {HOSTILE: HOSTILE}, "counts": {HOSTILE: 1}}
    system = {**node.system, COMMIT_INFO: json.dumps(info, ensure_ascii=False), f"odd{HOSTILE}": HOSTILE}
    node.system = system
    lake.storage.write(path, encode_node(node, order=128))


def is_harmless(text: str) -> bool:
    """Return whether text contains no control sequences and no invisible characters."""
    return all(char == "\n" or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} for char in text)


COMMANDS: tuple[tuple[object, ...], ...] = (
    ("log",),
    ("ls",),
    ("ls", NAME),
    ("show",),
    ("show", NAME),
    ("show", f"{NAME}.{NAME}"),
    ("show", "--version", HOSTILE),
    ("show", "--version", NAME),
    ("show", f"{NAME}.{HOSTILE}"),
    ("head", "ns.t"),
    ("head", "ns.t", "--columns", HOSTILE),
    ("head", f"{NAME}.{NAME}"),
    ("count", "ns.t"),
    ("count", f"{NAME}.{HOSTILE}"),
    ("log", "ns.t"),
    ("log", f"{NAME}.{NAME}"),
    ("diff", "0", "latest"),
    ("diff", "0", NAME),
    ("tree",),
    ("verify",),
    ("verify", "--deep"),
    ("repair",),
    ("exports",),
    ("clones",),
    ("drop-clone", HOSTILE),
    ("compare", HOSTILE),
    ("promote", HOSTILE),
    ("refresh", HOSTILE),
    ("clone", HOSTILE),
    ("clone", "memory://hostile-clone/", "--name", HOSTILE),
    ("verify-export", NAME),
    ("verify-export", HOSTILE),
    ("expire",),
    ("purge",),
    ("orphans",),
    ("trim",),
    ("compact-tables",),
    ("prune-exports",),
    ("drop-namespace", NAME),
    ("rollback", "1"),
    ("restore", NAME),
    ("reconcile",),
    ("repair-hint", "--check-only"),
    ("undelete", HOSTILE),
    ("export", HOSTILE),
    ("drop-export", HOSTILE),
    ("register-table", f"{NAME}.x", HOSTILE),
    ("register-table", f"{NAME}.x", f"/{HOSTILE}"),
    ("resolve-commit", HOSTILE),
    ("create-namespace", HOSTILE),
    ("expire", "--yes"),
    ("purge", "--yes"),
    ("orphans", "--yes"),
    ("compact", "--yes"),
    ("compact",),
    ("trim", "--yes"),
    ("drop-namespace", NAME, "--yes"),
)
_WITH_JSON = [command for command in COMMANDS if "--yes" not in command]
_WITH_PAGE = (("log",), ("verify",), ("expire",))


def _id(command: tuple[object, ...]) -> str:
    return ascii(" ".join(map(str, command)))[1:40].replace("\\", "")


@pytest.mark.parametrize("command", COMMANDS, ids=_id)
def test_output_contains_no_terminal_control_sequences(cli: Cli, root: str, command: tuple[object, ...]) -> None:
    result = cli(*command, root=root)
    assert is_harmless(result.out), result.out
    assert is_harmless(result.err), result.err
    assert result.code != 1 or not result.err.startswith("Traceback")
    assert sum(line.startswith("Error: ") for line in result.err.splitlines()) <= 1


@pytest.mark.parametrize("command", _WITH_JSON, ids=_id)
def test_hostile_text_keeps_json_valid(cli: Cli, root: str, command: tuple[object, ...]) -> None:
    result = cli(*command, "--json", root=root)
    assert is_harmless(result.out) and is_harmless(result.err), result
    if result.code in (0, 1) and result.out:
        json.loads(result.out)


@pytest.mark.parametrize("command", _WITH_PAGE, ids=_id)
def test_html_reports_contain_no_control_characters(
    cli: Cli, root: str, command: tuple[object, ...], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = cli(*command, "--html", page, root=root)
    assert is_harmless(result.out) and is_harmless(result.err), result
    assert is_harmless(page.read_text())


def test_html_report_path_is_escaped(cli: Cli, root: str, tmp_path: Path) -> None:
    result = cli("log", "--html", tmp_path / f"{FILE}.html", root=root)
    assert is_harmless(result.out) and is_harmless(result.err), result
    assert is_harmless(cli("log", "--html", tmp_path / FILE / "no" / "folder.html", root=root).err)


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_warnings_are_one_escaped_line_each(cli: Cli, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log lines about errors, also from libraries."""

    def write_best_effort(storage: LocalStorage, path: str, data: bytes) -> None:
        warnings.warn(f"{HOSTILE}{'x' * 5_000}", stacklevel=1)
        logging.getLogger("library").warning("name %r of %s", HOSTILE, "y" * 5_000)
        try:
            raise ValueError(f"{HOSTILE}{'z' * 5_000}")
        except ValueError:
            logging.getLogger("library").warning("it went on", exc_info=True)
        raise StoragePermissionError(f"{HOSTILE}{'a/' * 2_500}", path=f"{HOSTILE}{'b/' * 2_500}")

    monkeypatch.setattr(LocalStorage, "write_best_effort", write_best_effort)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # excludes pytest's handlers
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = cli("create-namespace", "fresh", root=root)
    assert result.code == 0
    assert is_harmless(result.err), result.err
    lines = result.err.splitlines()
    assert len(lines) == 4, lines
    for line in lines:
        assert line.startswith("WARNING: ")
        assert len(line) < 1_000, line
        assert "Traceback" not in line
        assert not re.search(r"(x{201}|y{201}|z{201}|(a/){101}|(b/){101})", line)
    assert "hint could not be written" in lines[-1]
