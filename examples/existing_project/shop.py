"""A Dagster project without a lakehouse: assets that return tables, and a check."""

import dagster as dg
import pyarrow as pa


@dg.asset(key=["sales", "customers"])
def customers() -> pa.Table:
    """Return the customers."""
    return pa.table({"id": [1, 2, 3], "name": ["Ann", "Bob", "Cleo"]})


@dg.asset(key=["sales", "orders"])
def orders() -> pa.Table:
    """Return the orders."""
    return pa.table({"customer": [1, 1, 3], "euros": [20.0, 5.5, 12.0]})


@dg.asset(key=["sales", "revenue"])
def revenue(orders: pa.Table) -> pa.Table:
    """Compute the revenue of each customer."""
    return orders.group_by("customer").aggregate([("euros", "sum")])


@dg.asset_check(asset=orders, blocking=True)
def orders_are_paid(orders: pa.Table) -> dg.AssetCheckResult:
    """Check that no order has a negative price."""
    return dg.AssetCheckResult(passed=min(orders["euros"].to_pylist()) >= 0)


TABLES = [customers, orders, revenue]
CHECKS = [orders_are_paid]
