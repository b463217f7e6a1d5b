"""What is wrong in what the status has read. Whether all files are sound, only verify tells."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.maintenance.hint import HintState
from trinitylake_ops.maintenance.reach.root_chain import acknowledged_versions
from trinitylake_ops.maintenance.status.activity import Commits

_FUTURE_MS = 5 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something wrong: error or warning, what, and the command that mends it or tells more, without the root."""

    severity: str
    message: str
    command: str


def noticed_in(definition: LakehouseDef, commits: Commits, hint: HintState | None, now_ms: int) -> tuple[Noticed, ...]:
    """Return what is wrong with the hint and the newest versions. Versions that an operator knows of are left out."""
    known = acknowledged_versions(definition)
    found = []
    if hint not in (None, HintState.RIGHT):
        found.append(Noticed("warning", f"the hint is {hint.value}, which costs readers requests", "hint --repair"))
    for version in commits.backwards:
        if version not in known:
            message = f"version {version} is not younger than the one before"
            found.append(Noticed("warning", message, f"reconcile --acknowledge {version}"))
    foreign = [version for version in commits.foreign if version not in known]
    if foreign:
        message = f"another program committed {len(foreign)} of the newest versions, such as {foreign[0]}"
        found.append(Noticed("warning", message, "log"))
    newest = commits.newest
    if newest is not None and newest.created_at.timestamp() * 1000 > now_ms + _FUTURE_MS:
        found.append(Noticed("warning", "the latest version is of the future: a clock of a writer is wrong", "log"))
    return tuple(found)
