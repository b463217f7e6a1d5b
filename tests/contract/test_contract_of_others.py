"""The contract as other packages run it on their storages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from trinitylake_ops.storage import LocalStorage, Storage
from trinitylake_ops.storage.contract import plugin
from trinitylake_ops.storage.contract.__main__ import main

_MODULE = "tests.contract.test_contract_of_others"


def sound(folder: Path) -> Storage:
    """A storage that keeps the contract."""
    return LocalStorage(f"file://{folder}/shelf/", fsync=False)


class _Careless(LocalStorage):
    """Creates check first and then write."""

    def create(self, path: str, data: bytes) -> None:
        self.write(path, data)


def careless(folder: Path) -> Storage:
    """A storage whose create overwrites."""
    return _Careless(f"file://{folder}/shelf/", fsync=False)


no_function = 7


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinitylake_ops.storage.contract", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})


def test_contract_passes_for_a_correct_storage() -> None:
    ran = _run(f"{_MODULE}:sound", "-q", "-p", "no:cacheprovider", "-k", "create_then_read or range")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_contract_fails_for_an_incorrect_storage() -> None:
    ran = _run(f"{_MODULE}:careless", "-q", "-p", "no:cacheprovider", "-k", "test_create")
    assert ran.returncode == 1
    assert "test_create_fails_if_the_file_exists" in ran.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "--storage nowhere:f: No module named 'nowhere'"),
        (f"{_MODULE}:nothing", "has no attribute 'nothing'"),
        (f"{_MODULE}:no_function", "not a function"),
        (None, "the option --storage MODULE:FACTORY is required"),
    ],
)
def test_invalid_arguments_are_rejected(name: str | None, message: str) -> None:
    class Config:
        stash = pytest.Stash()

        def getoption(self, option: str) -> str | None:
            assert option == "--storage"
            return name

    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        plugin.pytest_configure(cast(pytest.Config, Config()))


def test_invalid_factory_fails_with_one_line() -> None:
    ran = _run("nowhere:f")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--storage nowhere:f: No module named 'nowhere'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "FACTORY takes an empty folder" in capsys.readouterr().out
