"""The pyiceberg catalog of a lakehouse."""

from trinitylake_ops.tables.catalog.catalog import TrinityLakeCatalog, catalog_at, catalog_for

__all__ = ["TrinityLakeCatalog", "catalog_at", "catalog_for"]
