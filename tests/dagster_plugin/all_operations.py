"""A code location with all operations and checks of a lakehouse that does not exist, for launchpad tests."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    LakehouseSettings,
    TrinityLakeResource,
    build_trinitylake_definitions,
)

defs = dg.Definitions.merge(
    build_trinitylake_definitions(
        LakehouseSettings(
            name="",
            lakehouse=TrinityLakeResource(root="memory://missing/"),
            operations="all",
            checks="all",
            crons={"check": "0 6 * * *"},
            limits=ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0)),
        )
    ),
    dg.Definitions(executor=dg.in_process_executor),
)
