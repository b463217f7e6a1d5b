"""Dagster definitions of the demo: the flights pipeline and the operations of its lakehouse.

``TRINITYLAKE_ROOT``             root URI of the lakehouse (default: .demo/lakehouse next to this file)
``TRINITYLAKE_STORAGE_OPTIONS``  options of its storage as ``NAME=VALUE,NAME=VALUE``, such as ``endpoint=https://s3.example.com``
``SPARK_MASTER``                 Spark master URL (default: local[2])

Do not put credentials into the options, because Dagster shows them. Each process gets credentials from variables such
as ``AWS_ACCESS_KEY_ID``, ``AZURE_STORAGE_ACCOUNT_KEY`` and ``REDIS_PASSWORD``, or from its role.
"""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg

from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    LakehouseSettings,
    SparkResource,
    StorageSettings,
    TrinityLakeResource,
    build_trinitylake_definitions,
)
from trinitylake_ops.demo.assets import MONTH_PUBLISHED, REFERENCE_PUBLISHED, flights_definitions

ROOT = os.environ.get("TRINITYLAKE_ROOT", str(Path(__file__).parent.resolve() / ".demo" / "lakehouse"))
SPARK = SparkResource(master=os.environ.get("SPARK_MASTER", "local[2]"))

defs = dg.Definitions.merge(
    flights_definitions(),
    # Schedules and sensors are off until they are turned on in the UI.
    build_trinitylake_definitions(
        LakehouseSettings(
            name="",  # a single lakehouse, so job names need no prefix
            lakehouse=TrinityLakeResource(root=ROOT, storage_options=StorageSettings.from_environment()),
            published_by=[REFERENCE_PUBLISHED, MONTH_PUBLISHED],
            operations=["repair_hint"],  # in addition to the default jobs, because the demo breaks the hint
            # Limits for runs that reclaim space without approval.
            limits=ApplyLimits(max_files=100_000, max_bytes=100 * 1024**3, min_age=timedelta(days=7)),
            spark=SPARK,
        )
    ),
    dg.Definitions(
        resources={"spark": SPARK},
        # One process per run, so that its steps share one Spark session.
        executor=dg.in_process_executor,
    ),
)
