"""The context of an operation that runs in a step of a Dagster job. :mod:`listeners` turns its report into events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.metadata import metadata_entries
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.dagster_plugin.table_events import TableAssets
from trinitylake_ops.dagster_plugin.version_page import VersionsPage
from trinitylake_ops.declarations.operation import Operation, OptionsT, ReportingContext
from trinitylake_ops.declarations.planned import PlannedOptions
from trinitylake_ops.declarations.rendering import Link
from trinitylake_ops.errors import VersionExpiredError, VersionNotFoundError
from trinitylake_ops.versions.history import version_infos
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Number of latest versions among which a run searches for its own version, because other writers may commit meanwhile.
_MAX_VERSIONS = 1_000


@dataclass(slots=True)
class JobReport:
    """The report of an operation that ran in a step."""

    #: The name of the operation if it committed a version.
    committed: str | None
    #: Metrics and tables of the operation, which become the metadata of the run's output.
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunningJob(ReportingContext[OptionsT]):
    """The context of an operation that runs in a step."""

    context: dg.OpExecutionContext
    #: The operation that the step executes.
    operation: Operation[Any]
    #: The latest version when the step started.
    begun_on: int
    #: The assets that contain tables.
    assets: TableAssets
    page: VersionsPage
    names: LakehouseNames
    #: Spark, which is not started yet because few operations need a session.
    spark: SparkResource
    #: The reports of the operation, for the listeners.
    reports: list[JobReport] = field(default_factory=list)

    @property
    def is_plan(self) -> bool:
        """Whether the run only plans the operation."""
        return isinstance(self.options, PlannedOptions) and self.options.is_plan

    @property
    def links(self) -> Links:
        """Links to the jobs of the lakehouse."""
        return self.page.links

    @property
    def run_id(self) -> str:
        """The run id."""
        return self.context.run.run_id

    @property
    def log(self) -> logging.Logger:
        """The run log."""
        return self.context.log

    def job(self, name: str) -> str:
        """Return the prefixed name of a job of this lakehouse, given the unprefixed name."""
        return self.names.of(name)

    def link(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link to the launchpad of a job, or None if the code location does not have the job."""
        return self.links.launchpad(job, config, text)

    @contextlib.contextmanager
    def session(self) -> Iterator[SparkSession]:
        """Start a Spark session, which takes seconds, and stop it when the context exits."""
        with dg.build_resources({"spark": self.spark}) as resources:
            yield resources.spark.session()

    def report(
        self,
        message: str,
        metadata: Mapping[str, Any],
        *,
        to_do: str = "",
        committed: str | None = None,
        logged: Mapping[str, Any] | None = None,
    ) -> None:
        """Log the result of the operation, and keep it for the listeners.

        Metrics and tables are also logged as text, because ``dagster job execute`` displays only the log.

        Args:
            message: What the operation did.
            metadata: Metrics and tables.
            to_do: What the user should do next.
            committed: The name of the operation if it committed a version.
            logged: The metrics to log instead of ``metadata``.
        """
        self.log_metrics(metadata if logged is None else logged)
        self.context.log.info("%s", f"{message}; {to_do}" if to_do else message)
        self.reports.append(JobReport(committed=committed, metadata=metadata_entries({**self.details, **metadata})))

    def own_versions(self) -> Iterator[tuple[Snapshot, Snapshot]]:
        """Yield each of the latest versions that this run committed, preceded by the version's predecessor."""
        head = self.lake.snapshot()
        versions = range(max(self.begun_on, head.version - _MAX_VERSIONS) + 1, head.version + 1)
        for info in version_infos(self.lake.files, versions, head):
            if info.run_id != self.context.run.run_id or info.state != "live":
                continue
            try:
                before, after = (
                    self.lake.snapshot(version, latest=head) for version in (info.version - 1, info.version)
                )
            except (VersionExpiredError, VersionNotFoundError) as error:
                self.context.log.warning("cannot report the tables changed by version %s: %s", info.version, error)
                continue
            yield before, after

    def failure(self, description: str, metadata: Mapping[str, Any]) -> dg.Failure:
        """Log metrics, and return a failure that is not retried."""
        self.log_metrics(metadata)
        return dg.Failure(description, metadata=metadata_entries({**self.details, **metadata}), allow_retries=False)
