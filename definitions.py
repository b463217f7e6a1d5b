"""What Dagster loads: the flights pipeline and the operations of one lakehouse, set by the environment.

``TRINITYLAKE_ROOT``             root URI of the lakehouse (default: .demo/lakehouse beside this file)
``TRINITYLAKE_STORAGE_OPTIONS``  options of its storage, ``K=V,K=V``, such as ``endpoint=https://s3.example.com``
``SPARK_MASTER``                 Spark master URL (default: local[2])

Credentials are not among these, as Dagster shows options. Each process takes them from its own environment, from
``AWS_ACCESS_KEY_ID``, ``AZURE_STORAGE_ACCOUNT_KEY``, ``REDIS_PASSWORD`` and so on, or from its role.
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
    # Its schedules and sensors are off until a person turns them on.
    build_trinitylake_definitions(
        LakehouseSettings(
            name="",  # one lakehouse, whose jobs have their plain names
            lakehouse=TrinityLakeResource(root=ROOT, storage_options=StorageSettings.from_environment()),
            published_by=[REFERENCE_PUBLISHED, MONTH_PUBLISHED],
            operations=["repair_hint"],  # beyond the common ones: the demo breaks the hint
            # Limits within which runs may free something without approval.
            limits=ApplyLimits(max_files=100_000, max_bytes=100 * 1024**3, min_age=timedelta(days=7)),
            spark=SPARK,
        )
    ),
    dg.Definitions(
        resources={"spark": SPARK},
        # One process a run, so that its steps share one Spark session.
        executor=dg.in_process_executor,
    ),
)
