"""Plans and operations: read-only until they are executed, with telemetry and the cost of each.

A digest is ``<base version>-<sha256>`` over the base version and all effects of the plan. So an approval binds exactly
these effects. Plans that depend on the time have it in their digest, too. They are made again at the version and time
of their approval.
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
from trinitylake_ops.operations.budget import Spending, counting
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
    """Report a block to telemetry as an operation: a span, a log line, its outcome and its duration."""
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
    """What an operation asked of its storage: requests by kind, sequential rounds, bytes, and how long it took."""

    requests: Mapping[str, int]
    rounds: int
    bytes_read: int
    bytes_written: int
    duration_ms: int

    @property
    def total_requests(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())


def uncached(lake: Lakehouse) -> Lakehouse:
    """Return a lakehouse that asks its storage for every file: caches could hide that one is gone."""
    return uncached_on(lake.storage, lake.storage_options)


def uncached_on(storage: Storage, storage_options: Mapping[str, str] | None) -> Lakehouse:
    """Return the lakehouse on a storage, as :func:`uncached` does."""
    return Lakehouse(storage, storage_options, cache="off")


class MeteredLakehouse:
    """A lakehouse whose requests are counted, and the time since it was opened.

    It reads past all caches; with ``keeps_cache`` by those of the lakehouse, for operations that delete no files.
    """

    def __init__(self, lake: Lakehouse, spending: Spending | None = None, *, keeps_cache: bool = False):
        self._storage = MeteredStorage(lake.storage) if spending is None else counting(lake.storage, spending)
        self._others: list[MeteredStorage] = []
        self._begun_s = time.monotonic()
        self.lake = lake.on(self._storage) if keeps_cache else uncached_on(self._storage, lake.storage_options)

    def also(self, storage: Storage) -> Storage:
        """Return another storage whose requests are counted, too."""
        self._others.append(MeteredStorage(storage))
        return self._others[-1]

    def cost(self) -> Cost:
        """Return what was asked of the storage so far."""
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
    """Base of plans: frozen dataclasses of data, which say what would be done.

    ``operation`` made the plan and executes it; it is no part of the content.
    """

    base_version: int
    #: Identifies the content of the base version (:func:`base_id_of`), because two lakehouses have equal numbers.
    base_id: str = field(repr=False, compare=False)
    operation: PlannedOperation[Any, Any] = field(repr=False, compare=False)

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of what the plan would do."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing would change."""

    @abstractmethod
    def execute(self) -> Document:
        """Execute the plan. Each kind takes an ``approved_digest`` and further options, and documents its errors."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as values of JSON, and the digest, which is None if there is nothing to approve."""
        return {**super().to_dict(), "digest": None if self.is_empty else self.digest}

    def check_approved(self, approved_digest: str) -> None:
        """Raise PlanChangedError when this is not the plan that was approved."""
        if approved_digest != self.digest:
            made_on = approved_digest.partition("-")[0]
            cause = "the options, or the files that it is about, are not those that it was made with"
            if made_on.isascii() and made_on.isdecimal() and made_on != str(self.base_version):
                cause = f"it was made on version {made_on}, and a plan is made on version {self.base_version} now"
            raise PlanChangedError(f"plan {approved_digest!r} is out of date: {cause}; look at the plan again")


@dataclass(frozen=True, kw_only=True)
class CommitReport(Document):
    """The result of one commit. ``version`` has it; it is ``base_version`` if there was nothing to do.

    ``changed`` counts the objects, or exports, that the plan named. ``damaged`` are tables whose files cannot all be
    read, with the reason: a rollback brought them back so, and other operations left them out.
    """

    operation: str
    base_version: int
    version: int
    changed: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    cost: Cost

    @property
    def is_complete(self) -> bool:
        """Whether no damaged table was left out or brought back."""
        return not self.damaged

    @property
    def has_changed(self) -> bool:
        """Whether there was something to do."""
        return self.version != self.base_version

    def table(self) -> Table:
        """Return one row: what was done, the version, how much changed, and what it cost."""
        row = (self.operation, self.version, self.changed, self.cost.total_requests, self.cost.duration_ms)
        title = f"Commit; damaged tables: {', '.join(self.damaged)}" if self.damaged else "Commit"
        return new_table(title, "operation", "version", "changed", "requests", "ms", rows=[row])


def base_id_of(base: Snapshot) -> str:
    """Return what identifies a version beyond its number: the id of its commit, or else its lakehouse definition.

    A digest contains it, so that a plan approved for one lakehouse applies to no other lakehouse.
    """
    return base.root.system.get(COMMIT_ID) or base.definition_location


def digest_of(base_version: int, base_id: str, *content: object) -> str:
    """Return the digest of a plan.

    Args:
        base_version: The version that the plan was made on.
        base_id: The identifier of that version, from :func:`base_id_of`.
        content: The effects of the plan, as values of JSON.
    """
    text = json.dumps([base_version, base_id, *content], sort_keys=True, separators=(",", ":"))
    return f"{base_version}-{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def timed_digest(base_version: int, now_ms: int, *content: object) -> str:
    """Return ``<base version>-<time in ms>-<sha256>`` over both and the content, which is made of values of JSON."""
    text = json.dumps([base_version, now_ms, *content], sort_keys=True, separators=(",", ":"))
    return f"{base_version}-{now_ms}-{hashlib.sha256(text.encode('ascii')).hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class TimedPlan(Plan):
    """Base of plans for a version and a time; ``now_ms`` is the storage's clock, in milliseconds since the epoch."""

    now_ms: int


PlannedT = TypeVar("PlannedT", bound=Plan)
TimedT = TypeVar("TimedT", bound=TimedPlan)
ReportT = TypeVar("ReportT", bound=Document)


@dataclass(frozen=True, kw_only=True)
class PlannedOperation(ABC, Generic[PlannedT, ReportT]):
    """Base of the operations: plans and executes one verb on a lakehouse.

    The fields are the lakehouse, the options of the operation and of its execution, and what planning opened.
    """

    #: The name of the operation in spans, metrics and the log.
    telemetry_name: ClassVar[str]

    lake: Lakehouse

    @abstractmethod
    def plan(self) -> PlannedT:
        """Make the plan, on the latest version unless a base was read; only reads."""

    @abstractmethod
    def run(self, plan: PlannedT, approved_digest: str | None) -> ReportT:
        """Apply a plan, as ``execute`` of the plan documents it."""

    def execute(self, plan: PlannedT, approved_digest: str | None = None) -> ReportT:
        """Run a plan, and report the run to telemetry.

        Args:
            plan: The plan, made by this operation.
            approved_digest: The digest of the approved plan, None to apply the plan without an approval.

        Raises:
            TrinityLakeError: The errors that ``execute`` of the plan documents.
        """
        with operation_span(self.telemetry_name):
            return self.run(plan, approved_digest)

    def checked(self, plan: PlannedT, approved_digest: str | None) -> PlannedT:
        """Return the plan, made again by this operation if a digest was approved.

        Raises PlanChangedError when the plan of now is not the approved one, and what ``plan`` raises.
        """
        if approved_digest is None:
            return plan
        now = self.plan()
        now.check_approved(approved_digest)
        return now


@dataclass(frozen=True, kw_only=True)
class TimedOperation(PlannedOperation[TimedT, ReportT]):
    """Base of operations whose plans are for a version and a time."""

    @abstractmethod
    def plan_at(self, base: Snapshot, now_ms: int) -> TimedT:
        """Return the plan for a version and a time, in milliseconds since the epoch."""

    def as_approved(self, plan: TimedT, approved_digest: str | None) -> TimedT:
        """Return the plan of a digest, made again. It is this one if no digest was given, or its own.

        Raises PlanChangedError when that is not the approved plan, or no plan can be made there any more.
        """
        if approved_digest in (None, plan.digest):
            return plan
        match = _DIGEST.fullmatch(str(approved_digest))
        if match is None:
            raise PlanChangedError(f"{approved_digest!r} is not the digest of such a plan: look at the plan again")
        base_version, now_ms = int(match[1]), int(match[2])
        if now_ms > self.lake.storage.now_ms():
            raise PlanChangedError("the approved plan bears a time that is still to come: look at the plan again")
        try:
            base = self.lake.snapshot(base_version)
        except NotFoundError as error:
            raise PlanChangedError(
                f"the approved plan was made at version {base_version}, which cannot be read any more: look at the plan"
                " again"
            ) from error
        try:
            then = self.plan_at(base, now_ms)
        except FileMissingError as error:
            if self.lake.latest_version() == base_version:
                raise
            raise PlanChangedError(
                f"the approved plan was made at version {base_version}; what it was made of is gone since, such as an"
                " export that was dropped: look at the plan again"
            ) from error
        then.check_approved(str(approved_digest))
        return then
