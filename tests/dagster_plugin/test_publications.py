"""Test that a run publishes its staged tables and those of its parent run exactly once, despite interruptions."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes, check_lake
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import publish_step
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_metadata import PublishedPages
from trinitylake_ops.dagster_plugin.table_settings import StoreMode, stored_as
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at

ORDERS, SUMMARY = dg.AssetKey(["shop", "orders"]), dg.AssetKey(["shop", "summary"])
PUBLISHED = dg.AssetKey(["publish", "shop"])
PARTS = dg.StaticPartitionsDefinition(["a", "b"])
_JOBS: dict[str, dg.JobDefinition] = {}


def current_job(name: str) -> dg.JobDefinition:
    """Return a job that a test of this process defined, for re-executions."""
    return _JOBS[name]


class Shop:
    """A project on one lakehouse whose runs can be interrupted at their commit."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance, patch: pytest.MonkeyPatch):
        self.lake, self.instance, self._patch = lake, instance, patch
        self.euros = [1.0]
        self._job = ""

    def define(self, *assets: Any, isolation: str = "lakehouse") -> None:
        lakehouse = TrinityLakeResource(root=self.lake.root, isolation=isolation)  # type: ignore[arg-type]
        definitions = dg.Definitions(
            assets=[asset for asset in assets if isinstance(asset, dg.AssetsDefinition) and not _is_check(asset)],
            asset_checks=[asset for asset in assets if _is_check(asset)],
            resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
            jobs=[dg.define_asset_job("shop", selection="*")],
            executor=dg.in_process_executor,
        )
        self._job = f"shop {len(_JOBS)}"  # Dagster caches definitions by name
        _JOBS[self._job] = definitions.resolve_job_def("shop")

    def orders(self, mode: StoreMode = "overwrite") -> dg.AssetsDefinition:
        @dg.asset(key=ORDERS, metadata=stored_as(mode=mode))
        def orders() -> pa.Table:
            return pa.table({"euros": self.euros})

        return orders

    def run(
        self,
        reexecution: dg.ReexecutionOptions | None = None,
        *,
        partition: str | None = None,
        keys: Any = None,
        partition_range: tuple[str, str] | None = None,
    ) -> dg.DagsterRun:
        """Execute the job, or part of it, for a partition or a range of partitions, in a separate Dagster run."""
        tags = {} if partition is None else {"dagster/partition": partition}
        if partition_range is not None:
            start, end = partition_range
            tags = {"dagster/asset_partition_range_start": start, "dagster/asset_partition_range_end": end}
        if reexecution is not None:
            parent = self.instance.get_run_by_id(reexecution.parent_run_id)
            assert parent is not None
            tags |= {
                "dagster/parent_run_id": parent.run_id,
                "dagster/root_run_id": parent.root_run_id or parent.run_id,
            }
        job = dg.build_reconstructable_job("tests.dagster_plugin.test_publications", "current_job", (self._job,))
        with dg.execute_job(
            job,
            self.instance,
            run_config=QUIET,
            reexecution_options=reexecution,
            asset_selection=keys,
            tags=tags,
        ) as result:
            run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def at_commit(
        self,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Call functions before and after the next commit of a publish asset or of a table's step."""
        publish_once = publish_step.publish_once

        def publish_with_hooks(*args: Any, **options: Any) -> Any:
            self._patch.setattr(publish_step, "publish_once", publish_once)
            before()
            publication = publish_once(*args, **options)
            after()
            return publication

        self._patch.setattr(publish_step, "publish_once", publish_with_hooks)

    def error_code(self, run: dg.DagsterRun) -> str:
        (code,) = self.error_codes(run)
        return code

    def error_codes(self, run: dg.DagsterRun) -> list[str]:
        """Return the error codes of the failed steps of a run."""
        records = self.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE).records
        events = [record.event_log_entry.dagster_event for record in records]
        failed = [event.step_failure_data.user_failure_data for event in events if event is not None]
        return [str(failure.metadata["error_code"].value) for failure in failed if failure is not None]

    def values(self, table: str = "orders", column: str = "euros") -> list[Any]:
        values: list[Any] = catalog_at(self.lake).load_table(("shop", table)).scan().to_arrow()[column].to_pylist()
        return sorted(values)

    def latest_materialization(self, key: dg.AssetKey = ORDERS) -> dg.AssetMaterialization:
        event = self.instance.fetch_materializations(key, limit=1).records[0].asset_materialization
        assert event is not None
        return event


def _is_check(asset: Any) -> bool:
    return isinstance(asset, dg.AssetChecksDefinition)


def fail_after_commit() -> None:
    raise RuntimeError("killed after the commit")


def re_execute_all(run: dg.DagsterRun) -> dg.ReexecutionOptions:
    return dg.ReexecutionOptions(parent_run_id=run.run_id)


def re_execute_publisher(run: dg.DagsterRun) -> dg.ReexecutionOptions:
    return dg.ReexecutionOptions(parent_run_id=run.run_id, step_selection=["publish__shop"])


@pytest.fixture
def shop(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    with dg.instance_for_test() as instance:
        project = Shop(lakes.local(), instance, monkeypatch)
        yield project
        check_lake(project.lake)


def publisher(*tables: dg.AssetsDefinition, key: str = "shop", **options: Any) -> dg.AssetsDefinition:
    assets_by_name = {table.key.path[-1]: table for table in tables}
    return build_publish_asset(key=["publish", key], tables=assets_by_name, description="Tables.", **options)


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_corrected_rows_replace_rows_of_interrupted_run(shop: Shop, mode: StoreMode) -> None:
    """Each row must exist once, although Dagster has no record of the first run's commit."""
    orders = shop.orders(mode)

    @dg.asset(key=SUMMARY, ins={"orders": dg.AssetIn(ORDERS)})
    def summary(orders: pa.Table) -> pa.Table:
        return pa.table({"euros": [sum(orders["euros"].to_pylist())]})

    shop.define(orders, summary, publisher(orders, summary), isolation="serializable")
    shop.at_commit(after=fail_after_commit)
    first = shop.run()
    assert (first.is_failure, shop.values()) == (True, [1.0])
    shop.euros = [100.0, 200.0]
    second = shop.run(re_execute_all(first))
    assert (second.is_success, shop.values(), shop.values("summary")) == (True, [100.0, 200.0], [300.0])
    metadata = shop.latest_materialization().metadata
    assert (metadata["lakehouse_version"].value, metadata["staged_by"].value) == (2, second.run_id)
    assert shop.run(re_execute_all(second)).is_success
    assert shop.values() == ([100.0, 200.0] if mode == "overwrite" else [100.0, 100.0, 200.0, 200.0])


def test_re_execution_replaces_append_of_failed_step(shop: Shop) -> None:
    """A step reports its tables before it ends. If the step fails afterwards, their rows are not duplicated."""
    summaries: list[Any] = ["not a table"]

    @dg.multi_asset(
        outs={
            name: dg.AssetOut(key=["shop", name], metadata=stored_as(mode="append")) for name in ("orders", "summary")
        }
    )
    def both() -> Iterator[dg.Output[Any]]:
        yield dg.Output(pa.table({"euros": shop.euros}), "orders")
        yield dg.Output(summaries[0], "summary")

    shop.define(both)
    first = shop.run()
    assert (first.is_failure, shop.values()) == (True, [1.0])
    shop.euros, summaries[0] = [3.0], pa.table({"euros": [2.0]})
    second = shop.run(dg.ReexecutionOptions.from_failure(first.run_id, shop.instance))
    assert (second.is_success, shop.values(), shop.values("summary")) == (True, [3.0], [2.0])
    assert shop.run(re_execute_all(second)).is_success
    assert (shop.values(), shop.values("summary")) == ([3.0, 3.0], [2.0, 2.0]), "a new run appends again"


@pytest.mark.parametrize("has_publisher", [False, True])
def test_re_execution_replaces_append_of_earlier_re_execution(shop: Shop, has_publisher: bool) -> None:
    """The first run fails and its re-execution appends and dies. Then the first run is re-executed again."""
    orders = shop.orders("append")
    shop.define(orders, *([publisher(orders)] if has_publisher else []))
    shop.at_commit(before=fail_after_commit)
    first = shop.run()
    assert (first.is_failure, shop.lake.latest_version()) == (True, 0)
    shop.at_commit(after=fail_after_commit)
    second = shop.run(re_execute_all(first))
    assert (second.is_failure, shop.values()) == (True, [1.0])
    third = shop.run(re_execute_all(first))
    assert (third.is_success, shop.values()) == (True, [1.0])
    assert shop.run(re_execute_all(first)).is_success
    assert shop.values() == [1.0, 1.0], "a new run appends again"


def test_deleted_partition_is_not_published(shop: Shop) -> None:
    days = dg.DynamicPartitionsDefinition(name="deleted")

    @dg.asset(key=ORDERS, partitions_def=days, metadata=stored_as(partition_by=["day"]))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"day": [context.partition_key], "euros": [1.0]})

    shop.define(orders)
    shop.instance.add_dynamic_partitions("deleted", ["x"])
    shop.at_commit(before=lambda: shop.instance.delete_dynamic_partition("deleted", "x"))
    run = shop.run(partition="x")
    assert (run.is_failure, shop.error_code(run), shop.lake.latest_version()) == (True, "invalid-input", 0)


@pytest.mark.parametrize("publisher", ["none", "partitioned", "unpartitioned"])
def test_range_with_deleted_partition_is_not_published(shop: Shop, publisher: str) -> None:
    """A partition in the middle of the range was deleted, but the ends of the range exist."""
    days = dg.DynamicPartitionsDefinition(name="range")

    names = ("orders", "summary")

    @dg.multi_asset(
        outs={name: dg.AssetOut(key=["shop", name], metadata=stored_as(partition_by=["day"])) for name in names},
        partitions_def=days,
    )
    def both(context: dg.AssetExecutionContext) -> Iterator[dg.Output[Any]]:
        rows = pa.table({"day": context.partition_keys, "euros": [1.0] * len(context.partition_keys)})
        yield from (dg.Output(rows, name) for name in names)

    tables = {name: dg.AssetKey(["shop", name]) for name in names}
    partitions = days if publisher == "partitioned" else None
    publisher_asset = build_publish_asset(key=["publish", "shop"], tables=tables, partitions_def=partitions)
    shop.define(both, *([] if publisher == "none" else [publisher_asset]))
    shop.instance.add_dynamic_partitions("range", ["a", "b", "c"])
    shop.at_commit(
        before=lambda: shop.instance.delete_dynamic_partition("range", "b"),
    )
    run = shop.run(partition_range=("a", "c"))
    assert (run.is_failure, shop.error_code(run), shop.lake.latest_version()) == (True, "invalid-input", 0)
    shop.instance.add_dynamic_partitions("range", ["b"])
    assert shop.run(partition_range=("a", "b")).is_success, "the recreated partition is the last one"
    assert shop.values(column="day") == ["a", "b", "c"]


@pytest.mark.parametrize("is_published", [False, True])
def test_range_interrupted_between_events_is_appended_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """Dagster has an event for only the first partition, so the step did not succeed."""

    @dg.asset(key=ORDERS, partitions_def=PARTS, metadata=stored_as(mode="append", partition_by=["part"]))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"part": context.partition_keys, "euros": [1.0] * len(context.partition_keys)})

    shop.define(orders, *([publisher(orders, partitions_def=PARTS)] if is_published else []))
    original_call = PublishedPages.__call__
    calls: list[object] = []

    def fail_on_second_call(self: PublishedPages, *args: Any) -> Any:
        calls.append(args)
        return original_call(self, *args) if len(calls) == 1 else fail_after_commit()

    with monkeypatch.context() as patch:
        patch.setattr(PublishedPages, "__call__", fail_on_second_call)
        first = shop.run(partition_range=("a", "b"))
    assert (first.is_failure, len(calls), shop.values(column="part")) == (True, 2, ["a", "b"])
    reexecution = shop.run(re_execute_all(first), partition_range=("a", "b"))
    assert (reexecution.is_success, shop.values(column="part")) == (True, ["a", "b"])


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_retry_replaces_rows_of_interrupted_attempt(shop: Shop, mode: StoreMode) -> None:
    """A table that is published by its step contains each row of the last attempt once."""

    @dg.asset(key=ORDERS, metadata=stored_as(mode=mode), retry_policy=dg.RetryPolicy(max_retries=1))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"euros": [*shop.euros, float(context.retry_number)]})

    shop.define(orders)
    shop.at_commit(after=fail_after_commit)
    first = shop.run()
    assert (first.is_success, shop.values()) == (True, [1.0, 1.0])
    assert shop.latest_materialization().metadata["lakehouse_version"].value == 2
    shop.at_commit(after=lambda: shop.at_commit(after=fail_after_commit) or fail_after_commit())
    second = shop.run()
    assert second.is_failure
    shop.euros = [7.0]
    assert shop.run(re_execute_all(second)).is_success
    assert shop.values() == ([0.0, 7.0] if mode == "overwrite" else [0.0, 1.0, 1.0, 7.0])


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_step_killed_between_commit_and_event_is_repeated_once(shop: Shop, mode: StoreMode) -> None:
    """The process is killed by SIGKILL, so Dagster has no materialization of the table and no failure of the step."""
    shop.define(shop.orders(mode))

    def run(_report: Callable[[str], None]) -> None:
        shop.at_commit(after=lambda: os.kill(os.getpid(), signal.SIGKILL))
        shop.run()

    status, _ = fork(run).finish()
    assert status == -signal.SIGKILL
    (killed,) = shop.instance.get_runs()
    assert (killed.is_finished, shop.values()) == (False, [1.0])
    assert shop.instance.fetch_materializations(ORDERS, limit=1).records == []
    shop.instance.report_run_failed(killed)
    shop.euros = [2.0]
    assert shop.run(re_execute_all(killed)).is_success
    assert (shop.values(), shop.latest_materialization().metadata["lakehouse_version"].value) == ([2.0], 2)


def test_re_execution_without_publish_step_stores_nothing(shop: Shop) -> None:
    orders = shop.orders("append")
    shop.define(orders, publisher(orders))
    shop.at_commit(after=fail_after_commit)
    first = shop.run()
    reexecution = shop.run(dg.ReexecutionOptions(first.run_id, step_selection=["shop__orders"]))
    assert (reexecution.is_failure, shop.values(), shop.lake.latest_version()) == (True, [1.0], 1)
    assert shop.run(re_execute_publisher(first)).is_success
    assert (shop.values(), shop.latest_materialization().metadata["lakehouse_version"].value) == ([1.0], 1)


def test_unidentifiable_rows_of_interrupted_run_are_a_conflict(shop: Shop) -> None:
    """Another engine rewrote the appended rows of an interrupted run, so they cannot be identified."""
    orders = shop.orders("append")
    shop.define(orders, publisher(orders))
    shop.at_commit(after=fail_after_commit)
    first = shop.run()
    table = catalog_at(shop.lake).load_table(("shop", "orders"))
    table.overwrite(table.scan().to_arrow())
    reexecution = shop.run(re_execute_all(first))
    assert (reexecution.is_failure, shop.error_code(reexecution), shop.values()) == (True, "commit-conflict", [1.0])
    assert shop.run(re_execute_publisher(first)).is_success
    assert shop.latest_materialization().metadata["lakehouse_version"].value == 1


def test_table_staged_again_after_conflict_can_conflict_again(shop: Shop) -> None:
    orders = shop.orders()
    shop.define(orders, publisher(orders))
    assert shop.run().is_success

    def writer(euros: float) -> Callable[[], object]:
        def write() -> None:
            catalog_at(shop.lake).load_table(("shop", "orders")).overwrite(pa.table({"euros": [euros]}))

        return write

    shop.at_commit(before=writer(2.0))
    first = shop.run()
    shop.at_commit(before=writer(4.0))
    second = shop.run(re_execute_all(first))
    assert [shop.error_code(run) for run in (first, second)] == ["commit-conflict"] * 2
    assert shop.values() == [4.0]
    third = shop.run(re_execute_publisher(second))
    assert (third.is_success, shop.values()) == (True, [1.0]), "an explicit re-execution replaces the rows"
    assert shop.latest_materialization().metadata["staged_by"].value == second.run_id


def test_append_is_recognized_after_its_snapshots_were_trimmed(shop: Shop) -> None:
    orders = shop.orders("append")
    shop.define(orders, publisher(orders))
    first = shop.run()
    table = catalog_at(shop.lake).load_table(("shop", "orders"))
    table.overwrite(table.scan().to_arrow())
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_trim_tables(shop.lake, policy).execute()
    assert len(catalog_at(shop.lake).load_table(("shop", "orders")).metadata.snapshots) == 1
    assert shop.run(re_execute_publisher(first)).is_success
    assert shop.values() == [1.0]
    assert "undone_by_version" not in shop.latest_materialization(PUBLISHED).metadata
    assert shop.latest_materialization().metadata["lakehouse_version"].value == 1


def test_undone_publication_is_reported_as_undone(shop: Shop) -> None:
    orders = shop.orders()

    @dg.asset(key=SUMMARY, ins={"orders": dg.AssetIn(ORDERS)})
    def summary(orders: pa.Table) -> pa.Table:
        return pa.table({"euros": [sum(orders["euros"].to_pylist())]})

    shop.define(orders, summary, publisher(orders, summary))
    assert shop.run().is_success
    shop.euros = [2.0]
    shop.at_commit(after=fail_after_commit)
    second = shop.run()
    operations.rollback(shop.lake, 1)
    assert shop.run(re_execute_publisher(second)).is_success
    assert (shop.values(), shop.lake.latest_version()) == ([1.0], 3)
    assert shop.latest_materialization(PUBLISHED).metadata["undone_by_version"].value == 3
    assert shop.latest_materialization().metadata["lakehouse_version"].value == 1, (
        "an undone publication must not be materialized"
    )
    observation = shop.instance.fetch_observations(ORDERS, limit=1).records[0].asset_observation
    assert observation is not None and observation.metadata["undone_by_version"].value == 3
    remaining_steps = dg.ReexecutionOptions(second.run_id, step_selection=["shop__summary", "publish__shop"])
    partial_run = shop.run(remaining_steps)
    assert shop.error_code(partial_run) == "commit-conflict", "the summary was computed from unpublished orders"
    operations.rollback(shop.lake, 2)
    assert shop.run(re_execute_publisher(second)).is_success
    assert shop.latest_materialization().metadata["lakehouse_version"].value == 2


@pytest.mark.parametrize("is_undone", [False, True])
def test_second_re_execution_recognizes_publication_of_first(shop: Shop, is_undone: bool) -> None:
    orders, summary_fails = shop.orders("append"), [True]

    @dg.asset(key=SUMMARY, ins={"orders": dg.AssetIn(ORDERS)})
    def summary(orders: pa.Table) -> pa.Table:
        assert not summary_fails
        return pa.table({"euros": [sum(orders["euros"].to_pylist())]})

    shop.define(orders, summary, publisher(orders, summary))
    first = shop.run()
    summary_fails.clear()
    remaining_steps = dg.ReexecutionOptions(first.run_id, step_selection=["shop__summary", "publish__shop"])
    assert shop.run(remaining_steps).is_success
    if is_undone:
        operations.rollback(shop.lake, 0)
        assert shop.error_code(shop.run(remaining_steps)) == "commit-conflict"
        assert not shop.lake.snapshot().has_namespace("shop")
        return
    assert shop.run(remaining_steps).is_success
    versions = {key: shop.latest_materialization(key).metadata["lakehouse_version"].value for key in (ORDERS, SUMMARY)}
    assert versions == {ORDERS: 1, SUMMARY: 2}
    assert (shop.values(), shop.values("summary")) == ([1.0], [1.0])


def test_table_derived_from_superseded_staged_table_is_not_published(shop: Shop) -> None:
    orders = shop.orders()

    @dg.asset(key=SUMMARY, ins={"orders": dg.AssetIn(ORDERS)})
    def summary(orders: pa.Table) -> pa.Table:
        return pa.table({"euros": [sum(orders["euros"].to_pylist())]})

    shop.define(orders, summary, publisher(orders, summary))
    shop.at_commit(before=fail_after_commit)
    first = shop.run()
    shop.euros = [5.0]
    partial_run = shop.run(dg.ReexecutionOptions(first.run_id, step_selection=["shop__orders", "publish__shop"]))
    assert shop.error_code(partial_run) == "commit-conflict"
    assert shop.lake.latest_version() == 0
    reexecution = shop.run(re_execute_publisher(first))
    assert (reexecution.is_success, shop.values("summary")) == (True, [1.0])
    assert {shop.latest_materialization(key).metadata["staged_by"].value for key in (ORDERS, SUMMARY)} == {first.run_id}


def test_publish_asset_rejects_two_assets_that_write_one_table(shop: Shop) -> None:
    def rows(name: str) -> dg.AssetsDefinition:
        @dg.asset(key=["shop", name], metadata=stored_as(table="shop.orders", mode="append"))
        def table() -> pa.Table:
            return pa.table({"euros": shop.euros})

        return table

    a, b = rows("a"), rows("b")
    with pytest.raises(InvalidInputError):
        publisher(a, b)
    publisher_of_keys = build_publish_asset(
        key=["publish", "shop"], tables={"a": a.key, "b": b.key}, description="Keys."
    )
    shop.define(a, b, publisher_of_keys)
    assert shop.error_code(shop.run()) == "invalid-input"
    assert shop.lake.latest_version() == 0
    shop.define(a, b, publisher(a, key="a"), publisher(b, key="b"))
    assert (shop.run().is_success, shop.values()) == (True, [1.0, 1.0])


def _writer(name: str, **options: Any) -> dg.AssetsDefinition:
    """Return an asset that writes the table shop.orders."""
    settings = {"table": "shop.orders", **{key: options.pop(key) for key in ("mode", "partition_by") if key in options}}

    @dg.asset(key=["shop", name], metadata=stored_as(**settings), **options)  # type: ignore[arg-type]
    def table(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"part": [context.partition_key if context.has_partition_key else "a"], "euros": [1.0]})

    return table


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("second_writer", ["overwrite", "append", "partitions"])
def test_run_with_two_assets_that_replace_each_others_rows_fails(
    shop: Shop, is_published: bool, second_writer: str
) -> None:
    options: dict[str, Any] = {"mode": second_writer}
    partition = None
    if second_writer == "partitions":
        options, partition = {"partition_by": ["part"], "partitions_def": PARTS}, "a"
    a = _writer("a", **(options if partition else {"mode": "overwrite"}))
    b, after = _writer("b", **options), _writer("b", **options, deps=[a])
    publishers = [publisher(a, key="a", partitions_def=a.partitions_def)] if is_published else []
    shop.define(a, b, *publishers)
    run = shop.run(partition=partition)
    assert (run.is_failure, shop.lake.latest_version()) == (True, 0)
    if not is_published:
        assert shop.error_codes(run) == ["invalid-input"] * 2
    shop.define(a, after, *publishers)
    assert shop.run(partition=partition).is_success


def test_run_with_two_assets_that_append_to_one_table_succeeds(shop: Shop) -> None:
    shop.define(*(_writer(name, mode="append") for name in "ab"))
    assert (shop.run().is_success, shop.values()) == (True, [1.0, 1.0])
    shop.define(_writer("a", mode="append"), _writer("b", mode="overwrite"))
    assert shop.run(keys=[dg.AssetKey(["shop", "b"])]).is_success, "the run writes only one of the assets"
    assert shop.values() == [1.0]


@pytest.mark.parametrize("timing", ["before", "after"])
def test_partition_deleted_during_run_fails_only_before_commit(shop: Shop, timing: str) -> None:
    shop.instance.add_dynamic_partitions("days", ["mon", "tue"])
    days = dg.DynamicPartitionsDefinition(name="days")

    @dg.asset(key=ORDERS, partitions_def=days, metadata=stored_as(partition_by=["day"]))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"day": [context.partition_key], "euros": [1.0]})

    shop.define(orders, publisher(orders, partitions_def=days))
    shop.at_commit(**{timing: lambda: shop.instance.delete_dynamic_partition("days", "mon")})  # type: ignore[arg-type]
    run = shop.run(partition="mon")
    if timing == "before":
        assert (shop.error_code(run), shop.lake.latest_version()) == ("invalid-input", 0)
    else:
        assert (run.is_success, shop.values()) == (True, [1.0])


def test_step_does_not_wait_for_publication_that_ended_without_its_partition(shop: Shop) -> None:
    shop.instance.add_dynamic_partitions("days", ["mon", "tue"])
    days, keys_read = dg.DynamicPartitionsDefinition(name="days"), []

    @dg.asset(key=ORDERS, partitions_def=days, metadata=stored_as(partition_by=["day"]))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"day": [context.partition_key], "euros": [1.0]})

    @dg.asset(ins={"orders": dg.AssetIn(ORDERS)})
    def report(orders: pa.Table) -> None:
        keys_read.append(orders["day"].to_pylist())

    shop.define(orders, publisher(orders, partitions_def=days), report)
    assert shop.run(partition="tue").is_success
    shop.at_commit(after=lambda: shop.instance.delete_dynamic_partition("days", "mon"))
    assert shop.run(partition="mon").is_success
    assert keys_read == [["tue"], ["tue"]], "the deleted partition must not be read"


def test_check_reads_partition_of_its_run(shop: Shop) -> None:
    keys_read: list[list[str]] = []

    @dg.asset(key=ORDERS, partitions_def=PARTS, metadata=stored_as(partition_by=["part"]))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"part": [context.partition_key], "euros": shop.euros})

    @dg.asset_check(asset=orders, blocking=True)
    def positive(orders: pa.Table) -> dg.AssetCheckResult:
        keys_read.append(orders["part"].to_pylist())
        return dg.AssetCheckResult(passed=min(orders["euros"].to_pylist()) > 0)

    shop.define(orders, positive, publisher(orders, partitions_def=PARTS))
    assert shop.run(partition="a").is_success
    shop.euros = [-1.0]
    assert shop.run(partition="a").is_failure
    shop.euros = [2.0]
    assert shop.run(partition="b").is_success
    assert (keys_read, shop.values()) == ([["a"], ["a"], ["b"]], [1.0, 2.0])
