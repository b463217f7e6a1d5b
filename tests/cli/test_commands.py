"""Every command, called in the test process: text output, JSON output and exit code."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tests.lakes import Lakes, lakes, table
from tests.operations.changes import append_rows, content, create, drop, expire, overwrite_rows
from tests.transaction.groups import commit_together
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.app import main, trinitylake
from trinitylake_ops.errors import StoragePermissionError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExportLevel, ExportRecord, RetentionRules
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.versions.commit_info import acting_for_run

__all__ = ["lakes"]

ROOT = "memory://cli/"
COMMANDS = sorted(trinitylake.commands)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code in (0, 1), self
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the logging configuration, which the command line changes for its process."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    logger.handlers = []
    yield
    logger.handlers, logger.level = handlers, level


class Cli:
    """Calls the command line in the test process."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch):
        self._capture = capture
        self._patch = patch

    def __call__(self, *arguments: object, root: str | None = ROOT) -> Result:
        root_option = [] if root is None else ["--root", root]
        self._patch.setattr(sys, "argv", ["trinitylake", *root_option, *map(str, arguments)])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as exit_error:
            main()
        assert isinstance(exit_error.value.code, int)
        return Result(exit_error.value.code, *self._capture.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.delenv("TRINITYLAKE_ROOT", raising=False)
    return Cli(capsys, monkeypatch)


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    """A lakehouse at version 2 with a namespace and two tables. One of them was altered."""
    lakehouse = Lakehouse.create(ROOT)
    create(lakehouse, "ns", "t", "u")
    with lakehouse.transaction(message="change", run_id="run-1") as txn:
        txn.alter_table("ns", "t", table(changed="yes"))
    yield lakehouse
    drop_memory_root(ROOT)


def assert_error(result: Result, code: int, *parts: str) -> None:
    """Assert that a command printed one error line to standard error, and nothing to standard output."""
    assert (result.code, result.out) == (code, ""), result
    assert result.err.startswith(("Error: ", '{"error": '))
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_command_names() -> None:
    assert set(COMMANDS) == {
        "clone", "clones", "compact", "compact-tables", "compare", "completion", "count", "create-namespace", "diff",
        "drop-clone", "drop-export", "drop-namespace", "expire", "export", "exports", "head", "init", "log", "ls",
        "maintain", "orphans", "policy", "promote", "prune-exports", "purge", "reconcile", "refresh",
        "register-table", "relocate", "repair", "repair-hint", "resolve-commit", "restore", "rollback", "serve",
        "show", "space", "status", "tree", "trim", "undelete", "verify", "verify-export",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_example_and_json_option(cli: Cli, command: str, flag: str) -> None:
    result = cli(command, flag, root=None)
    assert (result.code, result.err) == (0, "")
    assert f"Example: trinitylake {'--root /data/lake ' if command == 'init' else ''}{command}" in result.out
    assert "--json" in result.out or command in ("serve", "completion")  # they print no records


def test_general_help_lists_commands_and_exit_codes(cli: Cli) -> None:
    result = cli("--help", root=None)
    assert result.code == 0
    assert all(f"\n  {command} " in result.out for command in COMMANDS)
    assert all(f"\n    {code}  " in result.out for code in range(6))
    assert cli(root=None).code == 2
    assert cli("--version", root=None).code == 0


def test_help_examples_parse() -> None:
    for command in trinitylake.commands.values():
        assert command.help is not None
        (example,) = (line for line in command.help.splitlines() if line.strip().startswith("Example: "))
        arguments = example.split("Example: trinitylake ")[1].split()
        del arguments[: arguments.index(str(command.name)) + 1]
        assert isinstance(command.make_context("x", arguments), click.Context)


def test_init(cli: Cli, lakes: Lakes) -> None:
    root = str(lakes.folder / "made")
    result = cli("--storage-option", "fsync=false", "init", "--order", 8, "--property", "k=v=w", "--json", root=root)
    output = result.json
    assert (output["version"], output["root"]) == (0, f"file://{root}/")
    definition = Lakehouse.open(root).snapshot().definition
    assert (definition.order, definition.properties) == (8, {"k": "v=w"})
    assert output["definition"]["isolation_level"] == "snapshot"
    explained = cli("init", "--explain", "--json", root=f"{root}6").json
    assert explained.keys() - output.keys() == {"forecast"}
    forecast = explained["forecast"]
    assert [entry["objects"] for entry in forecast] == [10**exponent for exponent in range(3, 10)]
    assert [entry["height"] for entry in forecast] == sorted(entry["height"] for entry in forecast)
    default_output = cli("init", root=f"{root}7").out
    assert default_output.startswith(f"Created a lakehouse at file://{root}7/\n")
    assert len(default_output.splitlines()) == 2, "only what a new user needs"
    text = cli("init", "--isolation-level", "serializable", "--explain", root=f"{root}2")
    assert f"Created a lakehouse at file://{root}2/" in text.out
    assert "serializable" in text.out
    assert "1,000,000,000" in text.out
    assert re.search("node_compression +none", text.out)
    compressed = cli("init", "--node-compression", "zstd", "--json", root=f"{root}4").json
    assert compressed["definition"]["node_compression"] == "zstd"
    assert re.search("node_compression +zstd", cli("show", root=f"{root}4").out)
    assert cli("init", "--node-compression", "none", "--json", root=f"{root}5").json["definition"] | {
        "id": ""
    } == output["definition"] | {"id": "", "order": 128, "properties": {}}
    assert_error(cli("init", "--node-compression", "gzip", root=f"{root}3"), 2, "lz4")
    assert_error(cli("init", root=root), 3, "a lakehouse already exists")
    assert_error(cli("init", "--order", 2, root=f"{root}3"), 2, "order")
    # With these settings no commit would succeed, or no space would ever be reclaimed.
    for extreme in (1, 59_999, 10**12, 10**30):
        assert_error(cli("init", "--txn-ttl-millis", extreme, root=f"{root}3"), 2, "60000<=x<=315360000000")
    for invalid in ("novalue", "=value"):
        assert_error(cli("init", "--property", invalid, root=f"{root}3"), 2, "--property takes NAME=VALUE")
    assert_error(cli("init", "--property", "a=1", "--property", "a=2", root=f"{root}3"), 2, "--property has two values")


def test_log(cli: Cli, lake: Lakehouse) -> None:
    versions = cli("log", "--json").json
    assert [(v["version"], v["operation"], v["message"], v["run_id"]) for v in versions] == [
        (2, "alter-table", "change", "run-1"),
        (1, "transaction", "ns", None),
        (0, "init", "create the lakehouse", None),
    ]
    assert versions[0]["created_at"].endswith("+00:00")
    assert versions[0]["state"] == "live"
    assert len(cli("log", "--limit", 1, "--json").json) == 1
    operations.rollback(lake, 1)
    with acting_for_run("run-2", "Ada Lovelace"):
        expire(lake, "1")
    assert cli("log", "--limit", 1, "--json").json[0]["approved_by"] == "Ada Lovelace"
    text = cli("log").out
    assert ", approved by Ada Lovelace" in text
    assert "run-1" in text
    assert "rollback (from 2)" in text
    assert "expired" in text
    assert_error(cli("log", "--limit", 0), 2, "--limit")


def test_log_shows_clients_of_server(cli: Cli, lake: Lakehouse) -> None:
    with lake.transaction(properties={"principal": "etl"}) as txn:
        txn.create_namespace("made")
    (line,) = (line for line in cli("log").out.splitlines() if "etl (by the server)" in line)
    assert line.startswith("3 ")
    assert [info.committer for info in lake.history(1)] == ["etl (by the server)"]


def test_log_stat(cli: Cli, lake: Lakehouse) -> None:
    version = cli("log", "--limit", 1, "--json").json[0]
    assert version["counts"] == {"set": 1, "deleted": 0}
    assert version["cost"]["attempts"] == 1
    assert version["cost"]["requests"] == 3, "a definition, the root and the hint"
    assert version["root_bytes"] == lake.storage.stat(lake.snapshot().location).size_bytes
    lines = cli("log", "--stat").out.splitlines()
    header = next(line for line in lines if "attempts" in line)
    assert all(column in header for column in ("version", "operation", "set", "deleted", "requests", "bytes"))
    assert any("alter-table" in line and " kB" in line for line in lines)


def test_log_shows_each_transaction_of_group(cli: Cli, lake: Lakehouse) -> None:
    commit_together(lake, [lambda txn: txn.create_table("ns", "p", table()), lambda txn: txn.drop_table("ns", "t")])
    (version,) = cli("log", "--limit", 1, "--json").json
    assert (version["operation"], version["counts"]) == ("group", {"set": 1, "deleted": 1})
    assert [transaction["operation"] for transaction in version["transactions"]] == ["create-table", "drop-table"]
    assert [transaction["id"] for transaction in version["transactions"]] == version["members"]
    for options in ((), ("--stat",)):
        out = cli("log", *options).out
        assert "- create-table" in out
        assert "- drop-table" in out


def test_ls(cli: Cli, lake: Lakehouse) -> None:
    assert cli("ls", "--json").json == ["ns"]
    assert cli("ls", "ns", "--json").json == ["t", "u"]
    assert cli("ls", "--version", 0, "--json").json == []
    assert cli("ls", "--timestamp", lake.snapshot(0).created_at.isoformat(), "--json").json == []
    assert cli("ls", "--timestamp", lake.snapshot(1).created_at_ms, "--json").json == ["ns"]
    assert cli("ls").out.split() == ["namespace", "ns"]
    assert cli("ls", "ns").out.split() == ["table", "t", "u"]
    assert_error(cli("ls", "nowhere"), 4, "'nowhere'")
    assert_error(cli("ls", "--timestamp", "soon"), 2, "ISO 8601")
    assert_error(cli("ls", "--timestamp", "1970-01-01"), 4, "no version is as old")
    assert_error(cli("ls", "--version", 1, "--timestamp", "1970-01-01"), 2, "not both")


def test_show(cli: Cli, lake: Lakehouse) -> None:
    append_rows(lake, "ns.real")
    output = cli("show", "--json").json
    assert (output["version"], output["namespaces"]) == (lake.latest_version(), ["ns"])
    assert output["definition"]["order"] == 128
    namespace = cli("show", "ns", "--version", 2, "--json").json
    assert (namespace["namespace"], namespace["tables"], namespace["version"]) == ("ns", ["t", "u"], 2)
    output = cli("show", "ns.real", "--json").json
    assert (output["namespace"], output["table"], output["definition"]["table_type"]) == ("ns", "real", "MANAGED")
    assert [column["name"] for column in output["definition"]["schema"]["columns"]] == ["id"]
    assert "namespaces: ns" in cli("show").out
    assert "t, u" in cli("show", "ns", "--version", 2).out
    assert "long" in cli("show", "ns.real").out
    assert_error(cli("show", "nowhere"), 4, "'nowhere'")
    assert_error(cli("show", "ns.nowhere"), 4, "ns.nowhere")


def test_show_formats_records_as_text(cli: Cli, lake: Lakehouse) -> None:
    operations.plan_export(lake, "kept", "minimal").execute()
    lake.alter_definition(retention_rules=RetentionRules(keep_last=5), properties={"owner": "sales"})
    output = " ".join(cli("show").out.split())
    assert "exports kept (version" in output
    assert ", minimal)" in output
    assert "retention_rules keep_last=5" in output
    assert "properties owner=sales" in output
    assert "(name=" not in output


def test_show_resolves_names_with_dots(cli: Cli, lake: Lakehouse) -> None:
    long_name = "n" * 80
    with lake.transaction() as txn:
        for namespace in ("a.b", long_name):
            txn.create_namespace(namespace)
        txn.create_table("a.b", "c.d", table())
        txn.create_table(long_name, "t" * 80, table())
    assert cli("show", "a.b", "--json").json["namespace"] == "a.b"
    assert cli("show", "a.b.c.d", "--json").json["table"] == "c.d"
    assert cli("show", f"{long_name}.{'t' * 80}", "--json").json["namespace"] == long_name, (
        "the full name is too long for a namespace"
    )


def test_diff(cli: Cli, lake: Lakehouse) -> None:
    assert cli("diff", 1, 2, "--json").json == [{"kind": "changed", "namespace": "ns", "table": "t"}]
    assert {"kind": "added", "namespace": "ns", "table": None} in cli("diff", 0, 1, "--json").json
    assert cli("diff", 2, 2, "--json").json == []
    assert cli("diff", 1, 2).out.split() == ["change", "object", "changed", "ns.t"]
    assert cli("diff", 2, 2).out == "2 and 2 do not differ.\n"
    operations.plan_export(lake, "old", version=0).execute()
    assert len(cli("diff", "old", 1, "--json").json) == 3
    assert_error(cli("diff", 0, 99), 4, "99")


def test_diff_and_log_show_rows(cli: Cli, lake: Lakehouse) -> None:
    first = append_rows(lake, "ns.real")
    last = append_rows(lake, "ns.real")
    (change,) = cli("diff", first, last, "--stat", "--json").json["objects"]
    assert (change["kind"], change["before"]["rows"], change["after"]["rows"]) == ("changed", 3, 6)
    assert (change["delta"]["rows_added"], change["delta"]["rows_removed"], change["delta"]["files_added"]) == (3, 0, 1)
    (reverse,) = cli("diff", last, first, "--stat", "--json").json["objects"]
    assert (reverse["delta"]["rows_added"], reverse["delta"]["rows_removed"]) == (0, 3)
    line = next(line for line in cli("diff", first, last, "--stat").out.splitlines() if "ns.real" in line)
    assert line.split()[:5] == ["changed", "ns.real", "+3", "-0", "6"]
    logged = cli("log", "--stat", "--json").json
    assert logged[0]["diff"]["objects"] == [change]
    assert logged[-1]["diff"]["objects"] == []
    assert any("+3 -0" in line for line in cli("log", "--stat", "--limit", 1).out.splitlines())
    assert_error(cli("diff", 0, 99, "--stat"), 4, "99")


def test_create_namespace(cli: Cli, lake: Lakehouse) -> None:
    output = cli("create-namespace", "new", "--property", "owner=me", "--json").json
    assert (output["version"], output["namespace"], output["definition"]["properties"]) == (3, "new", {"owner": "me"})
    assert lake.snapshot().namespace("new").properties == {"owner": "me"}
    assert cli("create-namespace", "other").out == "Created namespace other: version 4\n"
    assert_error(cli("create-namespace", "new"), 3, "'new'")


@pytest.mark.parametrize("name", ["", "with space", "x" * 101, "bell\x07", "new\nline"])
def test_invalid_names_are_rejected(cli: Cli, lake: Lakehouse, name: str) -> None:
    before = content(lake)
    for arguments in (
        ["create-namespace", name],
        ["drop-namespace", name],
        ["ls", name],
        ["show", name],
        ["rollback", 0, "--namespace", name],
        ["export", name * 2],
    ):
        result = cli(*arguments)
        assert_error(result, 2)
        assert result.err.rstrip("\n").isprintable()
    assert content(lake) == before


def assert_planned(cli: Cli, lake: Lakehouse, *arguments: object) -> dict[str, Any]:
    """Assert that a command without approval prints its plan and changes nothing. Return the plan."""
    before = content(lake)
    result = cli(*arguments, "--json")
    plan: dict[str, Any] = result.json
    assert plan["digest"] in result.err
    assert "Nothing was done" in result.err
    text = cli(*arguments)
    assert (text.code, plan["digest"] in text.err) == (0, True)
    assert "\n" in text.out
    for other_digest in ("", "nonsense", plan["digest"].replace("-", "-0")):
        assert_error(cli(*arguments, "--apply", other_digest), 3, "review the new plan")
    assert content(lake) == before
    return plan


@pytest.mark.parametrize(
    "command",
    [
        ("expire",),
        ("purge",),
        ("orphans",),
        ("trim",),
        ("compact-tables",),
        ("relocate",),
        ("repair",),
        ("rollback", "1"),
        ("restore", "kept"),
        ("prune-exports", "kept", "--keep-last", "1"),
    ],
    ids=lambda command: command[0],
)
def test_empty_plans_print_same_message(cli: Cli, command: tuple[str, ...]) -> None:
    lake = Lakehouse.create(ROOT)
    try:
        create(lake, "ns", "t")
        operations.plan_export(lake, "kept").execute()
        before = lake.latest_version()
        for arguments in ((), ("--yes",), ("--json",), ("--yes", "--json")):
            result = cli(*command, *arguments)
            assert (result.code, result.err) == (0, "Nothing to do.\n"), arguments
            assert "--apply" not in result.out
            if "--json" in arguments:
                assert result.json.get("digest") is None
        assert lake.latest_version() == before
    finally:
        drop_memory_root(ROOT)


@pytest.mark.parametrize("command", ["ls", "show", "tree", "head", "count", "rollback", "clone"])
def test_help_of_timestamp_names_time_zone(cli: Cli, command: str) -> None:
    assert re.search(r"--timestamp TIME\s[^-]*UTC", cli(command, "-h", root=None).out)


def test_rollback(cli: Cli, lake: Lakehouse) -> None:
    plan = assert_planned(cli, lake, "rollback", 1)
    assert (plan["base_version"], plan["to_version"], plan["only"]) == (2, 1, [])
    assert plan["changes"] == [{"kind": "changed", "namespace": "ns", "table": "t"}]
    create(lake, "other")
    assert_error(cli("rollback", 1, "--apply", plan["digest"]), 3, plan["digest"])
    digest = cli("rollback", 1, "--json").json["digest"]
    output = cli("rollback", 1, "--apply", digest, "--json").json
    assert (output["version"], len(output["changes"])) == (4, 2)
    for arguments in ((), ("--yes",), ("--json",), ("--yes", "--json")):
        assert cli("rollback", 1, *arguments).err == "Nothing to do.\n"
    assert cli("rollback", 1, "--yes").out == ""
    assert cli("rollback", 1, "--json").json["digest"] is None
    assert cli("rollback", 3, "--table", "ns.t", "--yes").out == "Rolled back to the content of version 3: version 5\n"
    assert cli("rollback", "--timestamp", lake.snapshot(0).created_at_ms, "--yes").code == 0
    assert cli("ls", "--json").json == []
    assert_error(cli("rollback"), 2, "--timestamp")
    assert_error(cli("rollback", 1, "--timestamp", 5), 2, "--timestamp")
    assert_error(cli("rollback", 99), 4, "99")
    assert_error(cli("rollback", "nowhere"), 4, "'nowhere'")
    assert_error(cli("rollback", 1, "--table", "ns.nowhere"), 4)
    expire(lake, "1")
    assert_error(cli("rollback", 1), 4, "undelete")


def test_drop_namespace(cli: Cli, lake: Lakehouse) -> None:
    assert_error(cli("drop-namespace", "ns"), 3, "2 tables")
    plan = assert_planned(cli, lake, "drop-namespace", "ns", "--cascade")
    assert plan["tables"] == ["t", "u"]
    drop(lake, "ns", "u")
    assert_error(cli("drop-namespace", "ns", "--cascade", "--apply", plan["digest"]), 3)
    digest = cli("drop-namespace", "ns", "--cascade", "--json").json["digest"]
    assert cli("drop-namespace", "ns", "--cascade", "--apply", digest, "--json").json == {"version": 4, "tables": ["t"]}
    create(lake, "empty")
    assert cli("drop-namespace", "empty", "--yes").out == "Dropped namespace empty: version 6\n"
    assert_error(cli("drop-namespace", "empty"), 4, "'empty'")


def test_damaged_tables_of_exports_and_rollbacks_are_listed(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    for name in ("damaged.t", "whole.t"):
        append_rows(lake, name)
    cli("export", "away", "--level", "full", "--target", "memory://cli-target/")
    copy = Lakehouse.open("memory://cli-target/")
    copy.storage.write(copy.snapshot().table("damaged", "t").format_properties[METADATA_LOCATION], b"{")
    version = lake.latest_version()
    lake.storage.write(lake.snapshot().table("damaged", "t").format_properties[METADATA_LOCATION], b"{")
    exported = cli("export", "all", "--level", "full", "--json")
    assert exported.code == 1
    assert list(exported.json["damaged"]) == ["damaged.t"]
    with lake.transaction() as txn:
        txn.alter_table("damaged", "t", replace(txn.table("damaged", "t"), properties={"changed": str(time.time_ns())}))
    overwrite_rows(lake, "whole.t")
    assert cli("rollback", version, "--yes").code == 5
    digest = cli("rollback", version, "--json").json["digest"]
    rolled_back = cli("rollback", version, "--apply", digest, "--json")
    assert (rolled_back.code, list(rolled_back.json["damaged"])) == (0, ["damaged.t"])
    with lake.transaction() as txn:
        txn.alter_table("damaged", "t", replace(txn.table("damaged", "t"), properties={"changed": str(time.time_ns())}))
    overwrite_rows(lake, "whole.t")
    restored = cli("restore", "away", "--yes", "--json")
    assert (restored.code, list(restored.json["damaged"])) == (1, ["damaged.t"])
    drop_memory_root("memory://cli-target/")


def test_exports(cli: Cli, lake: Lakehouse) -> None:
    assert cli("exports", "--json").json == []
    report = cli("export", "first", "--level", "minimal", "--version", 1, "--retain-for", "30d", "--json").json
    assert (report["name"], report["version"], report["level"]) == ("first", 1, "minimal")
    assert "second" in cli("export", "second").out
    listed = cli("exports", "--json").json
    assert [(e["name"], e["version"], e["state"]) for e in listed] == [
        ("first", 1, "complete"),
        ("second", 4, "complete"),
    ]
    assert listed[0]["retain_until"] > listed[0]["created_at"]
    assert listed[1]["retain_until"] is None
    text = cli("exports").out
    assert report["location"] in text
    assert "kept until" in text
    assert cli("ls", "--version", "first", "--json").json == ["ns"]
    plan = cli("drop-export", "first", "--json").json
    assert (plan["export"]["name"], plan["other_exports"], plan["loses_files"]) == ("first", [], False)
    assert "version 1 can expire" in cli("drop-export", "first").out
    assert len(cli("exports", "--json").json) == 2, "a plan does not drop the export"
    dropped = cli("drop-export", "first", "--apply", plan["digest"], "--json").json
    assert dropped == {"version": 7, "name": "first"}
    assert_error(cli("drop-export", "second", "--apply", plan["digest"]), 3, "review the new plan")
    assert cli("drop-export", "second", "--yes").out == "Dropped export second: version 8\n"
    assert_error(cli("drop-export", "first"), 4, "'first'")
    cli("export", "third")
    assert_error(cli("export", "third"), 3, "'third'")
    assert_error(cli("export", "17"), 2, "digits")
    assert_error(cli("export", "x", "--level", "whole"), 2, "--level")
    assert_error(cli("export", "x", "--version", 99), 4)
    for duration in ("30", "d", "0d", "-1d", "999999999d", "1.5h"):
        assert_error(cli("export", "x", "--retain-for", duration), 2)
    cli("export", "whole", "--level", "full", "--retain-for", "30d")
    (export,) = (export for export in cli("exports", "--json").json if export["name"] == "whole")
    assert export["retain_until"] is not None, "the files of the export are deleted after this time"


def test_exports_of_other_levels(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    report = cli("export", "away", "--level", "full", "--target", target, "--json").json
    assert (report["level"], report["target_version"], report["location"][:7]) == ("full", 0, "file://")
    assert [export["target"] for export in cli("exports", "--json").json] == [
        report["location"].rpartition("/")[0] + "/"
    ]
    assert cli("ls", "--json", root=target).json == cli("ls", "--json").json
    checked = cli("verify-export", "away", "--deep", "--json").json
    assert (checked["missing"], checked["changed"], checked["deep"]) == ([], [], True)
    next((tmp_path / "target").rglob("*-namespace-*.binpb")).unlink()
    damaged = cli("verify-export", "away")
    assert (damaged.code, "missing" in damaged.out) == (1, True)
    cli("drop-namespace", "ns", "--yes")
    cli("export", "here", "--level", "partial", "--namespace", "ns", "--definitions", "--version", 1)
    plan = cli("restore", "here", "--json").json
    assert cli("restore", "here", "--apply", plan["digest"], "--json").json["changes"] == plan["changes"]
    assert_error(cli("restore", "nowhere"), 4, "nowhere")
    assert_error(cli("export", "x", "--level", "full", "--target", "here"), 2, "--target")
    assert_error(cli("export", "x", "--target-option", "region"), 2, "--target-option takes NAME=VALUE")
    assert_error(cli("export", "x", "--namespace", "ns"), 2, "minimal")


def test_clones(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/feature-x/"
    append_rows(lake, "ns.filled")
    created = cli("clone", target, "--retain-for", "14d", "--json").json
    assert (created["name"], created["version"], created["target"]) == ("feature-x", lake.latest_version() - 2, target)
    assert cli("ls", "--json", root=target).json == cli("ls", "--json").json
    (clone,) = cli("clones", "--json").json
    assert (clone["name"], clone["state"], clone["versions"], clone["parent_versions"]) == (
        "feature-x",
        "active",
        0,
        0,
    )
    assert "feature-x" in cli("clones").out
    output = " ".join(cli("show").out.split())
    assert f"clones feature-x (version {created['version']}, at {target})" in output
    assert "exports" not in output
    assert "No clones" in cli("clones", root=target).out
    assert_error(cli("clone", target), 3, "feature-x")
    flags = "--version, --export and --timestamp exclude each other"
    assert_error(cli("clone", f"{target}b", "--version", 1, "--timestamp", 5), 2, flags)
    assert_error(cli("drop-export", "feature-x"), 2, "drop-clone")
    assert_error(cli("drop-clone", "nobody"), 4, "nobody")
    assert cli("show", "--version", "parent@1", "--json", root=target).code == 0
    append_rows(Lakehouse.open(target), "ns.filled")
    compared = cli("compare", "feature-x", "--html", tmp_path / "page.html", "--json").json
    assert [difference["name"] for difference in compared["objects"]] == ["ns.filled"]
    assert "ns.filled" in (tmp_path / "page.html").read_text()
    assert "only in the clone" in cli("compare", "feature-x").out
    plan = cli("promote", "feature-x", "--json").json
    assert [change["table"] for change in plan["changes"]] == ["filled"]
    applied = cli("promote", "feature-x", "--apply", plan["digest"], "--json").json
    assert (applied["version"], applied["changed"]) == (lake.latest_version(), 1)
    assert "Nothing to do" in cli("promote", "feature-x").err
    append_rows(lake, "ns.filled")
    append_rows(Lakehouse.open(target), "ns.filled")
    for command in ("promote", "refresh"):
        steps = cli(command, "feature-x", "--dry-run", "--json").json
        assert {"step": "append", "what": "1 files, 3 rows"}.items() <= steps[1].items()
        assert "changed" in cli(command, "feature-x", "--dry-run").out
        assert_error(
            cli(command, "feature-x", "--dry-run", "--yes"), 2, "--dry-run cannot be combined with --apply and --yes"
        )
    assert_error(cli("promote", "feature-x", "--spark-master", "local[1]"), 2, "--engine spark")
    overwrite_rows(Lakehouse.open(target), "ns.filled")
    assert_error(cli("promote", "feature-x", "--yes"), 3, "--theirs ns.filled")
    assert cli("promote", "feature-x", "--theirs", "ns.filled", "--yes").code == 0
    assert re.search("same +ns.filled", cli("refresh", "feature-x").out)
    assert cli("refresh", "feature-x", "--yes", "--json").json["changed"] == 0
    plan = cli("drop-clone", "feature-x", "--delete-files", "--json").json
    assert plan["files"] > 0
    assert_error(cli("drop-clone", "feature-x", "--apply", plan["digest"]), 3, "review the new plan")
    applied = cli("drop-clone", "feature-x", "--delete-files", "--apply", plan["digest"], "--json").json
    assert (applied["files"], applied["failures"]) == (plan["files"], {})
    assert cli("clones", "--json").json == []
    assert_error(cli("ls", root=target), 4, "no lakehouse")


def test_documented_clone_commands_run(
    cli: Cli, lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "operations" / "clone.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    digest = ""
    for line in block.replace("s3://dev/", f"file://{tmp_path}/").splitlines():
        program, *arguments = line.split()
        assert program == "trinitylake"
        root = {"root": arguments[1]} if arguments[0] == "--root" else {}
        result = (
            cli(*arguments[2 if root else 0 :], *(["--json"]), **root)
            if "DIGEST" not in line
            else cli(*(digest if argument == "DIGEST" else argument for argument in arguments), "--json")
        )
        assert result.code == 0, (line, result)
        digest = result.json.get("digest", "") if isinstance(result.json, dict) else ""
    assert lake.snapshot().has_namespace("experiments")
    assert cli("clones", "--json").json == []


def test_prune_exports(cli: Cli, lake: Lakehouse) -> None:
    for number in range(4):
        cli("export", f"nightly-{number}")
    cli("export", "by-hand")
    plan = cli("prune-exports", "nightly-*", "--keep-last", 2, "--json").json
    assert [(verdict["name"], verdict["is_dropped"]) for verdict in plan["verdicts"]] == [
        ("nightly-3", False),
        ("nightly-2", False),
        ("nightly-1", True),
        ("nightly-0", True),
    ]
    applied = cli("prune-exports", "nightly-*", "--keep-last", 2, "--apply", plan["digest"], "--json").json
    assert applied["names"] == ["nightly-1", "nightly-0"]
    assert [export["name"] for export in cli("exports", "--json").json] == ["by-hand", "nightly-2", "nightly-3"]
    assert "Nothing to do" in cli("prune-exports", "nightly-*", "--keep-last", 2).err
    assert "and no rule keeps it" in cli("prune-exports", "nightly-*", "--keep-last", 1).out
    assert_error(cli("prune-exports", "*"), 2, "all exports but the newest would be dropped")
    help_text = " ".join(cli("prune-exports", "--help").out.split())
    assert "Keep the last N exports." in help_text and "Keep exports created within" in help_text
    assert "Keep the last N versions." in " ".join(cli("expire", "--help").out.split())


def test_export_of_another_program_is_listed(cli: Cli, lake: Lakehouse) -> None:
    record = ExportRecord(
        name="odd", version=1, level=ExportLevel(7), root_location=root_path(1), retain_until_millis=2**62
    )
    lake.alter_definition(exports=(record,), exported_snapshots={"foreign": root_path(1)})
    assert [export["level"] for export in cli("exports", "--json").json] == [None, "unknown_7"]
    assert "9999" in cli("exports").out


def test_hint(cli: Cli, lake: Lakehouse) -> None:
    lake.close()
    lake.storage.write(HINT_PATH, b"0")
    output = cli("repair-hint", "--check-only", "--json").json
    assert (output["state"], output["hinted"], output["latest"], output["repaired"]) == ("behind", 0, 2, False)
    behind = cli("repair-hint", "--check-only")
    assert (behind.code, "behind" in behind.out, behind.err) == (1, True, "")
    repaired = cli("repair-hint", "--json")
    assert (repaired.code, repaired.json["repaired"]) == (0, True)
    right = cli("repair-hint", "--check-only", "--json")
    assert (right.code, right.json["state"]) == (0, "right")
    assert "right" in cli("repair-hint").out


def test_tree_and_compact(cli: Cli, lake: Lakehouse) -> None:
    create(lake, "many", *(f"t{number:03}" for number in range(300)))
    with lake.transaction() as txn:
        for number in range(0, 300, 9):
            txn.alter_table("many", f"t{number:03}", table(changed="yes"))
    output = cli("tree", "--json").json
    assert (output["version"], output["order"]) == (4, 128)
    root, leaves = output["levels"]
    assert (root["depth"], root["nodes"], leaves["depth"]) == (0, 1, 1)
    assert root["messages"] > 0
    text = cli("tree").out
    assert all(name in text for name in ("root", "leaves", "█", f"{leaves['keys']:,}", "of 127"))
    assert len(cli("tree", "--version", 0, "--json").json["levels"]) == 1
    assert_error(cli("tree", "--version", 99), 4, "99")
    report = cli("compact", "--message", "tidy", "--json").json
    assert (report["base_version"], report["version"]) == (4, 5)
    assert report["after"]["levels"][0]["messages"] == 0
    assert cli("log", "--limit", 1, "--json").json[0]["message"] == "tidy"
    assert "nothing to do, version 5" in cli("compact").out
    assert cli("diff", 4, 5, "--json").json == []


def test_compact_tables(cli: Cli, lake: Lakehouse) -> None:
    for _ in range(5):
        append_rows(lake, "ns.rows")
    version = lake.latest_version()
    plan = cli("compact-tables", "--json").json
    assert [(table["table"], table["files"], table["groups"]) for table in plan["tables"]] == [("rows", 5, 1)]
    output = cli("compact-tables", "ns.rows")
    assert "5 of 5" in output.out and f"--apply {plan['digest']}" in output.err
    assert "5 files" not in cli("compact-tables", "--min-input-files", 6).out
    assert_error(cli("compact-tables", "ns.rows", "--apply", f"{version}-{'0' * 64}"), 3, "review the new plan")
    assert lake.latest_version() == version
    report = cli("compact-tables", "--apply", plan["digest"], "--run-id", "r", "--message", "nightly", "--json").json
    assert (report["version"], report["tables"][0]["files_after"]) == (version + 1, 1)
    assert cli("log", "--limit", 1, "--json").json[0]["message"] == "nightly"
    assert cli("compact-tables", "--yes").err == "Nothing to do.\n"


def test_resolve_commit(cli: Cli, lake: Lakehouse) -> None:
    commit_id = str(next(lake.history(1)).commit_id)
    other = "7c52cec4-43e3-4f73-91a3-87cfd94da1f0"
    result = cli("resolve-commit", 2, commit_id, "--json")
    assert (result.code, result.json) == (0, {"version": 2, "commit_id": commit_id, "resolution": "committed"})
    lost = cli("resolve-commit", 1, commit_id)
    assert (lost.code, lost.out) == (1, f"Commit {commit_id} as version 1: lost\n")
    assert cli("resolve-commit", 3, other, "--json").json["resolution"] == "undecided"
    assert lake.latest_version() == 2
    fenced = cli("resolve-commit", 3, other, "--fence")
    assert (fenced.code, fenced.out) == (1, f"Commit {other} as version 3: lost\n")
    assert lake.latest_version() == 3
    assert cli("resolve-commit", 9, other).code == 4
    assert cli("resolve-commit", 3, "its-id").code == 2


def test_verify(cli: Cli, lake: Lakehouse) -> None:
    result = cli("verify", "--json")
    assert (result.code, result.err, result.json["findings"]) == (0, "", [])
    assert cli("verify").out.startswith("Clean: 3 versions")
    lake.close()
    lake.storage.write(HINT_PATH, b"0")
    warned = cli("verify", "--json")
    assert (warned.code, [f["severity"] for f in warned.json["findings"]]) == (0, ["warning"])
    lake.storage.write(root_path(1), b"not an Arrow file")
    result = cli("verify", "--json")
    assert (result.code, result.err) == (1, "")
    assert {(f["code"], f["path"]) for f in result.json["findings"]} >= {("root-corrupt", root_path(1))}
    text = cli("verify")
    assert (text.code, text.out.startswith("Not clean")) == (1, True)
    assert root_path(1) in text.out


def test_verify_with_record_and_limits(cli: Cli, lake: Lakehouse) -> None:
    first = cli("verify", "--incremental", "--deep", "--json").json
    assert first["known_files"] == 0
    assert first["record_path"].startswith("_ops/verified-")
    assert cli("verify", "--incremental", "--json").json["known_files"] > 0
    stopped = cli("verify", "--max-requests", 2)
    assert (stopped.code, stopped.err) == (1, "")
    assert stopped.out.startswith("Incomplete (the budget of 2 requests is spent)")
    assert "not checked: " in stopped.out
    assert cli("verify", "--max-seconds", 1000).code == 0
    assert cli("verify", "--max-requests", 0).code == 2


def test_repair(cli: Cli, lake: Lakehouse) -> None:
    unneeded = cli("repair")
    assert (unneeded.code, unneeded.err) == (0, "Nothing to do.\n")
    lake.close()
    lake.storage.write(HINT_PATH, b"0")
    plan = cli("repair", "--json")
    assert (plan.code, [step["action"] for step in plan.json["steps"]]) == (0, ["hint"])
    assert lake.storage.read(HINT_PATH) == b"0"
    assert_error(cli("repair", "--apply", "2-" + "0" * 64), 3)
    applied = cli("repair", "--apply", plan.json["digest"], "--json")
    assert (applied.code, applied.json["version"]) == (0, 2)
    assert lake.storage.read(HINT_PATH) == b"2"
    lake.storage.write(root_path(1), b"not an Arrow file")
    for options in ((), ("--json",)):
        unrepaired = cli("repair", *options)
        message = "1 error remains that repair cannot fix; the remaining findings say what you can do\n"
        assert (unrepaired.code, unrepaired.err) == (1, message), "a plan without steps fails if errors remain"
    unrepaired = cli("repair", "--to-last-good", "--yes")
    assert (unrepaired.code, unrepaired.err) == (1, "")
    assert root_path(1) in unrepaired.out
    assert "restore the file from a backup" in unrepaired.out


@pytest.mark.parametrize("damage", [b"not an Arrow file", b"", None])
def test_error_of_damaged_root_is_one_line(cli: Cli, lake: Lakehouse, damage: bytes | None) -> None:
    path = root_path(2)
    lake.storage.write(path, lake.storage.read(path)[:300] if damage is None else damage)
    before = content(lake)
    for arguments in (["ls"], ["show"], ["create-namespace", "x"], ["rollback", 1], ["export", "x"], ["exports"]):
        assert_error(cli(*arguments), 5, path)
        assert_error(cli(*arguments, "--json"), 5, path)
    assert_error(cli("log"), 5, path)
    assert content(lake) == before


@pytest.mark.parametrize(
    ("arguments", "root", "code"),
    [
        (["ls"], None, 2),
        (["ls"], "", 2),
        (["ls"], "relative/path", 2),
        (["ls"], "/tmp/../etc", 2),
        (["ls"], "memory://no/./dots", 2),
        (["ls"], "ftp://host/path", 2),
        (["ls"], "memory://nowhere", 4),
        (["nonsense"], ROOT, 2),
        (["ls", "--nonsense"], ROOT, 2),
        (["diff", "1"], ROOT, 2),
        (["--storage-option", "x", "ls"], ROOT, 2),
        (["--storage-option", "nonsense=1", "ls"], ROOT, 2),
    ],
)
def test_error_of_invalid_call_is_one_line(cli: Cli, arguments: list[str], root: str | None, code: int) -> None:
    assert_error(cli(*arguments, root=root), code)
    assert_error(cli(*arguments, "--json", root=root), code)
    assert json.loads(cli(*arguments, "--json", root=root).err)["error"]["code"]


def test_warning_is_shown_after_success(cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that cannot be written does not fail the commit. If the commit fails, the warning is not shown."""

    def reject(self: MemoryStorage, path: str, data: bytes) -> None:
        raise StoragePermissionError("not allowed", path=path)

    lake.close()
    monkeypatch.setattr(MemoryStorage, "write", reject)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    result = cli("create-namespace", "x", "--json")
    assert result.json["version"] == 3
    assert result.err.startswith("WARNING: version 3 is committed")
    assert result.err.count("\n") == 1
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(MemoryStorage, "create", reject)
    monkeypatch.setattr(MemoryStorage, "delete", lambda self, path: reject(self, path, b""))
    assert_error(cli("create-namespace", "y"), 5, "not allowed")


def test_root_is_read_from_environment(cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITYLAKE_ROOT", ROOT)
    assert cli("ls", "--json", root=None).json == ["ns"]
    assert_error(cli("ls", root="memory://other"), 4), "the option has precedence"


def test_names_are_shown_in_full_and_escaped(cli: Cli, lake: Lakehouse) -> None:
    markup, control = "[red]ns[/red]", "c\x9b31m\u202e"
    for name in (markup, control):
        created = cli("create-namespace", name)
        assert created.code == 0
        lines = [created, cli("ls"), cli("show"), cli("show", name), cli("log"), cli("drop-namespace", name)]
        lines += [cli("export", name), cli("exports"), cli("diff", 0, name), cli("drop-export", name)]
        lines += [cli("ls", "--json"), cli("show", name, "--json"), cli("export", "no way " + name)]
        for result in lines:
            assert control not in result.out + result.err
            assert "\x9b" not in result.out + result.err
        assert name in cli("ls", "--json").json
        output = name if name == markup else "c\\x9b31m\\u202e"
        assert all(output in result.out for result in lines[:4])


def test_register_table(cli: Cli, lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.local("other")
    append_rows(other, "shop.orders")
    location = other.root + other.snapshot().table("shop", "orders").format_properties["metadata_location"]
    result = cli("register-table", "ns.orders", location, "--json")
    assert result.json["version"] == 3
    assert (result.json["namespace"], result.json["definition"]["table_type"]) == ("ns", "EXTERNAL")
    assert "Registered table ns.more: version 4" in cli("register-table", "ns.more", location).out
    assert_error(cli("register-table", "ns.orders", location), 3, "ns.orders already exists")
    assert_error(cli("register-table", "nothing.orders", location), 4, "nothing")
    assert_error(cli("register-table", "ns.x", f"{location}x"), 5, f"{location}x")
    for arguments in (
        (),
        ("ns.x",),
        ("orders", location),
        ("ns.x", location, "--catalog", "other"),
        ("ns.x", location, "--namespace", "shop"),
        ("ns.x", location, "--catalog-option", "k=v"),
    ):
        assert cli("register-table", *arguments).code == 2, arguments


def test_register_table_registers_whole_catalog(cli: Cli, lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.local("other")
    append_rows(other, "shop.orders")
    append_rows(other, "hr.staff")
    catalog = ["--catalog", "other", "--catalog-option", f"root={other.root}"]
    catalog += ["--catalog-option", "py-catalog-impl=trinitylake_ops.iceberg.catalog.TrinityLakeCatalog"]
    result = cli("register-table", *catalog, "--namespace", "shop", "--json")
    assert (result.json["tables"], result.json["version"]) == (["shop.orders"], 3)
    output = cli("register-table", *catalog)
    assert "1 tables registered, version 4" in output.out
    assert "already registered" in output.out
    assert lake.snapshot().tables("hr") == ["staff"]
    assert_error(cli("register-table", *catalog, "--namespace", "nothing"), 2, "no namespace 'nothing'")
    rejected = cli("register-table", "--catalog", "other", "--catalog-option", "a-secret")
    assert_error(rejected, 2, "--catalog-option takes NAME=VALUE")
    assert "a-secret" not in rejected.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("expire", "--keep-last", "\u0663"),
        ("expire", "--keep-last", "1_0"),
        ("purge", "--max-seconds", "1_0"),
        ("init", "--property", "a=1", "--property", "a=2"),
        ("create-namespace", "n", "--property", "a=1", "--property", "a=2"),
        ("export", "e", "--target-option", "region=x"),
        ("ls", "--timestamp", "99999999999999999999"),
        ("ls", "--timestamp", "-1"),
    ],
)
def test_ambiguous_or_ignored_options_are_rejected(cli: Cli, lake: Lakehouse, arguments: tuple[str, ...]) -> None:
    before = lake.latest_version()
    assert_error(cli(*arguments), 2)
    assert_error(cli(*arguments, "--json"), 2, '"path": null', '"version": null')
    assert lake.latest_version() == before


def test_error_about_name_does_not_mention_another_option(cli: Cli, lake: Lakehouse) -> None:
    result = cli("clone", "memory://clone/", "--name", 77)
    assert_error(result, 2, "'77'")
    assert "--export" not in result.err


def test_status_with_watch_prints_one_json_document_per_line(
    cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopWatching(KeyboardInterrupt):
        pass

    waits = iter([None])

    def sleep(_seconds: float) -> None:
        if next(waits, StopWatching) is StopWatching:
            raise StopWatching

    monkeypatch.setattr("trinitylake_ops.cli.status.time.sleep", sleep)
    result = cli("status", "--watch", 1, "--json")
    lines = result.out.splitlines()
    assert len(lines) == 2
    assert all(json.loads(line)["root"] == ROOT for line in lines)
