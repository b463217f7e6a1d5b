"""Test the ranges of versions in a space summary against sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.space.presence import (
    NOWHERE,
    OPEN,
    Presence,
    ended,
    export_number,
    first_of,
    intersects,
    is_open,
    parse,
    parse_all,
    started,
    text_of,
    union,
    with_export,
)

LAST = 40
VERSIONS = st.sets(st.integers(0, LAST))


def presence_of(versions: set[int], *, is_last_open: bool = False) -> Presence:
    """Return the ranges of some versions. With ``is_last_open``, the last range is open if it ends with ``LAST``."""
    presence: Presence = union(frozenset(((version, version),) for version in versions)) if versions else NOWHERE
    if is_last_open and presence and presence[-1][1] == LAST:
        presence = (*presence[:-1], (presence[-1][0], OPEN))
    return presence


def members(presence: Presence) -> set[int]:
    return {version for version in range(-40, LAST + 1) if any(first <= version <= last for first, last in presence)}


@given(VERSIONS, VERSIONS, st.booleans())
def test_union_and_intersection_equal_those_of_sets(left: set[int], right: set[int], is_open_: bool) -> None:
    first, second = presence_of(left, is_last_open=is_open_), presence_of(right)
    assert members(union(frozenset((first, second)))) == left | right
    assert intersects(first, sorted(right)) == bool(left & right)
    assert first_of(first, sorted(right)) == min(left & right, default=None)


@given(VERSIONS, st.booleans(), st.sets(st.integers(0, 9)))
def test_text_is_parsed_to_the_same_ranges(versions: set[int], is_last_open: bool, exports: set[int]) -> None:
    presence = presence_of(versions, is_last_open=is_last_open)
    for position in exports:
        presence = with_export(presence, export_number(position))
    assert parse(text_of(presence)) == presence
    assert parse_all([text_of(presence)] * 2) == [presence] * 2
    assert members(presence) == versions | {export_number(position) for position in exports}


@given(st.lists(st.booleans(), min_size=1, max_size=LAST), st.integers(0, 5))
def test_steps_from_version_to_version_equal_a_set(reached: list[bool], export: int) -> None:
    presence = with_export(NOWHERE, export_number(export))
    for version, is_reached in enumerate(reached):
        if is_reached and not is_open(presence):
            presence = started(presence, version)
        elif not is_reached and is_open(presence):
            presence = ended(presence, version - 1)
    expected = {version for version, is_reached in enumerate(reached) if is_reached}
    known = members(presence) & set(range(len(reached)))
    assert known == expected
    assert intersects(presence, [export_number(export)])
    assert is_open(presence) == reached[-1]


@pytest.mark.parametrize(
    "text", ["a", "3-4", "4:3", "3,3", "3,4", "-1", "-2:0", "-3", "99999999999", "5:,7", ",", "1:2:3"]
)
def test_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse(text)
