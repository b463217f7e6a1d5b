"""Cache options of the command line: commands share a cache folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import restore_logging
from tests.lakes import Lakes, lakes, table
from trinitylake_ops.cli.app import main
from trinitylake_ops.format.file_names import is_immutable_path
from trinitylake_ops.storage.cache.storage import clear_process_caches

__all__ = ["lakes", "restore_logging"]


def run(*arguments: str) -> int:
    """Run a command as a separate process would, with empty caches in memory."""
    clear_process_caches()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_error:
        patch.setattr(sys, "argv", ["trinitylake", *arguments])
        main()
    return int(exit_error.value.code or 0)


def test_commands_share_cache_folder(lakes: Lakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = lakes.local()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    call = ["--root", lake.root, "--storage-option", f"cache_folder={tmp_path}/cache"]
    assert run(*call, "show", "ns.t") == 0
    output = capsys.readouterr().out
    deleted = {info.path: lake.storage.read(info.path) for info in lake.storage.list() if is_immutable_path(info.path)}
    lake.storage.delete_many(list(deleted))
    assert run(*call, "show", "ns.t") == 0
    assert capsys.readouterr().out == output
    assert run("--root", lake.root, "show", "ns.t") == 5
    assert run(*call, "verify") == 1  # bypasses the cache
    lake.storage.create_many(deleted)


@pytest.mark.parametrize("option", ["cache_bytes=lots", "cache_folder=", "cache_folder_bytes=1.5"])
def test_error_of_invalid_cache_option_is_one_line(
    lakes: Lakes, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--root", lakes.local().root, "--storage-option", option, "ls") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option.partition("=")[0] in line
