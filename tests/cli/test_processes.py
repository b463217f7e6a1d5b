"""The command line as a process: exit codes, streams and failing file systems."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from tests.cli import forked
from tests.cli.forked import Result
from tests.lakes import Lakes, lakes
from tests.operations.changes import append_rows, content, create
from tests.storage.file_systems import mounted_read_only, small_disk
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import UnsupportedTypeError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import background

__all__ = ["lakes"]

PROGRAM = [sys.executable, "-m", "trinitylake_ops.cli"]


def run(*arguments: object, **environment: str) -> Result:
    """Run the command line in a separate process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRINITYLAKE_ROOT"}
    process = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        env={**inherited, **environment},
        timeout=60,
        encoding="utf-8",
    )
    return Result(process.returncode, process.stdout, process.stderr)


def run_all(calls: list[tuple[object, ...]]) -> list[Result]:
    """Run several commands, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: run(*call), calls))


def rerun_one(calls: list[tuple[object, ...]]) -> list[Result]:
    """Run the last command in a new process, and the others in forked processes."""
    return [*(forked.run(*call) for call in calls[:-1]), run(*calls[-1])]


def assert_one_line(result: Result, code: int, part: str) -> None:
    assert (result.code, result.out) == (code, ""), result
    assert result.err.startswith(("Error: ", '{"error": '))
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert part in result.err


def files_in(folder: Path) -> dict[str, bytes]:
    background.drain()
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_error_of_invalid_input_is_one_line_and_nothing_changes(lakes: Lakes) -> None:
    lake = lakes.local("lake")
    create(lake, "ns", "t")
    for name, damage in (("no-arrow", b"this is not Arrow"), ("truncated", lake.storage.read(root_path(1))[:200])):
        shutil.copytree(lakes.folder / "lake", lakes.folder / name)
        (lakes.folder / name / root_path(1)).write_bytes(damage)
    before = files_in(lakes.folder)
    folder = lakes.folder
    expected: dict[tuple[object, ...], tuple[int, str]] = {
        ("--root", folder / "nowhere", "ls"): (4, "there is no lakehouse"),
        ("--root", f"{folder}/../{folder.name}/lake", "ls"): (2, "'..'"),
        ("--root", folder / "lake", "create-namespace", "a b", "--json"): (2, "a space"),
        ("--root", folder / "lake", "create-namespace", ""): (2, "empty"),
        ("--root", folder / "lake", "create-namespace", "x" * 101): (2, "101 bytes"),
        ("--root", folder / "lake", "show", "--version", 7): (4, "version 7 does not exist"),
        ("--root", folder / "no-arrow", "ls", "--json"): (5, "not a readable Arrow IPC file"),
        ("--root", folder / "truncated", "create-namespace", "x"): (5, "not a readable Arrow IPC file"),
        ("--root", os.fsencode(folder / "lake").decode() + "/\udcff", "ls"): (2, "Unicode"),
    }
    for result, (code, part) in zip(rerun_one(list(expected)), expected.values(), strict=True):
        assert_one_line(result, code, part)
    assert files_in(lakes.folder) == before


def test_error_of_read_only_folder_is_one_line(lakes: Lakes) -> None:
    lake = lakes.local("lake")
    version = create(lake, "ns", "t")
    root = lakes.folder / "lake"
    before = content(lake)
    with mounted_read_only(root):
        changes: list[tuple[object, ...]] = [
            ("--root", root, "create-namespace", "x"),
            ("--root", root, "rollback", 0, "--yes", "--json"),
        ]
        results = run_all([*changes, ("--root", root, "ls", "--json")])
    for result in results[:2]:
        assert_one_line(result, 5, str(root))
    assert json.loads(results[2].out) == ["ns"]
    assert (content(lake), lake.latest_version()) == (before, version)


def test_error_of_full_disk_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 * 1024) as is_mounted:
        root = tmp_path / "disk"
        lake = Lakehouse.create(str(root), {"fsync": "false"})
        if is_mounted:
            filler = root / "filler"
            with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
                while True:
                    os.write(file.fileno(), b"x" * 1024)
        else:
            filler = root / "unused"
        before = content(lake)
        # The property exceeds the file size limit, which applies if a small disk cannot be mounted.
        result = run("--root", root, "create-namespace", "x", "--property", f"p={'v' * 100_000}")
        assert_one_line(result, 5, "space")
        assert content(lake) == before
        filler.unlink(missing_ok=True)
        assert run("--root", root, "create-namespace", "x").code == 0
        assert operations.verify(Lakehouse(lake.storage)).is_clean


def test_error_of_unsupported_column_type_is_one_line(lakes: Lakes) -> None:
    """No command creates tables, so that the test checks the message of the Python API."""
    lake = lakes.memory()
    version = create(lake, "ns")
    schema = pa.schema([("id", pa.int64()), ("waited", pa.duration("s"))])
    with catalog_at(lake) as catalog, pytest.raises(UnsupportedTypeError) as raised:
        catalog.create_table("ns.t", schema)
    message = str(raised.value)
    assert "'waited'" in message
    assert "\n" not in message
    assert raised.value.exit_code == 2
    assert lake.latest_version() == version


def test_first_write_after_move_warns_in_one_line(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local("before")
    append_rows(lake)
    for _ in range(2):
        append_rows(lake)
    shutil.copytree(lake.root.removeprefix("file://"), tmp_path / "after")
    root = f"file://{tmp_path}/after/"
    assert forked.run("--root", root, "ls").err == ""
    plan = forked.run("--root", root, "compact-tables", "--min-input-files", "2", "--yes")
    (warning,) = [
        line for line in plan.err.splitlines() if "trinitylake relocate" in line
    ]  # other lines may contain progress
    assert (plan.code, root in warning) == (0, True)
    assert "relocate" not in forked.run("--root", root, "relocate", "--yes").err
    second = forked.run("--root", root, "compact-tables", "--min-input-files", "2", "--yes")
    assert (second.code, "relocate" in second.err) == (0, False)


def test_output_streams_and_environment(lakes: Lakes) -> None:
    lake = lakes.local("lake")
    for number in range(30):
        create(lake, f"n{number}" * 20)
    create(lake, "kanji-漢-\u202e")
    append_rows(lake)
    root = lake.root
    program = shlex.join([*PROGRAM, "--root", root])
    shell = ["bash", "-o", "pipefail", "-c"]
    piped = subprocess.run([*shell, f"{program} log --json | head -1"], capture_output=True, text=True, timeout=60)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "[\n", "")
    closed = subprocess.run([*shell, f"{program} log | true"], capture_output=True, text=True, timeout=60)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    full_device = subprocess.run([*shell, f"{program} ls > /dev/full"], capture_output=True, text=True, timeout=60)
    assert (full_device.returncode, full_device.stderr.count("\n"), "No space left" in full_device.stderr) == (
        1,
        1,
        True,
    )
    full_device = subprocess.run(
        [*shell, f"{program} create-namespace made --json > /dev/full"], capture_output=True, text=True, timeout=60
    )
    assert (full_device.returncode, json.loads(full_device.stderr)["error"]["code"]) == (1, "output-failed"), (
        full_device.stderr
    )
    assert lake.snapshot().has_namespace("made"), "only the output failed"
    latin1_output = run("ls", TRINITYLAKE_ROOT=root, PYTHONIOENCODING="latin-1")
    assert (latin1_output.code, latin1_output.err) == (0, "")
    assert "kanji-\\u6f22" in latin1_output.out
    ascii_locale_output = run("--storage-option", "fsync=false", "ls", "--json", TRINITYLAKE_ROOT=root, LC_ALL="C")
    assert "kanji-漢-\u202e" in json.loads(ascii_locale_output.out)
    assert_one_line(run("--storage-option", "fsync=perhaps", "ls", TRINITYLAKE_ROOT=root), 2, "fsync")
