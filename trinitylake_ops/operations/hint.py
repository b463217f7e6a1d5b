"""Check and repair of the hint file (FORMAT.md, L10). A wrong hint only costs readers extra requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum

from trinitylake_ops.errors import FileMissingError, StorageError
from trinitylake_ops.format.file_names import HINT_PATH, MAX_VERSION, parse_hint
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, operation_span
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.root_files import HINT_READ_BYTES
from trinitylake_ops.versions.roots import Roots, find_latest
from trinitylake_ops.versions.snapshot import is_sealed_root

_MAX_PROBES = 20
_PAUSE_S = 0.1  # usually longer than a writer takes to update the hint after its root

logger = logging.getLogger(__name__)


class HintState(StrEnum):
    """How the hint compares with the latest version."""

    RIGHT = "right"
    BEHIND = "behind"
    AHEAD = "ahead"
    MISSING = "missing"
    GARBAGE = "garbage"
    #: The hint names a purged version: reads are slower, and other programs may fail when they read its root.
    SEALED = "sealed"


@dataclass(frozen=True, kw_only=True)
class HintReport(Document):
    """The state of the hint before a repair."""

    state: HintState
    #: The version that the hint named, if any.
    hinted: int | None
    latest: int
    repaired: bool = False
    cost: Cost

    @property
    def is_right(self) -> bool:
        """Whether the hint names the latest version now."""
        return self.repaired or self.state == HintState.RIGHT

    def table(self) -> Table:
        """Return one row: the state, both versions, and whether the hint was repaired."""
        row = (self.state, self.hinted, self.latest, "set to the latest" if self.repaired else "nothing")
        return new_table("Hint", "state", "hinted", "latest", "done", rows=[row])


def inspect_hint(lake: Lakehouse) -> HintReport:
    """Compare the hint with the latest version. Raises LakehouseNotFoundError, StorageError."""
    background.drain()  # pending hint updates for commits of this process
    metered = MeteredLakehouse(lake)
    state, hinted, latest = _state(metered.lake.files.roots)
    for _ in range(_MAX_PROBES):
        if state != HintState.BEHIND:
            break
        # A writer sets the hint after the root, so a commit between the two reads looks like an outdated hint.
        before = hinted
        process_clock.sleep(_PAUSE_S)
        state, hinted, latest = _state(metered.lake.files.roots)
        if hinted == before:
            break  # no writer is updating it
    return HintReport(state=state, hinted=hinted, latest=latest, cost=metered.cost())


def repair_hint(lake: Lakehouse) -> HintReport:
    """Write the latest version to the hint unless it is right, and return its former state.

    Raises LakehouseNotFoundError, StorageError.
    """
    with operation_span("repair-hint"):
        metered = MeteredLakehouse(lake)
        report = inspect_hint(metered.lake)
        if report.state == HintState.RIGHT:
            return replace(report, cost=metered.cost())
        storage, roots, latest = metered.lake.storage, metered.lake.files.roots, report.latest
        while True:
            storage.write(HINT_PATH, str(latest).encode("ascii"))
            # A later commit may already have set the hint, so do not leave an older version in it.
            if latest == MAX_VERSION or not storage.exists(roots.path(latest + 1)):
                return replace(report, latest=latest, repaired=True, cost=metered.cost())
            latest = find_latest(roots)[0]


def _state(roots: Roots) -> tuple[HintState, int | None, int]:
    try:
        data: bytes | None = roots.storage.read(HINT_PATH, length=HINT_READ_BYTES)
    except FileMissingError:
        data = None
    except StorageError as error:
        logger.warning("cannot read the hint: %s", error)
        data = b""
    latest = find_latest(roots)[0]
    if data is None:
        return HintState.MISSING, None, latest
    hinted = parse_hint(data)
    if hinted is None:
        return HintState.GARBAGE, None, latest
    if hinted == latest:
        return HintState.RIGHT, hinted, latest
    if hinted > latest:
        return HintState.AHEAD, hinted, latest
    is_sealed = is_sealed_root(roots.storage, roots.path(hinted))
    return HintState.SEALED if is_sealed else HintState.BEHIND, hinted, latest
