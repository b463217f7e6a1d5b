"""An operation: its declaration, and what it has while it runs as a command, a job or a task."""

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
    """What an operation has to plan and to execute, on an open lakehouse."""

    lake: Lakehouse
    options: OptionsT
    #: Draws versions, and knows which of them passed checks.
    page: VersionRows
    #: Returns the executor for the bulk of the requests.
    executor: Callable[[], Executor]
    #: The bound on the requests of the plan and of the execution together.
    spending: Spending = field(default_factory=Spending)
    #: Options of the storage of another root, None for those of this lakehouse.
    target_options: Mapping[str, str] | None = None

    @property
    @abstractmethod
    def run_id(self) -> str | None:
        """The id of the run, which its commits have; None for a command."""

    @abstractmethod
    def progress(self) -> Callable[[str, int, int], None]:
        """Return a callback that shows the progress of an operation."""

    @abstractmethod
    def group_writer(self) -> AbstractContextManager[GroupWriter]:
        """Provide the writer of groups of data files for a block."""


@dataclass(frozen=True, kw_only=True)
class ReportingContext(OperationContext[OptionsT]):
    """An operation while it runs as a job or a task, which reports what it does."""

    #: Shown with all that the operation reports.
    details: Mapping[str, Any] = field(default_factory=dict)
    #: The limits of runs without approval, None where the code sets none.
    limits: ApplyLimits | None = None

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The id of the run, which its commits have."""

    @property
    @abstractmethod
    def log(self) -> logging.Logger:
        """The log of the run."""

    @abstractmethod
    def job(self, name: str) -> str:
        """Return how another operation is called where this one runs."""

    @abstractmethod
    def link(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link that begins an operation with these options, None where there is none.

        None as an option's value is for a person to write.
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
        """Log what was done, and show its figures. ``committed`` names the operation if it made a version.

        ``to_do`` is what its reader may do next. Figures and tables are logged as text, too, or else ``logged``.
        """

    @abstractmethod
    def failure(self, description: str, metadata: Mapping[str, Any]) -> Exception:
        """Return a failure of one clear line, with figures, that is never retried."""

    @abstractmethod
    def session(self) -> AbstractContextManager[SparkSession]:
        """Return a Spark session, which starts and ends with the block."""

    @contextmanager
    def group_writer(self) -> Iterator[GroupWriter]:
        """Provide the writer of groups by Spark, whose session starts with the block, because that takes seconds."""
        with self.session() as spark:
            from trinitylake_ops.spark import write_groups_on

            yield write_groups_on(spark)

    def log_metrics(self, metadata: Mapping[str, Any]) -> None:
        """Log the figures and tables of metadata."""
        if text := log_text(metadata):
            self.log.info("%s", text)

    def entry(self, job: str, config: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Return an entry with the link to another operation, nothing where there is none."""
        link = self.link(job, config, text)
        return {} if link is None else {f"open {self.job(job)}": Markdown(link.markdown)}

    def progress(self) -> Callable[[str, int, int], None]:
        """Return a callback that logs, every few seconds, how far an operation is."""
        said_s: dict[str, float] = {}

        def log(what: str, done: int, total: int) -> None:
            now_s = time.monotonic()
            if now_s - said_s.setdefault(what, now_s) >= _PROGRESS_SECONDS:
                said_s[what] = now_s
                self.log.info("%s: %s of %s", what, f"{done:,}", f"{total:,}")

        return log


class Printable(Protocol):
    """A plan or report, in the forms that a command prints."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""

    def table(self) -> Table:
        """Return the form for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The result of a command that is one line: what it did, and the version that it committed."""

    version: int
    line: str
    has_changed: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command prints when it has executed its operation."""

    shown: Printable | Committed
    #: Whether the exit code is 0 and not 1.
    is_complete: bool = True
    #: Lines for people.
    notices: tuple[str, ...] = ()


def _whole_report(_run: OperationContext[Any], _plan: Any, report: Any) -> CommandResult:
    return CommandResult(shown=report, is_complete=getattr(report, "is_complete", True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """What the command of an operation has besides the options of the operation."""

    #: Whether it has ``--engine`` and the options of the engine.
    uses_engine: bool = False
    #: Whether it has ``--target-option``, for the storage of another root.
    has_target: bool = False
    #: What it shows while it counts nothing.
    working: str | None = None
    #: Draws an HTML report of the plan, which is None without one, and of the report, which is None for a plan alone.
    page: Callable[[OperationContext[Any], Any, Any], str] | None = None
    #: What it prints of a plan, which is None without one, and of the report of its execution.
    result: Callable[[OperationContext[Any], Any, Any], CommandResult] = _whole_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[OptionsT]):
    """The work of a job, a task or a command, on any lakehouse.

    ``step`` does the work of a job or a task. Of operations that free something, ``is_pooled``, one at a time runs in a
    lakehouse. Some ``changes_exports``. ``approved_by`` is recorded with its commits, unless its options say who
    approved. What came of one that ``is_proved`` is shown, as far as who runs it can. One that ``needs_limits`` only
    runs where the code sets limits. ``execute`` does the work of a command, unless the operation is ``planned``.
    """

    job: str
    description: str
    step: Callable[[ReportingContext[OptionsT]], None]
    options: type[OptionsT] | None = None
    is_pooled: bool = False
    changes_exports: bool = False
    approved_by: str | None = None
    is_proved: bool = False
    needs_limits: bool = False
    command: CommandSpec = field(default_factory=CommandSpec)
    execute: Callable[[OperationContext[OptionsT]], Any] | None = None
    plan_declaration: Any = None


def direct(
    *,
    execute: Callable[[OperationContext[Any]], ReportT],
    report: Callable[[ReportingContext[Any], ReportT], None],
    **declared: Any,
) -> Operation[Any]:
    """Return an operation without a plan.

    Args:
        execute: Does the work, and returns its report.
        report: Reports it in a job or a task.
        **declared: The other fields of the operation.
    """
    return Operation(step=lambda run: report(run, execute(run)), execute=execute, **declared)


def report_entries(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report and of its cost, one entry each."""
    cost = report.get("cost", {})
    plain = {name: value for name, value in report.items() if isinstance(value, str | int | float | None)}
    return {
        **plain,
        "requests": sum(cost.get("requests", {}).values()),
        **{name: cost[name] for name in ("bytes_read", "bytes_written", "duration_ms") if name in cost},
    }
