"""What the topology's code location loads: definitions.py as it is, with a sensor that looks often."""

from __future__ import annotations

import dagster as dg

import definitions
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor

defs = dg.Definitions.merge(
    definitions.defs,
    dg.Definitions(
        sensors=[build_commit_sensor(name="quick_commits", job_name="repair_hint", minimum_interval_seconds=1)]
    ),
)
