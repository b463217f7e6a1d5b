"""An operation that runs in an Airflow task, and the return value of the task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from trinitylake_ops.airflow_plugin.settings import LakehouseSettings
from trinitylake_ops.declarations.operation import Operation, OptionsT, ReportingContext
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.declarations.planned import PlannedOptions
from trinitylake_ops.declarations.rendering import InlineChart, Json, Link, Markdown, markdown_table
from trinitylake_ops.declarations.version_rows import VersionRows
from trinitylake_ops.extras import needs
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.rendering import Table, jsonable
from trinitylake_ops.versions.commit_info import acting_for_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The maximum length of a Markdown page that a person approves. Longer pages slow the browser down.
_MAX_PAGE_CHARS = 50_000


class OperationFailedError(Exception):
    """An operation failed, and a retry would fail again."""


@dataclass(frozen=True, kw_only=True)
class RunningTask(ReportingContext[OptionsT]):
    """An operation that runs in a task. ``result`` is the return value of the task."""

    settings: LakehouseSettings
    task_run_id: str
    task_log: logging.Logger
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The DAG run id."""
        return self.task_run_id

    @property
    def log(self) -> logging.Logger:
        """The task log."""
        return self.task_log

    def job(self, name: str) -> str:
        """Return the declared name of another operation."""
        return name

    def link(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return None: Airflow has no page that starts a task with prefilled options."""
        return None

    def report(
        self,
        message: str,
        metadata: Mapping[str, Any],
        *,
        to_do: str = "",
        committed: str | None = None,
        logged: Mapping[str, Any] | None = None,
    ) -> None:
        """Log what was done, with its metrics and tables as text. The task returns the metrics.

        The page omits the next step, because a person who approves a plan has a button for it.
        """
        self.log_metrics(metadata if logged is None else logged)
        line = f"{message}; {to_do}" if to_do else message
        self.log.info("%s", line)
        version = {} if committed is None else {"lakehouse_version": self.lake.latest_version(), "operation": committed}
        figures = {**version, **self.details, **metadata}
        self.result.update({"summary": line, **_plain(figures), "page": page(message, figures)})

    def failure(self, description: str, metadata: Mapping[str, Any]) -> Exception:
        """Log the metrics of a failure, and return its exception."""
        self.log_metrics(metadata)
        return OperationFailedError(description)

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """Provide a Spark session with the connection settings."""
        with spark_session(self.settings) as session:
            yield session


@contextmanager
def spark_session(settings: LakehouseSettings) -> Iterator[SparkSession]:
    """Provide a session on the Spark cluster of a connection. Raises MissingExtraError or JavaNotFoundError."""
    with needs("spark"):
        from trinitylake_ops.spark import session_scope
    spark = settings.spark
    with session_scope("trinitylake-ops", spark.master, remote=spark.remote, **spark.conf) as session:
        yield session


@contextmanager
def executors(settings: LakehouseSettings) -> Iterator[Callable[[], Executor]]:
    """Provide a function that returns the executor of a connection's engine. A session stops when the context exits."""
    with ExitStack() as scope:

        @cache
        def executor() -> Executor:
            if settings.engine == "local":
                return LOCAL
            with needs("spark"):
                from trinitylake_ops.spark.executor import SparkExecutor
            return SparkExecutor(scope.enter_context(spark_session(settings)))

        yield executor


def carry_out(
    operation: Operation[Any],
    values: Mapping[str, Any],
    settings: LakehouseSettings,
    run_id: str,
    log: logging.Logger,
    limits: ApplyLimits | None = None,
) -> dict[str, Any]:
    """Execute an operation with options, for a run, and return the metrics of its report as JSON.

    Args:
        operation: The operation.
        values: The values of its options.
        settings: The lakehouse.
        run_id: The run id that commits record.
        log: The log of the task.
        limits: The limits for runs without approval.

    Raises:
        InvalidInputError: An option is invalid.
        OperationFailedError: The operation failed, and a retry would fail again.
    """
    options = None if operation.options is None else operation.options(**values)
    approved_by = options.approver() if isinstance(options, PlannedOptions) else operation.approved_by
    with acting_for_run(run_id, approved_by), executors(settings) as executor:
        lake = settings.open()
        running = RunningTask(
            lake=lake,
            options=options,
            page=VersionRows(),
            executor=executor,
            details={} if approved_by is None else {"approved_by": approved_by},
            limits=limits,
            settings=settings,
            task_run_id=run_id,
            task_log=log,
        )
        operation.step(running)
    return running.result


def page(message: str, metadata: Mapping[str, Any]) -> str:
    """Render a report as one page of Markdown: numbers first, then tables. Images are left out."""
    numbers = [f"- {name}: {value}" for name, value in metadata.items() if isinstance(value, str | int | float)]
    rendered = {
        name: markdown_table(value.columns, value.rows) if isinstance(value, Table) else value
        for name, value in metadata.items()
    }
    tables = [
        f"**{name}**\n\n{value.text}"
        for name, value in rendered.items()
        if isinstance(value, Markdown) and not isinstance(value, InlineChart)
    ]
    text = "\n\n".join([message, "\n".join(numbers), *tables])
    return text if len(text) <= _MAX_PAGE_CHARS else f"{text[:_MAX_PAGE_CHARS]}\n\n... truncated"


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a report that Airflow's database stores: JSON, without tables and images."""
    plain = {}
    for name, value in metadata.items():
        if isinstance(value, Json):
            plain[name] = jsonable(value.value)
        elif not isinstance(value, Markdown | Table):
            plain[name] = jsonable(value)
    return plain
