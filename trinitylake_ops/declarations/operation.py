"""An operation: its declaration, and what it has while it runs, whoever runs it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.options import ApplyLimits, Options
from trinitylake_ops.declarations.rendering import Link, Markdown, log_text
from trinitylake_ops.declarations.version_rows import VersionRows
from trinitylake_ops.operations.budget import Spending
from trinitylake_ops.operations.executor import Executor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROGRESS_SECONDS = 10.0

OptionsT = TypeVar("OptionsT", bound=Options | None)


@dataclass(frozen=True, kw_only=True)
class OperationContext(ABC, Generic[OptionsT]):
    """An operation while it runs, on an open lakehouse.

    ``begun_on`` is the latest version when it began, ``page`` draws versions. ``executor`` returns the executor for the
    bulk of it. ``spending`` bounds the requests of its plan and of its execution together. ``details`` are shown with
    all that it reports. ``limits`` are those of runs without approval, None where the code sets none.
    """

    lake: Lakehouse
    begun_on: int
    options: OptionsT
    page: VersionRows
    executor: Callable[[], Executor]
    spending: Spending = field(default_factory=Spending)
    details: Mapping[str, Any] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[OptionsT]):
    """The work of a job or a task, on any lakehouse.

    ``step`` does the work. Of operations that free something, ``is_pooled``, one at a time runs in a lakehouse. Some
    ``changes_exports``. ``approved_by`` is recorded with its commits, unless its options say who approved. What came of
    one that ``is_proved`` is shown, as far as who runs it can. One that ``needs_limits`` only runs where the code sets
    limits.
    """

    job: str
    description: str
    step: Callable[[OperationContext[OptionsT]], None]
    options: type[OptionsT] | None = None
    is_pooled: bool = False
    changes_exports: bool = False
    approved_by: str | None = None
    is_proved: bool = False
    needs_limits: bool = False


def report_entries(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report and of its cost, one entry each."""
    cost = report.get("cost", {})
    plain = {name: value for name, value in report.items() if isinstance(value, str | int | float | None)}
    return {
        **plain,
        "requests": sum(cost.get("requests", {}).values()),
        **{name: cost[name] for name in ("bytes_read", "bytes_written", "duration_ms") if name in cost},
    }
