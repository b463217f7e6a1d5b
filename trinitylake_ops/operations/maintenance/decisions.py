"""The decisions of a run of maintenance, and its report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.operations.rendering import Document, Table, new_table


class DecisionState(StrEnum):
    """What a run decided, or did."""

    #: A run would do it.
    PLANNED = "planned"
    DONE = "done"
    #: A limit ended it early; the next run continues.
    PARTLY = "partly done"
    #: There is nothing to do.
    NOTHING = "nothing"
    #: It waits for an approval.
    WAITS = "waits"
    #: It is left for the next run.
    LEFT = "left"
    #: The policy leaves it out.
    SKIPPED = "skipped"
    FAILED = "failed"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if necessary."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


#: The states after which the next run begins with the step.
UNFINISHED = frozenset({DecisionState.LEFT, DecisionState.PARTLY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """How to approve a plan that waits."""

    #: The name of the operation, as in ``declarations``.
    job: str
    #: The arguments of its command.
    arguments: tuple[str, ...] = ()
    #: The options of its job.
    options: Mapping[str, Any] = field(default_factory=dict)
    digest: str

    @property
    def command(self) -> str:
        """The command that applies the plan, without the root."""
        flags = [part for name, value in self.options.items() if name not in _ARGUMENTS for part in _flag(name, value)]
        apply = [] if self.job in _WITHOUT_PLAN else ["--apply", self.digest]
        return shlex.join([self.job.replace("_", "-"), *self.arguments, *flags, *apply])


#: Operations whose commands make no plan.
_WITHOUT_PLAN = frozenset({"compact", "reconcile"})
#: Options that are arguments of commands.
_ARGUMENTS = frozenset({"name", "pattern", "tables"})


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, list):
        return [part for item in value for part in (flag, str(item))]
    return [flag] if value is True else [flag, str(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision: about a step, or about one table of a step."""

    step: Step
    state: DecisionState
    #: The table, export or clone; empty for the whole lakehouse.
    what: str = ""
    why: str
    #: The number of files to delete or rewrite, or that were deleted or rewritten.
    files: int = 0
    #: Their size.
    bytes: int = 0
    #: How to approve the plan, if it waits.
    approval: Approval | None = None

    def done(self, why: str, *, files: int | None = None, size_bytes: int | None = None) -> Decision:
        """Return this decision as done, with what was deleted or rewritten, if that differs from the plan."""
        return replace(
            self,
            state=DecisionState.DONE,
            why=why,
            files=self.files if files is None else files,
            bytes=self.bytes if size_bytes is None else size_bytes,
        )


#: The steps whose files are deleted.
DELETING = frozenset({Step.PURGE, Step.ORPHANS, Step.DROP_OVERDUE_CLONES})
_HAPPENED = frozenset({DecisionState.DONE, DecisionState.PARTLY})


@dataclass(frozen=True, kw_only=True)
class MaintenanceReport(Document):
    """What a run of maintenance decided and did."""

    root: str
    #: The latest version when the run began.
    base_version: int
    #: The latest version when it ended.
    version: int
    #: When it began, by the storage's clock.
    begun_at: datetime
    #: Whether it only planned.
    is_dry_run: bool
    #: Whether the lakehouse has no policy, so that the default applied.
    has_default_policy: bool
    #: Why nothing was done, if the policy does not allow maintenance at this time.
    closed: str | None
    decisions: tuple[Decision, ...]
    #: The number of deleted files.
    deleted_files: int
    #: Their size.
    deleted_bytes: int
    #: The number of data files that were rewritten to compact tables.
    rewritten_files: int
    #: Their size.
    rewritten_bytes: int
    cost: Cost = field(compare=False)

    @property
    def waiting(self) -> tuple[Decision, ...]:
        """The decisions that wait for an approval."""
        return tuple(decision for decision in self.decisions if decision.state == DecisionState.WAITS)

    @property
    def failed(self) -> tuple[Decision, ...]:
        """The decisions that failed."""
        return tuple(decision for decision in self.decisions if decision.state == DecisionState.FAILED)

    @property
    def left(self) -> tuple[Decision, ...]:
        """The decisions that the next run continues."""
        return tuple(decision for decision in self.decisions if decision.state in UNFINISHED)

    @property
    def is_complete(self) -> bool:
        """Whether nothing failed. What waits, or is left for the next run, is no failure."""
        return not self.failed

    @property
    def headline(self) -> str:
        """The run in one sentence."""
        if self.closed is not None:
            return f"Maintenance did nothing: {self.closed}"
        happened = [decision.step for decision in self.decisions if decision.state in _HAPPENED]
        planned = [decision.step for decision in self.decisions if decision.state == DecisionState.PLANNED]
        verb, steps = ("would run", planned) if self.is_dry_run else ("ran", happened)
        names = ", ".join(dict.fromkeys(step.value for step in steps))
        parts = [f"{verb} {names}" if names else "nothing to do"]
        delete, rewrite = ("would delete", "would rewrite") if self.is_dry_run else ("deleted", "rewrote")
        if self.deleted_files:
            parts.append(f"{delete} {counted(self.deleted_files, 'file')} of {self.deleted_bytes:,} bytes")
        if self.rewritten_files:
            parts.append(f"{rewrite} {counted(self.rewritten_files, 'file')} of {self.rewritten_bytes:,} bytes")
        counts = {"waiting for approval": self.waiting, "left for the next run": self.left, "failed": self.failed}
        parts += [f"{len(decisions):,} {state}" for state, decisions in counts.items() if decisions]
        return f"Maintenance of version {self.base_version:,}: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON values, with the headline and the commands that approve waiting plans."""
        commands = [decision.approval.command for decision in self.waiting if decision.approval is not None]
        return {"headline": self.headline, **super().to_dict(), "waiting": commands}

    def table(self) -> Table:
        """Return one row for each decision."""
        rows = [
            (
                decision.step.value,
                decision.what,
                decision.state.value,
                f"{decision.files:,}" if decision.files else "",
                f"{decision.bytes:,}" if decision.bytes else "",
                decision.why,
            )
            for decision in self.decisions
        ]
        return new_table(self.headline, "step", "what", "decision", "files", "bytes", "why", rows=rows)
