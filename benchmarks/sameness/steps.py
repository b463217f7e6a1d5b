"""The steps that both trees run: every command, with text and JSON output, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

Step = dict[str, Any]

COMMANDS = (
    *("clone", "clones", "compare", "drop-clone", "promote", "refresh"),
    *("compact", "compact-tables", "count", "create-namespace", "diff", "drop-export", "drop-namespace", "expire"),
    *(
        "export",
        "exports",
        "head",
        "init",
        "log",
        "ls",
        "orphans",
        "prune-exports",
        "purge",
        "reconcile",
        "register-table",
        "repair-hint",
    ),
    *("relocate", "repair", "resolve-commit", "restore", "rollback", "show", "tree", "trim", "undelete", "verify"),
    "verify-export",
)
_UNKNOWN_ID = "6f1b1c1e-5f0a-4c53-8a6e-1f0e8a7f6b2d"


def steps(folder: Path) -> list[Step]:
    """Return all steps. Their lakehouses are below ``folder``."""
    return [
        *_help_steps(),
        *_initial_steps(folder),
        *_read_steps(folder),
        *_change_steps(folder),
        *_export_steps(folder),
        *_reclaim_steps(folder),
        *_damage_steps(folder),
    ]


def _action(action: str, *arguments: object) -> Step:
    return {
        "action": action,
        "arguments": [argument if isinstance(argument, int) else str(argument) for argument in arguments],
    }


def _command(root: object, *arguments: object) -> Step:
    return _action("command", "--root", str(root), *map(str, arguments))


def _both(root: object, *arguments: object) -> Iterator[Step]:
    """Yield a command that changes nothing, with text and with JSON output."""
    yield _command(root, *arguments)
    yield _command(root, *arguments, "--json")


def _planned(root: object, *arguments: object) -> Iterator[Step]:
    """Yield a plan as text and JSON, a wrong digest, the execution with the right digest, and the plan afterwards."""
    yield from _both(root, *arguments)
    yield _command(root, *arguments, "--apply", "1-0000000000000000")
    yield _command(root, *arguments, "--apply", "@digest", "--json")
    yield from _both(root, *arguments)


def _help_steps() -> Iterator[Step]:
    yield _action("command")
    yield _action("command", "--help")
    yield _action("command", "--version")
    yield _action("command", "nonsense")
    yield _action("command", "--nonsense", "log")
    for command in COMMANDS:
        yield _action("command", command, "--help")
        yield _action("command", command, "--nonsense")
        yield _action("command", command, "a", "b", "c", "d")
        yield _action("command", command)


def _initial_steps(folder: Path) -> Iterator[Step]:
    lake = folder / "lake"
    yield from _both(folder / "nothing", "log")
    for command in COMMANDS:
        arguments = {"diff": ("1", "2"), "resolve-commit": ("1", _UNKNOWN_ID), "rollback": ("1",)}.get(command, ())
        yield _command("relative/root", command, *arguments)
        yield _command("ftp://nowhere/lake", command, *arguments)
        if command != "init":
            yield _command(folder / "nothing", command, *arguments)
    yield _command(folder / "nothing", "--storage-option", "x", "log")
    yield _command(lake, "init", "--order", 2)
    yield _command(lake, "init", "--node-compression", "gzip")
    yield _command(lake, "init", "--property", "novalue")
    yield _command(lake, "init", "--txn-ttl-millis", 10**30)
    yield _command(lake, "init", "--txn-ttl-millis", 3_600_000, "--order", 8, "--property", "k=v=w", "--json")
    yield _command(lake, "init")
    yield _command(folder / "packed", "init", "--node-compression", "zstd", "--isolation-level", "serializable")
    yield _command(folder / "lz4", "init", "--node-compression", "lz4", "--order", 3, "--json")
    for root in (lake, folder / "packed", folder / "lz4"):
        yield _command(root, "create-namespace", "sales", "--property", "owner=finance", "--json")
        yield _command(root, "create-namespace", "sales")
        yield _command(root, "create-namespace", "many")
        yield _action("many_tables", root, "many", 120)
        yield _action("alter_tables", root, "many", 3, 12)
        yield _action("make_table", root, "sales.orders")
        for number in range(6):
            yield _action("append", root, "sales.orders", number * 10, 10)
        yield _action("delete_rows", root, "sales.orders", "id = 15")
    yield _command(lake, "create-namespace", "")
    yield _command(lake, "create-namespace", "x" * 10_000)
    yield _command(lake, "create-namespace", "odd \x1b[31m ümläut", "--property", "novalue")
    yield _command(lake, "create-namespace", "odd \x1b[31m ümläut", "--json")
    yield _action("make_table", lake, "sales.items")
    yield _action("append", lake, "sales.items", 0, 3)


def _read_steps(folder: Path) -> Iterator[Step]:
    lake = folder / "lake"
    for root in (lake, folder / "packed", folder / "lz4"):
        for arguments in (
            ("log",),
            ("log", "--stat"),
            ("ls",),
            ("ls", "many"),
            ("show",),
            ("tree",),
            ("verify", "--deep"),
            ("head", "sales.orders", "--limit", 3),
            ("count", "sales.orders"),
        ):
            yield from _both(root, *arguments)
    for arguments in (
        *(("log", "--limit", 3), ("log", "--limit", 0), ("log", "--limit", "x"), ("ls", "--version", 2)),
        *(("ls", "missing"), ("ls", "--version", 999), ("ls", "--version", "no-export"), ("ls", "--version", "-1")),
        *(("ls", "--timestamp", "2024-01-01T03:00"), ("ls", "--timestamp", "1"), ("ls", "--timestamp", "never")),
        *(("ls", "--version", 1, "--timestamp", "1"), ("show", "sales"), ("show", "sales.orders"), ("show", "missing")),
        *(("show", "sales.missing"), ("show", "sales.orders", "--version", 3), ("show", "many.t0003")),
        *(
            ("diff", 1, 2),
            ("diff", 2, 10),
            ("diff", 5, 5),
            ("diff", 1, 999),
            ("diff", "x", 1),
            ("tree", "--version", 2),
        ),
        *(
            ("repair-hint", "--check-only"),
            ("exports",),
            ("verify",),
            ("verify", "--max-requests", 3),
            ("verify", "--max-requests", 0),
        ),
        *(("verify", "--incremental"), ("verify", "--incremental"), ("verify", "--max-seconds", "nan")),
        *(("verify", "--spark-master", "local"), ("verify", "--engine", "missing")),
        *(
            ("resolve-commit", 3, _UNKNOWN_ID),
            ("resolve-commit", 999, _UNKNOWN_ID),
            ("resolve-commit", "x", _UNKNOWN_ID),
        ),
        *(("resolve-commit", 3, "no-uuid"), ("resolve-commit", -1, _UNKNOWN_ID)),
    ):
        yield from _both(lake, *arguments)
    yield _command(lake, "log", "--html", folder / "log.html")
    yield _command(lake, "verify", "--html", folder / "verify.html")
    yield _command(lake, "verify", "--html", folder / "no" / "folder.html")


def _change_steps(folder: Path) -> Iterator[Step]:
    lake = folder / "lake"
    yield from _both(lake, "rollback")
    yield from _both(lake, "rollback", 999)
    yield from _both(lake, "rollback", 5, "--table", "missing")
    yield from _both(lake, "rollback", 5, "--namespace", "missing")
    yield from _planned(lake, "rollback", 5, "--table", "many.t0003")
    yield from _planned(lake, "rollback", 5, "--namespace", "many")
    yield from _both(lake, "rollback", "--timestamp", "1")
    yield from _planned(lake, "rollback", 8)
    yield _command(lake, "rollback", 20, "--yes", "--reapply")
    yield _command(lake, "rollback", 24, "--yes", "--json")
    yield from _both(lake, "drop-namespace", "missing")
    yield from _both(lake, "drop-namespace", "many")
    yield _command(lake, "drop-namespace", "odd \x1b[31m ümläut", "--yes")
    yield _command(lake, "create-namespace", "passing")
    yield from _planned(lake, "drop-namespace", "passing")
    yield _action("many_tables", lake, "sales", 5)
    yield from _planned(lake, "drop-namespace", "many", "--cascade")
    yield _command(lake, "compact", "--message", "smaller", "--json")
    yield _command(lake, "compact")
    yield from _planned(lake, "compact-tables", "sales.orders", "--min-input-files", 2)
    yield from _both(lake, "compact-tables", "--target-bytes", 0)
    yield from _both(lake, "compact-tables", "missing.t")
    yield _command(
        lake, "compact-tables", "--min-input-files", 2, "--run-id", "r1", "--message", "m", "--yes", "--json"
    )
    yield _action("outside_table", folder / "outside")
    metadata = folder / "outside" / "m.metadata.json"
    yield _command(lake, "register-table", "sales.far", metadata)
    yield _command(lake, "register-table", "sales.far", f"file://{metadata}", "--json")
    yield _command(lake, "register-table", "sales.far", f"file://{metadata}")
    yield _command(lake, "register-table", "nodot", f"file://{metadata}")
    yield _command(lake, "register-table", "sales.gone", f"file://{folder}/outside/gone.metadata.json")
    yield _command(lake, "register-table", "missing.far", f"file://{metadata}")
    by_catalog = ("--catalog", "outside", "--catalog-option", "type=sql")
    uri_option = ("--catalog-option", f"uri=sqlite:///{folder}/outside/catalog.db")
    yield _command(lake, "register-table", *by_catalog, *uri_option, "--json")
    yield _command(lake, "register-table", *by_catalog, *uri_option)
    yield _command(lake, "register-table", *by_catalog, "--catalog-option", "novalue")
    yield _command(lake, "register-table", "sales.far", *by_catalog)
    yield from _both(lake, "show", "far.things")
    yield from _both(lake, "verify", "--deep")
    yield _command(lake, "--allow-root", f"file://{folder}/outside", "verify", "--deep", "--json")
    yield from _both(lake, "relocate")
    yield _action("copy_folder", lake, folder / "moved")
    yield from _planned(folder / "moved", "relocate")
    yield from _both(folder / "moved", "verify", "--deep")


def _export_steps(folder: Path) -> Iterator[Step]:
    lake, other = folder / "lake", folder / "other"
    yield _command(lake, "export", "pin", "--json")
    yield _command(lake, "export", "pin")
    yield _command(lake, "export", "old", "--version", 8, "--retain-for", "2h")
    yield _command(lake, "export", "bad/name")
    yield _command(lake, "export", "never", "--version", 999)
    yield _command(lake, "export", "never", "--level", "nonsense")
    yield _command(lake, "export", "part", "--namespace", "sales", "--definitions", "--json")
    yield _command(lake, "export", "never", "--namespace", "missing")
    for level in ("metadata", "data", "full", "pin", "catalog", "tables", "definitions"):
        yield _command(lake, "export", f"here-{level}", "--level", level, "--json")
        yield _command(
            lake,
            "--allow-root",
            f"file://{folder}/outside",
            "export",
            f"there-{level}",
            "--level",
            level,
            "--target",
            other / level,
            "--json",
        )
        yield from _both(other / level, "verify", "--deep")
        yield from _both(other / level, "log")
        yield from _both(lake, "verify-export", f"there-{level}", "--deep")
    yield from _both(lake, "clones")
    yield from _both(lake, "clone", other / "clone", "--version", "missing")
    for clone_command in ("compare", "promote", "refresh", "drop-clone"):
        yield from _both(lake, clone_command, "missing")
    yield from _both(lake, "exports")
    yield from _both(lake, "verify-export", "pin")
    yield from _both(lake, "verify-export", "missing")
    yield from _both(lake, "diff", "old", "pin")
    yield from _both(lake, "ls", "--version", "old")
    yield from _both(lake, "restore", "missing")
    yield from _planned(lake, "restore", "old", "--namespace", "many")
    yield from _planned(lake, "restore", "pin")
    yield from _both(lake, "restore", "pin", "--table", "missing.t")
    yield _command(lake, "drop-export", "missing")
    yield from _planned(lake, "prune-exports", "here-*", "--keep-last", 1)
    yield from _both(lake, "prune-exports", "*", "--max-age", "nonsense")
    yield from _both(lake, "prune-exports", "missing*", "--keep-last", 1)


def _reclaim_steps(folder: Path) -> Iterator[Step]:
    for root in (folder / "lake", folder / "packed"):
        yield from _both(root, "expire")
        yield from _both(root, "expire", "--max-age", "nonsense")
        yield from _both(root, "trim", "--max-age", "1h", "--keep-last", 1)
        yield from _both(root, "purge")
        yield from _both(root, "orphans")
        yield _action("write_lost", root)
        yield _action("forward", 50)
        yield _action("append", root, "sales.orders", 1000, 5)
        yield from _planned(root, "trim", "--max-age", "1h", "--keep-last", 1)
        yield from _both(root, "trim", "missing.t", "--keep-last", 1)
        yield _command(root, "expire", "--max-age", "1h", "--keep-last", 3, "--html", folder / "expire.html")
        yield from _planned(root, "expire", "--max-age", "1h", "--keep-last", 3)
        yield from _both(root, "log")
        yield from _both(root, "ls", "--version", 4)
        yield _command(root, "undelete", "4", "--json")
        yield _command(root, "undelete", "4")
        yield _command(root, "undelete", "999")
        yield _command(root, "undelete", "x")
        yield from _both(root, "purge")
        yield _action("forward", 50)
        yield from _both(root, "purge", "--grace", "nonsense")
        yield from _planned(root, "purge", "--grace", "10d")
        yield _command(root, "purge", "--max-requests", 2, "--json")
        yield from _planned(root, "purge")
        yield _command(root, "undelete", "3")
        yield from _planned(root, "orphans", "--older-than", "20h")
        yield from _both(root, "orphans", "--inventory", f"file://{folder}/no/manifest.json")
        yield _command(root, "reconcile", "--json")
        yield _command(root, "reconcile", "--acknowledge", "999")
        yield _command(root, "reconcile", "--acknowledge", "x")
        yield from _both(root, "verify", "--deep")
        yield from _both(root, "tree")
        yield from _both(root, "log", "--stat")


def _damage_steps(folder: Path) -> Iterator[Step]:
    """Yield operations on copies of an intact lakehouse, each with a damaged, missing or wrong file."""
    intact = folder / "lz4"
    for name, *actions in (
        ("hint-gone", _action("remove", folder / "hint-gone" / "_latest_hint.txt")),
        ("hint-wrong", _action("write_text", folder / "hint-wrong" / "_latest_hint.txt", "nonsense")),
        ("hint-ahead", _action("write_text", folder / "hint-ahead" / "_latest_hint.txt", "99")),
        ("hint-behind", _action("write_text", folder / "hint-behind" / "_latest_hint.txt", "3")),
        ("node-gone", _action("remove", folder / "node-gone" / "*-node-*.arrow")),
        ("node-damaged", _action("damage", folder / "node-damaged" / "*-node-*.arrow", 2000)),
        ("definition-damaged", _action("damage", folder / "definition-damaged" / "*-table-orders-*.binpb", 20)),
        ("definition-gone", _action("remove", folder / "definition-gone" / "*-table-t0050-*.binpb")),
        ("settings-damaged", _action("damage", folder / "settings-damaged" / "_lakehouse_def_*.binpb", 9)),
        ("manifest-damaged", _action("damage", folder / "manifest-damaged" / "*-m0.avro", 500)),
        ("metadata-damaged", _action("damage", folder / "metadata-damaged" / "*.metadata.json", 300)),
        ("data-damaged", _action("damage", folder / "data-damaged" / "*.parquet", 60)),
        ("data-gone", _action("remove", folder / "data-gone" / "*.parquet")),
    ):
        root = folder / name
        yield _action("copy_folder", intact, root)
        yield from actions
        for arguments in (("log",), ("show", "sales.orders"), ("ls", "many"), ("repair-hint", "--check-only")):
            yield _command(root, *arguments, "--json")
        yield from _both(root, "verify", "--deep")
        yield _command(root, "create-namespace", "more", "--json")
        yield _command(root, "repair", "--json")
        yield _command(root, "rollback", 5, "--yes", "--json")
        yield from _both(root, "repair", "--to-last-good")
        yield _command(root, "repair", "--to-last-good", "--apply", "@digest", "--json")
        yield _command(root, "repair-hint", "--json")
        yield _command(root, "expire", "--keep-last", 1, "--max-age", "1m", "--json")
        yield _command(root, "orphans", "--json")
