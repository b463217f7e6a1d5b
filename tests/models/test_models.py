"""Protocol models: alternative designs have violations, and ours has none (docs/internals/protocol.md)."""

from __future__ import annotations

import pytest

from tests.models import exports, sealing
from tests.models.exports import EXPORT_DELETED, ROLLED_BACK_TO_DELETED
from tests.models.sealing import COMMITTED_TWICE, FALSE_ACKNOWLEDGEMENT, STALE_READ, Program, Writer

FOREIGN, COOPERATING = Writer("foreign"), Writer("cooperating")
LOSSY = Writer("cooperating", is_lossy=True)


@pytest.mark.parametrize(
    ("design", "writers", "reader", "n_states", "violations"),
    [
        ("delete", (FOREIGN,), "foreign", 1_440, {FALSE_ACKNOWLEDGEMENT, STALE_READ}),
        ("boundary", (COOPERATING,), "cooperating", 2_766, {COMMITTED_TWICE}),
        ("boundary", (FOREIGN,), "foreign", 2_461, {FALSE_ACKNOWLEDGEMENT, STALE_READ}),
        ("boundary", (LOSSY,), "cooperating", 3_555, {COMMITTED_TWICE}),
        ("seal, then delete", (FOREIGN,), "foreign", 8_608, {FALSE_ACKNOWLEDGEMENT, STALE_READ}),
        ("seal, then delete", (LOSSY,), "cooperating", 9_663, {FALSE_ACKNOWLEDGEMENT, COMMITTED_TWICE}),
    ],
)
def test_alternative_removals_of_roots_have_violations(
    design: sealing.Design, writers: tuple[Writer, ...], reader: Program, n_states: int, violations: set[str]
) -> None:
    assert sealing.find_violations(design, writers, reader) == (n_states, violations)


def test_sealing_roots_has_no_violations() -> None:
    """A foreign writer, a foreign reader and lost responses are included."""
    assert sealing.find_violations("seal", (FOREIGN, LOSSY), "foreign") == (46_361, set())


@pytest.mark.parametrize(
    ("design", "n_states", "violations"),
    [
        (exports.Design(False, False), 190_833, {EXPORT_DELETED, ROLLED_BACK_TO_DELETED}),
        (exports.Design(True, False), 99_512, {EXPORT_DELETED}),
        (exports.Design(False, True), 15_812, {EXPORT_DELETED, ROLLED_BACK_TO_DELETED}),
        (exports.Design(True, True), 20_460, set()),
    ],
)
def test_export_design_has_expected_violations(design: exports.Design, n_states: int, violations: set[str]) -> None:
    assert exports.find_violations(design) == (n_states, violations)
