"""What Dagster loads: the flights pipeline and the operations of one lakehouse, set by the environment.

``TRINITYLAKE_ROOT``             root URI of the lakehouse (default: .demo/lakehouse beside this file)
``TRINITYLAKE_STORAGE_OPTIONS``  options of its storage, ``K=V,K=V``, such as ``endpoint=https://s3.example.com``
``SPARK_MASTER``                 Spark master URL (default: local[2])

Credentials of S3 are not among these, as Dagster shows options: each process takes them from its own environment,
``AWS_ACCESS_KEY_ID`` and so on, or from its role.
"""

import os
from pathlib import Path

import dagster as dg

from trinitylake_ops.dagster_plugin.flights import MONTH_PUBLISHED, REFERENCE_PUBLISHED, flights_definitions
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.resources import SparkResource, StorageSettings, TrinityLakeResource

defs = dg.Definitions.merge(
    flights_definitions(),
    maintenance_definitions(lakehouse_deps=(REFERENCE_PUBLISHED, MONTH_PUBLISHED)),
    dg.Definitions(
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
