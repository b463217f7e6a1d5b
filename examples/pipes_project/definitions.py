"""Publish a table that a program outside of Dagster stages, here with spark-submit.

``LAKE_ROOT`` is the root of the lakehouse. ``SUBMIT`` is the command that starts the program, by default
``spark-submit``.
"""

import os
import shlex
from pathlib import Path

import dagster as dg

from trinitylake_ops.dagster_plugin import (
    LakehouseNames,
    LakehouseSettings,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
    staged_by_pipes,
)
from trinitylake_ops.iceberg import StagedTable

SHOP = LakehouseNames("shop")
ROOT = os.environ["LAKE_ROOT"]
PROGRAM = Path(__file__).with_name("load_orders.py")


@dg.asset(key=["shop", "orders"], io_manager_key=SHOP.io_manager_key)
def orders(context: dg.AssetExecutionContext, submit: dg.PipesSubprocessClient) -> dg.Output[StagedTable]:
    """Run the program and return the table that it staged. A step that uses Pipes returns Outputs."""
    command = [*shlex.split(os.environ.get("SUBMIT", "spark-submit")), str(PROGRAM), ROOT]
    completed = submit.run(command=command, context=context)
    return dg.Output(staged_by_pipes(completed, "shop.orders"))


publish = build_publish_asset(
    key=["publish", "shop"], tables={"orders": orders}, description="Publishes the shop.", names=SHOP
)

defs = dg.Definitions.merge(
    dg.Definitions(assets=[orders, publish], resources={"submit": dg.PipesSubprocessClient()}),
    build_trinitylake_definitions(LakehouseSettings(name="shop", lakehouse=TrinityLakeResource(root=ROOT))),
)
