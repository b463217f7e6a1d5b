"""Iceberg tables of a lakehouse: the PyIceberg catalog, staging and publishing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at, catalog_for
    from trinitylake_ops.iceberg.write.arrow import stage_arrow
    from trinitylake_ops.iceberg.write.plan import plan_write
    from trinitylake_ops.iceberg.write.publication import publish_once
    from trinitylake_ops.iceberg.write.staged_table import StagedTable
    from trinitylake_ops.iceberg.write.staging import Replace, StagingCatalog, load_staged, publish, stage_data_files

__all__ = [
    "Replace",
    "StagedTable",
    "StagingCatalog",
    "TrinityLakeCatalog",
    "catalog_at",
    "catalog_for",
    "load_staged",
    "plan_write",
    "publish",
    "publish_once",
    "stage_arrow",
    "stage_data_files",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "catalog": ("TrinityLakeCatalog", "catalog_at", "catalog_for"),
        "write.arrow": ("stage_arrow",),
        "write.plan": ("plan_write",),
        "write.publication": ("publish_once",),
        "write.staged_table": ("StagedTable",),
        "write.staging": ("Replace", "StagingCatalog", "load_staged", "publish", "stage_data_files"),
    },
)
