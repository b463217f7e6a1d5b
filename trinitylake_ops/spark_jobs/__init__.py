"""PySpark: sessions, the data source, reading and writing tables, and operations by many workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops.faces import lazy_face
from trinitylake_ops.spark_jobs.runtime.worker_memory import spare_modules

if TYPE_CHECKING:
    from trinitylake_ops.spark_jobs.catalog.registration import catalog_settings, register_catalog
    from trinitylake_ops.spark_jobs.executor import spark_executor
    from trinitylake_ops.spark_jobs.runtime.spark_errors import spark_failures
    from trinitylake_ops.spark_jobs.session import build_session, session_scope
    from trinitylake_ops.spark_jobs.source.data_source import read_metadata, register_data_source
    from trinitylake_ops.spark_jobs.sql import create_views, register_table_functions
    from trinitylake_ops.spark_jobs.tables.group_writer import write_groups_on
    from trinitylake_ops.spark_jobs.tables.pipeline_run import PipelineRun
    from trinitylake_ops.spark_jobs.tables.reader import read_table
    from trinitylake_ops.spark_jobs.tables.writer import stage_dataframe

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
        "catalog.registration": (
            "catalog_settings",
            "register_catalog",
        ),
        "executor": ("spark_executor",),
        "runtime.spark_errors": ("spark_failures",),
        "session": (
            "build_session",
            "session_scope",
        ),
        "source.data_source": (
            "read_metadata",
            "register_data_source",
        ),
        "sql": (
            "create_views",
            "register_table_functions",
        ),
        "tables.group_writer": ("write_groups_on",),
        "tables.pipeline_run": ("PipelineRun",),
        "tables.reader": ("read_table",),
        "tables.writer": ("stage_dataframe",),
    },
    extra="spark",
)

spare_modules()
