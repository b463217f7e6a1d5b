"""Differences that are meant: each by its command, its part and its field, with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sameness.compare import FIGURES, JSON_FIELDS, REQUESTS, ROUNDS, Difference


@dataclass(frozen=True)
class Reason:
    """Why a field of a command differs.

    ``command`` has words that all stand in the call, ``field`` is a place without the numbers of its entries.
    """

    command: str
    part: str
    field: str
    why: str


_REFUSED_LATER = "where a table's place is not allowed, more tables are read before that is said (8b31942)"
_CLEARER = "the message says what to do in a sentence of its own (9af9311)"
_ALL_REPAIRED = "verify names damaged versions, looks at tables of others, and says which repair mends (da562a0)"

#: All differences that are meant, each with the commit that made it. They are with revisions before these commits.
REASONS: Sequence[Reason] = (
    Reason("relocate --json", JSON_FIELDS, ".left_table_root", "a copy leaves a table root that was its own (7c25118)"),
    Reason("verify --deep --json", JSON_FIELDS, ".findings[].mend", _ALL_REPAIRED),
    Reason("verify --deep", FIGURES, "out", _ALL_REPAIRED),
    Reason("--allow-root verify --deep", REQUESTS, "read", _ALL_REPAIRED),
    Reason("--allow-root verify --deep", ROUNDS, "rounds", _ALL_REPAIRED),
    Reason("orphans", REQUESTS, "read", _REFUSED_LATER),
    Reason("orphans", ROUNDS, "rounds", _REFUSED_LATER),
    Reason("expire --max-age 1h --keep-last 3", REQUESTS, "read", _REFUSED_LATER),
    Reason("expire --max-age 1h --keep-last 3", ROUNDS, "rounds", _REFUSED_LATER),
    Reason("verify --deep --json", JSON_FIELDS, ".not_allowed.far.things", _CLEARER),
    Reason("verify --deep --json", JSON_FIELDS, ".not_allowed.sales.far", _CLEARER),
    Reason("verify --deep --json", JSON_FIELDS, ".unchecked[]", _CLEARER),
    Reason("--apply 1-0000000000000000", FIGURES, "err", "the error of another plan names no digest (380804f)"),
)


def reason_for(difference: Difference, reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason that names a difference, None where none does."""
    field = re.sub(r"\[\d+\]", "[]", difference.place)
    for reason in reasons:
        words = set(difference.what.split())
        if words.issuperset(reason.command.split()) and (reason.part, reason.field) == (difference.part, field):
            return reason
    return None
