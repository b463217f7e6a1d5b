"""The codes of errors are unique, and the command line prints them as JSON."""

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


def classes(kind: type[TrinityLakeError] = TrinityLakeError) -> Iterator[type[TrinityLakeError]]:
    """Yield the error classes of the public module, each before those that inherit from it."""
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from classes(below)


def test_each_class_has_a_code_of_its_own() -> None:
    found = list(dict.fromkeys(classes()))
    assert len({kind.code for kind in found}) == len(found) > 35
    for kind in found:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.code)
        assert "code" in vars(kind), kind


def test_errors_keep_what_they_know_when_they_are_pickled() -> None:
    error = errors.CommitConflictError("conflict", conflicts=("a",), base_version=1, latest_version=2, path="p")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, vars(again)) == (type(error), "commit-conflict", vars(error))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "where"),
    [
        (["show", "--json"], 4, "lakehouse-not-found", {"version": None}),
        (["log", "--json", "--limit", "x"], 2, "usage", {}),
    ],
)
def test_the_command_line_prints_an_error_as_json(
    tmp_path: Path, arguments: list[str], exit_code: int, code: str, where: dict[str, object]
) -> None:
    command = [sys.executable, "-c", "from trinitylake_ops.cli.app import main; main()", "--root", str(tmp_path / "no")]
    ran = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (exit_code, "")
    error = json.loads(ran.stderr)["error"]
    assert error["code"] == code
    assert error["message"]
    assert where.items() <= error.items()
