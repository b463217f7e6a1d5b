"""Six assets with different mappings between their daily partitions, stored by the IO manager of ``BACKFILL_CASE``.

``benchmarks/dagster_backfills.py`` loads this file in the environment of each case, so it imports only Dagster, pyarrow
and the package of the case. ``BACKFILL_FOLDER`` is the folder of the tables.
"""

import os
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

#: Each asset publishes its table.
PUBLISH_PER_STEP = "trinitylake-ops, each step publishes"
#: One publish asset publishes all six tables.
ONE_PUBLISH_ASSET = "trinitylake-ops, one publish asset"
ICEBERG = "dagster-iceberg"
PUBLISHER = dg.AssetKey(["publish", "shop"])

CASE = os.environ.get("BACKFILL_CASE", PUBLISH_PER_STEP)
FOLDER = os.environ.get("BACKFILL_FOLDER", "/tmp")
IO = "lake_lakehouse_io_manager"
ROWS_PER_DAY = 1_000
N_CUSTOMERS = 10
N_COUNTRIES = 3
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-03-01")
PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
TWO_DAYS = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=0)


def key(name: str) -> list[str]:
    """Return the key of the asset of a table."""
    return ["shop", name]


def daily_metadata() -> Mapping[str, Any]:
    """Return the metadata that makes the IO manager partition a table by day."""
    if CASE == ICEBERG:
        return {"partition_expr": "day"}
    from trinitylake_ops.dagster_plugin import stored_as

    return stored_as(partition_by=["day"])


def rows_of_day(context: dg.AssetExecutionContext, **columns: Any) -> pa.Table:
    """Return rows of the partition of the run."""
    day = context.partition_time_window.start.date()
    length = len(next(iter(columns.values())))
    return pa.table({"day": pa.array([day] * length, pa.date32()), **columns})


@dg.asset(key=key("customers"), io_manager_key=IO)
def customers() -> pa.Table:
    """A lookup table without partitions."""
    numbers = list(range(N_CUSTOMERS))
    return pa.table({"customer": numbers, "country": [f"country {number % N_COUNTRIES}" for number in numbers]})


@dg.asset(key=key("orders"), partitions_def=DAYS, io_manager_key=IO, metadata=daily_metadata())
def orders(context: dg.AssetExecutionContext) -> pa.Table:
    """The source asset: the orders of a day."""
    numbers = list(range(ROWS_PER_DAY))
    return rows_of_day(
        context, id=numbers, customer=[number % N_CUSTOMERS for number in numbers], euros=[1] * ROWS_PER_DAY
    )


@dg.asset(key=key("by_customer"), partitions_def=DAYS, io_manager_key=IO, metadata=daily_metadata())
def by_customer(context: dg.AssetExecutionContext, orders: pa.Table) -> pa.Table:
    """The sums of the same day of the orders by customer."""
    sums = orders.group_by("customer").aggregate([("euros", "sum")])
    return rows_of_day(context, customer=sums["customer"], euros=sums["euros_sum"])


@dg.asset(
    key=key("two_days"),
    partitions_def=DAYS,
    io_manager_key=IO,
    metadata=daily_metadata(),
    ins={
        "by_customer": dg.AssetIn(key("by_customer"), partition_mapping=TWO_DAYS),
        "customers": dg.AssetIn(key("customers")),
    },
)
def two_days(context: dg.AssetExecutionContext, by_customer: pa.Table, customers: pa.Table) -> pa.Table:
    """The sums of a day and the previous day by country, joined with the lookup table."""
    sums = by_customer.join(customers, "customer").group_by("country").aggregate([("euros", "sum")])
    return rows_of_day(context, country=sums["country"], euros=sums["euros_sum"])


@dg.asset(
    key=key("running"),
    partitions_def=DAYS,
    io_manager_key=IO,
    metadata=daily_metadata(),
    ins={"before": dg.AssetIn(key("running"), partition_mapping=PREVIOUS_DAY), "orders": dg.AssetIn(key("orders"))},
)
def running(context: dg.AssetExecutionContext, before: pa.Table, orders: pa.Table) -> pa.Table:
    """A running total that continues from its previous day."""
    return rows_of_day(
        context, n_orders=[orders.num_rows + sum(before["n_orders"].to_pylist() if before.num_rows else [])]
    )


@dg.asset(key=key("summary"), io_manager_key=IO, ins={"orders": dg.AssetIn(key("orders"))})
def summary(orders: pa.Table) -> pa.Table:
    """A table without partitions that summarizes all days."""
    return pa.table({"n_orders": [orders.num_rows]})


TABLES = (customers, orders, by_customer, two_days, running, summary)


def iceberg_properties() -> dict[str, str]:
    """Return the properties of the catalog of dagster-iceberg: SQLite, with tables in local files."""
    return {"type": "sql", "uri": f"sqlite:///{FOLDER}/catalog.db", "warehouse": f"file://{FOLDER}/tables"}


def _iceberg_io_manager() -> Any:
    """Return dagster-iceberg's IO manager, changed to load an empty table for the day before the first day.

    The original fails to load it, because the table of an asset that reads itself does not exist yet.
    """
    from dagster_iceberg.io_manager.arrow import PyArrowIcebergIOManager
    from pyiceberg.exceptions import NoSuchTableError

    (handler,) = PyArrowIcebergIOManager.type_handlers()

    class Handler(type(handler)):  # type: ignore[misc]
        def load_input(self, *arguments: Any) -> pa.Table:
            try:
                return super().load_input(*arguments)
            except NoSuchTableError:
                return pa.table({})

    class Manager(PyArrowIcebergIOManager):  # type: ignore[misc]
        @staticmethod
        def type_handlers() -> list[Handler]:
            return [Handler()]

    return Manager


def resources() -> Mapping[str, Any]:
    """Return the IO manager of the case."""
    if CASE == ICEBERG:
        from dagster_iceberg.config import IcebergCatalogConfig

        config = IcebergCatalogConfig(properties=iceberg_properties())
        return {IO: _iceberg_io_manager()(name="lake", config=config, namespace="shop")}
    from trinitylake_ops.dagster_plugin import TrinityLakeIOManager, TrinityLakeResource

    lakehouse = TrinityLakeResource(root=f"{FOLDER}/lake")
    return {"lake_lakehouse": lakehouse, IO: TrinityLakeIOManager(lakehouse=lakehouse)}


def assets() -> list[dg.AssetsDefinition]:
    """Return the assets of the case."""
    if CASE != ONE_PUBLISH_ASSET:
        return [*TABLES]
    from trinitylake_ops.dagster_plugin import LakehouseNames, build_publish_asset

    tables: dict[str, dg.AssetKey | dg.AssetsDefinition] = {table.key.path[-1]: table for table in TABLES}
    publish = build_publish_asset(key=PUBLISHER.path, tables=tables, partitions_def=DAYS, names=LakehouseNames("lake"))
    return [*TABLES, publish]


def read_tables() -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return the rows of each table, and the number of commits."""
    names = [table.key.path[-1] for table in TABLES]
    if CASE == ICEBERG:
        from pyiceberg.catalog import load_catalog

        catalog: Any = load_catalog("lake", **iceberg_properties())
        loaded = {name: catalog.load_table(("shop", name)) for name in names}
        # Each commit wrote one metadata file.
        n_commits = sum(1 + len(table.metadata.metadata_log) for table in loaded.values())
    else:
        from trinitylake_ops import Lakehouse
        from trinitylake_ops.iceberg import catalog_at

        lake = Lakehouse.open(f"{FOLDER}/lake")
        catalog, n_commits = catalog_at(lake), lake.latest_version()
        loaded = {name: catalog.load_table(("shop", name)) for name in names}
    return {name: table.scan().to_arrow().to_pylist() for name, table in loaded.items()}, n_commits


defs = dg.Definitions(assets=assets(), resources=resources(), executor=dg.multiprocess_executor)
