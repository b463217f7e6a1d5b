"""Differences that are meant: each by its command, its part and its field, with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sameness.compare import DIGESTS, EXIT_CODES, FIGURES, JSON_FIELDS, REQUESTS, ROUNDS, Difference


@dataclass(frozen=True)
class Reason:
    """Why a field of a command differs.

    The call contains all words of ``command``, and ``field`` is the path of the field without indexes, or of one
    that contains it. With ``after``
    the reason applies only to that new value.
    """

    command: str
    part: str
    field: str
    why: str
    after: object = None


_BOUND = "a digest covers the id of the commit that its base version was made by (66dd0671)"
_CHECKED_FIRST = "what the user typed is checked before the first request to the storage (8f6e3dbd)"
_CHECKED_AGAIN = "a relocation checks the moved root again when it writes (66dd0671)"
_REWORDED = "the message of a wrong checksum is shorter (87e11e1a)"
_COUNTED = "the message names the number of findings that repair cannot fix"
_NEXT_ROOT = "random ids decide which of the commits flushes a buffer or probes the next root; the sums are the same"

#: All intended differences from the revision before the layout of packages changed, 6beaad3e^.
REASONS: Sequence[Reason] = (
    Reason("--json", DIGESTS, ".digest", _BOUND),
    *(
        Reason(command, part, field, _CHECKED_FIRST, after)
        for command in (
            "create-namespace",
            "verify --spark-master",
            "rollback --table nobody",
            "drop-namespace odd",
            "export --namespace",
            "clone --version nobody",
            "undelete x",
            "reconcile --acknowledge x",
        )
        for part, field, after in ((REQUESTS, "read", "nothing"), (REQUESTS, "list", "nothing"), (ROUNDS, "rounds", 0))
    ),
    Reason("clone --version nobody", EXIT_CODES, "code", _CHECKED_FIRST, 2),
    Reason("relocate --apply", JSON_FIELDS, ".cost.rounds", _CHECKED_AGAIN, 18),
    Reason("relocate --apply", ROUNDS, "rounds", _CHECKED_AGAIN, 24),
    Reason("verify --deep --json", JSON_FIELDS, ".findings[].message", _REWORDED),
    *(Reason(f"{command} --json", JSON_FIELDS, ".damaged", _REWORDED) for command in ("expire", "orphans")),
    Reason("repair", FIGURES, "err", _COUNTED, ["1"]),
)


def reason_for(difference: Difference, reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason that names a difference, None where none does."""
    field = re.sub(r"\[\d+\]", "[]", difference.place)
    for reason in reasons:
        words = set(difference.what.split())
        if (
            words.issuperset(reason.command.split())
            and reason.part == difference.part
            and (field == reason.field or field.startswith(f"{reason.field}."))
            and reason.after in (None, difference.after)
        ):
            return reason
    return None
