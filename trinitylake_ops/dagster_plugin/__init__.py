"""Dagster resources, assets, checks and jobs that run a lakehouse's pipelines and operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops.faces import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.dagster_plugin.assets import build_exports_asset, build_head_asset, build_table_asset
    from trinitylake_ops.dagster_plugin.automation.closed_branches import build_closed_branch_sensor
    from trinitylake_ops.dagster_plugin.automation.conditions import published
    from trinitylake_ops.dagster_plugin.automation.schedules import CRONS, BlackoutWindow, build_maintenance_schedules
    from trinitylake_ops.dagster_plugin.automation.sensors import (
        FailedRun,
        build_commit_sensor,
        build_failed_run_sensor,
    )
    from trinitylake_ops.dagster_plugin.checks import CheckLimits, build_checks_job, build_lakehouse_checks
    from trinitylake_ops.dagster_plugin.code_location import LakehouseSettings, build_trinitylake_definitions
    from trinitylake_ops.dagster_plugin.component import TrinityLakeMaintenanceComponent
    from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
    from trinitylake_ops.dagster_plugin.names import LakehouseNames
    from trinitylake_ops.dagster_plugin.ops.jobs import ApplyLimits, build_jobs
    from trinitylake_ops.dagster_plugin.publish import build_publish_asset
    from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
    from trinitylake_ops.dagster_plugin.runs.pipes import report_staged, staged_by_pipes
    from trinitylake_ops.dagster_plugin.serving.health import build_server_check
    from trinitylake_ops.dagster_plugin.storage_settings import SecretVariables, StorageSettings
    from trinitylake_ops.dagster_plugin.stored.settings import stored_as
    from trinitylake_ops.dagster_plugin.table_pages.specs import as_tables

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
        "assets": (
            "build_exports_asset",
            "build_head_asset",
            "build_table_asset",
        ),
        "automation.closed_branches": ("build_closed_branch_sensor",),
        "automation.conditions": ("published",),
        "automation.schedules": (
            "CRONS",
            "BlackoutWindow",
            "build_maintenance_schedules",
        ),
        "automation.sensors": (
            "FailedRun",
            "build_commit_sensor",
            "build_failed_run_sensor",
        ),
        "checks": (
            "CheckLimits",
            "build_checks_job",
            "build_lakehouse_checks",
        ),
        "code_location": (
            "LakehouseSettings",
            "build_trinitylake_definitions",
        ),
        "component": ("TrinityLakeMaintenanceComponent",),
        "io_manager": ("TrinityLakeIOManager",),
        "names": ("LakehouseNames",),
        "ops.jobs": ("ApplyLimits", "build_jobs"),
        "publish": ("build_publish_asset",),
        "resources": (
            "SparkResource",
            "TrinityLakeResource",
        ),
        "runs.pipes": (
            "report_staged",
            "staged_by_pipes",
        ),
        "serving.health": ("build_server_check",),
        "storage_settings": (
            "SecretVariables",
            "StorageSettings",
        ),
        "stored.settings": ("stored_as",),
        "table_pages.specs": ("as_tables",),
    },
    extra="dagster",
)
