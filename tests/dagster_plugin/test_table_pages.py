"""Test the metadata of table assets after publications, rollbacks and observations, and its bounds."""

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import pyarrow as pa
import pytest
import yaml

from tests.dagster_plugin.maintenance_jobs import approved_rollback
from tests.dagster_plugin.metadata_values import plain
from tests.dagster_plugin.test_assets import values
from tests.dagster_plugin.test_table_events import LOCATION_PATH, PRICES, CodeLocation, append, code_location
from tests.dagster_plugin.test_table_events import ORDERS as MONTHLY
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import (
    TrinityLakeIOManager,
    TrinityLakeResource,
    as_tables,
    stored_as,
    table_metadata,
)
from trinitylake_ops.dagster_plugin.assets import build_table_asset
from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.table_metadata import Bounds, TablePages
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.staged_table import StagedTable

__all__ = ["code_location"]

DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])
ORDERS, SHOP = dg.AssetKey(["sales", "orders"]), dg.AssetKey(["raw", "shop"])
#: Links of a code location that has the rollback job.
LINKS = Links(ONLY, LOCATION_PATH, frozenset({"rollback"}))
LINEAGE = dg.TableColumnLineage({"n": [dg.TableColumnDep(SHOP, "count")]})
WEEKLY = dg.FreshnessPolicy.time_window(fail_window=timedelta(days=7))


def project(lake: Lakehouse, lineage: dg.TableColumnLineage = LINEAGE, **options: Any) -> dg.Definitions:
    """Return a code location with one daily table that has a preview and column descriptions."""
    column_schema = dg.TableSchema([dg.TableColumn("n", description="Number of pieces.", tags={"unit": "pieces"})])

    @dg.asset(
        key=ORDERS,
        partitions_def=DAYS,
        metadata={
            **stored_as(partition_by=["day"], preview_rows=2, column_lineage=lineage),
            "dagster/column_schema": column_schema,
        },
        owners=["team:sales"],
        freshness_policy=WEEKLY,
        **options,
    )
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"day": [*context.partition_keys, *context.partition_keys[:1]], "n": [1, 2]})

    publish = build_publish_asset(
        key=["publish", "orders"], tables={"orders": orders}, partitions_def=DAYS, description="Orders."
    )
    lakehouse = TrinityLakeResource(root=lake.root)
    return dg.Definitions(
        assets=[*as_tables([orders]), publish],
        resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        jobs=[dg.define_asset_job("load")],
        executor=dg.in_process_executor,
    )


def load(definitions: dg.Definitions, instance: dg.DagsterInstance, day: str) -> dict[str, Any]:
    """Run the job for a day, and return the metadata of the table's materialization."""
    job = definitions.resolve_job_def("load")
    assert job.execute_in_process(instance=instance, partition_key=day).success
    return latest_metadata(instance, ORDERS)


def latest_metadata(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    event = instance.get_latest_materialization_event(key)
    assert event is not None and event.asset_materialization is not None
    return plain(event.asset_materialization.metadata)


def test_published_table_has_metadata(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    definitions = project(lake)
    assert load(definitions, instance, "mon")["dagster/partition_row_count"] == 2
    metadata = load(definitions, instance, "tue")
    assert (metadata["dagster/row_count"], metadata["dagster/partition_row_count"], metadata["rows_changed"]) == (
        4,
        2,
        2,
    )
    assert metadata["dagster/uri"].startswith(lake.root)
    assert (metadata["dagster/table_name"], metadata["lakehouse_version"]) == ("sales.orders", 2)
    assert metadata["dagster/column_lineage"] == LINEAGE
    day, n = metadata["dagster/column_schema"].columns
    assert (n.description, dict(n.tags), dict(day.tags)) == (
        "Number of pieces.",
        {"unit": "pieces"},
        {"trinitylake/partition": ""},
    )
    assert "| day=tue | 2 | 1 |" in metadata["partition_rows"] and "| day=mon | 2 | 1 |" in metadata["partition_rows"]
    assert metadata["preview"].count("\n") == 3 and metadata["preview"].startswith("| day | n |")
    lines = metadata["versions"].splitlines()
    assert ["| changed | 4 | +2 |" in lines[2], "| added | 2 | +2 |" in lines[3]] == [True, True]
    assert not {"trinitylake/preview_rows", "trinitylake/partition_values", "trinitylake/staged"} & metadata.keys()


def test_rollback_link_selects_only_this_table(code_location: CodeLocation) -> None:
    code_location.run("load_prices")
    assert "roll_back" not in latest_metadata(code_location.instance, PRICES), (
        "there is no earlier version to roll back to"
    )
    code_location.run("load_prices")
    metadata = latest_metadata(code_location.instance, PRICES)
    match = re.fullmatch(r"\[roll back sales\.prices alone to version 1]\((.*)\)", metadata["roll_back"])
    assert match is not None
    link = urlsplit(match[1])
    assert (link.netloc, link.path) == ("", f"/locations/{LOCATION_PATH}/jobs/rollback/playground/setup")
    assert yaml.safe_load(parse_qs(link.query)["config"][0]) == {"to": {"version": 1}, "tables": ["sales.prices"]}
    assert f"[roll back to 1]({match[1]})" in metadata["versions"]


def test_rollback_link_omits_undone_versions(lake: Lakehouse) -> None:
    for number in range(3):
        append(lake, "orders", {"n": [number]})
    head = lake.snapshot()
    operations.rollback(lake, head.version - 1)
    metadata = TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders")
    assert f"to version {head.version - 2}]" in metadata["roll_back"].value
    assert f"roll back to {head.version} (undone by {head.version + 1})]" in metadata["versions"].value
    operations.rollback(lake, head.version - 2)
    assert "roll_back" not in TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders"), (
        "no earlier version remains"
    )


def test_links_use_webserver_url_and_existing_jobs(lake: Lakehouse) -> None:
    for number in range(2):
        append(lake, "orders", {"n": [number]})
        append(lake, "or.ders", {"n": [number]})
    head = lake.snapshot()
    proxied_links = replace(LINKS, base="https://dagster.example.com/ops")
    metadata = TablePages(lake, head, proxied_links).of("sales", "orders")
    assert "(https://dagster.example.com/ops/locations/" in metadata["roll_back"].value
    assert "(https://dagster.example.com/ops/locations/" in metadata["versions"].value
    for links, table in ((replace(LINKS, jobs=frozenset()), "orders"), (LINKS, "or.ders")):
        metadata = TablePages(lake, head, links).of("sales", table)
        assert "roll_back" not in metadata and "[roll back" not in metadata["versions"].value


def test_published_asset_has_table_kind_in_catalog(lake: Lakehouse) -> None:
    spec = next(iter(project(lake).resolve_asset_graph().get(ORDERS).assets_def.specs))
    assert (spec.kinds, spec.owners, spec.freshness_policy) == ({"iceberg", "trinitylake"}, ["team:sales"], WEEKLY)
    assert (spec.metadata["dagster/table_name"], spec.metadata["dagster/storage_kind"]) == ("sales.orders", "iceberg")


def test_lineage_of_missing_column_is_rejected(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    invalid_lineage = dg.TableColumnLineage({"m": [dg.TableColumnDep(SHOP, "count")]})
    with pytest.raises(InvalidInputError, match="column_lineage"):
        load(project(lake, invalid_lineage), instance, "mon")
    with pytest.raises(InvalidInputError, match="preview_rows"):
        stored_as(preview_rows=101)


def test_rollbacks_and_external_commits_have_metrics(code_location: CodeLocation) -> None:
    code_location.load()
    code_location.tick_sensor()
    append(code_location.lake, "prices", {"n": [7]})
    (event,) = code_location.tick_sensor()
    metrics = plain(event.metadata)
    assert (event.asset_key, metrics["dagster/row_count"]) == (PRICES, 2)
    assert (metrics["versions"], "partition_rows" in metrics) == ("4", False), "a sensor tick reads no history"
    code_location.run("rollback", approved_rollback(code_location.lake, 3))
    metadata = latest_metadata(code_location.instance, PRICES)
    assert (metadata["dagster/row_count"], metadata["rows_changed"]) == (1, -1)
    assert "| rollback |" in metadata["versions"]
    assert latest_metadata(code_location.instance, MONTHLY)["dagster/partition_row_count"] == 1


def test_observed_table_has_owners_freshness_and_preview(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    append(lake, "orders", {"n": [1, 2, 3], "text": ["a|b", "[x](http://y)", "z" * 500]})
    table = build_table_asset(
        "sales.orders", preview_rows=3, owners=["ann@example.com"], freshness_policy=WEEKLY, io_manager_key="tables"
    )
    (spec,) = table.specs
    assert (spec.kinds, spec.owners, spec.freshness_policy) == (
        {"iceberg", "trinitylake"},
        ["ann@example.com"],
        WEEKLY,
    )

    @dg.asset(ins={"orders": dg.AssetIn(ORDERS)})
    def total(orders: pa.Table) -> int:
        return sum(orders["n"].to_pylist())

    lakehouse = TrinityLakeResource(root=lake.root)
    definitions = dg.Definitions(
        assets=[table, total],
        resources={"lakehouse": lakehouse, "tables": TrinityLakeIOManager(lakehouse=lakehouse)},
        jobs=[
            dg.define_asset_job("observe_orders", selection=[ORDERS]),
            dg.define_asset_job("compute_total", selection=["total"]),
        ],
    )
    result = definitions.resolve_job_def("observe_orders").execute_in_process(instance=instance)
    (event,) = [event for event in result.all_events if event.is_asset_observation]
    metadata = values(event.asset_observation_data.asset_observation)
    assert "| 1 | a\\|b |" in metadata["preview"] and "`[x](http://y)`" in metadata["preview"]
    assert f"{'z' * 100}... |" in metadata["preview"] and "z" * 101 not in metadata["preview"]
    result = definitions.resolve_job_def("compute_total").execute_in_process(instance=instance)
    assert result.output_for_node("total") == 6


def test_table_metadata_is_bounded(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        append(lake, "orders", {"n": [number]})
    append(lake, "other", {"n": [1]})
    pages = TablePages(lake, lake.snapshot(), LINKS, Bounds(pages=1))
    assert "versions" in pages.of("sales", "orders")
    metadata = pages.of("sales", "other")
    assert "versions" not in metadata and metadata["dagster/row_count"] == 1
    monkeypatch.setattr(table_metadata, "MAX_DATA_FILES", 2)
    metadata = TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders", preview_rows=1)
    assert metadata["partition_rows"] == "not listed: it has 3 data files, more than 2"
    assert "preview" not in metadata
    monkeypatch.setattr(table_metadata, "MAX_PREVIEWED_BYTES", 1)
    metadata = TablePages(lake, lake.snapshot(), LINKS).of("sales", "other", preview_rows=1)
    assert metadata["preview"].value == "the data files are too large for a preview"


def test_bounds_apply_to_step_instead_of_each_version(lake: Lakehouse) -> None:
    bounds = Bounds(pages=2, tables=3, partitions=1)
    for number in range(4):
        append(lake, "orders", {"n": [number]})
    pages = [TablePages(lake, lake.snapshot(version), LINKS, bounds) for version in (2, 3, 4)]
    assert ["versions" in page.of("sales", "orders") for page in pages] == [True, True, False]
    assert [bounds.take_table() for _ in range(4)] == [True, True, True, False]
    assert [bounds.take_partition() for _ in range(2)] == [True, False]
    expired_bounds = Bounds(_ends_s=0)
    assert (expired_bounds.take_page(), expired_bounds.take_partition(), expired_bounds.take_table()) == (
        False,
        False,
        True,
    )


def test_row_count_of_partition_requires_partition_column(lake: Lakehouse) -> None:
    append(lake, "orders", {"day": ["mon", "tue"], "n": [1, 2]})
    table = catalog_at(lake).load_table("sales.orders")
    with pytest.raises(InvalidInputError):
        table_metadata.partition_row_count(table, {"day": "mon"})


def test_publishing_table_of_another_io_manager_fails(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=ORDERS)
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    publish = build_publish_asset(key=["publish", "orders"], tables={"orders": ORDERS}, description="Orders.")
    definitions = dg.Definitions(
        assets=[orders, publish],
        resources={"lakehouse": TrinityLakeResource(root=lake.root)},
        executor=dg.in_process_executor,
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    message = failure.step_failure_data.error
    assert message is not None and "the input is a Table instead of a staged table" in str(message)
    assert lake.latest_version() == 0


@pytest.mark.parametrize("manager", [None, dg.fs_io_manager, dg.mem_io_manager, dg.FilesystemIOManager()])
def test_missing_io_manager_is_rejected_when_definitions_load(manager: Any) -> None:
    @dg.asset(key=ORDERS, io_manager_key="io_manager" if manager is None else "files")
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    names = LakehouseNames("lake")
    publish = build_publish_asset(key=["publish"], tables={"orders": orders}, description="Orders.", names=names)
    lakehouse = TrinityLakeResource(root="memory://lake/")
    resources: dict[str, Any] = {"lake_lakehouse": lakehouse} | ({} if manager is None else {"files": manager})
    message = "asset sales/orders .* io_manager_key='lake_lakehouse_io_manager'"
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=message):
        dg.Definitions.validate_loadable(dg.Definitions(assets=[orders, publish], resources=resources))


def test_other_io_managers_are_accepted() -> None:
    """Another IO manager may wrap ours, and an asset that stages its table may use any IO manager."""

    @dg.io_manager  # type: ignore[untyped-decorator]
    def custom_manager(_context: dg.InitResourceContext) -> dg.IOManager:
        return dg.InMemoryIOManager()

    @dg.asset(key=ORDERS, io_manager_key="custom")
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.asset(key=["sales", "prices"])
    def prices() -> StagedTable: ...

    publish = [
        build_publish_asset(key=["publish", name], tables={"orders": orders, "prices": prices}, description="All.")
        for name in ("a", "b")
    ]
    resources = {"lakehouse": TrinityLakeResource(root="memory://lake/"), "custom": custom_manager}
    dg.Definitions.validate_loadable(dg.Definitions(assets=[orders, prices, *publish], resources=resources))
