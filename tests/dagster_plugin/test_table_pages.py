"""The page of a table's asset: what it shows after publications, rollbacks and observations, within its bounds."""

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
from tests.dagster_plugin.plain import plain
from tests.dagster_plugin.test_assets import values
from tests.dagster_plugin.test_table_events import ORDERS as MONTHLY
from tests.dagster_plugin.test_table_events import PLACE, PRICES, Located, located, put
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

__all__ = ["located"]

DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])
ORDERS, SHOP = dg.AssetKey(["sales", "orders"]), dg.AssetKey(["raw", "shop"])
#: A code location with the job that the links of a page lead to.
LINKS = Links(ONLY, PLACE, frozenset({"rollback"}))
LINEAGE = dg.TableColumnLineage({"n": [dg.TableColumnDep(SHOP, "count")]})
WEEKLY = dg.FreshnessPolicy.time_window(fail_window=timedelta(days=7))


def project(lake: Lakehouse, lineage: dg.TableColumnLineage = LINEAGE, **given: Any) -> dg.Definitions:
    """Return a code location of one table by days, which shows its first rows, and what its columns are."""
    said = dg.TableSchema([dg.TableColumn("n", description="How many.", tags={"unit": "pieces"})])

    @dg.asset(
        key=ORDERS,
        partitions_def=DAYS,
        metadata={
            **stored_as(partition_by=["day"], preview_rows=2, column_lineage=lineage),
            "dagster/column_schema": said,
        },
        owners=["team:sales"],
        freshness_policy=WEEKLY,
        **given,
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
    """Run the job for a day, and return the metadata of the table's asset."""
    job = definitions.resolve_job_def("load")
    assert job.execute_in_process(instance=instance, partition_key=day).success
    return newest(instance, ORDERS)


def newest(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    event = instance.get_latest_materialization_event(key)
    assert event is not None and event.asset_materialization is not None
    return plain(event.asset_materialization.metadata)


def test_a_published_table_shows_its_page(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    definitions = project(lake)
    assert load(definitions, instance, "mon")["dagster/partition_row_count"] == 2
    shown = load(definitions, instance, "tue")
    assert (shown["dagster/row_count"], shown["dagster/partition_row_count"], shown["rows_changed"]) == (4, 2, 2)
    assert shown["dagster/uri"].startswith(lake.root)
    assert (shown["dagster/table_name"], shown["lakehouse_version"]) == ("sales.orders", 2)
    assert shown["dagster/column_lineage"] == LINEAGE
    day, n = shown["dagster/column_schema"].columns
    assert (n.description, dict(n.tags), dict(day.tags)) == (
        "How many.",
        {"unit": "pieces"},
        {"trinitylake/partition": ""},
    )
    assert "| day=tue | 2 | 1 |" in shown["partition_rows"] and "| day=mon | 2 | 1 |" in shown["partition_rows"]
    assert shown["preview"].count("\n") == 3 and shown["preview"].startswith("| day | n |")
    lines = shown["versions"].splitlines()
    assert ["| changed | 4 | +2 |" in lines[2], "| added | 2 | +2 |" in lines[3]] == [True, True]
    assert not {"trinitylake/preview_rows", "trinitylake/partition_values", "trinitylake/staged"} & shown.keys()


def test_a_click_leads_to_the_rollback_of_this_table_alone(located: Located) -> None:
    located.run("load_prices")
    assert "roll_back" not in newest(located.instance, PRICES), "there is nothing to go back to"
    located.run("load_prices")
    shown = newest(located.instance, PRICES)
    found = re.fullmatch(r"\[roll back sales\.prices alone to version 1]\((.*)\)", shown["roll_back"])
    assert found is not None
    link = urlsplit(found[1])
    assert (link.netloc, link.path) == ("", f"/locations/{PLACE}/jobs/rollback/playground/setup")
    assert yaml.safe_load(parse_qs(link.query)["config"][0]) == {"to": {"version": 1}, "tables": ["sales.prices"]}
    assert f"[roll back to 1]({found[1]})" in shown["versions"]


def test_no_click_leads_back_to_an_undone_version(lake: Lakehouse) -> None:
    for number in range(3):
        put(lake, "orders", {"n": [number]})
    head = lake.snapshot()
    operations.rollback(lake, head.version - 1)
    shown = TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders")
    assert f"to version {head.version - 2}]" in shown["roll_back"].value
    assert f"roll back to {head.version} (undone by {head.version + 1})]" in shown["versions"].value
    operations.rollback(lake, head.version - 2)
    assert "roll_back" not in TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders"), (
        "nothing is left before it"
    )


def test_links_know_the_address_of_the_ui_and_the_jobs_that_are_there(lake: Lakehouse) -> None:
    for number in range(2):
        put(lake, "orders", {"n": [number]})
        put(lake, "or.ders", {"n": [number]})
    head = lake.snapshot()
    behind_a_proxy = replace(LINKS, base="https://dagster.example.com/ops")
    shown = TablePages(lake, head, behind_a_proxy).of("sales", "orders")
    assert "(https://dagster.example.com/ops/locations/" in shown["roll_back"].value
    assert "(https://dagster.example.com/ops/locations/" in shown["versions"].value
    for links, table in ((replace(LINKS, jobs=frozenset()), "orders"), (LINKS, "or.ders")):
        shown = TablePages(lake, head, links).of("sales", table)
        assert "roll_back" not in shown and "go back" not in shown["versions"].value


def test_the_catalog_takes_it_for_a_table(lake: Lakehouse) -> None:
    spec = next(iter(project(lake).resolve_asset_graph().get(ORDERS).assets_def.specs))
    assert (spec.kinds, spec.owners, spec.freshness_policy) == ({"iceberg", "trinitylake"}, ["team:sales"], WEEKLY)
    assert (spec.metadata["dagster/table_name"], spec.metadata["dagster/storage_kind"]) == ("sales.orders", "iceberg")


def test_the_origin_of_a_column_that_is_not_there_is_refused(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    wrong = dg.TableColumnLineage({"m": [dg.TableColumnDep(SHOP, "count")]})
    with pytest.raises(InvalidInputError, match="column_lineage"):
        load(project(lake, wrong), instance, "mon")
    with pytest.raises(InvalidInputError, match="preview_rows"):
        stored_as(preview_rows=101)


def test_rollbacks_and_commits_of_others_are_plotted_too(located: Located) -> None:
    located.load()
    located.look()
    put(located.lake, "prices", {"n": [7]})
    (event,) = located.look()
    figures = plain(event.metadata)
    assert (event.asset_key, figures["dagster/row_count"]) == (PRICES, 2)
    assert (figures["versions"], "partition_rows" in figures) == ("4", False), "a tick reads no history"
    located.run("rollback", approved_rollback(located.lake, 3))
    shown = newest(located.instance, PRICES)
    assert (shown["dagster/row_count"], shown["rows_changed"]) == (1, -1)
    assert "| rollback |" in shown["versions"]
    assert newest(located.instance, MONTHLY)["dagster/partition_row_count"] == 1


def test_an_observed_table_has_owners_freshness_and_a_preview(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    put(lake, "orders", {"n": [1, 2, 3], "text": ["a|b", "[x](http://y)", "z" * 500]})
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
        jobs=[dg.define_asset_job("look", selection=[ORDERS]), dg.define_asset_job("sum", selection=["total"])],
    )
    result = definitions.resolve_job_def("look").execute_in_process(instance=instance)
    (observed,) = [event for event in result.all_events if event.is_asset_observation]
    shown = values(observed.asset_observation_data.asset_observation)
    assert "| 1 | a\\|b |" in shown["preview"] and "`[x](http://y)`" in shown["preview"]
    assert f"{'z' * 100}... |" in shown["preview"] and "z" * 101 not in shown["preview"]
    summed = definitions.resolve_job_def("sum").execute_in_process(instance=instance)
    assert summed.output_for_node("total") == 6


def test_pages_have_bounds(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(lake, "orders", {"n": [number]})
    put(lake, "other", {"n": [1]})
    pages = TablePages(lake, lake.snapshot(), LINKS, Bounds(pages=1))
    assert "versions" in pages.of("sales", "orders")
    shown = pages.of("sales", "other")
    assert "versions" not in shown and shown["dagster/row_count"] == 1
    monkeypatch.setattr(table_metadata, "MOST_DATA_FILES", 2)
    shown = TablePages(lake, lake.snapshot(), LINKS).of("sales", "orders", preview_rows=1)
    assert shown["partition_rows"] == "not listed: it has 3 data files, more than 2"
    assert "preview" not in shown
    monkeypatch.setattr(table_metadata, "MOST_PREVIEWED_BYTES", 1)
    shown = TablePages(lake, lake.snapshot(), LINKS).of("sales", "other", preview_rows=1)
    assert shown["preview"].value == "the data files are too large for a preview"


def test_the_bounds_are_those_of_a_step_not_of_each_of_its_versions(lake: Lakehouse) -> None:
    bounds = Bounds(pages=2, tables=3, partitions=1)
    for number in range(4):
        put(lake, "orders", {"n": [number]})
    pages = [TablePages(lake, lake.snapshot(version), LINKS, bounds) for version in (2, 3, 4)]
    assert ["versions" in one.of("sales", "orders") for one in pages] == [True, True, False]
    assert [bounds.take_table() for _ in range(4)] == [True, True, True, False]
    assert [bounds.take_partition() for _ in range(2)] == [True, False]
    over = Bounds(_ends_s=0)
    assert (over.take_page(), over.take_partition(), over.take_table()) == (False, False, True)


def test_a_partition_is_named_by_the_columns_of_its_table(lake: Lakehouse) -> None:
    put(lake, "orders", {"day": ["mon", "tue"], "n": [1, 2]})
    table = catalog_at(lake).load_table("sales.orders")
    with pytest.raises(InvalidInputError):
        table_metadata.partition_row_count(table, {"day": "mon"})


def test_what_another_io_manager_stored_is_told_so(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
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
    said = failure.step_failure_data.error
    assert said is not None and "the input is a Table instead of a staged table" in str(said)
    assert lake.latest_version() == 0


@pytest.mark.parametrize("manager", [None, dg.fs_io_manager, dg.mem_io_manager, dg.FilesystemIOManager()])
def test_a_forgotten_io_manager_is_refused_when_definitions_load(manager: Any) -> None:
    @dg.asset(key=ORDERS, io_manager_key="io_manager" if manager is None else "files")
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    names = LakehouseNames("lake")
    publish = build_publish_asset(key=["publish"], tables={"orders": orders}, description="Orders.", names=names)
    lakehouse = TrinityLakeResource(root="memory://lake/")
    resources: dict[str, Any] = {"lake_lakehouse": lakehouse} | ({} if manager is None else {"files": manager})
    said = "asset sales/orders .* io_manager_key='lake_lakehouse_io_manager'"
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        dg.Definitions.validate_loadable(dg.Definitions(assets=[orders, publish], resources=resources))


def test_io_managers_of_others_are_left_alone() -> None:
    """They may hold ours. So may an asset that stages by itself use any."""

    @dg.io_manager  # type: ignore[untyped-decorator]
    def mine(_context: dg.InitResourceContext) -> dg.IOManager:
        return dg.InMemoryIOManager()

    @dg.asset(key=ORDERS, io_manager_key="mine")
    def orders() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.asset(key=["sales", "prices"])
    def prices() -> StagedTable: ...

    publish = [
        build_publish_asset(key=["publish", name], tables={"orders": orders, "prices": prices}, description="All.")
        for name in ("a", "b")
    ]
    resources = {"lakehouse": TrinityLakeResource(root="memory://lake/"), "mine": mine}
    dg.Definitions.validate_loadable(dg.Definitions(assets=[orders, prices, *publish], resources=resources))
