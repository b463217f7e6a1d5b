"""Test the metadata of the lakehouse asset, its tables and its exports in Dagster."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.metadata_values import plain
from tests.dagster_plugin.run_config import QUIET
from tests.iceberg.hostile import without_seals
from tests.lakes import Lakes
from tests.local_clock import HOUR_MS, LocalClock
from tests.operations.changes import alter, create, small_sizes, truncate
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.assets import (
    build_exports_asset,
    build_head_asset,
    build_table_asset,
)
from trinitylake_ops.dagster_plugin.lakehouse_metadata import head_metadata, lake_status
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor
from trinitylake_ops.dagster_plugin.table_metadata import table_metadata
from trinitylake_ops.errors import InvalidInputError, TableNotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION, Column, DataType, Schema, TableDef
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.tree.node import DEFAULT_BUFFER_TARGET_BYTES

ORDERS = dg.AssetKey(["sales", "orders"])
PARTITIONS = "trinitylake_exports"


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lakehouse = lakes.local()
    append(lakehouse, "orders", 3)
    append(lakehouse, "customers", 1)
    return lakehouse


def append(lake: Lakehouse, table: str, n_rows: int) -> None:
    staged = stage_arrow(lake, pa.table({"n": list(range(n_rows))}), "sales", table, mode="append")
    publish_once(lake, [staged], publication_id(table, str(lake.latest_version())))


def observe(lake: Lakehouse, instance: dg.DagsterInstance, *tables: str) -> dict[dg.AssetKey, dg.AssetObservation]:
    """Observe all assets in one run."""
    names = tables or ("sales.orders",)
    keys = [dg.AssetKey(name.split(".")) for name in names]
    definitions = dg.Definitions(
        assets=[build_head_asset(), *map(build_table_asset, names), build_exports_asset()],
        jobs=[dg.define_asset_job("observe", selection=dg.AssetSelection.assets(ONLY.lakehouse_key, *keys))],
        resources={"lakehouse": TrinityLakeResource(root=lake.root)},
        executor=dg.in_process_executor,
    )
    result = definitions.resolve_job_def("observe").execute_in_process(instance=instance, run_config=QUIET)
    return {
        event.asset_observation_data.asset_observation.asset_key: event.asset_observation_data.asset_observation
        for event in result.all_events
        if event.is_asset_observation
    }


def values(observation: dg.AssetObservation) -> Mapping[str, Any]:
    return plain(observation.metadata)


def test_lakehouse_observation_has_version_and_changes(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    head = observe(lake, instance)[ONLY.lakehouse_key]
    assert (head.tags or {})["dagster/data_version"] == "2"
    metadata = values(head)
    assert (metadata["lakehouse_version"], metadata["objects"], metadata["tables"], metadata["namespaces"]) == (
        2,
        3,
        2,
        1,
    )
    assert (metadata["changed_since"], metadata["changed_tables"]) == (1, 1)
    shape = lake.snapshot().tree_shape()
    assert (metadata["height"], metadata["buffered_messages"]) == (shape.height, shape.messages)
    assert metadata["tree_bytes"] == shape.file_bytes
    assert metadata["buffer_fill_percent"] == round(100 * shape.buffer_fill, 2)
    assert (metadata["hours_since_expiry"], metadata["hours_since_export"]) == ("none", "none")
    append(lake, "orders", 1)
    append(lake, "customers", 1)
    operations.verify(lake, incremental=True)
    metadata = values(observe(lake, instance)[ONLY.lakehouse_key])
    assert (metadata["changed_since"], metadata["changed_tables"]) == (2, 2)
    assert "| changed | sales | orders |" in metadata["changes"]
    assert 0 <= metadata["hours_since_verify"] < 1
    assert metadata["health"] == "good: nothing to do"
    assert (metadata["findings"], metadata["hint"]) == ("none", "right")
    assert [*metadata][:3] == ["lakehouse_version", "health", "last_versions"]
    assert "| verify | fine |" in metadata["due"]
    assert "| who | versions |" in metadata["committers"]
    assert values(observe(lake, instance)[ONLY.lakehouse_key])["changed_tables"] == 0


def test_buffer_metrics_increase_with_changes(lakes: Lakes) -> None:
    lake = lakes.local(order=4, **small_sizes(4))
    create(lake, "ns", *(f"t{number}" for number in range(12)))
    alter(lake, "ns", "t3")
    (root, *_) = lake.snapshot().tree_shape().levels
    assert root.messages > 0
    metadata = head_metadata(lake, lake.snapshot(), None)
    assert metadata["buffer_fill_percent"] == round(100 * root.message_bytes / DEFAULT_BUFFER_TARGET_BYTES, 2) > 0


def test_lakehouse_observation_has_reclaimable_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LocalClock(monkeypatch)
    settings = {"maximum_version_age_millis": HOUR_MS, "minimum_versions_to_keep": 1, "txn_ttl_millis": 60_000}
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"}, **settings)
    create(lake, "ns", "t")
    for _ in range(3):
        alter(lake, "ns", "t")

    def metadata(seconds: float = 60) -> dict[str, Any]:
        status = lake_status(lake, plan_seconds=seconds)
        metadata = head_metadata(lake, lake.snapshot(), status, is_planned=seconds > 0)
        return {name: value for name, value in metadata.items() if name.endswith(("able_bytes", "since_expiry"))}

    no_bytes = {"expirable_bytes": 0, "purgeable_bytes": 0, "reclaimable_bytes": 0}
    assert metadata() == {**no_bytes, "hours_since_expiry": "none"}
    clock.forward(2)
    before = metadata()
    assert before["expirable_bytes"] == before["reclaimable_bytes"] == operations.plan_expiration(lake).bytes > 0
    assert metadata(0) == {"hours_since_expiry": "none"}
    assert metadata(1e-9)["reclaimable_bytes"] == "not counted: it takes more than 1e-09 seconds"
    operations.plan_expiration(lake).execute()
    clock.forward(1)
    after = metadata()
    assert after["purgeable_bytes"] == after["reclaimable_bytes"] == before["expirable_bytes"]
    assert after["hours_since_expiry"] == pytest.approx(1, abs=0.1)
    operations.plan_purge(lake).execute()
    assert metadata()["purgeable_bytes"] == 0
    alter(lake, "ns", "t")
    truncate(lake.storage, root_path(alter(lake, "ns", "t") - 2))
    assert "not counted: " in metadata()["reclaimable_bytes"]


def test_table_observation_has_columns_rows_and_location(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    observation = observe(lake, instance)[ORDERS]
    metadata = values(observation)
    assert (metadata["dagster/row_count"], metadata["data_files"], metadata["lakehouse_version"]) == (3, 1, 2)
    assert metadata["dagster/table_name"] == "sales.orders"
    assert metadata["dagster/uri"].startswith(lake.root)
    assert [column.name for column in metadata["dagster/column_schema"].columns] == ["n"]
    data_version = (observation.tags or {})["dagster/data_version"]
    append(lake, "customers", 1)
    unchanged = observe(lake, instance)[ORDERS]
    assert (unchanged.tags or {})["dagster/data_version"] == data_version
    assert values(unchanged)["lakehouse_version"] == 3
    append(lake, "orders", 2)
    changed = observe(lake, instance)[ORDERS]
    assert (changed.tags or {})["dagster/data_version"] != data_version
    assert values(changed)["dagster/row_count"] == 5


def test_observation_of_missing_table_fails(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    with pytest.raises(TableNotFoundError, match=r"sales\.none"):
        observe(lake, instance, "sales.none")
    with pytest.raises(InvalidInputError, match=r"NAMESPACE\.TABLE"):
        build_table_asset("orders")


def test_exports_are_partitions_until_dropped(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    for name in ("first", "second"):
        operations.plan_export(lake, name, "minimal").execute()
    observe(lake, instance)
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {"first", "second"}
    event = instance.get_latest_materialization_event(ONLY.exports_key)
    assert event is not None and event.asset_materialization is not None
    assert event.asset_materialization.partition == "second"
    assert event.asset_materialization.metadata["lakehouse_version"].value == lake.snapshot("second").version
    operations.drop_export(lake, "first")
    observe(lake, instance)
    assert list(instance.get_dynamic_partitions(PARTITIONS)) == ["second"]
    assert len(instance.fetch_materializations(ONLY.exports_key, limit=9).records) == 2


def export_metadata(instance: dg.DagsterInstance, partition: str) -> Mapping[str, Any]:
    """Return the metadata of the latest materialization of an export."""
    event = instance.get_latest_materialization_event(ONLY.exports_key)
    assert event is not None and event.asset_materialization is not None
    assert event.asset_materialization.partition == partition
    return plain(event.asset_materialization.metadata)


def test_recreated_export_is_materialized_again(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    operations.plan_export(lake, "daily", "minimal").execute()
    observe(lake, instance)
    first = export_metadata(instance, "daily")
    operations.drop_export(lake, "daily")
    append(lake, "orders", 1)
    operations.plan_export(lake, "daily", "minimal").execute()
    for _ in range(2):
        observe(lake, instance)
    assert export_metadata(instance, "daily")["lakehouse_version"] == lake.snapshot("daily").version
    assert export_metadata(instance, "daily")["lakehouse_version"] > first["lakehouse_version"]
    assert len(instance.fetch_materializations(ONLY.exports_key, limit=9).records) == 2, (
        "one materialization for each export"
    )


def test_export_name_is_escaped_in_partition_key(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    for name in ("v1...v2", "a%2Eb", "été/1"):
        operations.plan_export(lake, name, "minimal").execute()
    observe(lake, instance)
    partitions = {"v1%2E%2E%2Ev2", "a%2Eb", "été/1"}
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == partitions
    observe(lake, instance)
    assert len(instance.fetch_materializations(ONLY.exports_key, limit=9).records) == 3
    operations.drop_export(lake, "v1...v2")
    observe(lake, instance)
    assert set(instance.get_dynamic_partitions(PARTITIONS)) == {"a%2Eb", "été/1"}


def test_observation_reports_that_previous_version_was_deleted(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    create(lake, "ns", "t")
    alter(lake, "ns", "t")
    lake.close()  # waits for the hint update; with an outdated hint, version 0 would be resolved as the latest
    lake.storage.delete(root_path(1))
    lake = Lakehouse(lake.storage)
    metadata = head_metadata(lake, lake.snapshot(), None, since=1)
    assert metadata["changes"] == "unknown: the previously observed version 1 does not exist"


def test_sensor_observation_is_not_used_as_previous_version(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    observe(lake, instance)
    append(lake, "orders", 1)
    context = dg.build_sensor_context(
        instance=instance, cursor="invalid", resources={"lakehouse": TrinityLakeResource(root=lake.root)}
    )
    (observation,) = build_commit_sensor().evaluate_tick(context).asset_events
    assert isinstance(observation, dg.AssetObservation)
    instance.report_runless_asset_event(observation)
    record = instance.get_latest_data_version_record(ONLY.lakehouse_key, is_source=True)
    assert record is not None and record.asset_observation is not None
    assert (record.asset_observation.tags or {})["dagster/data_version"] == "3"
    metadata = values(observe(lake, instance)[ONLY.lakehouse_key])
    assert (metadata["changed_since"], metadata["changed_tables"]) == (2, 1)


def test_data_version_of_other_format_is_derived_from_definition(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    def define(**properties: str) -> TableDef:
        columns = Schema(columns=(Column(id=1, name="n", type=DataType.INT8),))
        return TableDef(table_format="DELTA", schema=columns, properties=properties)

    versions = []
    with lake.transaction() as txn:
        txn.create_table("sales", "delta", define())
    for number in range(3):
        observed = observe(lake, instance, "sales.delta")[dg.AssetKey(["sales", "delta"])]
        assert values(observed)["format"] == "DELTA"
        versions.append((observed.tags or {})["dagster/data_version"])
        if number:
            with lake.transaction() as txn:
                txn.alter_table("sales", "delta", define(at=str(number)))
    assert versions[0] == versions[1] != versions[2]


def test_table_without_totals_has_unknown_row_count(lake: Lakehouse) -> None:
    """The Iceberg specification allows snapshot summaries without totals."""
    head = lake.snapshot()
    definition = head.table("sales", "orders")
    path = definition.format_properties[METADATA_LOCATION]
    metadata = without_seals(json.loads(lake.storage.read(path)))
    for snapshot in metadata["snapshots"]:
        snapshot["summary"] = {"operation": snapshot["summary"]["operation"]}
    lake.storage.write(path, json.dumps(metadata).encode())
    lake = Lakehouse(lake.storage)
    metadata = table_metadata(lake, lake.snapshot(), "sales", "orders", definition)
    assert not {"dagster/row_count", "bytes", "data_files"} & metadata.keys()
    assert metadata["snapshot_id"] != "none"
