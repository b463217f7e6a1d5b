"""Base classes of operations and their plans, with the cost and the telemetry of each run.

Planning only reads. The digest of a plan is ``<base version>-<sha256>`` over the base version and all effects, so an
approval covers exactly these effects. If the effects depend on the time, the digest also contains the time, and the
plan is made again for the version and time in the approved digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from trinitylake_ops.errors import FileMissingError, NotFoundError, PlanChangedError
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.operations.budget import Spending, counting_storage
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage import MeteredStorage, Storage
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import OPERATION_SECONDS, OPERATIONS
from trinitylake_ops.telemetry.settings import about
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.commit_info import acting_run
from trinitylake_ops.versions.snapshot import Snapshot

logger = logging.getLogger(__name__)


@contextmanager
def operation_span(operation: str) -> Iterator[None]:
    """Report a block to telemetry as an operation, with a span, a log line, the outcome and the duration in seconds."""
    begun_s, outcome = time.monotonic(), "failed"
    run_id = acting_run()
    attributes = {"trinitylake.operation": operation, **({"trinitylake.run": run_id} if run_id else {})}
    try:
        with about(operation=operation, run_id=run_id), spans.span(f"operation {operation}", attributes):
            yield
        outcome = "done"
    finally:
        seconds = time.monotonic() - begun_s
        log_fields = {"operation": operation, "outcome": outcome, "seconds": round(seconds, 3)}
        logger.info("%s: %s", operation, outcome, extra={"fields": log_fields})
        hub.add(OPERATIONS, operation=operation, outcome=outcome)
        hub.observe(OPERATION_SECONDS, seconds, operation=operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The storage usage of an operation: requests by kind, sequential round trips, bytes, and the duration."""

    requests: Mapping[str, int]
    rounds: int
    bytes_read: int
    bytes_written: int
    duration_ms: int

    @property
    def total_requests(self) -> int:
        """The number of requests of all kinds."""
        return sum(self.requests.values())


def uncached(lake: Lakehouse) -> Lakehouse:
    """Return a lakehouse without caches, because a cache could hide that a file is missing."""
    return uncached_on(lake.storage, lake.storage_options)


def uncached_on(storage: Storage, storage_options: Mapping[str, str] | None) -> Lakehouse:
    """Return the lakehouse on a storage without caches.

    Args:
        storage: The storage.
        storage_options: The options that the storage was opened with.
    """
    return Lakehouse(storage, storage_options, cache="off")


class MeteredLakehouse:
    """A lakehouse whose requests and time are measured, for the cost of an operation.

    Args:
        lake: The lakehouse.
        spending: The budget that requests are charged to.
        keeps_cache: Whether to use the caches of the lakehouse, for operations that delete no files.
    """

    def __init__(self, lake: Lakehouse, spending: Spending | None = None, *, keeps_cache: bool = False):
        self._storage = MeteredStorage(lake.storage) if spending is None else counting_storage(lake.storage, spending)
        self._others: list[MeteredStorage] = []
        self._begun_s = time.monotonic()
        self.lake = lake.on(self._storage) if keeps_cache else uncached_on(self._storage, lake.storage_options)

    def meter(self, storage: Storage) -> Storage:
        """Return a storage that counts its requests in this cost."""
        self._others.append(MeteredStorage(storage))
        return self._others[-1]

    def cost(self) -> Cost:
        """Return the cost so far."""
        counted = [storage.snapshot() for storage in (self._storage, *self._others)]
        requests: Counter[str] = Counter()
        for counts in counted:
            requests.update(counts.requests)
        return Cost(
            requests=dict(sorted(requests.items())),
            rounds=sum(counts.rounds for counts in counted),
            bytes_read=sum(counts.bytes_read for counts in counted),
            bytes_written=sum(counts.bytes_written for counts in counted),
            duration_ms=round((time.monotonic() - self._begun_s) * 1000),
        )


_DIGEST = re.compile(r"(\d{1,10})-(\d{1,15})-[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """Base of plans: frozen dataclasses that describe what an operation would do."""

    base_version: int
    #: Identifies the content of the base version (:func:`base_id_of`), because version numbers are not unique.
    base_id: str = field(repr=False, compare=False)
    #: The operation that made the plan and executes it. Not part of the plan's content.
    operation: PlannedOperation[Any, Any] = field(repr=False, compare=False)

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the effects."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the plan has no effects."""

    @abstractmethod
    def execute(self) -> Document:
        """Execute the plan. Subclasses add ``approved_digest`` and other options, and document their errors."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON values, and the digest, which is None if there is nothing to approve."""
        return {**super().to_dict(), "digest": None if self.is_empty else self.digest}

    def check_approved(self, approved_digest: str) -> None:
        """Raise PlanChangedError if this is not the approved plan."""
        if approved_digest != self.digest:
            made_on = approved_digest.partition("-")[0]
            cause = "the options, or the files to change, differ"
            if made_on.isascii() and made_on.isdecimal() and made_on != str(self.base_version):
                cause = f"it was made on version {made_on}, and the new plan on version {self.base_version}"
            raise PlanChangedError(f"plan {approved_digest!r} is out of date: {cause}; review the new plan")


@dataclass(frozen=True, kw_only=True)
class CommitReport(Document):
    """The result of an operation that makes one commit."""

    operation: str
    base_version: int
    #: The committed version, or ``base_version`` if there was nothing to do.
    version: int
    #: The number of objects or exports in the plan.
    changed: int
    #: Tables with unreadable files, and the reason for each. A rollback restores them; other operations skip them.
    damaged: Mapping[str, str] = field(default_factory=dict)
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether no damaged table was restored or skipped."""
        return not self.damaged

    @property
    def has_changed(self) -> bool:
        """Whether there was something to do."""
        return self.version != self.base_version

    def table(self) -> Table:
        """Return one row: the operation, the version, the number of changes, and the cost."""
        row = (self.operation, self.version, self.changed, self.cost.total_requests, self.cost.duration_ms)
        title = f"Commit; damaged tables: {', '.join(self.damaged)}" if self.damaged else "Commit"
        return new_table(title, "operation", "version", "changed", "requests", "ms", rows=[row])


def base_id_of(base: Snapshot) -> str:
    """Return an identifier of the content of a version: the id of its commit, or else its lakehouse definition.

    Digests contain it, so that an approval for one lakehouse does not apply to another.
    """
    return base.root.system.get(COMMIT_ID) or base.definition_location


def digest_of(base_version: int, base_id: str, *content: object) -> str:
    """Return the digest of a plan.

    Args:
        base_version: The version that the plan is based on.
        base_id: The identifier of that version, from :func:`base_id_of`.
        *content: The effects of the plan, as JSON values.
    """
    text = json.dumps([base_version, base_id, *content], sort_keys=True, separators=(",", ":"))
    return f"{base_version}-{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def timed_digest(base_version: int, now_ms: int, *content: object) -> str:
    """Return the digest ``<base version>-<time in ms>-<sha256>`` of a plan that depends on the time.

    Args:
        base_version: The version that the plan is based on.
        now_ms: The time of the plan by the storage's clock, in milliseconds since the epoch.
        *content: The effects of the plan, as JSON values.
    """
    text = json.dumps([base_version, now_ms, *content], sort_keys=True, separators=(",", ":"))
    return f"{base_version}-{now_ms}-{hashlib.sha256(text.encode('ascii')).hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class TimedPlan(Plan):
    """Base of plans that depend on the time."""

    #: The time of the plan by the storage's clock, in milliseconds since the epoch.
    now_ms: int


PlannedT = TypeVar("PlannedT", bound=Plan)
TimedT = TypeVar("TimedT", bound=TimedPlan)
ReportT = TypeVar("ReportT", bound=Document)


@dataclass(frozen=True, kw_only=True)
class PlannedOperation(ABC, Generic[PlannedT, ReportT]):
    """Base of operations, which make and execute plans on a lakehouse.

    Fields of subclasses hold the options for planning and execution, and resources opened during planning.
    """

    #: The name of the operation in spans, metrics and the log.
    telemetry_name: ClassVar[str]

    lake: Lakehouse

    @abstractmethod
    def plan(self) -> PlannedT:
        """Make a plan based on the latest version, without writing."""

    @abstractmethod
    def run(self, plan: PlannedT, approved_digest: str | None) -> ReportT:
        """Apply a plan. See the ``execute`` method of the plan."""

    def execute(self, plan: PlannedT, approved_digest: str | None = None) -> ReportT:
        """Run a plan, and report the run to telemetry.

        Args:
            plan: A plan of this operation.
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            TrinityLakeError: See the ``execute`` method of the plan.
        """
        with operation_span(self.telemetry_name):
            return self.run(plan, approved_digest)

    def checked(self, plan: PlannedT, approved_digest: str | None) -> PlannedT:
        """Return the plan, or a new plan if a digest was approved.

        Args:
            plan: The plan.
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The new plan is not the approved one.
            TrinityLakeError: Planning failed.
        """
        if approved_digest is None:
            return plan
        now = self.plan()
        now.check_approved(approved_digest)
        return now


@dataclass(frozen=True, kw_only=True)
class TimedOperation(PlannedOperation[TimedT, ReportT]):
    """Base of operations whose plans depend on the time."""

    @abstractmethod
    def plan_at(self, base: Snapshot, now_ms: int) -> TimedT:
        """Make the plan for a version and a time in milliseconds since the epoch."""

    def as_approved(self, plan: TimedT, approved_digest: str | None) -> TimedT:
        """Return the approved plan, made again for the version and the time in its digest.

        Args:
            plan: The plan to return if no digest was approved, or if the approved digest is that of the plan.
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The new plan is not the approved one, or can no longer be made.
        """
        if approved_digest in (None, plan.digest):
            return plan
        match = _DIGEST.fullmatch(str(approved_digest))
        if match is None:
            raise PlanChangedError(f"{approved_digest!r} is not a digest of such a plan; review the new plan")
        base_version, now_ms = int(match[1]), int(match[2])
        if now_ms > self.lake.storage.now_ms():
            raise PlanChangedError("the time of the approved plan is in the future; review the new plan")
        try:
            base = self.lake.snapshot(base_version)
        except NotFoundError as error:
            raise PlanChangedError(
                f"the approved plan was made on version {base_version}, which can no longer be read; review the new"
                " plan"
            ) from error
        try:
            approved = self.plan_at(base, now_ms)
        except FileMissingError as error:
            if self.lake.latest_version() == base_version:
                raise
            raise PlanChangedError(
                f"the approved plan was made on version {base_version}, and a file that it was made from was deleted"
                " since, for example by dropping an export; review the new plan"
            ) from error
        approved.check_approved(str(approved_digest))
        return approved
