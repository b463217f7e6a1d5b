"""The contract as somebody else runs it on a storage of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.storage import LocalStorage, Storage

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
    ran = _run(f"{_MODULE}:sound", "-q", "-p", "no:cacheprovider", "-k", "create_then_read or range", "-n0")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_a_careless_storage_fails() -> None:
    ran = _run(f"{_MODULE}:careless", "-q", "-p", "no:cacheprovider", "-k", "test_create", "-n0")
    assert ran.returncode == 1
    assert "test_create_loses_to_a_file_that_is_there" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "usage: python -m trinitylake_ops.storage.contract MODULE:FACTORY"),
        (["--help"], 0, "FACTORY takes a folder of its own"),
        (["nowhere:f"], 4, "--storage nowhere:f: No module named 'nowhere'"),
        ([f"{_MODULE}:nothing"], 4, "has no attribute 'nothing'"),
        ([f"{_MODULE}:no_function"], 4, "this is no function"),
    ],
)
def test_what_was_given_is_checked(arguments: list[str], code: int, said: str) -> None:
    ran = _run(*arguments)
    assert ran.returncode == code
    assert said in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
