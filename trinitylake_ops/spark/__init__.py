"""PySpark: sessions, the data source, reading and writing tables, and distributed operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face
from trinitylake_ops.spark.runtime.worker_memory import freeze_modules

if TYPE_CHECKING:
    from trinitylake_ops.spark.catalog.registration import catalog_settings, register_catalog
    from trinitylake_ops.spark.executor import spark_executor
    from trinitylake_ops.spark.runtime.errors import spark_failures
    from trinitylake_ops.spark.session import build_session, session_scope
    from trinitylake_ops.spark.source.data_source import read_metadata, register_data_source
    from trinitylake_ops.spark.sql import create_views, register_table_functions
    from trinitylake_ops.spark.tables.pipeline_run import PipelineRun
    from trinitylake_ops.spark.tables.reader import read_table
    from trinitylake_ops.spark.tables.writer import stage_dataframe, write_groups_on

__all__ = [
    "PipelineRun",
    "build_session",
    "catalog_settings",
    "create_views",
    "read_metadata",
    "read_table",
    "register_catalog",
    "register_data_source",
    "register_table_functions",
    "session_scope",
    "spark_executor",
    "spark_failures",
    "stage_dataframe",
    "write_groups_on",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "catalog.registration": ("catalog_settings", "register_catalog"),
        "executor": ("spark_executor",),
        "runtime.errors": ("spark_failures",),
        "session": ("build_session", "session_scope"),
        "source.data_source": ("read_metadata", "register_data_source"),
        "sql": ("create_views", "register_table_functions"),
        "tables.pipeline_run": ("PipelineRun",),
        "tables.reader": ("read_table",),
        "tables.writer": ("stage_dataframe", "write_groups_on"),
    },
    extra="spark",
)

freeze_modules()
