"""The state of a lakehouse as data.

Reading it takes a bounded number of requests: one root for each of the newest versions, and at most
``MAX_OTHER_REQUESTS`` additional requests. Tables and tree nodes are not read. Files that cannot be read are reported
as findings.
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
from trinitylake_ops.operations.policy.stored import policy_of
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
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms, utc_of
from trinitylake_ops.versions.undone import Undone, find_undone

#: The default number of newest versions to read.
LAST_VERSIONS = 20
#: The maximum number of requests in addition to those for the newest versions and for plans.
MAX_OTHER_REQUESTS = 48
#: The number of these requests that verify rollbacks among the newest versions.
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
    """The state of a lakehouse."""

    root: str
    version: int
    created_at: datetime
    #: The storage's time.
    now: datetime
    operation: str | None
    message: str | None
    #: A summary of the newest versions.
    commits: Commits
    #: Versions among the newest versions that later rollbacks undid.
    undone: tuple[UndoneVersions, ...]
    #: The number of versions that can be read.
    kept: int
    #: The number of expired versions that have not been purged.
    expired: int
    exports: int
    clones: int
    hint: HintState | None
    #: The operation that holds the lease, if any.
    running: str | None
    due: tuple[Due, ...]
    space: Space
    findings: tuple[StatusFinding, ...]
    ages: Activity
    cost: Cost = field(compare=False)

    @property
    def age_seconds(self) -> float:
        """The age of the latest version."""
        return max(0.0, (self.now - self.created_at).total_seconds())

    @property
    def tone(self) -> str:
        """The tone of the headline: good, warn or bad."""
        if any(finding.severity == "error" for finding in self.findings):
            return "bad"
        return "warn" if self.findings or self.is_due else "good"

    @property
    def is_due(self) -> tuple[Due, ...]:
        """The operations that are due now."""
        return tuple(due for due in self.due if due.state == DueState.DUE)

    @property
    def headline(self) -> str:
        """The state in one sentence."""
        n_due, n_findings = len(self.is_due), len(self.findings)
        parts = [f"{n_findings} finding{'s' if n_findings > 1 else ''}"] if n_findings else []
        parts += [f"{', '.join(due.what for due in self.is_due)} due"] if n_due else []
        age = span_text(round(self.age_seconds * 1000))
        return f"Version {self.version:,}, {age} old: {' and '.join(parts) or 'nothing to do'}"

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands to run next, in order, with the root."""
        commands = [*(finding.command for finding in self.findings), *(due.command for due in self.is_due)]
        prefix = f"trinitylake --root {shlex.quote(self.root)}"
        return tuple(f"{prefix} {command}" for command in dict.fromkeys(filter(None, commands)))

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values, with the headline and the commands."""
        document = {"headline": self.headline, "age_seconds": round(self.age_seconds, 3), "next": list(self.commands)}
        return {**document, **super().to_dict()}

    def table(self) -> Table:
        """Return one row for each operation that may be due."""
        rows = [(due.what, due.state, due.why, due.command) for due in self.due]
        return new_table(self.headline, "what", "state", "why", "command", rows=rows)


def lakehouse_status(
    lake: Lakehouse,
    *,
    last: int = LAST_VERSIONS,
    ages: DueAges | None = None,
    plan_seconds: float = 0,
) -> Status:
    """Read the state of a lakehouse.

    Args:
        lake: The lakehouse.
        last: The number of newest versions to read.
        ages: The intervals of operations; by default, the intervals in the lakehouse's policy.
        plan_seconds: The time limit for counting reclaimable bytes by making plans, which read all kept roots. With 0,
            the numbers come from the recorded plans of expirations.

    Raises:
        LakehouseNotFoundError: There is no lakehouse at the root.
        CorruptFileError: The latest version cannot be read.
        StorageError: A storage request failed.
    """
    metered = MeteredLakehouse(lake)
    reading = _Reading(metered.lake)
    latest = reading.latest
    definition, now_ms = latest.definition, lake.storage.now_ms()
    commits = reading.attempt("the newest versions", lambda: commits_of(latest, last), Commits())
    undone = reading.attempt(
        "the rollbacks", lambda: find_undone(latest.files, commits.infos, max_requests=_ROLLBACK_REQUESTS), Undone()
    )
    recorded = reading.attempt(
        "the plans of expirations", lambda: recorded_space(latest, now_ms), Space(note="unknown")
    )
    inputs = reading.attempt("what is due", lambda: MaintenanceInputs.of(latest, commits, now_ms), MaintenanceInputs())
    running = reading.attempt("the lease", lambda: describe_lease(latest.files.roots.storage), None)
    hint = reading.attempt("the hint", lambda: inspect_hint(metered.lake).state, None)
    space = recorded if plan_seconds <= 0 else planned_space(lake, plan_seconds)
    if ages is None:
        ages = reading.attempt("the policy", lambda: DueAges.of(policy_of(definition)), DEFAULT_AGES, "policy show")
    known_ages = ages
    due = reading.attempt(
        "the rules",
        lambda: due_of(definition, inputs, commits, recorded.batches, known_ages, now_ms),
        tuple[Due, ...](),
    )
    unreadable, expired = reading.attempt(
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
        kept=latest.version + 1 - len(unreadable),
        expired=len(expired),
        exports=_n_exports(definition),
        clones=len(clones),
        hint=hint,
        running=running,
        due=due,
        space=space,
        findings=(*reading.failures, *status_findings(definition, commits, hint, now_ms)),
        ages=Activity.of(definition, inputs.verified_ms, now_ms, epoch_ms(latest.created_at)),
        cost=metered.cost(),
    )


def _undone_versions(undone: Mapping[int, int]) -> tuple[UndoneVersions, ...]:
    """Return undone versions grouped by the rollback that undid them, newest rollback first."""
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
    """Reads parts of the state. Unreadable parts are reported as findings, and the other parts are still reported."""

    def __init__(self, lake: Lakehouse):
        self.latest: Snapshot = lake.snapshot()
        self.failures: list[StatusFinding] = []

    def attempt(self, what: str, read: Callable[[], T], otherwise: T, command: str = "verify") -> T:
        """Read a part, or record a finding and return ``otherwise``.

        Args:
            what: The name of the part, for the finding.
            read: Reads the part.
            otherwise: The value if the part cannot be read.
            command: The command that explains the finding.

        Raises:
            LakehouseNotFoundError: There is no lakehouse at the root.
        """
        try:
            return read()
        except LakehouseNotFoundError:
            raise
        except TrinityLakeError as error:
            self.failures.append(StatusFinding("error", f"{what} cannot be read: {error.message}", command))
            return otherwise


_SEVERITIES = ("error", "warning")
#: The value for operations that have been due since an unknown time; 0 would mean that they are not due.
_UNKNOWN_SINCE = 1.0


def emit_status_metrics(status: Status, lakehouse: str) -> None:
    """Set the gauges of a lakehouse. Activities that never happened have an age of +Inf.

    Args:
        status: The state.
        lakehouse: The name of the lakehouse in the metrics.
    """
    ages = status.ages
    ages_by_kind = {
        "commit": ages.commit_seconds,
        "verify": ages.verify_seconds,
        "export": ages.export_seconds,
        "expiry": ages.expiry_seconds,
        "orphans": ages.orphans_seconds,
    }
    for kind, seconds in ages_by_kind.items():
        hub.put(hub.AGE_SECONDS, math.inf if seconds is None else seconds, lakehouse=lakehouse, of=kind)
    for due in status.due:
        since = (due.since_seconds or _UNKNOWN_SINCE) if due.state == DueState.DUE else 0.0
        hub.put(hub.DUE_SECONDS, since, lakehouse=lakehouse, what=due.what)
    for severity in _SEVERITIES:
        count = sum(finding.severity == severity for finding in status.findings)
        hub.put(hub.FINDINGS, count, lakehouse=lakehouse, severity=severity)
    reclaimable = status.space.reclaimable_bytes
    if reclaimable is not None:
        hub.put(hub.RECLAIMABLE_BYTES, reclaimable, lakehouse=lakehouse)
    hub.put(hub.VERSION, status.version, lakehouse=lakehouse)
    hub.put(hub.RECENT_ATTEMPTS, status.commits.attempts, lakehouse=lakehouse)
    hub.put(hub.RECENT_LOST, status.commits.lost, lakehouse=lakehouse)
    hub.put(hub.READ_AT, status.now.timestamp(), lakehouse=lakehouse)
