"""Jobs that execute operations, one job for each operation.

Operations are ops, not assets, so that nothing materializes them by accident.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import repository_of
from trinitylake_ops.dagster_plugin.job_run import RunningJob
from trinitylake_ops.dagster_plugin.listeners import LISTENERS, JobEvent
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

# Destructive and one-off operations must not be repeated by the retry settings of the instance.
_TAGS = {"dagster/max_retries": "0"}


def build_job(
    operation: Operation[Any],
    names: LakehouseNames,
    spark: SparkResource | None = None,
    table_key: TableKey | None = None,
    limits: ApplyLimits | None = None,
) -> dg.JobDefinition:
    """Build the job of an operation.

    The run configuration consists of the operation's options only, so that no run can be pointed at another lakehouse.
    Options are validated when a run is launched: a run with invalid options is rejected before it is created.

    Args:
        operation: The operation.
        names: The names of the lakehouse's definitions.
        spark: Spark for operations that need it. Defaults to a local Spark.
        table_key: Returns the asset to which changes to a table are reported, given the table's namespace and name. By
            default, they are reported to all assets that contain the table.
        limits: The limits for runs without approval. Without limits, such runs fail.
    """
    op = _build_op(operation, names, spark or SparkResource(), table_key, limits)
    job, options = names.of(operation.job), operation.options

    def checked(values: Mapping[str, Any]) -> Mapping[str, Any]:
        assert options is not None
        checked_options(options, values)
        return {"ops": {op.name: {"config": values}}}

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
                    operation=operation,
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
                try:
                    operation.step(running)
                except Exception:
                    # Everything that the operation reported before it failed did happen, and needs events.
                    yield from _events(running)
                    raise
                yield from _events(running)
        except TrinityLakeError as error:
            raise dg.Failure(
                description=str(error), metadata={"error_code": error.code}, allow_retries=False
            ) from error
        yield dg.Output(None)

    return run


def _events(run: RunningJob[Any]) -> Iterator[JobEvent]:
    """Yield the events of all reports of a run, and add the output metadata."""
    for report in run.reports:
        for listener in LISTENERS:
            yield from listener(run, report)
        run.context.add_output_metadata(report.metadata)


def _approver(options: Options | None, operation: Operation[Any], run: dg.DagsterRun) -> str | None:
    """Return the approver of a run, or None if it needs no approval. Raises InvalidInputError."""
    if not isinstance(options, PlannedOptions):
        return operation.approved_by
    approver = options.approver(signed_in_user(run))
    if approver is not None:
        check_person(approver)
    return approver


def _check_pool(context: dg.OpExecutionContext, pool: str) -> None:
    """Warn if the Dagster instance does not limit a pool to one op at a time.

    Without that limit, only the lakehouse's lease prevents concurrent ops.
    """
    storage = context.instance.event_log_storage
    if not storage.supports_global_concurrency_limits:  # an in-memory instance of a single process
        return
    default = context.instance.global_op_concurrency_default_limit
    limit = next((pool_limit.limit for pool_limit in storage.get_pool_limits() if pool_limit.name == pool), default)
    if limit is None or limit > 1:
        context.log.warning(
            "pool limit is missing: this Dagster instance runs %s ops of pool %s concurrently, and all but one of them"
            " fail; to queue them, run: dagster instance concurrency set %s 1",
            "any number of" if limit is None else f"up to {limit}",
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
    """Build the jobs of a lakehouse's operations. Each job has a single op.

    Args:
        names: The names of the lakehouse's definitions.
        spark: Spark for operations that need it. Defaults to a local Spark.
        operations: Operations to add to the default ones: names of operations, the groups ``"clones"``, ``"tables"``
            and ``"admin"``, or ``"all"``.
        table_key: Returns the asset to which changes to a table are reported, given the table's namespace and name. By
            default, they are reported to all assets that contain the table.
        limits: The limits for runs without approval. Without limits, jobs that require limits are omitted.

    Raises:
        InvalidInputError: An operation or group is unknown.
    """
    return [
        build_job(operation, names, spark, table_key, limits)
        for operation in chosen_operations(operations)
        if limits is not None or not operation.needs_limits
    ]
