"""The context of an operation that runs in a step of a Dagster job, and the verification of its changes."""

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

# Number of latest versions in which a run searches for its own, because other writers may commit while it runs.
_MOST_VERSIONS = 1_000

# Operations that rewrite tables without changing their rows.
_SAME_ROWS = ("compact-tables", "relocate", "trim")


@dataclass(frozen=True, kw_only=True)
class RunningJob(ReportingContext[OptionsT]):
    """The context of an operation that runs in a step."""

    context: dg.OpExecutionContext
    #: The latest version when the step started.
    begun_on: int
    #: The assets that contain tables.
    assets: TableAssets
    page: VersionsPage
    names: LakehouseNames
    #: Spark that is not started yet, because few operations need a session.
    spark: SparkResource
    #: Events to record when the step ends.
    events: list[Any] = field(default_factory=list)
    #: Metadata of the run's output.
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
        """Return the name of a job of the lakehouse from its unprefixed name."""
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
        """Log the result of the operation, and add its metrics to the metadata of the run.

        Metrics and tables are also logged as text, because ``dagster job execute`` displays only the log.

        Args:
            message: What the operation did.
            metadata: Metrics and tables.
            to_do: What the user should do next.
            committed: The name of the operation if it committed a version. The lakehouse asset, and the assets of the
                tables that the run changed, are then materialized.
            logged: The metrics to log instead of ``metadata``.
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
        """Yield the events of the tables that this run's versions changed, without those of other writers' versions."""
        message, bounds = {"operation": committed, **metadata_entries(self.details)}, Bounds()
        for before, after in self.own_versions():
            pages = TablePages(self.lake, after, self.links, bounds)
            changes = TableChanges(self.lake, before, after, self.assets, self.context.instance, pages)
            yield from changes.events(diff_snapshots(before, after), message, has_new_rows=committed not in _SAME_ROWS)

    def own_versions(self) -> Iterator[tuple[Snapshot, Snapshot]]:
        """Yield each version that this run committed, preceded by its predecessor, among the latest versions."""
        head = self.lake.snapshot()
        versions = range(max(self.begun_on, head.version - _MOST_VERSIONS) + 1, head.version + 1)
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


_ASSET_JOB = "__ASSET_JOB"  # Dagster's implicit job of all assets and checks of a code location


def prove(run: RunningJob[Any]) -> dict[str, Any]:
    """Compare the tables that a run changed before and after, and run the asset checks of these tables again.

    Returns:
        Metadata with the row counts and the results of the checks.

    Raises:
        dg.Failure: A check failed with severity ERROR. The changes of the run are not rolled back.
    """
    tables = [table for ends in run.own_versions() for table in diff_versions(run.lake, *ends).tables]
    metadata: dict[str, Any] = {
        **metadata_entries(
            {
                "rows_before": sum_of(None if table.before is None else table.before.rows for table in tables),
                "rows_after": sum_of(None if table.after is None else table.after.rows for table in tables),
            }
        ),
        "proof": listing(("table", "rows before", "rows after", "rows", "files", "bytes"), map(_row, tables)),
    }
    assets = {holder.key for table in tables for holder in run.assets.of(table.namespace, table.table or "")}
    evaluations = _run_asset_checks(run, assets, metadata)
    metadata["checks"] = listing(
        ("asset", "check", "result", "description"),
        [
            (check.asset_key.to_user_string(), check.check_name, _result(check), check.description or "")
            for check in evaluations
        ],
    )
    failed = [check for check in evaluations if _result(check) == "failed"]
    metadata["checks_passed"] = sum(check.passed for check in evaluations)
    metadata["checks_failed"] = len(failed)
    if failed:
        first = f"{failed[0].check_name} of {failed[0].asset_key.to_user_string()}"
        message = (
            f"{len(failed)} checks of the changed tables failed, the first is {first}; the operation has completed and"
            " was not rolled back"
        )
        raise run.failure(message, metadata)
    return metadata


def _row(table: ChangedObject) -> tuple[object, ...]:
    totals = (
        "?" if state is None or state.rows is None else f"{state.rows:,}" for state in (table.before, table.after)
    )
    return (table.name, *totals, *delta_texts(table.delta))


def _result(evaluation: dg.AssetCheckEvaluation) -> str:
    if evaluation.passed:
        return "passed"
    return "failed" if evaluation.severity == dg.AssetCheckSeverity.ERROR else "warned"


def _run_asset_checks(
    run: RunningJob[Any], assets: Collection[dg.AssetKey], metadata: dict[str, Any]
) -> list[dg.AssetCheckEvaluation]:
    """Run the checks of assets in this process as a separate run, and add a link to that run to ``metadata``.

    Omits the checks of partitioned assets, and checks that can only execute in the step of their asset.
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
        run.context.log.warning("cannot run the checks of the changed tables: %s", metadata["checks_not_run"])
        return []
    metadata["run of the checks"] = link_metadata(run.links.run(result.run_id))
    evaluations = list(result.get_asset_check_evaluations())
    if len(evaluations) < len(keys):
        metadata["checks_not_run"] = f"{len(keys) - len(evaluations)} of {len(keys)} ended without a result"
        run.context.log.warning("checks of the changed tables: %s", metadata["checks_not_run"])
    return evaluations
