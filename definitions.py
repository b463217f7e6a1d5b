"""What Dagster loads: the flights pipeline and the operations of one lakehouse, set by the environment.

``TRINITYLAKE_ROOT``             root URI of the lakehouse (default: .demo/lakehouse beside this file)
``TRINITYLAKE_STORAGE_OPTIONS``  options of its storage, ``K=V,K=V``, such as ``endpoint=https://s3.example.com``
``SPARK_MASTER``                 Spark master URL (default: local[2])

Credentials of S3 are not among these, as Dagster shows options: each process takes them from its own environment,
``AWS_ACCESS_KEY_ID`` and so on, or from its role.
"""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg

from trinitylake_ops.dagster_plugin.checks import CHECKS_JOB, build_checks_job, build_lakehouse_checks
from trinitylake_ops.dagster_plugin.flights import MONTH_PUBLISHED, REFERENCE_PUBLISHED, flights_definitions
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.resources import SparkResource, StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.scheduled_ops import ApplyLimits
from trinitylake_ops.dagster_plugin.schedules import build_maintenance_schedules
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor

#: Up to where schedules let go of something without approval.
LIMITS = ApplyLimits(max_files=100_000, max_bytes=100 * 1024**3, min_age=timedelta(days=7))
CHECKS = build_lakehouse_checks()

defs = dg.Definitions.merge(
    flights_definitions(),
    maintenance_definitions(lakehouse_deps=(REFERENCE_PUBLISHED, MONTH_PUBLISHED)),
    dg.Definitions(
        asset_checks=CHECKS,
        jobs=[build_checks_job(CHECKS)],
        # All are off until somebody turns them on.
        sensors=[build_commit_sensor(job_name=CHECKS_JOB)],
        schedules=build_maintenance_schedules(limits=LIMITS, checks_job=CHECKS_JOB),
        resources={
            "lakehouse": TrinityLakeResource(
                root=os.environ.get("TRINITYLAKE_ROOT", str(Path(__file__).parent.resolve() / ".demo" / "lakehouse")),
                storage_options=StorageSettings.from_environment(),
            ),
            "spark": SparkResource(master=os.environ.get("SPARK_MASTER", "local[2]")),
        },
        # One process a run, so that its steps share one Spark session.
        executor=dg.in_process_executor,
    ),
)
