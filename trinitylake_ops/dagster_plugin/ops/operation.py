"""An operation on a lakehouse as a Dagster job of one op: its declaration, its run, and its report.

Operations are ops, not assets, so that nothing materializes them by accident.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.assets import report_exports
from trinitylake_ops.dagster_plugin.metadata import figures, log_text
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.ops.table_events import TableAssets, TableChanges, TableEvent, TableKey
from trinitylake_ops.dagster_plugin.options import NO_OPTIONS, Options, check_person
from trinitylake_ops.dagster_plugin.resources import SparkResource, lakehouse_of
from trinitylake_ops.dagster_plugin.runs.beyond_public import repository_of
from trinitylake_ops.dagster_plugin.runs.person import signed_in_user
from trinitylake_ops.dagster_plugin.table_pages.bounds import Bounds
from trinitylake_ops.dagster_plugin.table_pages.pages import TablePages
from trinitylake_ops.dagster_plugin.versions.links import Links
from trinitylake_ops.dagster_plugin.versions.page import VersionsPage
from trinitylake_ops.errors import InvalidInputError, TrinityLakeError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.maintenance.plans.budget import Spending
from trinitylake_ops.maintenance.plans.executor import Executor
from trinitylake_ops.versions.changes import diff_snapshots
from trinitylake_ops.versions.commit_info import acting_for_run
from trinitylake_ops.versions.history import version_infos
from trinitylake_ops.versions.snapshot import Snapshot

_PROGRESS_SECONDS = 10.0
# Among so many of the last versions a run looks for its own: others may commit many while it runs.
_MOST_VERSIONS = 1_000

# A destructive or one-off operation is never repeated by the instance's retry settings.
_TAGS = {"dagster/max_retries": "0"}

# Operations that write tables anew, with the same rows.
_SAME_ROWS = ("compact-tables", "relocate", "trim")

OptionsT = TypeVar("OptionsT", bound=Options | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Generic[OptionsT]):
    """An operation while it runs, on an open lakehouse.

    ``begun_on`` is the latest version when it began, ``assets`` are those that hold tables, ``page`` shows versions.
    ``spark`` is a resource that is not set up yet, as few operations need a session. ``executor`` returns the executor
    for the bulk of it. ``spending`` bounds the requests of its plan and of its execution together. ``details`` are
    metadata of all that it reports. ``events`` are to be recorded, and ``shown`` is the
    metadata of the run.
    """

    context: dg.OpExecutionContext
    lake: Lakehouse
    begun_on: int
    assets: TableAssets
    page: VersionsPage
    names: LakehouseNames
    options: OptionsT
    spark: SparkResource
    executor: Callable[[], Executor]
    spending: Spending = field(default_factory=Spending)
    details: Mapping[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def links(self) -> Links:
        """Links to the jobs of the lakehouse."""
        return self.page.links

    def progress(self) -> Callable[[str, int, int], None]:
        """Return a callback that logs, every few seconds, how far an operation is."""
        said_s: dict[str, float] = {}

        def log(what: str, done: int, total: int) -> None:
            now_s = time.monotonic()
            if now_s - said_s.setdefault(what, now_s) >= _PROGRESS_SECONDS:
                said_s[what] = now_s
                self.context.log.info("%s: %s of %s", what, f"{done:,}", f"{total:,}")

        return log

    def report(
        self,
        said: str,
        metadata: Mapping[str, Any],
        *,
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
        self.context.log.info("%s", said)
        if committed is not None:
            self.events.extend(self._table_events(committed))
            version = {"lakehouse_version": self.lake.latest_version(), "operation": committed}
            # What the operation itself counted goes before a figure of the same name.
            metadata = {**version, **self.page.metadata(self.lake), **shown}
            self.events.append(dg.AssetMaterialization(self.names.lakehouse_key, metadata=metadata))
        self.shown.update(shown)

    def log_figures(self, metadata: Mapping[str, Any]) -> None:
        """Log the figures and tables of metadata."""
        if text := log_text(metadata):
            self.context.log.info("%s", text)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[OptionsT]):
    """The work of a job, on any lakehouse.

    ``step`` does the work. An operation that frees something is in the lakehouse's pool. If it may add or end exports,
    the partitions of exports follow. ``approved_by`` is recorded with its commits, unless its options say who approved.
    ``proof`` returns metadata of what came of it, after its events were recorded.
    """

    job: str
    description: str
    step: Callable[[Running[OptionsT]], None]
    options: type[OptionsT] | None = None
    is_pooled: bool = False
    changes_exports: bool = False
    approved_by: str | None = None
    proof: Callable[[Running[OptionsT]], Mapping[str, Any]] | None = None


def build_job(
    operation: Operation[Any],
    names: LakehouseNames,
    spark: SparkResource | None = None,
    table_key: TableKey | None = None,
) -> dg.JobDefinition:
    """Return an operation as a job of its own. Its run configuration has the options, and nothing beside them.

    So no run is pointed at another lakehouse. The options are checked when a run is launched. A run with wrong options
    is refused before it exists. ``spark`` gives sessions to operations that use Spark. Changes of tables are reported
    to the assets that hold them, or that ``table_key`` names.
    """
    op = _build_op(operation, names, spark or SparkResource(), table_key)
    job, options = names.of(operation.job), operation.options

    def checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
        assert options is not None
        options(**given)
        return {"ops": {op.name: {"config": given}}}

    graph = dg.GraphDefinition(name=job, node_defs=[op], description=operation.description)
    config = NO_OPTIONS if options is None else dg.ConfigMapping(checked, config_schema=_schema(operation))
    return graph.to_job(name=job, description=operation.description, tags=_TAGS, config=config)


def _schema(operation: Operation[Any]) -> dict[str, dg.Field] | None:
    return None if operation.options is None else operation.options.fields()


def _build_op(
    operation: Operation[Any], names: LakehouseNames, spark: SparkResource, table_key: TableKey | None
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
        options = None if operation.options is None else operation.options(**context.op_config)
        resource = lakehouse_of(context.resources, names)
        if operation.is_pooled:
            _check_pool(context, names.pool)
        try:
            approved_by = _approver(options, operation, context.run)
            details = {} if approved_by is None else {"approved_by": approved_by}
            with acting_for_run(context.run.run_id, approved_by), resource.executors(spark) as executor:
                lake = resource.open()
                running = Running(
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
                )
                operation.step(running)
                if operation.changes_exports:
                    report_exports(context.instance, lake, names, running.links)
                yield from running.events
                proof = {} if operation.proof is None else operation.proof(running)
                running.log_figures(proof)
                context.add_output_metadata({**figures(proof), **running.shown})
        except TrinityLakeError as error:
            raise dg.Failure(
                description=str(error), metadata={"error": type(error).__name__}, allow_retries=False
            ) from error
        yield dg.Output(None)

    return run


def _approver(options: Options | None, operation: Operation[Any], run: dg.DagsterRun) -> str | None:
    """Return who approved what a run does. Raises InvalidInputError if somebody else is signed in, or nobody is."""
    given: str | None = getattr(options, "approved_by", None)
    if given is None:
        return operation.approved_by
    user = signed_in_user(run)
    if user is not None and given.strip() not in ("", user):
        raise InvalidInputError(f"approved_by is {given!r}, and the user is {user!r}: leave it empty")
    approver = given if user is None else user
    if not approver.strip():
        raise InvalidInputError("approved_by has to be given: no user launched this run")
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


def report_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report and of its cost, one entry each."""
    cost = report.get("cost", {})
    plain = {name: value for name, value in report.items() if isinstance(value, str | int | float | None)}
    return {
        **plain,
        "requests": sum(cost.get("requests", {}).values()),
        **{name: cost[name] for name in ("bytes_read", "bytes_written", "duration_ms") if name in cost},
    }
