"""Tables of a lakehouse in Apache Iceberg: the pyiceberg catalog, and staging and publishing of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops.faces import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.tables.catalog.catalog import TrinityLakeCatalog, catalog_at, catalog_for
    from trinitylake_ops.tables.writing.arrow_writer import stage_arrow
    from trinitylake_ops.tables.writing.publication import publish_once
    from trinitylake_ops.tables.writing.staged_table import StagedTable
    from trinitylake_ops.tables.writing.staging import Replace, StagingCatalog, load_staged, publish, stage_data_files
    from trinitylake_ops.tables.writing.write_plan import plan_write

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
        "catalog.catalog": (
            "TrinityLakeCatalog",
            "catalog_at",
            "catalog_for",
        ),
        "writing.arrow_writer": ("stage_arrow",),
        "writing.publication": ("publish_once",),
        "writing.staged_table": ("StagedTable",),
        "writing.staging": (
            "Replace",
            "StagingCatalog",
            "load_staged",
            "publish",
            "stage_data_files",
        ),
        "writing.write_plan": ("plan_write",),
    },
)
