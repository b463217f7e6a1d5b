"""The IO manager of tables as definitions name it, without what its steps import."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource


class TrinityLakeIOManager(dg.ConfigurableIOManagerFactory[dg.IOManager]):
    """Stages the outputs of assets as tables of a lakehouse, and reads their inputs.

    Outputs are Spark DataFrames, pyarrow Tables and RecordBatchReaders, pandas DataFrames, frames of polars, or a
    StagedTable of the asset itself. Those that replace the whole table replace its columns, too. Levels with a name of
    an index of pandas become columns. Inputs have the type that the asset annotates: one of these, or a pyiceberg
    ``Table``, which reads lazily. If both assets have the same Dagster partitions, only the rows of the run's partition
    are read. Only Spark's types start Spark.
    """

    lakehouse: TrinityLakeResource
    spark: SparkResource
    version: str = Field(
        default="",
        description="Read tables that the run does not stage at this version, or export; empty: the latest one when"
        " the run first reads, for all its steps.",
    )

    def __init__(self, **fields: Any):
        # Dagster finds resources in fields only if they are given.
        super().__init__(**{"spark": SparkResource(), **fields})

    def create_io_manager(self, context: dg.InitResourceContext) -> dg.IOManager:
        """Return the IO manager of a run. Without a run it reads the latest version."""
        # Only steps need it. The process of a run, and a code location, start without what it imports.
        from trinitylake_ops.dagster_plugin.table_io_manager import IOManagerSettings, TableIOManager

        settings = IOManagerSettings(self.lakehouse, self.spark, self.version, TrinityLakeIOManager)
        return TableIOManager(settings, context.run, context.instance)
