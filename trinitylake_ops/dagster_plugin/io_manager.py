"""The configurable IO manager for tables. Its implementation is imported only in steps."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource


class TrinityLakeIOManager(dg.ConfigurableIOManagerFactory[dg.IOManager]):
    """Stages the outputs of assets as tables of a lakehouse, and loads their inputs.

    Outputs can be Spark DataFrames, pyarrow Tables and RecordBatchReaders, pandas DataFrames, polars frames, or a
    StagedTable that the asset staged itself. An output that replaces the whole table also replaces its columns. Named
    levels of a pandas index become columns. Inputs are loaded into the annotated type: one of these, or a pyiceberg
    ``Table``, which reads lazily. If an asset and its input have the same Dagster partitions, only the rows of the
    run's partitions are read. Spark is started only for Spark DataFrames.
    """

    lakehouse: TrinityLakeResource
    spark: SparkResource
    version: str = Field(
        default="",
        description="Version or export at which to read tables that the run does not stage. If empty, all steps of a"
        " run read the version that is the latest at the run's first read.",
    )

    def __init__(self, **fields: Any):
        # Dagster discovers nested resources only if they are passed explicitly.
        super().__init__(**{"spark": SparkResource(), **fields})

    def create_io_manager(self, context: dg.InitResourceContext) -> dg.IOManager:
        """Return the IO manager of a run. Outside of a run, it reads the latest version."""
        # Imported here because only steps need it, so that code locations and run processes start faster.
        from trinitylake_ops.dagster_plugin.table_io_manager import IOManagerSettings, TableIOManager

        settings = IOManagerSettings(self.lakehouse, self.spark, self.version, TrinityLakeIOManager)
        return TableIOManager(settings, context.run, context.instance)
