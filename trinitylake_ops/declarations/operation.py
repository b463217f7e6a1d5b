"""Declarations of operations, and the context in which a command, a job or a task runs them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.options import ApplyLimits, Options
from trinitylake_ops.declarations.rendering import Link, Markdown, log_text
from trinitylake_ops.declarations.version_rows import VersionRows
from trinitylake_ops.operations.budget import Spending
from trinitylake_ops.operations.executor import Executor
from trinitylake_ops.operations.rendering import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from trinitylake_ops.iceberg.write.rewrite import GroupWriter

_PROGRESS_SECONDS = 10.0

OptionsT = TypeVar("OptionsT", bound=Options | None)
ReportT = TypeVar("ReportT")


@dataclass(frozen=True, kw_only=True)
class OperationContext(ABC, Generic[OptionsT]):
    """The inputs of an operation: an open lakehouse, options, and the resources for planning and execution."""

    lake: Lakehouse
    options: OptionsT
    #: Formats versions as table rows, and knows which versions passed checks.
    page: VersionRows
    #: Returns the executor that sends the requests for individual files.
    executor: Callable[[], Executor]
    #: The budget that planning and execution share.
    spending: Spending = field(default_factory=Spending)
    #: Storage options for another root; None to use the options of this lakehouse.
    target_options: Mapping[str, str] | None = None

    @property
    @abstractmethod
    def run_id(self) -> str | None:
        """The id of the run, which its commits record; None for a command."""

    @abstractmethod
    def progress(self) -> Callable[[str, int, int], None]:
        """Return a callback that reports progress: what is counted, the number done, and the total."""

    @abstractmethod
    def group_writer(self) -> AbstractContextManager[GroupWriter]:
        """Return a context manager that provides the writer of data file groups."""


@dataclass(frozen=True, kw_only=True)
class ReportingContext(OperationContext[OptionsT]):
    """The context of an operation that runs as a job or a task, and reports its results there."""

    #: Metadata that is added to everything the operation reports.
    details: Mapping[str, Any] = field(default_factory=dict)
    #: The limits for runs without approval; None if the code sets none.
    limits: ApplyLimits | None = None

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The id of the run, which its commits record."""

    @property
    @abstractmethod
    def log(self) -> logging.Logger:
        """The run log."""

    @abstractmethod
    def job(self, name: str) -> str:
        """Return the name by which users of this orchestrator know another operation."""

    @abstractmethod
    def link(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link that opens another operation with an initial configuration.

        Args:
            job: The operation name.
            config: The operation's options. The user fills in options that are None.
            text: The link text; by default the orchestrator chooses one.

        Returns:
            The link, or None if the orchestrator has no such page.
        """

    @abstractmethod
    def report(
        self,
        message: str,
        metadata: Mapping[str, Any],
        *,
        to_do: str = "",
        committed: str | None = None,
        logged: Mapping[str, Any] | None = None,
    ) -> None:
        """Log what was done, and record its metadata.

        Args:
            message: A one-line description of what was done.
            metadata: Metrics, tables and links to show.
            to_do: What the user can do next.
            committed: The name of the operation if it committed a version.
            logged: Metadata to log as text; by default ``metadata``.
        """

    @abstractmethod
    def failure(self, description: str, metadata: Mapping[str, Any]) -> Exception:
        """Return an exception that fails the run with a one-line description, without retries."""

    @abstractmethod
    def session(self) -> AbstractContextManager[SparkSession]:
        """Return a context manager that starts and stops a Spark session."""

    @contextmanager
    def group_writer(self) -> Iterator[GroupWriter]:
        """Provide a writer that uses Spark. The session starts when the context is entered."""
        with self.session() as spark:
            from trinitylake_ops.spark import write_groups_on

            yield write_groups_on(spark)

    def log_metrics(self, metadata: Mapping[str, Any]) -> None:
        """Log the metrics and tables in metadata."""
        if text := log_text(metadata):
            self.log.info("%s", text)

    def entry(self, job: str, config: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Return a metadata entry that links to another operation, or nothing if there is no link.

        Args:
            job: The operation name.
            config: The operation's options. The user fills in options that are None.
            text: The link text; by default the orchestrator chooses one.
        """
        link = self.link(job, config, text)
        return {} if link is None else {f"open {self.job(job)}": Markdown(link.markdown)}

    def progress(self) -> Callable[[str, int, int], None]:
        """Return a callback that logs progress every few seconds."""
        logged_at_s: dict[str, float] = {}

        def log(item: str, done: int, total: int) -> None:
            now_s = time.monotonic()
            if now_s - logged_at_s.setdefault(item, now_s) >= _PROGRESS_SECONDS:
                logged_at_s[item] = now_s
                self.log.info("%s: %s of %s", item, f"{done:,}", f"{total:,}")

        return log


class Printable(Protocol):
    """A plan or report in the formats that a command prints."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""

    def table(self) -> Table:
        """Return the human-readable table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A one-line result: what a command did, and the version that it committed."""

    version: int
    line: str
    has_changed: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The output of a command after the execution of its operation."""

    shown: Printable | Committed
    #: Whether the command exits with 0 instead of 1.
    is_complete: bool = True
    #: Additional human-readable lines.
    notices: tuple[str, ...] = ()


def _whole_report(_run: OperationContext[Any], _plan: Any, report: Any) -> CommandResult:
    return CommandResult(shown=report, is_complete=getattr(report, "is_complete", True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """The parts of a generated command that are not derived from the options of its operation."""

    #: Whether the command has ``--engine`` and the related options.
    uses_engine: bool = False
    #: Whether the command has ``--target-option`` for the storage of another root.
    has_target: bool = False
    #: The text of the progress bar while nothing is counted.
    working: str | None = None
    #: Returns an HTML report of the plan (None without one) and the report (None if the plan was not executed).
    page: Callable[[OperationContext[Any], Any, Any], str] | None = None
    #: Returns what to print for the plan (None without one) and the report of its execution.
    result: Callable[[OperationContext[Any], Any, Any], CommandResult] = _whole_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[OptionsT]):
    """One operation on a lakehouse, from which a job, a task and a command are generated."""

    #: The name of the operation, which is also the name of its job and its task.
    job: str
    #: A description of one or two sentences, for the job and the reference.
    description: str
    #: Runs the operation as a job or a task, and reports the result.
    step: Callable[[ReportingContext[OptionsT]], None]
    options: type[OptionsT] | None = None
    #: Whether the operation reclaims space, so that only one such operation runs at a time in a lakehouse.
    is_pooled: bool = False
    #: Whether the operation changes the exports of the lakehouse.
    changes_exports: bool = False
    #: The approver recorded in commits, unless the options name another one.
    approved_by: str | None = None
    #: Whether the run checks its result, as far as the orchestrator supports this, for example by asset checks.
    is_proved: bool = False
    #: Whether the operation runs only if the code sets limits.
    needs_limits: bool = False
    command: CommandSpec = field(default_factory=CommandSpec)
    #: Executes the operation for a command; None if it has a ``plan_declaration``.
    execute: Callable[[OperationContext[OptionsT]], Any] | None = None
    #: The :class:`PlanDeclaration` of an operation with a plan.
    plan_declaration: Any = None


def direct(
    *,
    execute: Callable[[OperationContext[Any]], ReportT],
    report: Callable[[ReportingContext[Any], ReportT], None],
    **declared: Any,
) -> Operation[Any]:
    """Declare an operation without a plan.

    Args:
        execute: Executes the operation, and returns its report.
        report: Reports the result in a job or a task.
        **declared: The other fields of :class:`Operation`.
    """
    return Operation(step=lambda run: report(run, execute(run)), execute=execute, **declared)


def report_entries(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a report and its cost as one entry each."""
    cost = report.get("cost", {})
    plain = {name: value for name, value in report.items() if isinstance(value, str | int | float | None)}
    return {
        **plain,
        "requests": sum(cost.get("requests", {}).values()),
        **{name: cost[name] for name in ("bytes_read", "bytes_written", "duration_ms") if name in cost},
    }
