"""Conflicts of clones on the command line: one line with the choices, exit code 3, and no change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.cli.test_commands import ROOT, Cli, assert_error, cli
from tests.operations.changes import append_rows, create
from tests.operations.conflicts import CONFLICTS
from tests.operations.copies import files
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import drop_memory_root

__all__ = ["cli"]
CLONE = "memory://cli-clone/"
Conflict = Callable[[Lakehouse, Lakehouse], str]


@pytest.fixture
def parent() -> Iterator[Lakehouse]:
    lakehouse = Lakehouse.create(ROOT)
    append_rows(lakehouse)
    create(lakehouse, "n1", "a")
    yield lakehouse
    for root in (ROOT, CLONE):
        drop_memory_root(root)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.__name__)
def test_error_of_conflict_is_one_line_and_nothing_changes(cli: Cli, parent: Lakehouse, conflict: Conflict) -> None:
    assert cli("clone", CLONE, "--name", "feature").code == 0
    clone = Lakehouse.open(CLONE)
    name = conflict(parent, clone)
    before = files(parent), files(clone)
    choice = f"--ours {name} keeps what the parent has, --theirs {name} takes what clone feature has"
    cause = f"1 conflict, nothing was changed: {name}: {CONFLICTS[conflict]}"
    message = f"{cause}; choose a side for each, for example: {choice}\n"
    rejected = cli("promote", "feature", "--yes")
    assert_error(rejected, 3, message)
    assert rejected.err == f"Error: {message}"
    opposite = r"--ours [.\w]+ keeps what clone feature has, --theirs [.\w]+ takes what the parent has\n$"
    rejected = cli("refresh", "feature", "--yes")
    assert_error(rejected, 3, "1 conflict, nothing was changed: ")
    assert re.search(opposite, rejected.err)
    plan = cli("promote", "feature")
    assert (plan.code, CONFLICTS[conflict] in plan.out) == (0, True)
    assert plan.err == f"Nothing was done: 1 conflict; choose a side for each, for example: {choice}\n"
    for command in ("promote", "refresh"):
        steps = cli(command, "feature", "--dry-run")
        assert re.search("^conflict ", steps.out, re.MULTILINE)
        assert steps.err.startswith("Nothing was done: 1 conflict; choose a side for each")
    assert_error(cli("export", "feature"), 3, "'feature'")
    assert (files(parent), files(clone)) == before
    assert cli("promote", "feature", "--theirs", name, "--yes").code == 0
    assert cli("promote", "feature", "--theirs", name, "--yes").code == 0, "the command can be repeated"


@pytest.mark.parametrize("command", ["promote", "refresh"])
@pytest.mark.parametrize("name", ["nope", "ns.nope", "nope.", ".", "a.b.c"])
def test_choice_for_unknown_object_is_rejected(cli: Cli, parent: Lakehouse, command: str, name: str) -> None:
    assert cli("clone", CLONE, "--name", "feature").code == 0
    for option in ("--ours", "--theirs"):
        assert_error(cli(command, "feature", option, name), 2, repr(name))
    for existing in ("n1", "n1.a"):
        assert cli(command, "feature", "--ours", existing).code == 0
