"""Expected differences, each with its command, part, field and reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sameness.compare import DIGESTS, EXIT_CODES, JSON_FIELDS, NUMBERS, REQUESTS, ROUNDS, Difference


@dataclass(frozen=True)
class Reason:
    """The reason why a field of a command differs."""

    #: Words in the command line.
    command: str
    part: str
    #: The path of the field, or of a field that contains it, without indexes.
    field: str
    explanation: str
    #: The only new value that the reason explains, or None for any value.
    after: object = None


_BOUND = "a digest covers the id of the commit that its base version was made by (66dd0671)"
_CHECKED_FIRST = "user input is checked before the first request to the storage (8f6e3dbd)"
_CHECKED_AGAIN = "a relocation checks the moved root again when it writes (66dd0671)"
_COUNTED = "the message names the number of findings that repair cannot fix"

#: All intended differences from the revision before the layout of packages changed, 6beaad3e^.
REASONS: Sequence[Reason] = (
    Reason("--json", DIGESTS, ".digest", _BOUND),
    *(
        Reason(command, part, field, _CHECKED_FIRST, after)
        for command in (
            "create-namespace",
            "verify --spark-master",
            "rollback --table missing",
            "drop-namespace odd",
            "export --namespace",
            "clone --version missing",
            "undelete x",
            "reconcile --acknowledge x",
        )
        for part, field, after in ((REQUESTS, "read", "nothing"), (REQUESTS, "list", "nothing"), (ROUNDS, "rounds", 0))
    ),
    Reason("clone --version missing", EXIT_CODES, "code", _CHECKED_FIRST, 2),
    Reason("relocate --apply", JSON_FIELDS, ".cost.rounds", _CHECKED_AGAIN, 18),
    Reason("relocate --apply", ROUNDS, "rounds", _CHECKED_AGAIN, 24),
    Reason("repair", NUMBERS, "err", _COUNTED, ["1"]),
)


def reason_for(difference: Difference, reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason that explains a difference, or None."""
    field = re.sub(r"\[\d+\]", "[]", difference.path)
    for reason in reasons:
        words = set(difference.step.split())
        if (
            words.issuperset(reason.command.split())
            and reason.part == difference.part
            and (field == reason.field or field.startswith(f"{reason.field}."))
            and reason.after in (None, difference.after)
        ):
            return reason
    return None
