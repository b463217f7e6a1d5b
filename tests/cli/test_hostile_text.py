"""Hostile text in a lakehouse: it cannot control the terminal, and JSON output and HTML reports stay valid."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_commands import Cli, cli, restore_logging
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationBatch, ExportLevel, ExportRecord, TableDef
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import COMMIT_INFO
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import LocalStorage

__all__ = ["cli", "restore_logging"]

#: Sequences that clear the screen and set a title, a C1 control character, a forged line and right-to-left text.
HOSTILE = "\x1b[2J\x1b]0;pwned\x07\x9b31m\rError: none\nDone\u202egpj.exe\u2028\u200b"
#: Hostile text with characters that are allowed in names.
NAME = "evil\x9b31m\u202egpj\u200b"
#: Hostile text with characters that are allowed in file names.
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
        lost_format = {METADATA_LOCATION: f"tables/{FILE}/metadata/1.json".replace("\n", "")}
        txn.create_table(NAME, "lost", TableDef(format_properties=lost_format, id="lost"))
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
    """Write records and commit info with values that this package never writes."""
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
_WITH_HTML = (("log",), ("verify",), ("expire",))


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


@pytest.mark.parametrize("command", _WITH_HTML, ids=_id)
def test_html_reports_contain_no_control_characters(
    cli: Cli, root: str, command: tuple[object, ...], tmp_path: Path
) -> None:
    report = tmp_path / "page.html"
    result = cli(*command, "--html", report, root=root)
    assert is_harmless(result.out) and is_harmless(result.err), result
    assert is_harmless(report.read_text())


def test_html_report_path_is_escaped(cli: Cli, root: str, tmp_path: Path) -> None:
    result = cli("log", "--html", tmp_path / f"{FILE}.html", root=root)
    assert is_harmless(result.out) and is_harmless(result.err), result
    assert is_harmless(cli("log", "--html", tmp_path / FILE / "no" / "folder.html", root=root).err)


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_warnings_are_one_escaped_line_each(cli: Cli, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are log lines about errors of this package and of libraries."""

    def write_best_effort(storage: LocalStorage, path: str, data: bytes) -> None:
        warnings.warn(f"{HOSTILE}{'x' * 5_000}", stacklevel=1)
        logging.getLogger("library").warning("name %r of %s", HOSTILE, "y" * 5_000)
        try:
            raise ValueError(f"{HOSTILE}{'z' * 5_000}")
        except ValueError:
            logging.getLogger("library").warning("continuing after an error", exc_info=True)
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
