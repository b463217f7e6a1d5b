"""A group of daily tables with different partition mappings, which Dagster backfills in several runs."""

import os

import dagster as dg
import pandas as pd

from trinitylake_ops.dagster_plugin import (
    LakehouseNames,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_publish_asset,
    stored_as,
)

LAKE = LakehouseNames("lake")
IO = LAKE.io_manager_key
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
BY_DAY = stored_as(partition_by=["day"])


@dg.asset(key=["shop", "orders"], partitions_def=DAYS, io_manager_key=IO, metadata=BY_DAY)
def orders(context: dg.AssetExecutionContext) -> pd.DataFrame:
    return pd.DataFrame({"day": [context.partition_key] * 2, "amount": [1.0, 2.0]})


@dg.asset(key=["shop", "daily_totals"], partitions_def=DAYS, io_manager_key=IO, metadata=BY_DAY)
def daily_totals(orders: pd.DataFrame) -> pd.DataFrame:
    return orders.groupby("day", as_index=False).sum()


@dg.asset(
    key=["shop", "two_days"],
    partitions_def=DAYS,
    io_manager_key=IO,
    metadata=BY_DAY,
    ins={
        "orders": dg.AssetIn(
            key=["shop", "orders"], partition_mapping=dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=0)
        )
    },
)
def two_days(context: dg.AssetExecutionContext, orders: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"day": [context.partition_key], "rows_in": [len(orders)]})


@dg.asset(key=["shop", "summary"], io_manager_key=IO, ins={"orders": dg.AssetIn(key=["shop", "orders"])})
def summary(orders: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"rows_in": [len(orders)]})


@dg.asset(key=["shop", "share"], partitions_def=DAYS, io_manager_key=IO, metadata=BY_DAY)
def share(context: dg.AssetExecutionContext, orders: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"day": [context.partition_key], "share": [len(orders) / summary["rows_in"].sum()]})


@dg.asset_check(asset=orders, blocking=True)
def has_rows(orders: pd.DataFrame) -> dg.AssetCheckResult:
    days = set(orders["day"])
    return dg.AssetCheckResult(passed=len(days) > 0 and os.environ.get("BACKFILL_BAD_ORDERS") not in days)


@dg.asset_check(asset=two_days, blocking=True)
def has_no_bad_day(two_days: pd.DataFrame) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=os.environ.get("BACKFILL_BAD_DAY") not in set(two_days["day"]))


publish = build_publish_asset(
    key=["publish", "days"],
    tables={
        "orders": orders,
        "daily_totals": daily_totals,
        "two_days": two_days,
        "summary": summary,
        "share": share,
    },
    partitions_def=DAYS,
    names=LAKE,
    description="All tables of a day.",
)

lakehouse = TrinityLakeResource(root=dg.EnvVar("BACKFILL_LAKE"))
defs = dg.Definitions(
    assets=[orders, daily_totals, two_days, summary, share, publish],
    asset_checks=[has_rows, has_no_bad_day],
    jobs=[dg.define_asset_job("all_days", selection="*")],
    resources={LAKE.resource_key: lakehouse, IO: TrinityLakeIOManager(lakehouse=lakehouse)},
    executor=dg.in_process_executor,
)
