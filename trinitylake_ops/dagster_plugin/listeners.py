"""Listeners that turn the report of an operation into the events and the output metadata of its job.

Each listener receives the run and the report, and returns the events to record. The op of every job applies
``LISTENERS`` in order, so that an operation only calls ``run.report``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import repository_of
from trinitylake_ops.dagster_plugin.assets import report_exports
from trinitylake_ops.dagster_plugin.job_run import JobReport, RunningJob
from trinitylake_ops.dagster_plugin.metadata import link_metadata, metadata_entries
from trinitylake_ops.dagster_plugin.table_events import TableChanges
from trinitylake_ops.dagster_plugin.table_metadata import Bounds, TablePages
from trinitylake_ops.dagster_plugin.version_page import operation_metrics
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.operations.diff.versions import ChangedObject, delta_texts, diff_versions, sum_of
from trinitylake_ops.versions.history import diff_snapshots

JobEvent: TypeAlias = dg.AssetMaterialization | dg.AssetObservation
Listener: TypeAlias = Callable[[RunningJob[Any], JobReport], Iterable[JobEvent]]

# Operations that rewrite tables without changing their rows.
_SAME_ROWS = ("compact-tables", "relocate", "trim")

_ASSET_JOB = "__ASSET_JOB"  # Dagster's implicit job of all assets and checks of a code location


def sync_exports(run: RunningJob[Any], report: JobReport) -> Iterable[JobEvent]:
    """Synchronize the exports asset with the lakehouse's exports, which reports events independently of the run."""
    if run.operation.changes_exports and not run.is_plan:
        report_exports(run.context.instance, run.lake, run.names, run.links)
    return ()


def table_events(run: RunningJob[Any], report: JobReport) -> Iterator[JobEvent]:
    """Yield the events of the tables that this run's versions changed, ignoring other writers' versions."""
    if report.committed is None:
        return
    message, bounds = {"operation": report.committed, **metadata_entries(run.details)}, Bounds()
    has_new_rows = report.committed not in _SAME_ROWS
    for before, after in run.own_versions():
        pages = TablePages(run.lake, after, run.links, bounds)
        changes = TableChanges(run.lake, before, after, run.assets, run.context.instance, pages)
        yield from changes.events(diff_snapshots(before, after), message, has_new_rows=has_new_rows)


def lakehouse_events(run: RunningJob[Any], report: JobReport) -> Iterator[JobEvent]:
    """Yield the events of the lakehouse asset after a commit: the versions page, and the operation's metrics."""
    if report.committed is None:
        return
    details = metadata_entries(run.details)
    counts = {name: value for name, value in report.metadata.items() if name not in details}
    metrics = operation_metrics(report.committed, counts)
    yield from run.page.events(run.lake, report.committed, shown=details, metrics=metrics)


def verify_changes(run: RunningJob[Any], report: JobReport) -> Iterable[JobEvent]:
    """Compare the tables that a run changed with their previous state, and run the tables' asset checks again.

    The row counts and the results of the checks become metadata of the run's output.

    Args:
        run: The run.
        report: The report of its operation.

    Raises:
        dg.Failure: A check failed with severity ERROR. The changes of the run are not rolled back.
    """
    if run.is_plan or not run.operation.is_proved:
        return ()
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
    run.log_metrics(metadata)
    report.metadata = {**metadata_entries(metadata), **report.metadata}
    return ()


#: The listeners, in the order in which they are applied. Checks evaluate the events that earlier listeners recorded.
LISTENERS: tuple[Listener, ...] = (sync_exports, table_events, lakehouse_events, verify_changes)


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
    except dg.DagsterError as error:  # for example, a check needs a configuration
        metadata["checks_not_run"] = str(error).partition("\n")[0]
        run.context.log.warning("cannot run the checks of the changed tables: %s", metadata["checks_not_run"])
        return []
    metadata["run of the checks"] = link_metadata(run.links.run(result.run_id))
    evaluations = list(result.get_asset_check_evaluations())
    if len(evaluations) < len(keys):
        metadata["checks_not_run"] = f"{len(keys) - len(evaluations)} of {len(keys)} ended without a result"
        run.context.log.warning("checks of the changed tables: %s", metadata["checks_not_run"])
    return evaluations
