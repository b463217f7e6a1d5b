"""Test that reads at a run's pinned version are verified only if the run publishes with serializable isolation."""

from collections.abc import Callable
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import stored_as
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.replacement import TableRead

OTHER = dg.AssetKey(["ref", "other"])
PARTS = dg.StaticPartitionsDefinition(["x", "y"])


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lakehouse = lakes.local()
    lakehouse.alter_definition(isolation_level=IsolationLevel.SERIALIZABLE)
    write_value(lakehouse, "other", 1)
    return lakehouse


def write_value(lake: Lakehouse, table: str, value: int) -> None:
    staged = stage_arrow(lake, pa.table({"n": [value]}), "ref", table, mode="replace_table")
    publish_once(lake, [staged], publication_id(table, str(value)))


def asset(key: str, before_output: Callable[[], object] = lambda: None, **options: Any) -> dg.AssetsDefinition:
    @dg.asset(key=["marts", key], ins={"other": dg.AssetIn(OTHER)}, **options)
    def copied(other: pa.Table) -> pa.Table:
        before_output()
        return other

    return copied


def job(
    lake: Lakehouse,
    *assets: Any,
    published_keys: list[dg.AssetKey] | None = None,
    version: str = "",
    **resource_options: Any,
) -> dg.JobDefinition:
    lakehouse = TrinityLakeResource(root=lake.root, **resource_options)
    keys = published_keys or [key for asset in assets for key in asset.keys]
    publish = build_publish_asset(
        key=["publish"], tables={key.path[-1]: key for key in keys}, description="All.",
        partitions_def=assets[0].partitions_def,
    )  # fmt: skip
    return dg.Definitions(
        assets=[*assets, publish, dg.AssetSpec(OTHER)],
        resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse, version=version)},
        jobs=[dg.define_asset_job("everything")],
        executor=dg.in_process_executor,
    ).resolve_job_def("everything")


def run(job: dg.JobDefinition, instance: dg.DagsterInstance, **options: Any) -> dg.ExecuteInProcessResult:
    return job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False, **options)


def step_error(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    return str(failed.error)


def test_run_with_changed_input_publishes_nothing(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    result = run(job(lake, asset("a", lambda: write_value(lake, "other", 2))), instance)
    assert not result.success
    assert "table ref.other: read at version" in step_error(result)
    assert not lake.snapshot().has_namespace("marts")
    assert run(job(lake, asset("a")), instance).success


def test_isolation_level_defaults_to_lakehouse(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    changed_input_job = job(
        lake, asset("a", lambda: write_value(lake, "other", lake.latest_version())), isolation="snapshot"
    )
    assert run(changed_input_job, instance).success
    lake.alter_definition(isolation_level=IsolationLevel.SNAPSHOT)
    values = iter((100, 101))
    assert run(job(lake, asset("a", lambda: write_value(lake, "other", next(values)))), instance).success
    serializable_job = job(lake, asset("a", lambda: write_value(lake, "other", next(values))), isolation="serializable")
    assert not run(serializable_job, instance).success


def test_only_one_of_two_runs_with_write_skew_publishes(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    def flip(name: str, source_name: str, before_output: Callable[[], object] = lambda: None) -> dg.JobDefinition:
        @dg.asset(key=["ref", name], ins={"source": dg.AssetIn(["ref", source_name])})
        def flipped_value(source: pa.Table) -> pa.Table:
            before_output()
            return pa.table({"n": [0 if source["n"][0].as_py() else 1]})

        lakehouse = TrinityLakeResource(root=lake.root)
        publish = build_publish_asset(key=["publish"], tables={name: dg.AssetKey(["ref", name])}, description="One.")
        return dg.Definitions(
            assets=[flipped_value, publish, dg.AssetSpec(["ref", source_name])],
            resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
            executor=dg.in_process_executor,
        ).resolve_implicit_global_asset_job_def()

    write_value(lake, "on", 1)
    inner_results: list[bool] = []
    inner_job = flip("on", "other")
    outer_job = flip("other", "on", lambda: inner_results.append(run(inner_job, instance).success))
    assert not run(outer_job, instance).success
    assert inner_results == [True]
    values = {
        name: catalog_at(lake).load_table(("ref", name)).scan().to_arrow()["n"][0].as_py() for name in ("other", "on")
    }
    assert values == {"other": 1, "on": 0}


def test_reads_of_unpublished_step_are_verified(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    first = asset("first", lambda: write_value(lake, "other", 2))

    @dg.asset(key=["marts", "second"], ins={"source": dg.AssetIn(first.key)})
    def second(source: pa.Table) -> pa.Table:
        return source

    assert not run(job(lake, first, second, published_keys=[dg.AssetKey(["marts", "second"])]), instance).success


def test_read_of_configured_version_is_not_verified(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    version = str(lake.latest_version())
    assert run(job(lake, asset("a", lambda: write_value(lake, "other", 2)), version=version), instance).success


def test_read_of_another_lakehouse_is_not_verified(lakes: Lakes, lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    other_lake = lakes.local("external")
    write_value(other_lake, "other", 1)

    @dg.asset(
        key=["marts", "a"],
        ins={"other": dg.AssetIn(OTHER, input_manager_key="external_io_manager")},
        io_manager_key="local_io_manager",
    )
    def a(other: pa.Table) -> pa.Table:
        write_value(other_lake, "other", 2)
        return other

    external, local = (TrinityLakeResource(root=lakehouse.root) for lakehouse in (other_lake, lake))
    definitions = dg.Definitions(
        assets=[a, build_publish_asset(key=["publish"], tables={"a": a.key}, description="One."), dg.AssetSpec(OTHER)],
        resources={
            "lakehouse": local,
            "external_io_manager": TrinityLakeIOManager(lakehouse=external),
            "local_io_manager": TrinityLakeIOManager(lakehouse=local),
        },
        executor=dg.in_process_executor,
    )
    assert run(definitions.resolve_implicit_global_asset_job_def(), instance).success


def two_steps(root: str) -> dg.JobDefinition:
    """Return a job whose second step fails unless the run is a re-execution."""
    first = asset("first")

    @dg.asset(key=["marts", "second"], ins={"source": dg.AssetIn(["marts", "first"])})
    def second(context: dg.AssetExecutionContext, source: pa.Table) -> pa.Table:
        if context.run.parent_run_id is None:
            raise dg.Failure("not now")
        return source

    return job(Lakehouse.open(root), first, second)


def test_reads_of_reused_tables_are_verified(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    job = dg.build_reconstructable_job("tests.dagster_plugin.test_run_reads", "two_steps", (lake.root,))

    def execute(reexecution: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
        with dg.execute_job(job, instance, run_config=QUIET, reexecution_options=reexecution) as result:
            run = instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    failed = execute()
    write_value(lake, "other", 2)
    remaining_steps = ["marts__second", "publish"]
    assert not execute(dg.ReexecutionOptions(failed.run_id, remaining_steps)).is_success
    assert not execute(dg.ReexecutionOptions.from_failure(failed.run_id, instance)).is_success
    assert execute(dg.ReexecutionOptions(failed.run_id)).is_success


def test_reads_of_partitions_are_verified(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    changed_input_job = job(lake, asset("a", lambda: write_value(lake, "other", 2), partitions_def=PARTS))
    assert not run(changed_input_job, instance, partition_key="x").success


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
def test_read_of_missing_table_is_verified(
    lake: Lakehouse, instance: dg.DagsterInstance, is_published: bool, isolation: Any
) -> None:
    """Another run creates the table after this run observed that it does not exist."""
    key, days = dg.AssetKey(["marts", "total"]), dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
    previous = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    pending_writes = [lambda: append_total(7)]

    def append_total(value: int) -> None:
        rows = pa.table({"day": ["2026-01-01"], "n": [value]})
        staged = stage_arrow(lake, rows, "marts", "total", mode="append", partition_by=["day"])
        publish_once(lake, [staged], publication_id("total", str(value)))

    @dg.asset(
        key=key,
        partitions_def=days,
        ins={"total": dg.AssetIn(key, partition_mapping=previous)},
        metadata=stored_as(partition_by=["day"]),
    )
    def total(context: dg.AssetExecutionContext, total: pa.Table | None) -> pa.Table:
        while pending_writes:
            pending_writes.pop()()
        before = 0 if total is None else sum(total["n"].to_pylist())
        return pa.table({"day": [context.partition_key], "n": [1 + before]})

    lakehouse = TrinityLakeResource(root=lake.root, isolation=isolation)
    publisher = build_publish_asset(key=["publish"], tables={"total": key}, partitions_def=days)
    definitions = dg.Definitions(
        assets=[total, *([publisher] if is_published else [])],
        resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=dg.in_process_executor,
    ).resolve_implicit_global_asset_job_def()

    def values() -> list[int]:
        return sorted(catalog_at(lake).load_table(("marts", "total")).scan().to_arrow()["n"].to_pylist())

    result = run(definitions, instance, partition_key="2026-01-02")
    if isolation == "snapshot":
        assert (result.success, values()) == (True, [1, 7])
        return
    assert (result.success, values()) == (False, [7])
    assert run(definitions, instance, partition_key="2026-01-02").success
    assert values() == [7, 8]


def test_run_may_create_table_that_it_read_as_missing(lake: Lakehouse) -> None:
    read = TableRead.of_missing(lake.snapshot(), "marts", "new")
    created_table, other_table = (
        stage_arrow(lake, pa.table({"n": [1]}), "marts", name, mode="replace_table") for name in ("new", "more")
    )
    publish_once(lake, [created_table], publication_id("first"), reads=[read])
    with pytest.raises(CommitConflictError):
        publish_once(lake, [other_table], publication_id("second"), reads=[read])
    publish_once(lake, [other_table], publication_id("second"), reads=[read], own=[created_table])
    added = stage_arrow(lake, pa.table({"n": [2]}), "marts", "new", mode="append")
    publish_once(lake, [added], publication_id("third"), reads=[read], own=[created_table, added])
    later_table = stage_arrow(lake, pa.table({"n": [2]}), "marts", "later", mode="append")
    with pytest.raises(CommitConflictError):
        publish_once(lake, [later_table], publication_id("fourth"), reads=[read], own=[added])
    publish_once(lake, [later_table], publication_id("fourth"), reads=[read], own=[created_table, added])


def test_run_may_change_table_that_it_read(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    """In a run with two publications, the second one read a table before the first one wrote it."""
    snapshot = lake.snapshot()
    read = TableRead.of(snapshot, "ref", "other")
    changed_table = stage_arrow(lake, pa.table({"n": [2]}), "ref", "other", mode="replace_table")
    publish_once(lake, [changed_table], publication_id("first"), reads=[read])
    other_table = stage_arrow(lake, pa.table({"n": [2]}), "marts", "more", mode="replace_table")
    with pytest.raises(CommitConflictError, match=r"ref\.other"):
        publish_once(lake, [other_table], publication_id("second"), reads=[read])
    version = publish_once(lake, [other_table], publication_id("second"), reads=[read], own=[changed_table]).version
    assert publish_once(lake, [other_table], publication_id("second"), reads=[read]).version == version


def test_reads_are_serializable(lake: Lakehouse) -> None:
    read = TableRead.of(lake.snapshot(), "ref", "other")
    missing = TableRead.of_missing(lake.snapshot(), "ref", "missing")
    assert [TableRead.from_json(table_read.to_json()) for table_read in (read, missing)] == [read, missing]
    for text in ("", "[]", "{}", '{"root": 1, "extra": 2}'):
        with pytest.raises(InvalidInputError):
            TableRead.from_json(text)
    with pytest.raises(InvalidInputError, match=r"ref\.missing"):
        TableRead.of(lake.snapshot(), "ref", "missing")
