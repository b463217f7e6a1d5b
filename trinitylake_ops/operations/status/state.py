"""The state of a lakehouse as data.

One function makes it, within a bounded number of requests: ``versions_looked_at`` roots and at most
``MOST_OTHER_REQUESTS`` more. Neither tables nor nodes of the tree are read. What cannot be read becomes a finding.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from trinitylake_ops.errors import LakehouseNotFoundError, TrinityLakeError
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.base import Cost, MeteredLakehouse
from trinitylake_ops.operations.gc.survey import expired_versions
from trinitylake_ops.operations.hint import HintState, inspect_hint
from trinitylake_ops.operations.lease import describe_lease
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.retention import span_text
from trinitylake_ops.operations.status.activity import (
    Activity,
    Commits,
    Space,
    commits_of,
    planned_space,
    recorded_space,
)
from trinitylake_ops.operations.status.due import (
    DEFAULT_AGES,
    Due,
    DueAges,
    DueState,
    MaintenanceInputs,
    StatusFinding,
    due_of,
    status_findings,
)
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry import hub as named
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms, utc_of
from trinitylake_ops.versions.undone import Undone, find_undone

#: How many of the newest versions are looked at, unless told otherwise.
LAST_VERSIONS = 20
#: The most requests beside those for the newest versions, where no plan is asked for.
MOST_OTHER_REQUESTS = 48
#: How many of them prove rollbacks among the newest versions.
_ROLLBACK_REQUESTS = 8
_UNPURGED = (ExpirationState.EXPIRED, ExpirationState.PURGING)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UndoneVersions:
    """Versions, such as ``3-5``, that a later rollback of the whole lakehouse undid."""

    versions: str
    by: int


@dataclass(frozen=True, kw_only=True)
class Status(Document):
    """The state of a lakehouse at ``now``, by the storage's clock.

    ``commits`` are those of the newest versions, and ``undone`` those of them that later rollbacks undid. ``kept``
    versions can be opened, ``expired`` ones wait for a purge. ``running`` says which operation deletes now. Ages are
    None for what never happened, or is not recorded.
    """

    root: str
    version: int
    created_at: datetime
    now: datetime
    operation: str | None
    message: str | None
    commits: Commits
    undone: tuple[UndoneVersions, ...]
    kept: int
    expired: int
    exports: int
    clones: int
    hint: HintState | None
    running: str | None
    due: tuple[Due, ...]
    space: Space
    findings: tuple[StatusFinding, ...]
    ages: Activity
    cost: Cost = field(compare=False)

    @property
    def age_seconds(self) -> float:
        """How old the latest version is."""
        return max(0.0, (self.now - self.created_at).total_seconds())

    @property
    def tone(self) -> str:
        """Return good, warn or bad, for the color of the headline."""
        if any(one.severity == "error" for one in self.findings):
            return "bad"
        return "warn" if self.findings or self.is_due else "good"

    @property
    def is_due(self) -> tuple[Due, ...]:
        """Return what is due now."""
        return tuple(one for one in self.due if one.state == DueState.DUE)

    @property
    def headline(self) -> str:
        """Return the state in a sentence."""
        due, found = len(self.is_due), len(self.findings)
        words = [f"{found} finding{'s' if found > 1 else ''}"] if found else []
        words += [f"{', '.join(one.what for one in self.is_due)} due"] if due else []
        age = span_text(round(self.age_seconds * 1000))
        return f"Version {self.version:,}, {age} old: {' and '.join(words) or 'nothing to do'}"

    @property
    def commands(self) -> tuple[str, ...]:
        """Return what to run next, in this order, for this root."""
        wanted = [*(one.command for one in self.findings), *(one.command for one in self.is_due)]
        prefix = f"trinitylake --root {shlex.quote(self.root)}"
        return tuple(f"{prefix} {command}" for command in dict.fromkeys(filter(None, wanted)))

    def to_dict(self) -> dict[str, object]:
        """Return the content as values of JSON, with the headline and the commands."""
        document = {"headline": self.headline, "age_seconds": round(self.age_seconds, 3), "next": list(self.commands)}
        return {**document, **super().to_dict()}

    def table(self) -> Table:
        """Return a row for each thing that may be due."""
        rows = [(one.what, one.state, one.why, one.command) for one in self.due]
        return new_table(self.headline, "what", "state", "why", "command", rows=rows)


def lakehouse_status(
    lake: Lakehouse,
    *,
    last: int = LAST_VERSIONS,
    ages: DueAges = DEFAULT_AGES,
    plan_seconds: float = 0,
) -> Status:
    """Return the state of a lakehouse. ``last`` is how many of the newest versions are looked at.

    ``ages`` say when a verification and so on is due. For at most ``plan_seconds`` the bytes that can be freed are
    counted by plans, which read all kept roots. With 0 they are those of the plans that expiries recorded. Raises
    LakehouseNotFoundError, StorageError, and CorruptFileError if the latest version cannot be read.
    """
    metered = MeteredLakehouse(lake)
    reading = _Reading(metered.lake)
    latest = reading.latest
    definition, now_ms = latest.definition, lake.storage.now_ms()
    commits = reading.attempt("the newest versions", lambda: commits_of(latest, last), Commits())
    undone = reading.attempt(
        "the rollbacks", lambda: find_undone(latest.files, commits.infos, most_requests=_ROLLBACK_REQUESTS), Undone()
    )
    recorded = reading.attempt("the plans of expiries", lambda: recorded_space(latest, now_ms), Space(note="unknown"))
    facts = reading.attempt("what is due", lambda: MaintenanceInputs.of(latest, commits, now_ms), MaintenanceInputs())
    running = reading.attempt("the lease", lambda: describe_lease(latest.files.roots.storage), None)
    hint = reading.attempt("the hint", lambda: inspect_hint(metered.lake).state, None)
    space = recorded if plan_seconds <= 0 else planned_space(lake, plan_seconds)
    due = reading.attempt(
        "the rules", lambda: due_of(definition, facts, commits, recorded.batches, ages, now_ms), tuple[Due, ...]()
    )
    gone, expired = reading.attempt(
        "the expired versions",
        lambda: (expired_versions(definition), expired_versions(definition, _UNPURGED)),
        (VersionRanges(), VersionRanges()),
    )
    clones = clones_of(definition)
    return Status(
        root=lake.root,
        version=latest.version,
        created_at=latest.created_at,
        now=utc_of(now_ms),
        operation=commits.newest.operation if commits.newest else None,
        message=commits.newest.message if commits.newest else None,
        commits=commits,
        undone=_undone_versions(undone.everything),
        kept=latest.version + 1 - len(gone),
        expired=len(expired),
        exports=_n_exports(definition),
        clones=len(clones),
        hint=hint,
        running=running,
        due=due,
        space=space,
        findings=(*reading.failures, *status_findings(definition, commits, hint, now_ms)),
        ages=Activity.of(definition, facts.verified_ms, now_ms, epoch_ms(latest.created_at)),
        cost=metered.cost(),
    )


def _undone_versions(undone: Mapping[int, int]) -> tuple[UndoneVersions, ...]:
    """Return undone versions by the rollbacks that undid them, the newest rollback first."""
    by_rollback: dict[int, list[int]] = {}
    for version, rollback in undone.items():
        by_rollback.setdefault(rollback, []).append(version)
    return tuple(
        UndoneVersions(str(VersionRanges.of(versions)), rollback)
        for rollback, versions in sorted(by_rollback.items(), reverse=True)
    )


def _n_exports(definition: LakehouseDef) -> int:
    clones = {record.name for record in definition.exports if record.clone_id}
    return len({record.name for record in definition.exports} | set(definition.exported_snapshots)) - len(clones)


class _Reading:
    """Reads parts one after the other. A part that cannot be read becomes a finding, and the others are told."""

    def __init__(self, lake: Lakehouse):
        self.latest: Snapshot = lake.snapshot()
        self.failures: list[StatusFinding] = []

    def attempt(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        """Return a part, or ``otherwise`` with a finding. Raises LakehouseNotFoundError."""
        try:
            return read()
        except LakehouseNotFoundError:
            raise
        except TrinityLakeError as error:
            self.failures.append(StatusFinding("error", f"{what} cannot be read: {error.message}", "verify"))
            return otherwise


_SEVERITIES = ("error", "warning")
#: What is due without a known moment is due since a second: the gauge must not say that it is not.
_UNKNOWN_SINCE = 1.0


def emit_status_metrics(status: Status, lakehouse: str) -> None:
    """Set the gauges of a lakehouse, by the name that an operator gave it. What never happened is +Inf ago."""
    ages = status.ages
    ages_by_kind = {
        "commit": ages.commit_seconds,
        "verify": ages.verify_seconds,
        "export": ages.export_seconds,
        "expiry": ages.expiry_seconds,
        "orphans": ages.orphans_seconds,
    }
    for of, seconds in ages_by_kind.items():
        hub.put(named.AGE_SECONDS, math.inf if seconds is None else seconds, lakehouse=lakehouse, of=of)
    for one in status.due:
        since = (one.since_seconds or _UNKNOWN_SINCE) if one.state == DueState.DUE else 0.0
        hub.put(named.DUE_SECONDS, since, lakehouse=lakehouse, what=one.what)
    for severity in _SEVERITIES:
        count = sum(one.severity == severity for one in status.findings)
        hub.put(named.FINDINGS, count, lakehouse=lakehouse, severity=severity)
    reclaimable = status.space.reclaimable_bytes
    if reclaimable is not None:
        hub.put(named.RECLAIMABLE_BYTES, reclaimable, lakehouse=lakehouse)
    hub.put(named.VERSION, status.version, lakehouse=lakehouse)
    hub.put(named.RECENT_ATTEMPTS, status.commits.attempts, lakehouse=lakehouse)
    hub.put(named.RECENT_LOST, status.commits.lost, lakehouse=lakehouse)
    hub.put(named.READ_AT, status.now.timestamp(), lakehouse=lakehouse)
