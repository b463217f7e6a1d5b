"""What repair advises on findings that it leaves: something for each, and nothing that deletes by default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinitylake_ops.operations.repair_steps import _ADVICE, advice_on

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations" / "verify.md"
#: The findings that are files which nothing needs.
LEFT = {"plan-left", "transaction-left", "export-left", "orphans"}


def documented_codes() -> set[str]:
    """Return the codes of the table of findings."""
    table = OPERATIONS.read_text().split("| finding |")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {code for cell in cells for code in re.findall(r"`([a-z-]+)`", cell)}


@pytest.mark.parametrize("code", sorted(documented_codes()))
def test_each_finding_has_advice_of_its_own(code: str) -> None:
    assert code in _ADVICE
    assert (advice_on(code) == "run orphans") == (code in LEFT)


def test_nobody_is_sent_to_a_deletion_for_a_finding_that_is_not_known() -> None:
    assert "orphans" not in advice_on("of-a-later-version")


def test_a_moved_lakehouse_is_relocated() -> None:
    assert advice_on("moved") == "run relocate"
