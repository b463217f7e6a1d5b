"""An operation while it runs in a step of a Dagster job, and what it reports to Dagster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from trinitylake_ops.dagster_plugin.metadata import figures
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.ops.table_events import TableAssets, TableChanges, TableEvent
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.dagster_plugin.table_pages.bounds import Bounds
from trinitylake_ops.dagster_plugin.table_pages.pages import TablePages
from trinitylake_ops.dagster_plugin.versions.links import Links
from trinitylake_ops.dagster_plugin.versions.page import VersionsPage, operation_metrics
from trinitylake_ops.errors import VersionExpiredError, VersionNotFoundError
from trinitylake_ops.operations.operation import OptionsT, Running
from trinitylake_ops.operations.shown import Link
from trinitylake_ops.versions.changes import diff_snapshots
from trinitylake_ops.versions.history import version_infos
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Among so many of the last versions a run looks for its own: others may commit many while it runs.
_MOST_VERSIONS = 1_000

# Operations that write tables anew, with the same rows.
_SAME_ROWS = ("compact-tables", "relocate", "trim")


@dataclass(frozen=True, kw_only=True)
class RunningJob(Running[OptionsT]):
    """An operation while it runs in a step.

    ``assets`` are those that hold tables. ``spark`` is a resource that is not set up yet, as few operations need a
    session. ``events`` are to be recorded, and ``shown`` is the metadata of the run.
    """

    context: dg.OpExecutionContext
    assets: TableAssets
    page: VersionsPage
    names: LakehouseNames
    spark: SparkResource
    events: list[Any] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def links(self) -> Links:
        """Links to the jobs of the lakehouse."""
        return self.page.links

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.context.run.run_id

    @property
    def log(self) -> logging.Logger:
        """The log of the run."""
        return self.context.log

    def job(self, name: str) -> str:
        """Return the name of another job of the lakehouse."""
        return self.names.of(name)

    def link(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link to the launchpad of another job."""
        return self.links.launchpad(job, config, text)

    @contextlib.contextmanager
    def session(self) -> Iterator[SparkSession]:
        """Provide the session of the run's Spark, which is started here, as that takes seconds."""
        with dg.build_resources({"spark": self.spark}) as resources:
            yield resources.spark.session()

    def report(
        self,
        said: str,
        metadata: Mapping[str, Any],
        *,
        to_do: str = "",
        committed: str | None = None,
        logged: Mapping[str, Any] | None = None,
    ) -> None:
        """Log what was done, and show its figures. Its events are recorded when the step has ended.

        Figures and tables are logged as text, too, or else ``logged``: ``dagster job execute`` shows the log alone.
        ``committed`` names the operation if it made a version. Then the lakehouse is reported as materialized, and so
        are the assets of tables that it changed.
        """
        self.log_figures(metadata if logged is None else logged)
        shown = figures({**self.details, **metadata})
        self.context.log.info("%s", f"{said}; {to_do}" if to_do else said)
        if committed is not None:
            self.events.extend(self._table_events(committed))
            details = figures(self.details)
            counted = {name: value for name, value in shown.items() if name not in details}
            self.events.extend(
                self.page.events(self.lake, committed, shown=details, metrics=operation_metrics(committed, counted))
            )
        self.shown.update(shown)

    def _table_events(self, committed: str) -> Iterator[TableEvent]:
        """Yield the events of the tables that the versions of this run changed. Versions of others are none of it."""
        said, bounds = {"operation": committed, **figures(self.details)}, Bounds()
        for before, after in self.own_versions():
            pages = TablePages(self.lake, after, self.links, bounds)
            changes = TableChanges(self.lake, before, after, self.assets, self.context.instance, pages)
            yield from changes.events(diff_snapshots(before, after), said, has_new_rows=committed not in _SAME_ROWS)

    def own_versions(self) -> Iterator[tuple[Snapshot, Snapshot]]:
        """Yield the versions that this run committed, each after the one before it, among the last ones of all."""
        head = self.lake.snapshot()
        versions = range(max(self.begun_on, head.version - _MOST_VERSIONS) + 1, head.version + 1)
        for info in version_infos(self.lake.files, versions, head):
            if info.run_id != self.context.run.run_id or info.state != "live":
                continue
            try:
                before, after = (self.lake.snapshot(one, latest=head) for one in (info.version - 1, info.version))
            except (VersionExpiredError, VersionNotFoundError) as error:
                self.context.log.warning("tables that version %s changed are not reported: %s", info.version, error)
                continue
            yield before, after

    def failure(self, description: str, metadata: Mapping[str, Any]) -> dg.Failure:
        """Return a failure of one clear line, with figures, that is never retried."""
        self.log_figures(metadata)
        return dg.Failure(description, metadata=figures({**self.details, **metadata}), allow_retries=False)
