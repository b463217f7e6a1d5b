"""Definitions of the topology's code location: definitions.py, a sensor with a short interval, and more lakehouses.

Three lakehouses are in the folder that replaces the volume ``lakehouse``; their expiry is scheduled every minute.
``shop`` has a table that is published and checked.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg

import definitions
from tests.dagster_plugin.incident_project import shop_definitions
from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    LakehouseSettings,
    StorageSettings,
    TrinityLakeResource,
    build_commit_sensor,
    build_trinitylake_definitions,
)

VOLUME = Path(os.environ["DAGSTER_HOME"]).with_name("lakehouse")


def on_volume(name: str) -> LakehouseSettings:
    return LakehouseSettings(
        name=name,
        lakehouse=TrinityLakeResource(root=str(VOLUME / name), storage_options=StorageSettings(fsync="false")),
        limits=ApplyLimits(max_files=10_000, max_bytes=10**9, min_age=timedelta(days=7)),
        checks="all",
        crons={"expire": "* * * * *", "check": "30 6 * * *"},
        location_name="trinitylake",
    )


defs = dg.Definitions.merge(
    definitions.defs,
    build_trinitylake_definitions(on_volume("expiring"), on_volume("purged"), on_volume("sales")),
    shop_definitions(str(VOLUME / "shop")),
    dg.Definitions(
        sensors=[
            build_commit_sensor(
                name="quick_commits",
                job_name="repair_hint",
                table_key=lambda namespace, table: dg.AssetKey([namespace, table]),
                minimum_interval_seconds=1,
            )
        ]
    ),
)
