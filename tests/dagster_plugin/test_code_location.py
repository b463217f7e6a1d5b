"""Test the definitions that are built for one lakehouse, or for several lakehouses of one code location."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.test_assets import values
from tests.environments import run_without
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse, dagster_plugin
from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    BlackoutWindow,
    FailedRun,
    LakehouseNames,
    LakehouseSettings,
    StorageSettings,
    TrinityLakeResource,
    build_failed_run_sensor,
    build_publish_asset,
    build_trinitylake_definitions,
    code_location,
    stored_as,
)
from trinitylake_ops.dagster_plugin.checks import repairing_jobs
from trinitylake_ops.dagster_plugin.schedules import LIMITED
from trinitylake_ops.declarations.registry import ALL, GROUPS
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

LIMITS = ApplyLimits(max_files=10, max_bytes=1 << 20, min_age=timedelta(days=7))
UNPREFIXED_IO_MANAGER = LakehouseNames("").io_manager_key
SALES, HR = LakehouseNames("sales"), LakehouseNames("hr")
PAGE = Path(__file__).parents[2] / "docs" / "dagster" / "README.md"
DEFAULT_JOBS = {
    "rollback", "export", "restore", "expire", "undelete", "purge", "maintain", "verify", "repair", "observe",
}  # fmt: skip


def settings(root: str, name: str = "", **options: Any) -> LakehouseSettings:
    resource = TrinityLakeResource(root=root, storage_options=StorageSettings(fsync="false"))
    return LakehouseSettings(lakehouse=resource, name=name, **options)


def in_process_definitions(*lakehouses: LakehouseSettings) -> dg.Definitions:
    in_process = dg.Definitions(executor=dg.in_process_executor)
    return dg.Definitions.merge(build_trinitylake_definitions(*lakehouses), in_process)


def write_rows(lake: Lakehouse, name: str, n_rows: int) -> None:
    namespace, _, table = name.partition(".")
    staged = stage_arrow(lake, pa.table({"n": list(range(n_rows))}), namespace, table, mode="append")
    publish_once(lake, [staged], publication_id(name, str(lake.latest_version())))


def run(
    definitions: dg.Definitions, instance: dg.DagsterInstance, job: str, **config: Any
) -> dg.ExecuteInProcessResult:
    return definitions.resolve_job_def(job).execute_in_process(instance=instance, run_config=config)


def job_names(definitions: dg.Definitions) -> set[str]:
    return {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}


def test_loading_definitions_imports_no_modules_for_steps() -> None:
    """Each run starts a process that loads the definitions, even if it stores and publishes no table."""
    program = """
import sys
import dagster as dg
from trinitylake_ops.dagster_plugin import (
    LakehouseNames, TrinityLakeIOManager, TrinityLakeResource, build_publish_asset, stored_as
)
names, lakehouse = LakehouseNames("lake"), TrinityLakeResource(root="/lake")
days = dg.DailyPartitionsDefinition("2026-01-01")

@dg.asset(key=["shop", "orders"], io_manager_key=names.io_manager_key, partitions_def=days,
          metadata=stored_as(partition_by=["day"]))
def orders():
    pass

tables = {"orders": orders, "totals": dg.AssetKey(["shop", "totals"])}
publish = build_publish_asset(key=["publish"], tables=tables, partitions_def=days, names=names)
resources = {names.resource_key: lakehouse, names.io_manager_key: TrinityLakeIOManager(lakehouse=lakehouse)}
dg.Definitions(assets=[orders, dg.AssetSpec(["shop", "totals"]), publish], resources=resources).get_repository_def()
table_modules = {name for name in sys.modules if name.startswith("trinitylake_ops.iceberg.")}
loaded = {"pyiceberg", "trinitylake_ops.operations.status"} & sys.modules.keys() | table_modules
loaded -= {"trinitylake_ops.iceberg.write", "trinitylake_ops.iceberg.write.staged_table"}
assert not loaded, loaded
"""
    completed = run_without((), program)
    assert completed.returncode == 0, completed.stderr


def test_definitions_contain_assets_jobs_and_sensors_of_lakehouse() -> None:
    def alert(_failed: FailedRun) -> None:
        raise AssertionError

    publish = dg.AssetKey(["publish", "orders"])
    definitions = build_trinitylake_definitions(
        settings("memory://m/", tables=["shop.orders"], published_by=[publish], limits=LIMITS, alert=alert)
    )
    repository = definitions.get_repository_def()
    assert set(repository.get_top_level_resources()) == {"lakehouse", "lakehouse_io_manager"}
    graph = definitions.resolve_asset_graph()
    head = graph.get(dg.AssetKey("lakehouse"))
    assert (head.is_observable, head.is_materializable, head.parent_keys) == (True, False, {publish})
    assert graph.get(dg.AssetKey("exports")).parent_keys == {head.key}
    assert graph.get(dg.AssetKey(["shop", "orders"])).is_observable
    assert {check.name for check in graph.asset_check_keys} == {"verify_clean", "retention_kept"}
    assert job_names(definitions) == DEFAULT_JOBS
    assert {sensor.name for sensor in repository.sensor_defs} == {"commits", "failed_runs"}
    schedules = {schedule.name: schedule for schedule in repository.schedule_defs}
    assert set(schedules) == {"observe_schedule"}
    stopped = dg.DefaultScheduleStatus.STOPPED
    assert {schedule.default_status for schedule in schedules.values()} == {stopped}


@pytest.mark.parametrize(
    ("operations", "additional_jobs"),
    [
        ("orphans", {"orphans"}),
        (["clones", "diff"], {"diff", *(operation.job for operation in GROUPS["clones"])}),
        ("all", {operation.job for operation in ALL} - DEFAULT_JOBS),
    ],
    ids=["operation", "group", "all"],
)
def test_operations_are_selected_by_name_or_group(operations: Any, additional_jobs: set[str]) -> None:
    definitions = build_trinitylake_definitions(settings("memory://m/", operations=operations, limits=LIMITS))
    assert job_names(definitions) == DEFAULT_JOBS | additional_jobs


def test_jobs_that_need_limits_are_omitted_without_limits() -> None:
    definitions = build_trinitylake_definitions(settings("memory://m/", operations="all"))
    assert job_names(definitions) == DEFAULT_JOBS | {operation.job for operation in ALL if not operation.needs_limits}


def test_selected_checks_include_their_repair_jobs() -> None:
    definitions = build_trinitylake_definitions(settings("memory://m/", checks=["tree_in_shape", "hint_right"]))
    evaluations = {check.name for check in definitions.resolve_asset_graph().asset_check_keys}
    assert evaluations == {"tree_in_shape", "hint_right"}
    assert job_names(definitions) == {*DEFAULT_JOBS, "compact", "repair_hint"}
    all_checks = build_trinitylake_definitions(settings("memory://m/", checks="all"))
    names = {check.name for check in all_checks.resolve_asset_graph().asset_check_keys}
    assert len(names) == 8
    assert {*repairing_jobs(sorted(names))} <= job_names(all_checks)
    for spec in (spec for check in all_checks.asset_checks or () for spec in check.check_specs):
        assert spec.description is not None and "Protects " in spec.description and "Costs: " in spec.description


@pytest.mark.parametrize(
    "invalid_options", [{"operations": "vacuum"}, {"operations": ["all", "vacuum"]}, {"checks": ["vacuum"]}]
)
def test_unknown_operations_and_checks_are_rejected(invalid_options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="'vacuum'"):
        build_trinitylake_definitions(settings("memory://m/", **invalid_options))


def test_alert_covers_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    alerts: list[str] = []

    def build_and_record(
        alert: Any, names: LakehouseNames, *, jobs: Sequence[Any], **options: Any
    ) -> dg.SensorDefinition:
        alerts.extend(job.name for job in jobs)
        return build_failed_run_sensor(alert, names, jobs=jobs, **options)

    monkeypatch.setattr(code_location, "build_failed_run_sensor", build_and_record)
    definitions = build_trinitylake_definitions(
        settings("memory://m/", "sales", operations="all", limits=LIMITS, alert=print)
    )
    assert set(alerts) == job_names(definitions)
    assert {f"sales_{name}" for name in LIMITED} <= set(alerts)


def test_settings_reach_schedules_and_sensors() -> None:
    blackout = BlackoutWindow(start=time(0), end=time(0), reason="closed")
    definitions = build_trinitylake_definitions(
        settings(
            "memory://m/",
            timezone="Asia/Tokyo",
            crons={"repair_hint": "1 * * * *", "check": "2 * * * *"},
            blackouts=[blackout],
            observe_cron=None,
            on_commit="observe",
            is_on=True,
        )
    )
    repository = definitions.get_repository_def()
    schedules = {schedule.name: schedule for schedule in repository.schedule_defs}
    assert set(schedules) == {"repair_hint_schedule", "check_schedule"}
    assert job_names(definitions) == {*DEFAULT_JOBS, "repair_hint", "check"}, "jobs of schedules must exist"
    assert schedules["repair_hint_schedule"].cron_schedule == "1 * * * *"
    assert {schedule.execution_timezone for schedule in schedules.values()} == {"Asia/Tokyo"}
    assert {schedule.default_status for schedule in schedules.values()} == {dg.DefaultScheduleStatus.RUNNING}
    tick = schedules["repair_hint_schedule"].evaluate_tick(
        dg.build_schedule_context(scheduled_execution_time=datetime(2026, 3, 4, tzinfo=UTC))
    )
    assert tick.skip_message is not None and "closed" in tick.skip_message
    (sensor,) = repository.sensor_defs
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    assert [target.job_name for target in sensor.targets] == ["observe"]


def test_two_lakehouses_have_separate_definitions(lakes: Lakes, instance: dg.DagsterInstance) -> None:
    sales, hr = lakes.local("sales"), lakes.local("hr")
    write_rows(sales, "shop.orders", 3)
    write_rows(hr, "shop.orders", 1)
    write_rows(hr, "shop.orders", 1)
    definitions = in_process_definitions(
        settings(sales.root, "sales", tables=["shop.orders"], limits=LIMITS),
        settings(hr.root, "hr", tables=["shop.orders"], limits=LIMITS),
    )
    names = job_names(definitions)
    assert {name.removeprefix("sales_") for name in names if name.startswith("sales_")} == {
        name.removeprefix("hr_") for name in names if not name.startswith("sales_")
    }
    versions = {}
    for lake_names in (SALES, HR):
        config = {"name": f"{lake_names.name}-export", "level": "minimal"}
        exported = run(definitions, instance, lake_names.of("export"), **config)
        (event,) = exported.get_asset_materialization_events()
        assert event.asset_key == lake_names.lakehouse_key
        observed = run(definitions, instance, lake_names.of("observe"))
        for event in observed.all_events:
            if event.is_asset_observation:
                observation = event.asset_observation_data.asset_observation
                versions[observation.asset_key] = values(observation)
        assert list(instance.get_dynamic_partitions(lake_names.exports_partitions)) == [f"{lake_names.name}-export"]
    assert versions[SALES.lakehouse_key]["lakehouse_version"] == sales.latest_version()
    assert versions[HR.lakehouse_key]["lakehouse_version"] == hr.latest_version() != sales.latest_version()
    assert versions[SALES.table_key("shop", "orders")]["dagster/row_count"] == 3
    assert versions[HR.table_key("shop", "orders")]["dagster/row_count"] == 2
    pools = {node.pool for name in names for node in definitions.resolve_job_def(name).all_node_defs if node.pool}
    assert pools == {SALES.pool, HR.pool}


def test_failed_check_names_repair_job_of_its_lakehouse(lakes: Lakes, instance: dg.DagsterInstance) -> None:
    sales, hr = lakes.local("sales"), lakes.local("hr")
    write_rows(hr, "shop.orders", 1)
    hr.close()
    hr.storage.write("_latest_hint.txt", b"0")
    hr_settings = settings(
        hr.root, "hr", location_name="lakes", checks=["hint_right", "verify_clean"], crons={"check": "0 6 * * *"}
    )
    definitions = in_process_definitions(settings(sales.root, "sales"), hr_settings)
    assert "sales_check" not in job_names(definitions)
    evaluations = run(definitions, instance, "hr_check").get_asset_check_evaluations()
    assert {evaluation.asset_key for evaluation in evaluations} == {HR.lakehouse_key}
    (hint,) = [evaluation for evaluation in evaluations if evaluation.check_name == "hint_right"]
    assert not hint.passed
    assert hint.metadata["repaired_by"] == dg.MetadataValue.job("hr_repair_hint", "lakes")
    run(definitions, instance, "hr_repair_hint")
    evaluations = run(definitions, instance, "hr_check").get_asset_check_evaluations()
    assert [evaluation.passed for evaluation in evaluations if evaluation.check_name == "hint_right"] == [True]


def test_commit_sensor_reports_only_its_lakehouse(lakes: Lakes, instance: dg.DagsterInstance) -> None:
    sales, hr = lakes.local("sales"), lakes.local("hr")
    lakehouses = (
        settings(sales.root, "sales"),
        settings(hr.root, "hr", tables=["shop.orders"], on_commit="hr_check"),
    )
    repository = build_trinitylake_definitions(*lakehouses).get_repository_def()
    resources = {
        lakehouse_settings.names.resource_key: lakehouse_settings.lakehouse for lakehouse_settings in lakehouses
    }
    sensors = {name: repository.get_sensor_def(f"{name}_commits") for name in ("sales", "hr")}

    def tick(name: str, cursor: str | None) -> dg.SensorResult:
        context = dg.build_sensor_context(
            instance=instance, cursor=cursor, resources=resources, repository_def=repository
        )
        result: Any = sensors[name].evaluate_tick(context)
        return result

    cursors = {name: tick(name, None).cursor for name in sensors}
    write_rows(hr, "shop.orders", 1)
    assert tick("sales", cursors["sales"]).asset_events == []
    commit_batch = tick("hr", cursors["hr"])
    assert {event.asset_key for event in commit_batch.asset_events} == {
        HR.table_key("shop", "orders"),
        HR.lakehouse_key,
    }
    assert len(commit_batch.run_requests or []) == 1
    assert [target.job_name for target in sensors["hr"].targets] == ["hr_check"]


@pytest.mark.parametrize(
    ("lakehouses", "message"),
    [
        ([("file:///a/b/", "a"), ("memory://b/", "a")], "name='a'"),
        ([("file:///a/b/", "a"), ("/a/b", "b")], "'a', 'b'"),
        ([("memory://a/", ""), ("memory://b/", "b")], "name= is empty"),
        ([("memory://a/", "Sales!")], "'Sales!'"),
    ],
    ids=["name", "root", "empty-name", "invalid-name"],
)
def test_ambiguous_lakehouses_are_rejected(lakehouses: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build_trinitylake_definitions(*(settings(root, name) for root, name in lakehouses))


def test_name_is_required_and_may_be_empty() -> None:
    lakehouse = TrinityLakeResource(root="memory://m/")
    with pytest.raises(InvalidInputError, match="name="):
        build_trinitylake_definitions(LakehouseSettings(lakehouse=lakehouse))
    unprefixed = build_trinitylake_definitions(LakehouseSettings(name="", lakehouse=lakehouse))
    assert job_names(unprefixed) == DEFAULT_JOBS
    definitions = build_trinitylake_definitions(LakehouseSettings(name="sales", lakehouse=lakehouse))
    assert not job_names(unprefixed) & job_names(definitions)


@pytest.mark.parametrize("value", [None, "memory://shared/"], ids=["unset", "set"])
def test_roots_from_environment_are_compared(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    first, second = dg.EnvVar("FIRST_ROOT"), dg.EnvVar("SECOND_ROOT")
    for variable in ("FIRST_ROOT", "SECOND_ROOT"):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    second_or_first = second if value is not None else first
    with pytest.raises(InvalidInputError, match="'a'"):
        build_trinitylake_definitions(settings(first, "a"), settings(second_or_first, "b"))


@pytest.mark.parametrize("root", ["s3://bucket/lake", "dynamodb://table/lake"])
def test_same_root_on_two_servers_identifies_two_lakehouses(root: str) -> None:
    def settings_at(endpoint: str, name: str) -> LakehouseSettings:
        options = StorageSettings(endpoint=endpoint)
        return LakehouseSettings(lakehouse=TrinityLakeResource(root=root, storage_options=options), name=name)

    first_server, second_server = "https://one.example.com", "https://other.example.com"
    assert "b_lakehouse" in (
        build_trinitylake_definitions(settings_at(first_server, "a"), settings_at(second_server, "b")).resources or {}
    )
    with pytest.raises(InvalidInputError, match="'a'"):
        build_trinitylake_definitions(settings_at(first_server, "a"), settings_at(f"{first_server}/", "b"))


def test_public_names_are_imported_lazily() -> None:
    assert all(getattr(dagster_plugin, name) is not None for name in dagster_plugin.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        dagster_plugin.missing  # noqa: B018
    program = (
        "import sys; from trinitylake_ops.dagster_plugin import LakehouseNames;"
        " print([m for m in ('pyspark', 'pyarrow', 'pyiceberg') if m in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert completed.stdout == "[]\n"


def test_docs_list_definitions_of_new_project() -> None:
    @dg.asset(key=["shop", "orders"], io_manager_key="lake_lakehouse_io_manager")
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.asset(key=["shop", "totals"], io_manager_key="lake_lakehouse_io_manager")
    def totals(orders: pa.Table) -> pa.Table:
        return orders

    lakehouse = build_trinitylake_definitions(settings("memory://m/", "lake"))
    definitions = dg.Definitions.merge(dg.Definitions(assets=[orders, totals]), lakehouse)
    repository, graph = definitions.get_repository_def(), definitions.resolve_asset_graph()
    names_by_kind = {
        "assets": {key.to_user_string() for key in graph.get_all_asset_keys()},
        "checks": {key.name for key in graph.asset_check_keys},
        "jobs": job_names(definitions),
        "schedules": {schedule.name for schedule in repository.schedule_defs},
        "sensors": {sensor.name for sensor in repository.sensor_defs},
    }
    rows = [
        f"| {kind} | {len(names)} | {', '.join(f'`{name}`' for name in sorted(names))} |"
        for kind, names in names_by_kind.items()
    ]
    assert "\n".join(["| | number | names |", "|---|---|---|", *rows]) in PAGE.read_text()


def _table_asset(**options: Any) -> dg.AssetsDefinition:
    @dg.asset(key=["shop", "orders"], io_manager_key=UNPREFIXED_IO_MANAGER, **options)
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    return orders


def _asset_with_two_outputs(**settings: Any) -> dg.AssetsDefinition:
    """Return an asset with two outputs that write the same table."""
    out: dict[str, Any] = {
        "io_manager_key": UNPREFIXED_IO_MANAGER,
        "metadata": stored_as(table="shop.orders", **settings),
    }

    @dg.multi_asset(outs={name: dg.AssetOut(key=["shop", name], **out) for name in "ab"})
    def both() -> Any:
        yield from (dg.Output(pa.table({"n": [1]}), name) for name in "ab")

    return both


DAYS = dg.DailyPartitionsDefinition("2026-01-01")
STATIC = dg.StaticPartitionsDefinition(["a"])


@pytest.mark.parametrize(
    "asset",
    [
        _table_asset(partitions_def=DAYS, metadata=stored_as(partition_by=["m"], partition_format={"m": "%Y-%m"})),
        _table_asset(partitions_def=STATIC, metadata=stored_as(partition_by=["d"], partition_format={"d": "%Y"})),
        _table_asset(partitions_def=STATIC, metadata=stored_as(partition_by=["a", "b"])),
        _table_asset(partitions_def=STATIC, metadata=stored_as(table="shop.orders")),
        _asset_with_two_outputs(),
    ],
    ids=[
        "coarse format",
        "time format of static partitions",
        "two columns for one key",
        "no column",
        "two assets of one table",
    ],
)
def test_definitions_with_unstorable_table_are_rejected(tmp_path: Path, asset: dg.AssetsDefinition) -> None:
    """Tables without a publish asset are validated like tables with one."""
    definitions = in_process_definitions(settings(f"file://{tmp_path}/lake"))
    with pytest.raises(dg.DagsterInvalidDefinitionError) as raised:
        dg.Definitions.validate_loadable(dg.Definitions.merge(definitions, dg.Definitions(assets=[asset])))
    assert isinstance(raised.value.__cause__, InvalidInputError)


EAGER = dg.AutomationCondition.eager()
WEEKS = dg.WeeklyPartitionsDefinition("2026-01-01")


@pytest.mark.parametrize(
    ("table", "partitions"),
    [
        (dg.AssetSpec(["shop", "orders"]), None),
        (_table_asset(partitions_def=DAYS, metadata=stored_as(partition_by=["day"])), WEEKS),
        (
            _table_asset(partitions_def=DAYS, metadata=stored_as(partition_by=["day"]), automation_condition=EAGER),
            None,
        ),
        (_table_asset(automation_condition=EAGER), DAYS),
    ],
    ids=["another code location", "other partitions", "automation without partitions", "automation with partitions"],
)
def test_publish_asset_of_unpublishable_table_is_rejected(tmp_path: Path, table: Any, partitions: Any) -> None:
    definitions = in_process_definitions(settings(f"file://{tmp_path}/lake"))
    publisher = build_publish_asset(
        key=["publish", "shop"], tables={"orders": dg.AssetKey(["shop", "orders"])}, partitions_def=partitions
    )
    with pytest.raises(dg.DagsterInvalidDefinitionError) as raised:
        dg.Definitions.validate_loadable(dg.Definitions.merge(definitions, dg.Definitions(assets=[table, publisher])))
    assert isinstance(raised.value.__cause__, InvalidInputError)


def test_definitions_with_assets_without_tables_load(tmp_path: Path) -> None:
    @dg.asset(partitions_def=STATIC, io_manager_key=UNPREFIXED_IO_MANAGER)
    def returns_nothing() -> None: ...

    @dg.asset(partitions_def=STATIC, io_manager_key="files", metadata=stored_as(partition_by=["a", "b"]))
    def file() -> pa.Table: ...

    definitions = dg.Definitions(
        assets=[
            returns_nothing,
            file,
            _asset_with_two_outputs(mode="append"),
            dg.AssetSpec("external", partitions_def=STATIC),
        ],
        resources={"files": dg.mem_io_manager},
    )
    dg.Definitions.validate_loadable(
        dg.Definitions.merge(in_process_definitions(settings(f"file://{tmp_path}/lake")), definitions)
    )
