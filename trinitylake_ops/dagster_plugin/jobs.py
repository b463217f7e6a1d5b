"""Operations as jobs, one for each verb.

Operations are ops, not assets, so that nothing materializes them by accident.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import repository_of
from trinitylake_ops.dagster_plugin.assets import report_exports
from trinitylake_ops.dagster_plugin.job_run import RunningJob, prove
from trinitylake_ops.dagster_plugin.metadata import metadata_entries
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.options import NO_OPTIONS, checked_options, config_fields, signed_in_user
from trinitylake_ops.dagster_plugin.resources import SparkResource, lakehouse_of
from trinitylake_ops.dagster_plugin.table_events import TableAssets, TableKey
from trinitylake_ops.dagster_plugin.version_page import VersionsPage
from trinitylake_ops.declarations.operation import Operation
from trinitylake_ops.declarations.options import ApplyLimits, Options, check_person
from trinitylake_ops.declarations.planned import PlannedOptions
from trinitylake_ops.declarations.registry import chosen_operations
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.versions.commit_info import acting_for_run

# A destructive or one-off operation is never repeated by the instance's retry settings.
_TAGS = {"dagster/max_retries": "0"}


def build_job(
    operation: Operation[Any],
    names: LakehouseNames,
    spark: SparkResource | None = None,
    table_key: TableKey | None = None,
    limits: ApplyLimits | None = None,
) -> dg.JobDefinition:
    """Return an operation as a separate job, whose run configuration is its options and nothing else.

    So no run is pointed at another lakehouse. The options are checked when a run is launched. A run with wrong options
    is rejected before it exists.

    Args:
        operation: The operation.
        names: The names of the lakehouse.
        spark: The sessions of operations that use Spark, by default those of this machine.
        table_key: Names the asset to which changes of a table are reported, by default the assets that hold it.
        limits: The limits of runs without approval. Without them such runs fail.
    """
    op = _build_op(operation, names, spark or SparkResource(), table_key, limits)
    job, options = names.of(operation.job), operation.options

    def checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
        assert options is not None
        checked_options(options, given)
        return {"ops": {op.name: {"config": given}}}

    graph = dg.GraphDefinition(name=job, node_defs=[op], description=operation.description)
    config = NO_OPTIONS if options is None else dg.ConfigMapping(checked, config_schema=_schema(operation))
    return graph.to_job(name=job, description=operation.description, tags=_TAGS, config=config)


def _schema(operation: Operation[Any]) -> dict[str, dg.Field] | None:
    return None if operation.options is None else config_fields(operation.options)


def _build_op(
    operation: Operation[Any],
    names: LakehouseNames,
    spark: SparkResource,
    table_key: TableKey | None,
    limits: ApplyLimits | None,
) -> dg.OpDefinition:
    @dg.op(
        name=names.op(operation.job),
        description=operation.description,
        config_schema=_schema(operation),
        out=dg.Out(dg.Nothing),
        required_resource_keys={names.resource_key},
        pool=names.pool if operation.is_pooled else None,
    )
    def run(context: dg.OpExecutionContext) -> Iterator[Any]:
        options = None if operation.options is None else checked_options(operation.options, context.op_config)
        resource = lakehouse_of(context.resources, names)
        if operation.is_pooled:
            _check_pool(context, names.pool)
        try:
            approved_by = _approver(options, operation, context.run)
            details = {} if approved_by is None else {"approved_by": approved_by}
            with acting_for_run(context.run.run_id, approved_by), resource.executors(spark) as executor:
                lake = resource.open()
                running = RunningJob(
                    context=context,
                    lake=lake,
                    begun_on=lake.latest_version(),
                    assets=TableAssets(repository_of(context), names, resource, table_key),
                    page=VersionsPage.of(context, names, resource.webserver_url),
                    names=names,
                    options=options,
                    spark=spark,
                    executor=executor,
                    details=details,
                    limits=limits,
                )
                operation.step(running)
                is_plan = isinstance(options, PlannedOptions) and options.is_plan
                if operation.changes_exports and not is_plan:
                    report_exports(context.instance, lake, names, running.links)
                yield from running.events
                proof = prove(running) if operation.is_proved and not is_plan else {}
                running.log_metrics(proof)
                context.add_output_metadata({**metadata_entries(proof), **running.shown})
        except TrinityLakeError as error:
            raise dg.Failure(
                description=str(error), metadata={"error_code": error.code}, allow_retries=False
            ) from error
        yield dg.Output(None)

    return run


def _approver(options: Options | None, operation: Operation[Any], run: dg.DagsterRun) -> str | None:
    """Return who approved what a run does, None for one that needs no approval. Raises InvalidInputError."""
    if not isinstance(options, PlannedOptions):
        return operation.approved_by
    approver = options.approver(signed_in_user(run))
    if approver is not None:
        check_person(approver)
    return approver


def _check_pool(context: dg.OpExecutionContext, pool: str) -> None:
    """Warn when the Dagster instance does not limit a pool to one op.

    Only the lakehouse's lease then keeps ops apart.
    """
    storage = context.instance.event_log_storage
    if not storage.supports_global_concurrency_limits:  # an instance in memory, of one process
        return
    default = context.instance.global_op_concurrency_default_limit
    limit = next((known.limit for known in storage.get_pool_limits() if known.name == pool), default)
    if limit is None or limit > 1:
        context.log.warning(
            "this Dagster instance runs %s ops of the pool %s at once, and those that meet fail; let them wait with:"
            " dagster instance concurrency set %s 1",
            "any number of" if limit is None else limit,
            pool,
            pool,
        )


__all__ = ["ApplyLimits", "build_jobs"]


def build_jobs(
    names: LakehouseNames = ONLY,
    spark: SparkResource | None = None,
    *,
    operations: str | Sequence[str] = (),
    table_key: TableKey | None = None,
    limits: ApplyLimits | None = None,
) -> list[dg.JobDefinition]:
    """Return the operations on a lakehouse as jobs, each of one op.

    Args:
        names: The names of the lakehouse.
        spark: The sessions of the jobs that use Spark, by default those of this machine.
        operations: Operations to add to those of every lakehouse: names of operations, the groups ``"clones"``,
            ``"tables"`` and ``"admin"``, or ``"all"``.
        table_key: Names the asset to which changes of a table are reported, by default the assets that hold it.
        limits: The limits of runs without approval. Jobs that only run within limits are left out without them.

    Raises:
        InvalidInputError: There is no such operation or group.
    """
    return [
        build_job(operation, names, spark, table_key, limits)
        for operation in chosen_operations(operations)
        if limits is not None or not operation.needs_limits
    ]
