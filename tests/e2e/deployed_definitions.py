"""What the topology's code location loads: a lakehouse on S3, as in definitions.py, with a sensor that looks often."""

from __future__ import annotations

import os
from datetime import timedelta

import dagster as dg

from trinitylake_ops.dagster_plugin.checks import CHECKS_JOB, build_checks_job, build_lakehouse_checks
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.scheduled_ops import ApplyLimits
from trinitylake_ops.dagster_plugin.schedules import build_maintenance_schedules
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor

LIMITS = ApplyLimits(max_files=100_000, max_bytes=100 * 1024**3, min_age=timedelta(days=7))
CHECKS = build_lakehouse_checks()

defs = dg.Definitions.merge(
    maintenance_definitions(),
    dg.Definitions(
        asset_checks=CHECKS,
        jobs=[build_checks_job(CHECKS)],
        sensors=[build_commit_sensor(job_name="repair_hint", minimum_interval_seconds=1)],
        schedules=build_maintenance_schedules(limits=LIMITS, checks_job=CHECKS_JOB),
        resources={
            "lakehouse": TrinityLakeResource(
                root=os.environ["TRINITYLAKE_ROOT"], storage_options=StorageSettings.from_environment()
            )
        },
        executor=dg.in_process_executor,
    ),
)
