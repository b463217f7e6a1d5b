"""Differences that are meant: each by its command, its part and its field, with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sameness.compare import Difference


@dataclass(frozen=True)
class Reason:
    """Why a field of a command differs. ``field`` is a place without the numbers of its entries."""

    command: str
    part: str
    field: str
    why: str


#: All differences that are meant.
REASONS: Sequence[Reason] = ()


def reason_for(difference: Difference, reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason that names a difference, None where none does."""
    field = re.sub(r"\[\d+\]", "[]", difference.place)
    for reason in reasons:
        words = difference.what.split()
        if reason.command in words and (reason.part, reason.field) == (difference.part, field):
            return reason
    return None
