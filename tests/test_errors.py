"""Error codes are unique, errors can be pickled, and the command line prints errors as JSON."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinitylake_ops import errors
from trinitylake_ops.errors import TrinityLakeError

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def error_classes(base: type[TrinityLakeError] = TrinityLakeError) -> Iterator[type[TrinityLakeError]]:
    """Yield an error class, followed by its subclasses in the public module, recursively."""
    yield base
    for subclass in base.__subclasses__():
        if subclass.__module__ == errors.__name__:
            yield from error_classes(subclass)


def test_each_error_class_has_unique_code() -> None:
    classes = list(dict.fromkeys(error_classes()))
    assert len({error_class.code for error_class in classes}) == len(classes) > 35
    for error_class in classes:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error_class.code)
        assert "code" in vars(error_class), error_class


def test_pickled_error_keeps_its_fields() -> None:
    error = errors.CommitConflictError("conflict", conflicts=("a",), base_version=1, latest_version=2, path="p")
    unpickled = pickle.loads(pickle.dumps(error))
    assert (type(unpickled), unpickled.code, vars(unpickled)) == (type(error), "commit-conflict", vars(error))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "fields"),
    [
        (["show", "--json"], 4, "lakehouse-not-found", {"version": None}),
        (["log", "--json", "--limit", "x"], 2, "usage", {}),
    ],
)
def test_command_line_prints_error_as_json(
    tmp_path: Path, arguments: list[str], exit_code: int, code: str, fields: dict[str, object]
) -> None:
    command = [sys.executable, "-c", "from trinitylake_ops.cli.app import main; main()", "--root", str(tmp_path / "no")]
    process = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (exit_code, "")
    error = json.loads(process.stderr)["error"]
    assert error["code"] == code
    assert error["message"]
    assert fields.items() <= error.items()
