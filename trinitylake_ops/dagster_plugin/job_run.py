"""An operation while it runs in a step of a Dagster job, and the proof of what it changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import repository_of
from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.metadata import link_metadata, metadata_entries
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import SparkResource
from trinitylake_ops.dagster_plugin.table_events import TableAssets, TableChanges, TableEvent
from trinitylake_ops.dagster_plugin.table_metadata import Bounds, TablePages
from trinitylake_ops.dagster_plugin.version_page import VersionsPage, operation_metrics
from trinitylake_ops.declarations.operation import OptionsT, ReportingContext
from trinitylake_ops.declarations.rendering import Link, listing
from trinitylake_ops.errors import VersionExpiredError, VersionNotFoundError
from trinitylake_ops.operations.diff.versions import ChangedObject, delta_texts, diff_versions, sum_of
from trinitylake_ops.versions.history import diff_snapshots, version_infos
from trinitylake_ops.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Among so many of the last versions a run looks for its own: others may commit many while it runs.
_MOST_VERSIONS = 1_000

# Operations that write tables anew, with the same rows.
_SAME_ROWS = ("compact-tables", "relocate", "trim")


@dataclass(frozen=True, kw_only=True)
class RunningJob(ReportingContext[OptionsT]):
    """An operation while it runs in a step.

    ``assets`` are those that hold tables. ``spark`` is a resource that is not set up yet, as few operations need a
    session. ``begun_on`` is the latest version when the step began. ``events`` are to be recorded, and ``shown`` is the
    metadata of the run.
    """

    context: dg.OpExecutionContext
    begun_on: int
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
        message: str,
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
        self.log_metrics(metadata if logged is None else logged)
        shown = metadata_entries({**self.details, **metadata})
        self.context.log.info("%s", f"{message}; {to_do}" if to_do else message)
        if committed is not None:
            self.events.extend(self._table_events(committed))
            details = metadata_entries(self.details)
            counted = {name: value for name, value in shown.items() if name not in details}
            self.events.extend(
                self.page.events(self.lake, committed, shown=details, metrics=operation_metrics(committed, counted))
            )
        self.shown.update(shown)

    def _table_events(self, committed: str) -> Iterator[TableEvent]:
        """Yield the events of the tables that the versions of this run changed. Versions of others are none of it."""
        message, bounds = {"operation": committed, **metadata_entries(self.details)}, Bounds()
        for before, after in self.own_versions():
            pages = TablePages(self.lake, after, self.links, bounds)
            changes = TableChanges(self.lake, before, after, self.assets, self.context.instance, pages)
            yield from changes.events(diff_snapshots(before, after), message, has_new_rows=committed not in _SAME_ROWS)

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
        self.log_metrics(metadata)
        return dg.Failure(description, metadata=metadata_entries({**self.details, **metadata}), allow_retries=False)


_ASSET_JOB = "__ASSET_JOB"  # Dagster's own, of all assets and checks of a code location


def prove(run: RunningJob[Any]) -> dict[str, Any]:
    """Return rows before and after of the tables that the run changed, and run the checks of their assets again.

    Raises Failure when a check fails that is not only a warning. What the run did stays.
    """
    tables = [one for ends in run.own_versions() for one in diff_versions(run.lake, *ends).tables]
    metadata: dict[str, Any] = {
        **metadata_entries(
            {
                "rows_before": sum_of(None if one.before is None else one.before.rows for one in tables),
                "rows_after": sum_of(None if one.after is None else one.after.rows for one in tables),
            }
        ),
        "proof": listing(("table", "rows before", "rows after", "rows", "files", "bytes"), map(_row, tables)),
    }
    assets = {holder.key for one in tables for holder in run.assets.of(one.namespace, one.table or "")}
    evaluations = _run_asset_checks(run, assets, metadata)
    metadata["checks"] = listing(
        ("asset", "check", "result", "says"),
        [(one.asset_key.to_user_string(), one.check_name, _result(one), one.description or "") for one in evaluations],
    )
    failed = [one for one in evaluations if _result(one) == "failed"]
    metadata["checks_passed"] = sum(one.passed for one in evaluations)
    metadata["checks_failed"] = len(failed)
    if failed:
        first = f"{failed[0].check_name} of {failed[0].asset_key.to_user_string()}"
        message = f"it is done, and {len(failed)} checks of the changed tables fail, the first: {first}"
        raise run.failure(message, metadata)
    return metadata


def _row(one: ChangedObject) -> tuple[object, ...]:
    totals = ("?" if state is None or state.rows is None else f"{state.rows:,}" for state in (one.before, one.after))
    return (one.name, *totals, *delta_texts(one.delta))


def _result(evaluation: dg.AssetCheckEvaluation) -> str:
    if evaluation.passed:
        return "passed"
    return "failed" if evaluation.severity == dg.AssetCheckSeverity.ERROR else "warned"


def _run_asset_checks(
    run: RunningJob[Any], assets: Collection[dg.AssetKey], metadata: dict[str, Any]
) -> list[dg.AssetCheckEvaluation]:
    """Run the checks of assets within this process, as a run of their own; ``metadata`` gets a link to it.

    Checks that are part of an asset's own step cannot be run without it, and those of partitions are left out.
    """
    repository = repository_of(run.context)
    if repository is None:
        return []
    graph = repository.asset_graph
    keys = {
        key
        for key in graph.asset_check_keys
        if key.asset_key in assets
        and graph.get(key).partitions_def is None
        and not any(isinstance(other, dg.AssetKey) for other in graph.get_execution_set_asset_and_check_keys(key))
    }
    if not keys:
        return []
    job = repository.get_maybe_subset_job_def(_ASSET_JOB, asset_check_selection=keys)
    try:
        result = job.execute_in_process(instance=run.context.instance, raise_on_error=False)
    except dg.DagsterError as error:  # such as checks that need a configuration
        metadata["checks_not_run"] = str(error).partition("\n")[0]
        run.context.log.warning("the checks of the changed tables were not run: %s", metadata["checks_not_run"])
        return []
    metadata["run of the checks"] = link_metadata(run.links.run(result.run_id))
    evaluations = list(result.get_asset_check_evaluations())
    if len(evaluations) < len(keys):
        metadata["checks_not_run"] = f"{len(keys) - len(evaluations)} of {len(keys)} ended without a result"
        run.context.log.warning("checks of the changed tables: %s", metadata["checks_not_run"])
    return evaluations
