"""The contract as somebody else runs it on a storage of theirs."""

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
    """Creates look first and write then."""

    def create(self, path: str, data: bytes) -> None:
        self.write(path, data)


def careless(folder: Path) -> Storage:
    """A storage whose create overwrites."""
    return _Careless(f"file://{folder}/shelf/", fsync=False)


no_function = 7


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinitylake_ops.storage.contract", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})


def test_a_sound_storage_passes() -> None:
    ran = _run(f"{_MODULE}:sound", "-q", "-p", "no:cacheprovider", "-k", "create_then_read or range")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_a_careless_storage_fails() -> None:
    ran = _run(f"{_MODULE}:careless", "-q", "-p", "no:cacheprovider", "-k", "test_create")
    assert ran.returncode == 1
    assert "test_create_loses_to_a_file_that_is_there" in ran.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere:f", "--storage nowhere:f: No module named 'nowhere'"),
        (f"{_MODULE}:nothing", "has no attribute 'nothing'"),
        (f"{_MODULE}:no_function", "this is no function"),
        (None, "say which storage: --storage MODULE:FACTORY"),
    ],
)
def test_what_was_given_is_checked(given: str | None, said: str) -> None:
    class Given:
        stash = pytest.Stash()

        def getoption(self, name: str) -> str | None:
            assert name == "--storage"
            return given

    with pytest.raises(pytest.UsageError, match=re.escape(said)):
        plugin.pytest_configure(cast(pytest.Config, Given()))


def test_a_wrong_factory_ends_in_one_line() -> None:
    ran = _run("nowhere:f")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--storage nowhere:f: No module named 'nowhere'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "FACTORY takes a folder of its own" in capsys.readouterr().out
