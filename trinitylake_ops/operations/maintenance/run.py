"""The context of a run of maintenance: the policy, the limits and their usage, and what is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import ConflictError, NotFoundError
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.iceberg.write.rewrite import GroupWriter, rewrite_in_process
from trinitylake_ops.operations.budget import Spending
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.survey import (
    Progress,
    Survey,
    expired_versions,
    is_lapsed,
    no_progress,
    survey_versions,
)
from trinitylake_ops.operations.maintenance.decisions import Approval, Decision, DecisionState, counted
from trinitylake_ops.operations.maintenance.state_file import MaintenanceState
from trinitylake_ops.operations.policy.document import Limits, MaintenancePolicy, Step
from trinitylake_ops.operations.policy.values import duration_text, size_text
from trinitylake_ops.operations.retention import RetentionPolicy, protected_ms, span_text
from trinitylake_ops.operations.status.activity import Commits, commits_of
from trinitylake_ops.operations.status.due import Due, DueAges, DueState, MaintenanceInputs, due_of
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms

_SECOND_MS = 1_000
#: The maximum number of tables that are planned together, and about how many requests each takes.
_MAX_TABLES_AT_ONCE, _REQUESTS_PER_TABLE = 256, 8
_MAX_SHOWN_NAMES = 5
_PERIODS = ("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")

#: The operations in the log that steps of maintenance commit.
OWN_OPERATIONS = frozenset(
    {
        *("trim", "compact-tables", "compact", "expire", "purge", "orphans", "export", "drop-export", "drop-clone"),
        *("reconcile", "set-policy"),
    }
)
#: So many versions expire even if only maintenance committed them.
_MAX_OWN_VERSIONS = 100

WriterFactory = Callable[[], AbstractContextManager[GroupWriter]]


def in_this_process() -> AbstractContextManager[GroupWriter]:
    """Provide the writer of data files that uses threads of this process."""
    return nullcontext(rewrite_in_process)


@dataclass(slots=True)
class Allowance:
    """The files and bytes that a run may delete, or rewrite. None means no limit."""

    max_files: int | None
    max_bytes: int | None
    files: int = 0
    bytes: int = 0

    def exceeds_limit(self, files: int, size_bytes: int) -> bool:
        """Whether a plan is larger than the limit of a whole run."""
        return _exceeds(files, self.max_files) or _exceeds(size_bytes, self.max_bytes)

    def fits(self, files: int, size_bytes: int) -> bool:
        """Whether a plan fits into what is left."""
        return not self.exceeds_limit(self.files + files, self.bytes + size_bytes)

    def spend(self, files: int, size_bytes: int) -> None:
        """Count what was deleted or rewritten."""
        self.files += files
        self.bytes += size_bytes

    def __str__(self) -> str:
        parts = [] if self.max_files is None else [f"{self.max_files:,} files"]
        parts += [] if self.max_bytes is None else [size_text(self.max_bytes)]
        return " and ".join(parts)


def _exceeds(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit


@dataclass
class MaintenanceRun:
    """The context of one run."""

    #: The lakehouse, whose requests are charged to ``spending``.
    lake: Lakehouse
    policy: MaintenancePolicy
    state: MaintenanceState
    spending: Spending
    #: Whether the run only plans.
    is_dry_run: bool
    #: The storage's time when the run began, in milliseconds since the epoch.
    now_ms: int
    executor: Callable[[], Executor] = lambda: LOCAL
    writer: WriterFactory = in_this_process
    progress: Progress = no_progress
    deleted: Allowance = field(init=False)
    rewritten: Allowance = field(init=False)
    _scope: ExitStack = field(default_factory=ExitStack, repr=False)
    _survey: Survey | None = field(default=None, repr=False)
    _writer: GroupWriter | None = field(default=None, repr=False)
    _n_own: int = 0

    def __post_init__(self) -> None:
        limits = self.limits
        self.deleted = Allowance(limits.max_deleted_files, limits.max_deleted_bytes)
        self.rewritten = Allowance(limits.max_rewritten_files, limits.max_rewritten_bytes)

    @property
    def limits(self) -> Limits:
        """The limits of the policy."""
        return self.policy.limits

    @cached_attribute
    def latest(self) -> Snapshot:
        """The latest version when the run began."""
        return self.lake.snapshot()

    @property
    def min_age_ms(self) -> int:
        """The age below which nothing is expired or deleted, in whole seconds, so that a command can name it."""
        return -(-self.limits.min_age_ms // _SECOND_MS) * _SECOND_MS

    def retention(self, definition: LakehouseDef) -> RetentionPolicy:
        """Return the lakehouse's retention rules, extended to keep everything younger than the least age."""
        own = RetentionPolicy.of(definition)
        return replace(
            own,
            maximum_age_ms=max(own.maximum_age_ms, self.min_age_ms),
            age_overrides={version: max(age_ms, self.min_age_ms) for version, age_ms in own.age_overrides.items()},
        )

    def max_age_option(self) -> dict[str, str]:
        """Return the least age as an option of expire and trim, unless the lakehouse keeps versions for longer."""
        own_ms = RetentionPolicy.of(self.latest.definition).maximum_age_ms
        return {"max_age": duration_text(self.min_age_ms)} if self.min_age_ms > own_ms else {}

    def grace_ms(self, definition: LakehouseDef) -> int:
        """Return how long ago versions must have expired, or files have been written, to be deleted."""
        return max(self.min_age_ms, protected_ms(definition))

    @contextmanager
    def planning(self) -> Iterator[Progress]:
        """Enforce the limits on requests and time while the block plans.

        Yields:
            The progress callback to use in the block.

        Raises:
            BudgetSpentBeforeError: A limit was reached.
        """
        with self.spending.planning(self.progress) as progress:
            yield progress

    # What is due

    @cached_attribute
    def _inputs(self) -> MaintenanceInputs:
        return MaintenanceInputs.of(self.latest, self._commits, self.now_ms)

    @cached_attribute
    def _commits(self) -> Commits:
        return commits_of(self.latest, 1)

    @cached_attribute
    def due(self) -> dict[str, Due]:
        """What the status reports as due, by name."""
        ages = DueAges.of(self.policy)
        entries = due_of(self.latest.definition, self._inputs, self._commits, (), ages, self.now_ms)
        return {entry.what: entry for entry in entries}

    @cached_attribute
    def why_nothing_expires(self) -> str:
        """Why no version can expire; empty if one may. Rules by period need a survey of all versions to decide."""
        definition = self.latest.definition
        rules = self.retention(definition)
        if any(is_lapsed(record, self.now_ms) for record in definition.exports):
            return ""
        n_live = self.latest.version + 1 - len(expired_versions(definition))
        n_kept = max(1, rules.minimum_versions, rules.keep_last)
        if n_live <= n_kept:
            return f"the newest {counted(n_kept, 'version')} are kept"
        if any(getattr(rules, name) for name in _PERIODS):
            return ""
        infos = {info.version: info for info in (*self._inputs.oldest, *self._commits.infos)}
        oldest = next((info for _, info in sorted(infos.items()) if info.state == "live"), None)
        successor = None if oldest is None else infos.get(oldest.version + 1)
        if oldest is None or successor is None:
            return "" if oldest is None or oldest.version < self.latest.version else "only the latest version is kept"
        superseded_ms = self.now_ms - epoch_ms(max(oldest.created_at, successor.created_at))
        kept_ms = max(rules.age_overrides.get(oldest.version, rules.maximum_age_ms), rules.protected_ms)
        if superseded_ms > kept_ms:
            return ""
        age = span_text(max(0, superseded_ms))
        return f"the oldest version, {oldest.version}, was superseded {age} ago, and is kept for {span_text(kept_ms)}"

    @property
    def purgeable(self) -> tuple[str, ...]:
        """The versions of the batches that can be purged now."""
        definition = self.latest.definition
        grace_ms = self.grace_ms(definition)
        return tuple(
            batch.versions
            for batch in definition.expirations
            if batch.state == ExpirationState.PURGING
            or (batch.state == ExpirationState.EXPIRED and batch.expired_at_millis + grace_ms <= self.now_ms)
        )

    @property
    def orphans_due(self) -> bool:
        """Whether orphans were last removed, or checked, too long ago."""
        every_ms, due = self.policy.targets.orphans_every_ms, self.due["orphans"]
        if every_ms is None or due.state == DueState.FINE:
            return False
        checked_ms = self.state.orphans_checked_ms
        return checked_ms is None or self.now_ms - checked_ms > every_ms

    def survey(self) -> Survey:
        """Return the survey of all versions. Reads only roots that are new since an earlier call."""
        base = self.lake.snapshot()
        if self._survey is None:
            self._survey = survey_versions(self.lake, base, self.progress, executor=self.executor())
        else:
            self._survey = self._survey.extended(base)
        return self._survey

    def forget_survey(self) -> None:
        """Forget the survey after the settings that decide about versions changed."""
        self._survey = None

    def expiring(self) -> tuple[int, ...]:
        """Return the versions that can expire now, unless maintenance committed all of them and they are few.

        Otherwise maintenance of an unchanged lakehouse would commit versions in each run, only to expire those
        of earlier runs.
        """
        survey = self.survey()
        verdicts = survey.verdicts(self.retention(survey.definition), self.lake.storage.now_ms())
        expiring = tuple(verdict.version for verdict in verdicts if verdict.expires)
        is_own = all(survey.roots[version].operation in OWN_OPERATIONS for version in expiring)
        self._n_own = len(expiring) if is_own and len(expiring) < _MAX_OWN_VERSIONS else 0
        return () if self._n_own else expiring

    def why_none_is_expiring(self) -> str:
        """Return why :meth:`expiring` is empty."""
        if not self._n_own:
            return "the rules keep all versions"
        return f"only {counted(self._n_own, 'version')} of maintenance itself can expire, too few to commit another one"

    def tables_at_once(self) -> int:
        """Return how many tables to plan together, so that their requests fit into what is left of the limit."""
        limit = self.limits.max_requests
        if limit is None:
            return _MAX_TABLES_AT_ONCE
        return max(1, min(_MAX_TABLES_AT_ONCE, (limit - self.spending.requests) // _REQUESTS_PER_TABLE))

    # Deciding

    def apply(
        self,
        planned: Decision,
        execute: Callable[[], Decision],
        *,
        approval: Approval,
        allowance: Allowance | None = None,
    ) -> Decision:
        """Decide about a plan, and execute it if the policy allows that.

        Args:
            planned: The decision to execute the plan, with its files and bytes.
            execute: Executes the plan, and returns the decision with its outcome.
            approval: How to approve the plan.
            allowance: What the plan is charged to, with the files and bytes that were deleted.
        """
        if planned.step in self.policy.approval:
            return replace(
                planned,
                state=DecisionState.WAITS,
                why=f"{planned.why}; the policy requires an approval",
                approval=approval,
            )
        if self.deleted.exceeds_limit(planned.files, planned.bytes):
            why = f"{planned.why}; more than the limit of {self.deleted} without approval"
            return replace(planned, state=DecisionState.WAITS, why=why, approval=approval)
        if allowance is not None and not allowance.fits(planned.files, planned.bytes):
            why = f"{planned.why}; more than what is left of the limit of {allowance} of this run"
            return replace(planned, state=DecisionState.LEFT, why=why)
        if self.is_dry_run:
            outcome = planned
        elif (spent := self.spending.exhausted()) is not None:
            return replace(planned, state=DecisionState.LEFT, why=f"{planned.why}; {spent}")
        else:
            outcome = execute()
        if allowance is not None:
            allowance.spend(outcome.files, outcome.bytes)
        return outcome

    def group_writer(self) -> GroupWriter:
        """Return the writer of data files. It is started with the first table."""
        if self._writer is None:
            self._writer = self._scope.enter_context(self.writer())
        return self._writer

    def save_state(self) -> None:
        """Write what maintenance remembers, unless the run only plans."""
        if not self.is_dry_run:
            self.state.write(self.lake.storage)

    def close(self) -> None:
        """Stop what was started for the run."""
        self._scope.close()


def nothing(step: Step, why: str) -> Decision:
    """Return the decision that a step has nothing to do."""
    return Decision(step=step, state=DecisionState.NOTHING, why=why)


def left_by(step: Step, error: ConflictError | NotFoundError, what: str = "") -> Decision:
    """Return the decision to leave a step or a table for the next run, because of another writer."""
    return Decision(step=step, state=DecisionState.LEFT, what=what, why=error.message)


def names_text(names: Sequence[Any]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(map(str, names[:_MAX_SHOWN_NAMES]))
    return shown + (f" and {len(names) - _MAX_SHOWN_NAMES:,} more" if len(names) > _MAX_SHOWN_NAMES else "")
