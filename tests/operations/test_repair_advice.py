"""Test the advice of repair on findings that it does not fix. Advice on unknown codes suggests no deletion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinitylake_ops.operations.repair_steps import _ADVICE, advice_on

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations" / "verify.md"
#: Findings about files that are not needed.
UNNEEDED = {"plan-left", "transaction-left", "export-left", "orphans"}


def documented_codes() -> set[str]:
    """Return the codes in the documented table of findings."""
    table = OPERATIONS.read_text().split("| finding |")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {code for cell in cells for code in re.findall(r"`([a-z-]+)`", cell)}


@pytest.mark.parametrize("code", sorted(documented_codes()))
def test_each_finding_has_advice(code: str) -> None:
    assert code in _ADVICE
    assert (advice_on(code) == "run orphans") == (code in UNNEEDED)


def test_advice_on_unknown_finding_suggests_no_deletion() -> None:
    assert "orphans" not in advice_on("of-a-later-version")


def test_advice_on_moved_lakehouse_is_relocate() -> None:
    assert advice_on("moved") == "run relocate"
