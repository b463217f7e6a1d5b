"""What Dagster loads: the flights pipeline and the operations of one lakehouse, set by the environment.

``TRINITYLAKE_ROOT``  root URI of the lakehouse (default: .demo/lakehouse beside this file)
``SPARK_MASTER``      Spark master URL (default: local[2])
"""

import os
from pathlib import Path

import dagster as dg

from trinitylake_ops.dagster_plugin.flights import MONTH_PUBLISHED, REFERENCE_PUBLISHED, flights_definitions
from trinitylake_ops.dagster_plugin.jobs import maintenance_definitions
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource

defs = dg.Definitions.merge(
    flights_definitions(),
    maintenance_definitions(lakehouse_deps=(REFERENCE_PUBLISHED, MONTH_PUBLISHED)),
    dg.Definitions(
        resources={
            "lakehouse": TrinityLakeResource(
                root=os.environ.get("TRINITYLAKE_ROOT", str(Path(__file__).parent.resolve() / ".demo" / "lakehouse"))
            ),
            "spark": SparkResource(master=os.environ.get("SPARK_MASTER", "local[2]")),
        },
        # One process a run, so that its steps share one Spark session.
        executor=dg.in_process_executor,
    ),
)
