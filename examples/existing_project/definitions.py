"""The project of shop.py with a lakehouse: it publishes all tables as one version, and has jobs for the lakehouse.

``LAKE_ROOT`` is the root of the lakehouse. Create it with ``trinitylake --root $LAKE_ROOT init``.
"""

import dagster as dg
from shop import CHECKS, TABLES

from trinitylake_ops.dagster_plugin import (
    LakehouseSettings,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
)

lakehouse = TrinityLakeResource(root=dg.EnvVar("LAKE_ROOT"))
tables = {table.key.path[-1]: table.key for table in TABLES}
publish = build_publish_asset(
    key=["publish", "sales"], tables=tables, description="Publishes all tables as one version."
)
io_manager = TrinityLakeIOManager(lakehouse=lakehouse)
defs = dg.Definitions.merge(
    dg.Definitions(assets=[*TABLES, publish], asset_checks=CHECKS, resources={"io_manager": io_manager}),
    build_trinitylake_definitions(LakehouseSettings(name="", lakehouse=lakehouse, published_by=[publish.key])),
)
