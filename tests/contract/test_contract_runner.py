"""The contract tests, run as another package would run them for its storage."""

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

_MODULE = "tests.contract.test_contract_runner"


def correct_storage(folder: Path) -> Storage:
    """Return a storage that satisfies the contract."""
    return LocalStorage(f"file://{folder}/lake/", fsync=False)


class _OverwritingStorage(LocalStorage):
    """A storage whose ``create`` overwrites existing files."""

    def create(self, path: str, data: bytes) -> None:
        self.write(path, data)


def overwriting_storage(folder: Path) -> Storage:
    """Return a storage that violates the contract."""
    return _OverwritingStorage(f"file://{folder}/lake/", fsync=False)


not_a_function = 7


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinitylake_ops.storage.contract", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})


def test_contract_passes_for_a_correct_storage() -> None:
    completed = _run(f"{_MODULE}:correct_storage", "-q", "-p", "no:cacheprovider", "-k", "create_then_read or range")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert " passed" in completed.stdout


def test_contract_fails_for_an_incorrect_storage() -> None:
    completed = _run(f"{_MODULE}:overwriting_storage", "-q", "-p", "no:cacheprovider", "-k", "test_create")
    assert completed.returncode == 1
    assert "test_create_fails_if_the_file_exists" in completed.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "--storage nowhere:f: No module named 'nowhere'"),
        (f"{_MODULE}:nothing", "has no attribute 'nothing'"),
        (f"{_MODULE}:not_a_function", "not a function"),
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


def test_invalid_factory_fails_without_traceback() -> None:
    completed = _run("nowhere:f")
    assert completed.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--storage nowhere:f: No module named 'nowhere'" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "FACTORY takes an empty folder" in capsys.readouterr().out
