"""A Dagster project as it was before the lakehouse: assets that return tables, and a check."""

import dagster as dg
import pyarrow as pa


@dg.asset(key=["sales", "customers"])
def customers() -> pa.Table:
    """Who buys."""
    return pa.table({"id": [1, 2, 3], "name": ["Ann", "Bob", "Cleo"]})


@dg.asset(key=["sales", "orders"])
def orders() -> pa.Table:
    """What was bought."""
    return pa.table({"customer": [1, 1, 3], "euros": [20.0, 5.5, 12.0]})


@dg.asset(key=["sales", "revenue"])
def revenue(orders: pa.Table) -> pa.Table:
    """What each customer paid."""
    return orders.group_by("customer").aggregate([("euros", "sum")])


@dg.asset_check(asset=orders, blocking=True)
def orders_are_paid(orders: pa.Table) -> dg.AssetCheckResult:
    """Whether no order costs less than nothing."""
    return dg.AssetCheckResult(passed=min(orders["euros"].to_pylist()) >= 0)


TABLES = [customers, orders, revenue]
CHECKS = [orders_are_paid]
