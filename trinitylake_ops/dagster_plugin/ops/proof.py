"""What came of an operation that changed tables: their rows before and after, and their checks, run again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.metadata import figures, link_metadata
from trinitylake_ops.dagster_plugin.ops.running import RunningJob
from trinitylake_ops.dagster_plugin.runs.beyond_public import repository_of
from trinitylake_ops.maintenance.differences.versions import ChangedObject, delta_texts, diff_versions, sum_of
from trinitylake_ops.operations.shown import listing

_ASSET_JOB = "__ASSET_JOB"  # Dagster's own, of all assets and checks of a code location


def prove(run: RunningJob[Any]) -> dict[str, Any]:
    """Return rows before and after of the tables that the run changed, and run the checks of their assets again.

    Raises Failure when a check fails that is not only a warning. What the run did stays.
    """
    tables = [one for ends in run.own_versions() for one in diff_versions(run.lake, *ends).tables]
    metadata: dict[str, Any] = {
        **figures(
            {
                "rows_before": sum_of(None if one.before is None else one.before.rows for one in tables),
                "rows_after": sum_of(None if one.after is None else one.after.rows for one in tables),
            }
        ),
        "proof": listing(("table", "rows before", "rows after", "rows", "files", "bytes"), map(_row, tables)),
    }
    assets = {holder.key for one in tables for holder in run.assets.of(one.namespace, one.table or "")}
    evaluations = _checked_again(run, assets, metadata)
    metadata["checks"] = listing(
        ("asset", "check", "result", "says"),
        [(one.asset_key.to_user_string(), one.check_name, _result(one), one.description or "") for one in evaluations],
    )
    failed = [one for one in evaluations if _result(one) == "failed"]
    metadata["checks_passed"] = sum(one.passed for one in evaluations)
    metadata["checks_failed"] = len(failed)
    if failed:
        first = f"{failed[0].check_name} of {failed[0].asset_key.to_user_string()}"
        said = f"it is done, and {len(failed)} checks of the changed tables fail, the first: {first}"
        raise run.failure(said, metadata)
    return metadata


def _row(one: ChangedObject) -> tuple[object, ...]:
    totals = ("?" if state is None or state.rows is None else f"{state.rows:,}" for state in (one.before, one.after))
    return (one.name, *totals, *delta_texts(one.delta))


def _result(evaluation: dg.AssetCheckEvaluation) -> str:
    if evaluation.passed:
        return "passed"
    return "failed" if evaluation.severity == dg.AssetCheckSeverity.ERROR else "warned"


def _checked_again(
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
