"""The protocol models: designs that lose data are found broken, ours holds (docs/internals/protocol.md)."""

from __future__ import annotations

import pytest

from tests.models import exports, sealing
from tests.models.exports import EXPORT_DELETED, ROLLED_BACK_TO_DELETED
from tests.models.sealing import ACKNOWLEDGED_VOID, COMMITTED_TWICE, STALE_READ, Finder, Writer

FOREIGN, COOPERATING = Writer("foreign"), Writer("cooperating")
LOSSY = Writer("cooperating", is_lossy=True)


@pytest.mark.parametrize(
    ("design", "writers", "reader", "n_states", "broken"),
    [
        ("delete", (FOREIGN,), "foreign", 1_440, {ACKNOWLEDGED_VOID, STALE_READ}),
        ("boundary", (COOPERATING,), "cooperating", 2_766, {COMMITTED_TWICE}),
        ("boundary", (FOREIGN,), "foreign", 2_461, {ACKNOWLEDGED_VOID, STALE_READ}),
        ("boundary", (LOSSY,), "cooperating", 3_555, {COMMITTED_TWICE}),
        ("seal, then drop", (FOREIGN,), "foreign", 8_608, {ACKNOWLEDGED_VOID, STALE_READ}),
        ("seal, then drop", (LOSSY,), "cooperating", 9_663, {ACKNOWLEDGED_VOID, COMMITTED_TWICE}),
    ],
)
def test_other_ways_to_free_roots_are_broken(
    design: sealing.Design, writers: tuple[Writer, ...], reader: Finder, n_states: int, broken: set[str]
) -> None:
    assert sealing.violations(design, writers, reader) == (n_states, broken)


def test_sealed_roots_hold() -> None:
    """With a foreign writer and reader, and responses that get lost."""
    assert sealing.violations("seal", (FOREIGN, LOSSY), "foreign") == (46_361, set())


@pytest.mark.parametrize(
    ("design", "n_states", "broken"),
    [
        (exports.Design(False, False), 190_833, {EXPORT_DELETED, ROLLED_BACK_TO_DELETED}),
        (exports.Design(True, False), 99_512, {EXPORT_DELETED}),
        (exports.Design(False, True), 15_812, {EXPORT_DELETED, ROLLED_BACK_TO_DELETED}),
        (exports.Design(True, True), 20_460, set()),
    ],
)
def test_expiry_is_a_commit_and_the_definition_is_carried_forward(
    design: exports.Design, n_states: int, broken: set[str]
) -> None:
    assert exports.violations(design) == (n_states, broken)
