"""Dagster resources, assets, checks and jobs that run a lakehouse's pipelines and operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.dagster_plugin.assets import build_exports_asset, build_head_asset, build_table_asset
    from trinitylake_ops.dagster_plugin.checks import (
        CheckLimits,
        build_checks_job,
        build_lakehouse_checks,
        build_server_check,
    )
    from trinitylake_ops.dagster_plugin.code_location import LakehouseSettings, build_trinitylake_definitions
    from trinitylake_ops.dagster_plugin.component import TrinityLakeMaintenanceComponent
    from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
    from trinitylake_ops.dagster_plugin.jobs import ApplyLimits, build_jobs
    from trinitylake_ops.dagster_plugin.names import LakehouseNames
    from trinitylake_ops.dagster_plugin.publish import build_publish_asset
    from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
    from trinitylake_ops.dagster_plugin.runs.pipes import report_staged, staged_by_pipes
    from trinitylake_ops.dagster_plugin.schedules import CRONS, BlackoutWindow, build_maintenance_schedules, published
    from trinitylake_ops.dagster_plugin.sensors import (
        FailedRun,
        build_closed_branch_sensor,
        build_commit_sensor,
        build_failed_run_sensor,
    )
    from trinitylake_ops.dagster_plugin.storage_settings import SecretVariables, StorageSettings
    from trinitylake_ops.dagster_plugin.table_metadata import as_tables
    from trinitylake_ops.dagster_plugin.table_settings import stored_as

__all__ = [
    "CRONS",
    "ApplyLimits",
    "BlackoutWindow",
    "CheckLimits",
    "FailedRun",
    "LakehouseNames",
    "LakehouseSettings",
    "SecretVariables",
    "SparkResource",
    "StorageSettings",
    "TrinityLakeIOManager",
    "TrinityLakeMaintenanceComponent",
    "TrinityLakeResource",
    "as_tables",
    "build_checks_job",
    "build_closed_branch_sensor",
    "build_commit_sensor",
    "build_exports_asset",
    "build_failed_run_sensor",
    "build_head_asset",
    "build_jobs",
    "build_lakehouse_checks",
    "build_maintenance_schedules",
    "build_publish_asset",
    "build_server_check",
    "build_table_asset",
    "build_trinitylake_definitions",
    "published",
    "report_staged",
    "staged_by_pipes",
    "stored_as",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "assets": ("build_exports_asset", "build_head_asset", "build_table_asset"),
        "checks": ("CheckLimits", "build_checks_job", "build_lakehouse_checks", "build_server_check"),
        "code_location": ("LakehouseSettings", "build_trinitylake_definitions"),
        "component": ("TrinityLakeMaintenanceComponent",),
        "io_manager": ("TrinityLakeIOManager",),
        "jobs": ("ApplyLimits", "build_jobs"),
        "names": ("LakehouseNames",),
        "publish": ("build_publish_asset",),
        "resources": ("SparkResource", "TrinityLakeResource"),
        "runs.pipes": ("report_staged", "staged_by_pipes"),
        "schedules": ("BlackoutWindow", "CRONS", "build_maintenance_schedules", "published"),
        "sensors": ("FailedRun", "build_closed_branch_sensor", "build_commit_sensor", "build_failed_run_sensor"),
        "storage_settings": ("SecretVariables", "StorageSettings"),
        "table_metadata": ("as_tables",),
        "table_settings": ("stored_as",),
    },
    extra="dagster",
)
