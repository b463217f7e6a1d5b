"""Two lakehouses in one code location, with an asset that reads a table from one and publishes to the other.

``SALES_ROOT`` and ``MARTS_ROOT`` are the roots of the lakehouses. The names of jobs, schedules, sensors and assets
start with ``sales`` or ``marts``.
"""

from datetime import timedelta

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    LakehouseNames,
    LakehouseSettings,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
)

SALES, MARTS = LakehouseNames("sales"), LakehouseNames("marts")
ORDERS = SALES.table_key("shop", "orders")
LIMITS = ApplyLimits(max_files=10_000, max_bytes=10 * 1024**3, min_age=timedelta(days=7))


@dg.asset(
    key=MARTS.table_key("reports", "revenue"),
    ins={"orders": dg.AssetIn(ORDERS)},
    io_manager_key=MARTS.io_manager_key,
)
def revenue(orders: pa.Table) -> pa.Table:
    """Compute the revenue of each customer."""
    return orders.group_by("customer").aggregate([("euros", "sum")])


publish = build_publish_asset(
    key=["marts", "publish"],
    tables={"revenue": revenue.key},
    description="Publishes the reports as one version.",
    names=MARTS,
)

defs = dg.Definitions.merge(
    dg.Definitions(assets=[revenue, publish]),
    build_trinitylake_definitions(
        LakehouseSettings(
            name="sales",
            lakehouse=TrinityLakeResource(root=dg.EnvVar("SALES_ROOT")),
            tables=["shop.orders"],
            limits=LIMITS,
        ),
        LakehouseSettings(
            name="marts",
            lakehouse=TrinityLakeResource(root=dg.EnvVar("MARTS_ROOT")),
            published_by=[publish.key],
            limits=LIMITS,
        ),
    ),
)
